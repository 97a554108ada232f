# SPDX-License-Identifier: Apache-2.0
"""The public SWE-bench Pro data: rows from a pinned revision or an offline folder, scripts from a checkout.

The rows hold no scripts. Those come from a checkout of the benchmark's own repository (`run_scripts/`, `dockerfiles/`),
whose commit is recorded with the run, because both the data and the scripts were corrected several times.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from examples.swe_bench_pro.optional import require
from examples.swe_bench_pro.tasks.columns import Task, read_row

DATASET = "ScaleAI/SWE-bench_Pro"
FORM = "read this form of the public data; rows as *.jsonl in a folder need no package"
_REVISION = re.compile(r"[0-9a-f]{7,40}")


def read_offline(folder: Path) -> list[dict[str, str]]:
    """Return the rows of every `*.jsonl` and `*.parquet` file of a folder, in the order of file names.

    Raises:
        ValueError: the folder has neither.
    """
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.parquet")])
    if not files:
        raise ValueError(
            f"{folder} has no *.jsonl and no *.parquet file; put the data set's files there, or name a revision"
        )
    return [row for file in files for row in (_jsonl(file) if file.suffix == ".jsonl" else _parquet(file))]


def read_revision(revision: str) -> list[dict[str, str]]:
    """Download the `test` split at a fixed revision with the optional package `datasets`.

    Raises:
        ValueError: the revision is a branch name, which moves.
        ModuleNotFoundError: `datasets` is not installed.
    """
    if not _REVISION.fullmatch(revision):
        raise ValueError(
            f"revision is {revision!r}; a commit (7 to 40 hex digits) is needed: a branch moves under a run"
        )
    datasets = require("datasets", FORM)
    return [dict(row) for row in datasets.load_dataset(DATASET, split="test", revision=revision)]


def public_tasks(
    rows: Sequence[Mapping[str, str]], scripts: Path, *, only: Collection[str] | None = None
) -> list[Task]:
    """Join rows with their scripts.

    Args:
        rows: of `read_offline` or `read_revision`.
        scripts: checkout of the benchmark's repository.
        only: instance ids to keep, as the filter tool writes them; None keeps all.

    Raises:
        ValueError: lists every row that is malformed or has no scripts, and every wanted id without a row.
    """
    problems: list[str] = []
    tasks = []
    for row in rows:
        name = row.get("instance_id", "<no instance_id>")
        if only is not None and name not in only:
            continue
        try:
            tasks.append(read_row(row, **_scripts(scripts, name), exports=_exports(scripts, name)))
        except (ValueError, FileNotFoundError) as error:
            problems.append(str(error))
    absent = sorted(set(only or ()) - {row.get("instance_id") for row in rows})
    problems += [f"{name} is wanted but not among the rows" for name in absent]
    if problems:
        raise ValueError(f"{len(problems)} tasks cannot be used:\n  - " + "\n  - ".join(problems))
    return tasks


def _scripts(checkout: Path, name: str) -> dict[str, str]:
    folder = checkout / "run_scripts" / name
    return {"run_script": (folder / "run_script.sh").read_text(), "parser": (folder / "parser.py").read_text()}


def _exports(checkout: Path, name: str) -> Iterator[str]:
    for kind in ("base", "instance"):
        for line in (checkout / "dockerfiles" / f"{kind}_dockerfile" / name / "Dockerfile").read_text().splitlines():
            if line.strip().startswith("ENV"):
                yield line.strip().replace("ENV", "export", 1)


def _jsonl(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def _parquet(file: Path) -> list[dict[str, str]]:
    return require("pyarrow.parquet", FORM).read_table(file).to_pylist()
