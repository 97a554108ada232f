# SPDX-License-Identifier: Apache-2.0
"""Measure what a sandbox costs on this machine: start, hidden history, one command, reading out, grading, closing.

Example: python -m examples.swe_bench_pro.bench_sandbox --at-once 16
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from examples.swe_bench_pro.grade.grader import grade
from examples.swe_bench_pro.sandbox.bubblewrap import BubblewrapHost
from examples.swe_bench_pro.sandbox.protocol import IsolationUnavailable, Limits, SandboxHost, hide_history
from examples.swe_bench_pro.tasks.columns import APP, Task
from examples.swe_bench_pro.tasks.own import OWN_TASKS, load_folder

MISUSE = 2
COMMANDS = 5


def main(arguments: list[str] | None = None) -> int:
    """Print medians in milliseconds as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=1, help="sandboxes that do the same at one time")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            host = BubblewrapHost(Path(folder) / "sandboxes", run_name=f"bench{os.getpid()}", limits=Limits())
        except IsolationUnavailable as error:
            print(error, file=sys.stderr)
            return MISUSE
        task = load_folder(OWN_TASKS, Path(folder) / "repositories")[0]
        begin = time.monotonic()
        times = asyncio.run(measure(host, task, args.at_once))
        medians = {name: round(statistics.median(values) * 1000, 1) for name, values in times.items()}
        whole = {
            "at_once": args.at_once,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "seconds": time.monotonic() - begin,
        }
        print(json.dumps({**whole, "median_ms": medians, **host.describe()}))
    return 0


async def measure(host: SandboxHost, task: Task, at_once: int) -> dict[str, list[float]]:
    """Return seconds of each part, one value a sandbox and command."""
    times: dict[str, list[float]] = defaultdict(list)

    async def timed(name: str, work) -> None:
        begin = time.monotonic()
        await work
        times[name].append(time.monotonic() - begin)

    async def one(number: int) -> None:
        sandbox = host.sandbox(task, f"s{number}")
        await timed("start", sandbox.start())
        await timed("hide_history", hide_history(sandbox, task))
        for _ in range(COMMANDS):
            await timed("command", sandbox.execute("true", seconds=60))
        await timed("read_project", sandbox.get(APP, max_bytes=1 << 30))
        await timed("close", sandbox.close())
        await timed("grade", grade(task, task.patch, lambda: host.sandbox(task, f"g{number}"), seconds=120))

    await asyncio.gather(*map(one, range(at_once)))
    return times


if __name__ == "__main__":
    sys.exit(main())
