# SPDX-License-Identifier: Apache-2.0
"""Keep the problems that can teach: the gold patch passes every time, and samples of the base model are mixed.

Example: python -m examples.swe_bench_pro.filter_tasks gold --swe-config FILE --folder runs/filter --times 3
         python -m examples.swe_bench_pro.sample_tasks --swe-config FILE --vllm-forward FILE --folder runs/base
         python -m examples.swe_bench_pro.filter_tasks keep --swe-config FILE --folder runs/filter --samples runs/base
"""

import argparse
import asyncio
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from examples.swe_bench_pro.config import AgentConfig, load_agent_config
from examples.swe_bench_pro.grade.grader import grade
from examples.swe_bench_pro.outcomes import INFRASTRUCTURE_OUTCOMES
from examples.swe_bench_pro.sandbox.choose import open_host
from examples.swe_bench_pro.sandbox.protocol import IsolationUnavailable, SandboxHost
from examples.swe_bench_pro.tasks.columns import Task
from examples.swe_bench_pro.train.assemble import run_name
from examples.swe_bench_pro.train.journal import EpisodeJournal
from examples.swe_bench_pro.train.lines import append_line, read_lines

MISUSE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one of the two passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("gold", "keep"), help="grade gold patches, or write the file of kept ids")
    parser.add_argument("--swe-config", type=Path, required=True, help="TOML file of the run")
    parser.add_argument("--folder", type=Path, required=True, help="journal and result; a second start goes on")
    parser.add_argument("--times", type=int, default=3, help="gold runs of each problem, to find tests that flicker")
    parser.add_argument("--samples", type=Path, help="folder of sample_tasks.py")
    parser.add_argument("--least-samples", type=int, default=4, help="valid samples that a problem needs")
    args = parser.parse_args(arguments)
    try:
        config = load_agent_config(args.swe_config)
        tasks = config.load_tasks(args.folder / "repositories")
        journal = GoldJournal(args.folder / "gold.jsonl")
        if args.action == "gold":
            host = open_host(
                config.sandbox.kind,
                args.folder / "sandboxes",
                run_name=run_name(args.folder, 0),
                limits=config.sandbox.limits,
            )
            asyncio.run(run_gold(tasks, journal, host, config, times=args.times))
            print(f"{journal.path}: {sum(map(len, journal.outcomes().values()))} gold runs of {len(tasks)} problems")
            return 0
        if args.samples is None:
            parser.error("keep needs --samples, the folder that sample_tasks.py filled")
        result = kept(
            tasks,
            journal,
            EpisodeJournal(args.samples / "episodes"),
            config,
            times=args.times,
            least=args.least_samples,
        )
    except (ValueError, OSError, IsolationUnavailable) as error:
        print(error, file=sys.stderr)
        return MISUSE
    path = args.folder / "kept.json"
    path.with_suffix(".tmp").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".tmp").replace(path)
    print(f"{path}: {len(result['ids'])} of {len(tasks)} problems; {json.dumps(result['counts'])}")
    return 0


class GoldJournal:
    """One line a gold run; a killed pass goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, instance_id: str, run: int, outcome: str, seconds: float, detail: str) -> None:
        """Write one result and wait until it is on disk."""
        row = {"id": instance_id, "run": run, "outcome": outcome, "seconds": round(seconds, 3), "detail": detail[-500:]}
        append_line(self.path, row)

    def outcomes(self) -> dict[str, dict[int, str]]:
        """Return each problem's outcomes by run; the last line of a run counts, a torn line does not."""
        found: dict[str, dict[int, str]] = defaultdict(dict)
        for row in read_lines(self.path):
            found[row["id"]][row["run"]] = row["outcome"]
        return found


async def run_gold(
    tasks: Sequence[Task], journal: GoldJournal, host: SandboxHost, config: AgentConfig, *, times: int
) -> None:
    """Grade every gold patch `times` times; runs that are in the journal are not made again."""
    await host.sweep()
    done = journal.outcomes()
    limit = asyncio.Semaphore(config.collect.gradings)

    async def one(task: Task, run: int) -> None:
        async with limit:
            found = await grade(
                task,
                task.patch,
                lambda: host.sandbox(task, f"gold-{hashlib.sha256(task.instance_id.encode()).hexdigest()[:12]}-{run}"),
                seconds=config.agent.grade_seconds,
            )
        journal.append(task.instance_id, run, found.outcome, found.seconds, found.detail)

    async with asyncio.TaskGroup() as work:
        for task in tasks:
            for run in range(times):
                # An environment that failed says nothing about the problem: it is tried again by the next start.
                if done.get(task.instance_id, {}).get(run) in (None, "sandbox_error"):
                    work.create_task(one(task, run))


def kept(
    tasks: Sequence[Task], journal: GoldJournal, samples: EpisodeJournal, config: AgentConfig, *, times: int, least: int
) -> dict:
    """Return ids, revisions and counts: what the configuration's `[tasks] keep` reads.

    A problem is kept if all of `times` gold runs resolved it, and of at least `least` valid base samples some but not
    all did.
    """
    gold = journal.outcomes()
    base = _base_outcomes(samples)
    reasons = {
        task.instance_id: _reason(gold.get(task.instance_id, {}), base[task.instance_id], times, least)
        for task in tasks
    }
    section = config.tasks
    return {
        "ids": sorted(name for name, reason in reasons.items() if reason == "kept"),
        "revisions": {
            "source": section.source,
            "data": section.revision or section.folder,
            "scripts": section.scripts,
            "tasks_digest": _digest(tasks),
        },
        "rule": {"gold_runs": times, "least_samples": least},
        "counts": dict(sorted(Counter(reasons.values()).items())),
        "problems": {
            name: {"reason": reasons[name], "gold": sorted(gold.get(name, {}).values()), "base": dict(base[name])}
            for name in sorted(reasons)
        },
    }


def _base_outcomes(samples: EpisodeJournal) -> dict[str, Counter]:
    found: dict[str, Counter] = defaultdict(Counter)
    last = {(step, place): episode for step, place, episode in samples.every()}
    for episode in last.values():
        found[episode.instance_id][episode.outcome] += 1
    return found


def _reason(gold: dict[int, str], base: Counter, times: int, least: int) -> str:
    runs = [gold.get(run) for run in range(times)]
    if None in runs:
        return "gold runs missing"
    if set(runs) != {"resolved"}:
        return "gold flickers" if "resolved" in runs else "gold fails"
    valid = sum(number for outcome, number in base.items() if outcome not in INFRASTRUCTURE_OUTCOMES)
    if valid < least:
        return "samples missing"
    if base["resolved"] == 0:
        return "never solved"
    return "always solved" if base["resolved"] == valid else "kept"


def _digest(tasks: Iterable[Task]) -> str:
    """Identify patches, tests and scripts of the problems, so that a changed data set shows."""
    text = json.dumps([[t.instance_id, t.patch, t.run_script, t.parser, sorted(t.required_tests)] for t in tasks])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
