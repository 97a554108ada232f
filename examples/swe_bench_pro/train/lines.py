# SPDX-License-Identifier: Apache-2.0
"""Files of one JSON object a line that survive a kill at any point: a line is whole, or it never was."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Write one record and wait until it is on disk; a line that a crash tore is ended first."""
    with path.open("a+b") as out:
        # Another writer's half-written line must not be taken for a torn one.
        fcntl.flock(out, fcntl.LOCK_EX)
        if out.seek(0, os.SEEK_END):
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                out.write(b"\n")
        out.write((json.dumps(record) + "\n").encode())
        out.flush()
        os.fsync(out.fileno())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of a file, none if there is no file; torn lines are left out."""
    for line in path.read_text().split("\n") if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a crash, or the empty text behind the last line
        yield record
