# SPDX-License-Identifier: Apache-2.0
"""The grader: gold is right, nothing is not, and what is done to fool it does not pay."""

import asyncio
from dataclasses import replace

import pytest
from swe_workbench import SMALL, bubblewrap, own_tasks, tar_of

from examples.swe_bench_pro.grade.grader import grade
from examples.swe_bench_pro.grade.patch import PatchTaker, TreeRefused, checked, without_binary_parts
from examples.swe_bench_pro.grade.suspicion import suspicions
from examples.swe_bench_pro.outcomes import MASKS, OUTCOMES, RewardRule, count
from examples.swe_bench_pro.sandbox.protocol import SandboxError

TRUSTING_RUN = "python -B -m unittest -v $(echo $1 | sed 's/\\.py//g; s#/#.#g; s/,/ /g')"
TRUSTING_PARSER = """
import json, re, sys
text = open(sys.argv[1]).read() + open(sys.argv[2]).read()
rows = [{"name": name, "status": "PASSED"} for name in re.findall(r"^(\\S+::\\S+) PASSED$", text, re.M)]
json.dump({"tests": rows}, open(sys.argv[3], "w"))
"""


def graded(tmp_path, task, patch, *, seconds=20.0, limits=SMALL):
    host = bubblewrap(tmp_path, limits)
    found = asyncio.run(grade(task, patch, lambda: host.sandbox(task, "grade"), seconds=seconds))
    assert not list((tmp_path / "sandboxes").iterdir())
    return found


def new_file(name, text):
    lines = text.splitlines()
    body = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{body}"


def prepended(task, name, text):
    """Return a patch that puts lines before the first line of a file of the base."""
    first = (task.origin / name).read_text().splitlines()[0]
    lines = text.splitlines()
    body = "".join(f"+{line}\n" for line in lines)
    return f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1,1 +1,{len(lines) + 1} @@\n{body} {first}\n"


@pytest.mark.parametrize(
    "name", ["ledger", "patterns", "cache", "templates", "intervals", "schedule", "settings", "wire"]
)
def test_gold_patch_resolves(tmp_path, name):
    found = graded(tmp_path, own_tasks()[name], own_tasks()[name].patch)
    assert (found.outcome, found.missing, found.suspicions) == ("resolved", frozenset(), ()), found.detail
    assert found.passed >= own_tasks()[name].required_tests


def test_half_a_gold_patch_does_not_resolve(tmp_path):
    task = own_tasks()["ledger"]
    half = "diff --git" + task.patch.split("diff --git")[2]
    found = graded(tmp_path, task, half)
    assert found.outcome == "unresolved"
    assert found.missing < set(task.fail_to_pass)


def test_empty_and_unappliable_patches(tmp_path):
    task = own_tasks()["ledger"]
    assert graded(tmp_path, task, "").outcome == "no_patch"
    assert graded(tmp_path, task, task.patch.replace("each", "beach")).outcome == "patch_rejected"
    assert graded(tmp_path, task, "no patch at all").outcome == "patch_rejected"


def test_edited_tests_are_overwritten(tmp_path):
    task = own_tasks()["ledger"]
    gone = new_file("tests/test_report.py", "raise SystemExit\n")
    weaker = prepended(task, "tests/test_split.py", "raise SystemExit(0)\n")
    assert graded(tmp_path, task, weaker).outcome == "unresolved"
    assert graded(tmp_path, task, task.patch + weaker + gone).outcome == "resolved"


def test_printed_verdict_does_not_pay_where_the_runner_is_ours(tmp_path):
    task = own_tasks()["ledger"]
    lines = "".join(f"print('{test} PASSED')\n" for test in sorted(task.required_tests))
    found = graded(tmp_path, task, prepended(task, "ledger/__init__.py", lines))
    assert found.outcome == "unresolved"
    assert "prints a test's name beside a word for success" in found.suspicions


def test_printed_verdict_fools_a_parser_of_text_and_is_flagged(tmp_path):
    task = replace(own_tasks()["ledger"], run_script=TRUSTING_RUN, parser=TRUSTING_PARSER)
    lines = "import atexit\n" + "".join(
        f"atexit.register(print, '{test} PASSED')\n" for test in sorted(task.required_tests)
    )
    forged = prepended(task, "ledger/split.py", lines)
    found = graded(tmp_path, task, forged)
    assert found.missing == frozenset(), "the benchmark's own rule is satisfied"
    assert found.outcome == "forged"
    assert "runs code at exit" in found.suspicions
    assert RewardRule(context_tokens=100).reward(found.outcome, 50) == 0.0


