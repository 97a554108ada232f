# SPDX-License-Identifier: Apache-2.0
"""Judge a patch as the benchmark does, in a sandbox of its own.

Order: reset to the base, apply the patch, check the hidden tests out of the fix commit, run `run_script.sh`, run
`parser.py`. Resolved if every required test is among the passed ones. The parser's line runs after everything that the
tests started is dead, on a fresh copy of the parser, because patched code could have rewritten it.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from examples.swe_bench_pro.grade.patch import TreeRefused, checked
from examples.swe_bench_pro.grade.suspicion import suspicions
from examples.swe_bench_pro.sandbox.protocol import Executed, Sandbox, SandboxError, read_file
from examples.swe_bench_pro.tasks.columns import WORKSPACE, Task

_OUTPUT_BYTES = 16 << 20
_SETUP_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What the grader found."""

    outcome: str
    passed: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    """Required tests that did not pass."""
    suspicions: tuple[str, ...] = ()
    detail: str = ""
    seconds: float = 0.0


async def grade(task: Task, patch: str, open_sandbox: Callable[[], Sandbox], *, seconds: float) -> Grade:
    """Grade a patch. Never raises for what the patch or the sandbox does: the outcome says it.

    Args:
        task: the problem.
        patch: a git patch against the base commit.
        open_sandbox: makes a fresh sandbox that holds the task's repository with its history.
        seconds: time for the tests.
    """
    begin = time.monotonic()
    try:
        verdict = await _judge(task, patch, open_sandbox, seconds)
    except SandboxError as error:
        verdict = Grade(outcome="sandbox_error", detail=str(error))
    return Grade(**{**vars(verdict), "seconds": time.monotonic() - begin})


async def _judge(task: Task, patch: str, open_sandbox: Callable[[], Sandbox], seconds: float) -> Grade:
    if not task.required_tests:
        return Grade(outcome="grade_error", detail="the task names no required test, so every patch would be right")
    try:
        patch = checked(patch)
    except TreeRefused as error:
        return Grade(outcome="patch_rejected", detail=str(error))
    if not patch.strip():
        return Grade(outcome="no_patch")
    found = suspicions(patch, task.required_tests)
    sandbox = open_sandbox()
    try:
        await sandbox.start()
        verdict = await _run(task, patch, sandbox, seconds)
    finally:
        await sandbox.close()
    outcome = "forged" if verdict.outcome == "resolved" and found else verdict.outcome
    return Grade(**{**vars(verdict), "outcome": outcome, "suspicions": found})


async def _run(task: Task, patch: str, sandbox: Sandbox, seconds: float) -> Grade:
    tests, parse = task.entry_script()
    files = {"patch.diff": patch, "run_script.sh": task.run_script, "parser.py": task.parser, "entryscript.sh": tests}
    await sandbox.put({f"{WORKSPACE}/{name}": text.encode() for name, text in files.items()})
    check = f"git reset -q --hard {task.base_commit} && git checkout -q {task.base_commit}"
    reset = await sandbox.execute(check, seconds=_SETUP_SECONDS)
    if reset.end != "exit" or reset.returncode != 0:
        return Grade(outcome="grade_error", detail=f"the base commit cannot be checked out: {reset.text[-500:]}")
    applies = await sandbox.execute(f"git apply --check {WORKSPACE}/patch.diff", seconds=_SETUP_SECONDS)
    if applies.returncode != 0:
        return Grade(outcome="patch_rejected", detail=applies.text[-500:])
    ran = await sandbox.execute(f"bash {WORKSPACE}/entryscript.sh", seconds=seconds, cwd="/")
    if (early := _early_end(ran)) is not None:
        return early
    await sandbox.put({f"{WORKSPACE}/parser.py": task.parser.encode()})
    parsed = await sandbox.execute("\n".join([*task.exports, parse]), seconds=_SETUP_SECONDS, cwd="/")
    output = await read_file(sandbox, f"{WORKSPACE}/output.json", max_bytes=_OUTPUT_BYTES)
    return _verdict(task, output, parsed.text)


def _early_end(ran: Executed) -> Grade | None:
    if ran.end == "timeout":
        return Grade(outcome="grade_timeout", detail=f"the tests ran longer than {ran.seconds:.0f} s")
    if ran.end == "memory":
        return Grade(outcome="oom", detail=ran.text[-500:])
    if ran.end in ("output", "disk"):
        return Grade(outcome="unresolved", detail=f"the tests were ended: too much {ran.end}")
    return None


def _verdict(task: Task, output: bytes | None, log: str) -> Grade:
    try:
        rows = json.loads(output or b"")["tests"]
        passed = frozenset(row["name"] for row in rows if row["status"] == "PASSED")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        return Grade(outcome="grade_error", detail=f"the parser left no usable output ({error!r}): {log[-500:]}")
    missing = task.required_tests - passed
    return Grade(outcome="unresolved" if missing else "resolved", passed=passed, missing=missing)
