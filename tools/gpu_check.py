# SPDX-License-Identifier: Apache-2.0
"""Run the GPU proofs stage by stage, each in its own process with a time limit, and write what they found as it comes.

Example: python tools/gpu_check.py ops --out runs/gpu
"""

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_ENGINE = ["tests/gpu/test_engine.py", "tests/gpu/test_trainer.py"]
STAGES = {
    "values": (["tests/gpu/test_values.py"], 200),
    "against_vllm": (["tests/gpu/test_against_vllm.py"], 120),
    "columns": (["tests/gpu/test_columns.py"], 90),
    "sequences": (["tests/gpu/test_sequences.py"], 150),
    "rows": (["tests/gpu/test_rows.py", "-k", "not time"], 200),
    "processes": (["tests/gpu/test_processes.py"], 150),
    "row_times": (["tests/gpu/test_rows.py", "-k", "time"], 90),
    "engine_tiny": ([*_ENGINE, "--model", "tiny"], 400),
    "engine_wide": ([*_ENGINE, "--model", "wide"], 540),
    "steps_tiny": (["tests/gpu/test_trainer.py", "-k", "ten_steps or byte_for_byte", "--model", "tiny"], 200),
    "memory": (["tests/gpu/test_memory.py"], 200),
    "long_wide": (["tests/gpu/test_long.py", "--model", "wide"], 560),
    "long_full": (["tests/gpu/test_long.py", "--model", "full"], 560),
    "disk": (["tests/gpu/test_disk.py"], 250),
    "thread": (["tests/gpu/test_thread.py"], 200),
    "own_process": (["tests/gpu/test_trainer.py", "--model", "tiny", "--own-process"], 300),
    "own_process_wide": (["tests/gpu/test_trainer.py", "--model", "wide", "--own-process"], 540),
    "own_gpu": (["tests/gpu/test_trainer.py", "--model", "tiny", "--own-process", "--rollout-devices", "1"], 300),
    "layouts": (["tests/gpu/test_layouts.py"], 280),
    "grpo": (["tests/gpu/test_grpo.py"], 540),
    "stock": (["tests/gpu/test_stock.py"], 400),
    "engine_full": ([*_ENGINE, "--model", "full", "-k", "every_op or decode_is_prefill or same_logprobs"], 580),
}
"""Stage -> (pytest arguments, seconds it may take). Cheap before dear."""

GROUPS = {
    "ops": ("values", "against_vllm", "columns", "sequences", "rows", "processes", "row_times"),
    "engine": ("engine_wide", "engine_tiny", "grpo", "stock", "values", "against_vllm", "columns"),
}


def main() -> int:
    """Run the chosen stages; return 0 if all passed, 1 if any failed, 2 on misuse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", help=f"stages ({', '.join(STAGES)}) or groups ({', '.join(GROUPS)})")
    parser.add_argument("--out", default="runs/gpu", help="folder for results.jsonl, summary.md and a log a stage")
    parser.add_argument(
        "--limit", type=float, default=570.0, help="seconds for everything; stages that do not fit are cut short"
    )
    parser.add_argument("--jobs", type=int, default=1, help="stages at a time; times mean little with more than one")
    given = parser.parse_args()
    names = [name for given_name in given.stages for name in GROUPS.get(given_name, (given_name,))]
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        print(f"unknown stages: {', '.join(unknown)}; choose from {', '.join([*STAGES, *GROUPS])}", file=sys.stderr)
        return 2
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    _append(results, {"machine": _machine(), "stages": names})
    end = time.monotonic() + given.limit

    def run(name: str) -> None:
        arguments, seconds = STAGES[name]
        _append(results, _run_stage(name, arguments, min(seconds, end - time.monotonic()), out, results))
        (out / "summary.md").write_text(_summary(_read(results)))

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(run, names))
    print(_summary(_read(results)))
    return int(any(entry.get("stage") and entry["outcome"] != "passed" for entry in _read(results)))


def _run_stage(name: str, arguments: list[str], seconds: float, out: Path, results: Path) -> dict:
    if seconds < 5:
        return {"stage": name, "outcome": "not started: no time left"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        f"--results={results}",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            outcome = "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            outcome = "cut short"
    print(f"{name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
    return {"stage": name, "outcome": outcome, "seconds": round(time.monotonic() - start, 1)}


def _machine() -> dict:
    import torch

    versions = {}
    for package in ("torch", "triton", "vllm", "humming-kernels", "megatron-core"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d %H:%M"), **versions}


def _read(path: Path) -> list[dict]:
    # What follows the last newline is being written by another stage.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _append(path: Path, entry: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _summary(entries: list[dict]) -> str:
    lines = [f"Machine: {entry['machine']}" for entry in entries if "machine" in entry]
    lines += ["", "| stage | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {e['stage']} | {e['outcome']} | {e.get('seconds', '')} |" for e in entries if "stage" in e]
    tests = [entry for entry in entries if "test" in entry and "outcome" in entry]
    counts = {outcome: sum(t["outcome"] == outcome for t in tests) for outcome in ("passed", "failed", "skipped")}
    lines += ["", f"Tests: {counts}", ""]
    for test in tests:
        if test["outcome"] == "failed":
            lines += [f"- failed {test['test']}", "", "```", test["error"][-700:], "```"]
    measured = [entry["measured"] for entry in entries if "measured" in entry]
    times = {(m["op"], m["rows"]): m["microseconds"] for m in measured if "op" in m}
    rows = sorted({rows for _, rows in times})
    if times:
        lines += ["", "| microseconds at rows | " + " | ".join(map(str, rows)) + " |", "|---" * (len(rows) + 1) + "|"]
        for op in dict.fromkeys(op for op, _ in times):
            lines.append(f"| {op} | " + " | ".join(str(times.get((op, r), "")) for r in rows) + " |")
    lines += [f"- {m}" for m in measured if "op" not in m]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