def test_rewritten_parser_is_not_run(tmp_path):
    task = own_tasks()["ledger"]
    forger = (
        "from pathlib import Path\n"
        f"rows = {[{'name': test, 'status': 'PASSED'} for test in sorted(task.required_tests)]}\n"
        "import json\n"
        "text = json.dumps({'tests': rows})\n"
        "Path('/workspace/parser.py').write_text(f'import sys; open(sys.argv[3], \"w\").write({text!r})')\n"
    )
    found = graded(tmp_path, task, prepended(task, "ledger/__init__.py", forger))
    assert found.outcome == "unresolved"
    assert "touches the grader's folder" in found.suspicions


def test_hanging_tests_end_at_the_limit(tmp_path):
    task = own_tasks()["ledger"]
    found = graded(tmp_path, task, prepended(task, "ledger/__init__.py", "while True:\n    pass\n"), seconds=1.5)
    assert found.outcome == "grade_timeout"
    assert found.seconds < 15


def test_memory_hungry_tests_are_oom(tmp_path):
    task = own_tasks()["ledger"]
    hungry = prepended(task, "ledger/__init__.py", "kept = bytearray(10**9)\n")
    # Where only process limits exist, Python sees a MemoryError instead of being killed.
    assert graded(tmp_path, task, hungry).outcome in ("oom", "unresolved")


def test_task_without_required_tests_is_refused(tmp_path):
    task = replace(own_tasks()["ledger"], fail_to_pass=(), pass_to_pass=())
    found = graded(tmp_path, task, task.patch)
    assert found.outcome == "grade_error"
    assert "no required test" in found.detail


def test_broken_parser_is_an_error_of_the_grader(tmp_path):
    task = replace(own_tasks()["ledger"], parser="raise SystemExit(1)")
    assert graded(tmp_path, task, task.patch).outcome == "grade_error"


def test_lost_sandbox_is_an_outcome():
    class Lost:
        async def start(self):
            raise SandboxError("no machine")

        async def close(self):
            pass

    task = own_tasks()["ledger"]
    found = asyncio.run(grade(task, task.patch, Lost, seconds=1))
    assert (found.outcome, found.detail) == ("sandbox_error", "no machine")


def test_patch_is_taken_from_files_without_trusting_git_folders(tmp_path):
    taker = PatchTaker(tmp_path / "bases")
    base = {"app/a.txt": b"one\n", "app/keep.txt": b"k\n", "app/.gitignore": b"*.log\n"}
    evil = {
        "app/a.txt": b"two\n",
        "app/keep.txt": b"k\n",
        "app/.gitignore": b"*.log\n",
        "app/.git/config": b"[core]\n\tfsmonitor = touch /tmp/owned\n",
        "app/sub/.git/hooks/post-index-change": b"#!/bin/sh\nexit 1\n",
        "app/sub/new.txt": b"new\n",
        "app/../../escape.txt": b"x",
        "app/noise.log": b"ignored",
        "app/picture.bin": bytes(range(256)),
    }

    async def run():
        await taker.remember("task", tar_of(base))
        return await taker.take("task", tar_of(evil)), await taker.take("task", tar_of(base))

    patch, none = asyncio.run(run())
    assert none == ""
    assert "-one\n+two" in patch
    assert "b/sub/new.txt" in patch
    assert not any(word in patch for word in (".git/", "escape", "noise", "picture", "keep"))
    assert not (tmp_path / "escape.txt").exists()


def test_patch_limits():
    section = "diff --git a/x b/x\nGIT binary patch\nliteral 3\nabc\n"
    text = "diff --git a/y b/y\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n"
    assert without_binary_parts(section + text) == text
    with pytest.raises(TreeRefused, match="bytes are accepted|accepted"):
        checked("diff --git a/x b/x\n" + "+x\n" * (1 << 19))
    with pytest.raises(TreeRefused, match="UTF-8"):
        checked("diff --git a/x b/x\n+\udcff\n")


def test_honest_patches_are_not_suspicious():
    for task in own_tasks().values():
        assert suspicions(task.patch, task.required_tests) == ()
        assert suspicions(task.test_patch, task.required_tests) == (), (
            "tests that an agent adds carry names, no verdicts"
        )


def test_reward_rule():
    rule = RewardRule(context_tokens=1000, overlong_tokens=200)
    assert rule.reward("resolved", 800) == 1.0
    assert rule.reward("resolved", 900) == 0.5
    assert rule.reward("context", 1000) == -1.0
    assert rule.reward("steps", 10) == 0.0
    assert [name for name in OUTCOMES if not rule.is_valid(name)] == [
        "sandbox_error",
        "grade_timeout",
        "grade_error",
        "oom",
    ]
    assert not RewardRule(context_tokens=1000, masked=MASKS["infrastructure-and-limits"]).is_valid("steps")
    assert count(["resolved", "resolved", "oom"])["resolved"] == 2
    with pytest.raises(ValueError) as error:
        RewardRule(context_tokens=10, overlong_tokens=10, masked=frozenset({"resolved", "sandbox_error", "typo"}))
    for word in ("typo", "resolved is masked", "'oom' must be masked", "overlong_tokens is 10"):
        assert word in str(error.value)
