# SPDX-License-Identifier: Apache-2.0
"""Run the whole path on this machine: tiny ModelOpt checkpoint, Megatron, GRPO bridged and baseline, table and plot.

Example: python tools/quickstart.py --steps 50
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megatron.vllm_forward.orphans import STARTER
from megatron.vllm_forward.rl.journal import read_journal
from megatron.vllm_forward.rl.report import plot_runs, step_table
from vllm_forward_bridge.checkpoint import convert_to_megatron, make_tiny_checkpoint

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_tiny"
MODES = ("bridged", "baseline")
# Tensors of the tiny model are too small to share; on a busy machine a second thread waits more than it computes.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MISUSE = 2
EXIT_DIFFERENT = 1


def main(arguments: list[str] | None = None) -> int:
    """Make what is missing, run both modes, show the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=_positive, default=50, help="GRPO steps of each run")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "quickstart", help="where everything goes")
    parser.add_argument("--every", type=_positive, default=1, help="show each nth step in the tables")
    args = parser.parse_args(arguments)
    args.folder = args.folder.resolve()  # the trainer runs in another directory
    _exit_on_signals()
    console = Console()
    start = time.monotonic()
    with _progress(console) as progress:
        checkpoint = _once(progress, "tiny ModelOpt checkpoint", args.folder / "tiny", make_tiny_checkpoint)
        convert = partial(convert_to_megatron, checkpoint)
        megatron = _once(progress, "convert to Megatron", args.folder / "megatron", convert)
        for mode in MODES:
            if not _run(progress, mode, args.folder, megatron, args.steps):
                console.print(f"The {mode} run failed; its log is {args.folder / mode / 'log.txt'}", style="red")
                return MISUSE
    runs = {mode: read_journal(args.folder / mode / "journal.jsonl")[: args.steps] for mode in MODES}
    for mode, records in runs.items():
        console.print(step_table(f"{mode} forward against the rollout", records, every=args.every))
    picture = args.folder / "difference_reward_entropy.png"
    plot_runs(runs, picture)
    return _verdict(console, runs, picture, time.monotonic() - start)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text!r}; a whole number from 1 on is needed, none leaves no result")
    return int(text)


def _exit_on_signals() -> None:
    """Leave through `finally` when told to end, so that the trainer ends too; nohup's ignored SIGHUP stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description:<26}"), BarColumn(bar_width=28), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[state]}"), console=console,
    )  # fmt: skip


def _once(progress: Progress, title: str, path: Path, make) -> Path:
    """Make a folder unless it is there; makers write elsewhere and rename, so what is there is whole."""
    task = progress.add_task(title, total=1, state="found" if path.exists() else "")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
    progress.update(task, completed=1)
    return path


def _run(progress: Progress, mode: str, folder: Path, megatron: Path, steps: int) -> bool:
    """Run or resume one mode in a process of its own, and follow its journal."""
    home = folder / mode
    home.mkdir(parents=True, exist_ok=True)
    task = progress.add_task(f"GRPO, {mode} forward", total=steps, state="starting")
    records = read_journal(home / "journal.jsonl")
    if len(records) < steps:
        command = _command(mode, home, megatron, steps)
        if _train(command, home, lambda: _show(progress, task, read_journal(home / "journal.jsonl"))):
            return False
    _show(progress, task, read_journal(home / "journal.jsonl")[:steps])
    return True


def _train(command: list[str], home: Path, show: Callable[[], None]) -> int:
    """Run the trainer and return its exit code; it has ended when this function is left, however that is."""
    environment = {**os.environ, **_ONE_THREAD, STARTER: str(os.getpid())}
    with (home / "log.txt").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                show()
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
    return process.returncode


def _command(mode: str, home: Path, megatron: Path, steps: int) -> list[str]:
    return [
        sys.executable, "-m", "megatron.vllm_forward", str(EXAMPLE / "train_grpo.py"),
        "--vllm-forward", str(_write_toml(mode, home)),
        "--pretrained-checkpoint", str(megatron), "--load", str(home / "checkpoints"),
        "--save", str(home / "checkpoints"), "--rl-journal", str(home / "journal.jsonl"), "--train-iters", str(steps),
        "--distributed-backend", "nccl" if torch.cuda.is_available() else "gloo",
    ]  # fmt: skip


def _write_toml(mode: str, home: Path) -> Path:
    """Write the example's configuration with the checkpoint beside `home` as its repository."""
    example = (EXAMPLE / f"{mode}.toml").read_text()
    path = home / "bridge.toml"
    path.write_text(re.sub(r"^repository = .*$", 'repository = "../tiny"', example, flags=re.MULTILINE))
    return path


def _show(progress: Progress, task, records: list[dict]) -> None:
    if records:
        last = records[-1]
        state = f"reward {last['reward']:.3f}, {last['mismatches']} of {last['compared']} tokens differ"
        progress.update(task, completed=len(records), state=state)


def _verdict(console: Console, runs: dict[str, list[dict]], picture: Path, seconds: float) -> int:
    differing = {mode: sum(record["mismatches"] for record in records) for mode, records in runs.items()}
    largest = {mode: max(record["max"] for record in records) for mode, records in runs.items()}
    for mode in MODES:
        tokens = sum(record["compared"] for record in runs[mode])
        console.print(f"{mode:>9}: {differing[mode]:,} of {tokens:,} sampled tokens differ, largest {largest[mode]:g}")
    console.print(f"picture: {picture}\n{seconds:.0f} s")
    return EXIT_DIFFERENT if differing["bridged"] else 0


if __name__ == "__main__":
    sys.exit(main())
