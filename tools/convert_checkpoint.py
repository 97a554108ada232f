# SPDX-License-Identifier: Apache-2.0
"""Convert nemotron_h checkpoints between Hugging Face / ModelOpt and Megatron, look into them, compare them.

Example:
  python tools/convert_checkpoint.py to-megatron NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4 lightning-megatron
  python tools/convert_checkpoint.py to-hf lightning-megatron lightning-exported
  python tools/convert_checkpoint.py verify NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4 lightning-exported

Exit status: 0 done, or both sides are the same; 1 they differ; 2 misuse or a checkpoint that cannot be used.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from vllm_forward_bridge.checkpoint import convert_to_hf, convert_to_megatron, open_repository
from vllm_forward_bridge.checkpoint.compare import Comparison, changed_masters, compare, open_source
from vllm_forward_bridge.checkpoint.inspection import inspect_checkpoint
from vllm_forward_bridge.checkpoint.layout import layout_problems, parse_layout
from vllm_forward_bridge.checkpoint.megatron_checkpoint import MegatronCheckpoint

SAME, DIFFERS, MISUSE = 0, 1, 2
_SHOWN = 20
_TABLE_WIDTH = 132


def main(arguments: list[str] | None = None) -> int:
    """Run one sub-command."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return MISUSE


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str, *folders: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=raw)
        sub.set_defaults(run=run)
        for folder in folders:
            sub.add_argument(folder)
        sub.add_argument("--workers", type=_workers, default=2, help="files or tensors at a time (default 2)")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    forth = command("to-megatron", _to_megatron, "Write a Megatron checkpoint from a repository.", "source", "target")
    forth.add_argument("--layout", type=parse_layout, help="check a trainer's layout: tp=2,ep=8,pp=4")
    forth.add_argument("--without-masters", action="store_true", help="bytes only: to keep, not to train from")
    back = command("to-hf", _to_hf, "Write the repository that a Megatron checkpoint exports to.", "source", "target")
    for sub in (forth, back):
        sub.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
    look = command("inspect", _inspect, "Say what a repository or Megatron checkpoint holds.", "source")
    look.add_argument("--scales", action="store_true", help="read all weights; name the scales that are calibrated")
    verify = command("verify", _verify, "Compare two checkpoints of either kind, tensor by tensor.", "left", "right")
    diff = command(
        "diff", _diff, "Compare a Megatron checkpoint with its original: bytes and masters.", "source", "original"
    )
    for sub in (back, look, verify, diff):
        sub.add_argument("--base", help="Megatron checkpoint that a training run started from, for what its own lacks")
    return parser


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} was given; a number of at least 1 is needed, or nothing gets done")
    return int(text)


def _to_megatron(args: argparse.Namespace) -> int:
    problems = layout_problems(open_repository(args.source).config, args.layout) if args.layout else []
    if problems:
        raise ValueError(f"{args.source}: this layout is impossible:\n  - " + "\n  - ".join(problems))
    with _progress("to-megatron") as progress:
        done = convert_to_megatron(
            args.source, args.target, masters=not args.without_masters, workers=args.workers, dry_run=args.dry_run,
            on_progress=progress,
        )  # fmt: skip
    return _report_conversion(args, asdict(done))


def _to_hf(args: argparse.Namespace) -> int:
    with _progress("to-hf") as progress:
        done = convert_to_hf(
            args.source, args.target, base=args.base, workers=args.workers, dry_run=args.dry_run, on_progress=progress
        )
    return _report_conversion(args, asdict(done))


def _report_conversion(args: argparse.Namespace, done: dict) -> int:
    text = "{tensors} tensors, {num_bytes} bytes, {reused_bytes} of them from an interrupted run".format(**done)
    print(json.dumps(done) if args.json else f"{'would write' if args.dry_run else 'wrote'} {args.target}: {text}")
    return SAME


def _inspect(args: argparse.Namespace) -> int:
    with _progress("inspect") as progress:
        source = open_source(args.source, args.base)
        report = inspect_checkpoint(source, scales=args.scales, workers=args.workers, on_progress=progress)
    if args.json:
        print(json.dumps(report))
        return SAME
    table = Table("module", "format", "tensors", "bytes", "leaves", title=f"layers {report['layers']}")
    for group in report["groups"]:
        leaves = "\n".join(f"{leaf} {' '.join(map(str, shapes))}" for leaf, shapes in group["leaves"].items())
        table.add_row(group["module"], group["format"], f"{group['tensors']:,}", f"{group['bytes']:,}", leaves)
    console = Console(width=max(Console().width, _TABLE_WIDTH))
    console.print(table)
    for name in ("tensors", "shards", "bytes", "mtp", "kv_cache", "scalars", "scale_rules"):
        if name in report:
            console.print(f"{name}: {report[name]}")
    return SAME


def _verify(args: argparse.Namespace) -> int:
    with _progress("verify") as progress:
        sides = open_source(args.left), open_source(args.right, args.base)
        result = compare(*sides, workers=args.workers, on_progress=progress)
    return _report_comparison(args, result)


def _diff(args: argparse.Namespace) -> int:
    checkpoint, original = MegatronCheckpoint(args.source, args.base), open_repository(args.original)
    with _progress("diff") as progress:
        result = compare(original, checkpoint, workers=args.workers, on_progress=progress)
        result.differences.extend(changed_masters(checkpoint, original))
    return _report_comparison(args, result)


def _report_comparison(args: argparse.Namespace, result: Comparison) -> int:
    print(json.dumps({"same": result.same, **asdict(result)}) if args.json else result.text(_SHOWN))
    return SAME if result.same else DIFFERS


@contextmanager
def _progress(text: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(text), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, advance=done, total=total)


if __name__ == "__main__":
    sys.exit(main())
