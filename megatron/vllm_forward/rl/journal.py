# SPDX-License-Identifier: Apache-2.0
"""The record of a run: one JSON line a step, on disk before the next step starts."""

import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self


class Journal:
    """Append-only file of step records.

    A record is an object with an integer `step`; steps rise by one. Opening the journal for a resumed run drops what
    was written after the checkpoint, a torn last line included, so that no step appears twice. A lock file beside it
    keeps a second run out until `close` or the end of this process.

    Raises:
        RuntimeError: another run holds the journal.
        ValueError: the journal lacks steps that the checkpoint has.
    """

    def __init__(self, path: str | Path, *, resume_after: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path)
        try:
            self._drop_after(resume_after)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another run have the journal."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_after(self, resume_after: int) -> None:
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


def _locked(journal: Path) -> IO[str]:
    """Take the lock file of a journal; the system lets go of it when the process ends, however it ends."""
    path = journal.with_name(journal.name + ".lock")
    lock = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read() or "of unknown id"
        lock.close()
        raise RuntimeError(
            f"{journal} is being written by process {holder}, which holds {path}: one run at a time is accepted, two "
            "would mix their steps and checkpoints; end that process or wait for it, or give this run another journal "
            "and checkpoint folder"
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _write_durably(path: Path, mode: str, records: list) -> None:
    with path.open(mode) as out:
        out.writelines(json.dumps(record) + "\n" for record in records)
        out.flush()
        os.fsync(out.fileno())
