# SPDX-License-Identifier: Apache-2.0
"""Tasks of a local folder: each subfolder is a tree, a gold patch, hidden tests and a TOML file.

A task becomes a git repository with two commits, the base and the fix, as a SWE-bench Pro image has it. Author and
dates are fixed, so the commits, and with them the instance id, are functions of the files alone.
"""

import json
import os
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

from examples.swe_bench_pro.tasks.columns import Task, read_row

OWN_TASKS = Path(__file__).parents[1] / "own_tasks"
_KEYS = (
    "repo", "repo_language", "issue_specificity", "issue_categories", "problem_statement", "requirements", "interface",
    "fail_to_pass", "pass_to_pass", "selected_test_files_to_run",
)  # fmt: skip
_WHO = {"NAME": "task", "EMAIL": "task@example.invalid", "DATE": "2026-01-01T00:00:00+0000"}


def git_environment() -> dict[str, str]:
    """Return an environment in which git reads no configuration of this machine."""
    identity = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in _WHO.items()}
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C", **identity}  # fmt: skip


def load_folder(folder: Path, repositories: Path) -> list[Task]:
    """Build every task of a folder, ordered by name.

    Args:
        folder: has `run_script.sh`, `parser.py` and one subfolder a task.
        repositories: where the built git repositories are kept; an existing one is used again.

    Raises:
        ValueError: lists every task that lacks a file or key.
    """
    names = sorted(path.parent.name for path in folder.glob("*/task.toml"))
    problems = [] if names else [f"{folder} has no subfolder with a task.toml"]
    problems += [
        f"{name} lacks {part}"
        for name in names
        for part in ("base", "gold.patch", "hidden.patch")
        if not (folder / name / part).exists()
    ]
    tables = {name: tomllib.loads((folder / name / "task.toml").read_text()) for name in names}
    problems += [f"{name}: task.toml lacks {key}" for name in names for key in _KEYS if key not in tables[name]]
    if problems:
        raise ValueError("these tasks cannot be built:\n  - " + "\n  - ".join(problems))
    scripts = {"run_script": (folder / "run_script.sh").read_text(), "parser": (folder / "parser.py").read_text()}
    return [_task(folder / name, tables[name], scripts, repositories) for name in names]


def _task(source: Path, table: dict, scripts: dict[str, str], repositories: Path) -> Task:
    base, fix, origin = _repository(source, repositories)
    row = {key: table[key].strip() for key in _KEYS if isinstance(table[key], str)}
    row |= {key: json.dumps(table[key]) for key in _KEYS if isinstance(table[key], list)}
    tests = " ".join(table["selected_test_files_to_run"])
    row |= {
        "instance_id": f"instance_own__{source.name}-{fix}",
        "base_commit": base,
        "patch": (source / "gold.patch").read_text(),
        "test_patch": (source / "hidden.patch").read_text(),
        "before_repo_set_cmd": (
            f"git reset --hard {base}\ngit clean -fd\ngit checkout {base}\ngit checkout {fix} -- {tests}"
        ),
        "dockerhub_tag": "",
    }
    return read_row(row, **scripts, origin=origin)


def _repository(source: Path, repositories: Path) -> tuple[str, str, Path]:
    repositories.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=repositories, prefix="building-") as folder:
        work = Path(folder) / "app"
        shutil.copytree(source / "base", work)

        def git(*arguments: str) -> str:
            command = ["git", "-c", "core.hooksPath=/dev/null", *arguments]
            done = subprocess.run(command, cwd=work, env=git_environment(), capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"task {source.name}: `git {' '.join(arguments)}` failed: {done.stderr.strip()}")
            return done.stdout.strip()

        git("init", "-q", "-b", "main")
        git("add", "-A")
        git("commit", "-q", "-m", "base")
        base = git("rev-parse", "HEAD")
        git("apply", "--index", str(source.resolve() / "gold.patch"), str(source.resolve() / "hidden.patch"))
        git("commit", "-q", "-m", "fix")
        fix = git("rev-parse", "HEAD")
        git("update-ref", "refs/upstream/fix", fix)
        git("reset", "-q", "--hard", base)
        origin = repositories / f"{source.name}-{fix}"
        if not origin.exists():
            work.rename(origin)
    return base, fix, origin
