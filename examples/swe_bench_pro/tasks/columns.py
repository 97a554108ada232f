# SPDX-License-Identifier: Apache-2.0
"""One task: the columns of SWE-bench Pro, its two scripts, and the entry script made of them. Runs nothing.

All columns are text; the three list columns hold the text of a list of strings. The fix commit is part of the instance
id, and the last line of `before_repo_set_cmd` checks the hidden tests out of it: the grader needs that commit, the
agent must never see it.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TEXT_COLUMNS = (
    "instance_id", "repo", "base_commit", "problem_statement", "requirements", "interface", "patch", "test_patch",
    "repo_language", "issue_specificity", "issue_categories", "before_repo_set_cmd", "dockerhub_tag",
)  # fmt: skip
LIST_COLUMNS = ("fail_to_pass", "pass_to_pass", "selected_test_files_to_run")
COLUMNS = TEXT_COLUMNS + LIST_COLUMNS
IMAGES = "jefzda/sweap-images"
APP = "/app"
WORKSPACE = "/workspace"

_INSTANCE_ID = re.compile(r"instance_.+-(?P<fix>[0-9a-f]{40})(-v[0-9a-z]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem. Column names are the data set's; what follows them comes from files beside it."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    requirements: str
    interface: str
    patch: str
    test_patch: str
    repo_language: str
    issue_specificity: str
    issue_categories: str
    before_repo_set_cmd: str
    dockerhub_tag: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    selected_test_files_to_run: tuple[str, ...]
    run_script: str
    """Runs the tests that its first argument names, comma-separated."""
    parser: str
    """Python: turns two logs into `{"tests": [{"name", "status"}]}`."""
    exports: tuple[str, ...] = ()
    """`export NAME=value` lines of the image; the entry script needs them again."""
    origin: Path | None = None
    """Git repository with the base and the fix commit; None when the image holds it."""

    @property
    def fix_commit(self) -> str:
        """Return the commit whose tests grade the task."""
        return _INSTANCE_ID.fullmatch(self.instance_id)["fix"]

    @property
    def required_tests(self) -> frozenset[str]:
        """Return the tests that must all pass. Empty would make every patch right: the grader refuses it."""
        return frozenset(self.fail_to_pass) | frozenset(self.pass_to_pass)

    @property
    def image(self) -> str:
        """Return the container image that holds the repository at `/app`."""
        return f"{IMAGES}:{self.dockerhub_tag}"

    def entry_script(self) -> tuple[str, str]:
        """Return what the grader runs, in the official order: everything up to the tests, and the parser's line.

        The two parts in one file are the official entry script. There is no `set -e`: a patch that does not apply
        still lets the tests run on the base.
        """
        tests = ",".join(self.selected_test_files_to_run)
        hidden_tests = self.before_repo_set_cmd.strip().splitlines()[-1]
        logs = f"{WORKSPACE}/stdout.log {WORKSPACE}/stderr.log"
        lines = [
            *self.exports,
            f"cd {APP}",
            f"git reset --hard {self.base_commit}",
            f"git checkout {self.base_commit}",
            f"git apply -v {WORKSPACE}/patch.diff",
            hidden_tests,
            f"bash {WORKSPACE}/run_script.sh {tests} > {WORKSPACE}/stdout.log 2> {WORKSPACE}/stderr.log",
        ]
        return "\n".join(lines) + "\n", f"python {WORKSPACE}/parser.py {logs} {WORKSPACE}/output.json\n"

    def statement(self) -> str:
        """Return what the agent is told: the issue, the required behaviour, and the names that tests will use."""
        return f"{self.problem_statement}\n\nRequirements:\n{self.requirements}\n\nNew interfaces:\n{self.interface}"


def read_row(
    row: Mapping[str, str], *, run_script: str, parser: str, exports: Iterable[str] = (), origin: Path | None = None
) -> Task:
    """Make a task of one row.

    Raises:
        ValueError: lists every missing column, malformed list, id and commit at once.
    """
    name = row.get("instance_id", "<no instance_id>")
    problems = [f"column {column} is missing" for column in COLUMNS if column not in row]
    problems += [
        f"column {column} is {type(row[column]).__name__}; text is needed"
        for column in COLUMNS
        if column in row and not isinstance(row[column], str)
    ]
    if not problems:
        lists = {column: _list_of_text(column, row[column], problems) for column in LIST_COLUMNS}
        if not _INSTANCE_ID.fullmatch(row["instance_id"]):
            problems.append("instance_id must be instance_<owner>__<repo>-<40 hex digits of the fix commit>[-v...]")
        if not _COMMIT.fullmatch(row["base_commit"]):
            problems.append(f"base_commit is {row['base_commit']!r}; 40 hex digits are needed")
        if not row["before_repo_set_cmd"].strip():
            problems.append("before_repo_set_cmd is empty; its last line brings the hidden tests")
    if problems:
        raise ValueError(f"task {name} does not keep the SWE-bench Pro columns:\n  - " + "\n  - ".join(problems))
    texts = {column: row[column] for column in TEXT_COLUMNS}
    return Task(**texts, **lists, run_script=run_script, parser=parser, exports=tuple(exports), origin=origin)


def write_row(task: Task) -> dict[str, str]:
    """Return the task's columns as the data set holds them."""
    row = {column: getattr(task, column) for column in TEXT_COLUMNS}
    return row | {column: json.dumps(list(getattr(task, column))) for column in LIST_COLUMNS}


def _list_of_text(column: str, text: str, problems: list[str]) -> tuple[str, ...]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        problems.append(f"column {column} is {text[:60]!r}; the text of a list is needed")
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        problems.append(f"column {column} holds {type(value).__name__}; a list of strings is needed")
        return ()
    return tuple(value)
