# SPDX-License-Identifier: Apache-2.0
"""The record of a run: one JSON line a step, on disk before the next step starts."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """Append-only file of step records.

    A record is an object with an integer `step`; steps rise by one. Opening the journal for a resumed run drops what
    was written after the checkpoint, a torn last line included, so that no step appears twice.
    """

    def __init__(self, path: str | Path, *, resume_after: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_journal(self.path) if record["step"] <= resume_after]
        if len(kept) != resume_after:
            raise ValueError(
                f"{self.path} holds {len(kept)} steps up to {resume_after}, the checkpoint is at step {resume_after}: "
                "journal and checkpoint must be of one run; start in an empty folder, or bring the journal back"
            )
        temporary = self.path.with_suffix(".tmp")
        _write_durably(temporary, "w", kept)
        temporary.replace(self.path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and wait until it is on disk.

        Raises:
            ValueError: a number is not finite, which JSON cannot hold; the message names it.
        """
        wrong = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        if wrong:
            raise ValueError(f"step {record.get('step')}: {', '.join(wrong)} not finite, but JSON has no such numbers")
        _write_durably(self.path, "a", [record])


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """Return the complete records of a journal; none if there is no file.

    Raises:
        ValueError: a line before the last is damaged; only the last can be torn by a crash.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is torn
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); restore the file or delete it") from error
    return records


def _write_durably(path: Path, mode: str, records: list) -> None:
    with path.open(mode) as out:
        out.writelines(json.dumps(record) + "\n" for record in records)
        out.flush()
        os.fsync(out.fileno())
