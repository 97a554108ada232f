# SPDX-License-Identifier: Apache-2.0
"""What both directions of a conversion share: disk space, the temporary folder, parallel units, resuming, progress."""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_forward_bridge.checkpoint.repository import finish_folder, partial_folder, refuse_existing

PLAN_FILE = "conversion.json"
_RECORDS = "records"
_RESULT = "result"
_UNFINISHED = ".partial"
# Beside the tensors: zip and safetensors headers, metadata, the small files.
_SPACE_MARGIN = 1.01


@dataclass(frozen=True)
class Conversion:
    """What a conversion did, or would do."""

    tensors: int
    """Tensors written; a dry run counts those it would write."""
    num_bytes: int
    """Bytes of those tensors."""
    reused_bytes: int = 0
    """Of these, bytes that an interrupted run had finished."""


@dataclass(frozen=True)
class Unit:
    """One file of the result: the smallest piece that is resumed."""

    name: str
    num_bytes: int
    write: Callable[["Ticker"], object]
    """Writes the file; returns what must be remembered about it (JSON)."""


Progress = Callable[[int, int], None]
"""Called with bytes that are done and the bytes of the whole work, from several threads."""


class Ticker:
    """Counts bytes for progress and lets all workers stop together."""

    def __init__(self, on_progress: Progress | None, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self.stop = threading.Event()

    def advance(self, num_bytes: int) -> None:
        """Report bytes that are done; raise if another worker failed."""
        if self.stop.is_set():
            raise InterruptedError("another unit failed")
        if self._on_progress:
            self._on_progress(num_bytes, self._total)


class Workplace:
    """The temporary folder of one conversion: its result so far and the records of its finished units."""

    def __init__(self, target: Path, plan: Mapping[str, object]) -> None:
        self.target = target
        self._place = partial_folder(target)
        # A folder of its own, so that one rename parts the result from plan and records: a kill finds both or neither.
        self.folder = self._place / _RESULT
        self._digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()

    def finished(self) -> dict[str, object]:
        """Return the records of units that an interrupted run of the same conversion finished.

        Raises:
            FileExistsError: the target exists.
            ValueError: the temporary folder belongs to another conversion.
        """
        refuse_existing(self.target)
        begun, plan = self.folder.exists(), self._place / PLAN_FILE
        if self._has_others() or begun and json.loads(plan.read_text())["digest"] != self._digest:
            raise ValueError(
                f"{self._place} holds parts of another conversion, or its source has changed since; remove that folder "
                "to start again"
            )
        if not begun:
            return {}
        records = (json.loads(path.read_text()) for path in sorted((self._place / _RECORDS).glob("*.json")))
        return {record["unit"]: record["result"] for record in records}

    def begin(self) -> None:
        """Note which conversion the folder belongs to; the result's folder comes last, its presence says begun."""
        if not self.folder.exists():
            shutil.rmtree(self._place, ignore_errors=True)
        (self._place / _RECORDS).mkdir(parents=True, exist_ok=True)
        self._write(self._place / PLAN_FILE, {"digest": self._digest})
        self.folder.mkdir(exist_ok=True)

    def record(self, unit: str, result: object) -> None:
        """Note that a unit is finished; in one rename, so that a kill leaves no half a record."""
        self._write(self._place / _RECORDS / f"{unit}.json", {"unit": unit, "result": result})

    def finish(self) -> None:
        """Put the result in its place, then remove what only an unfinished conversion has."""
        finish_folder(self.folder, self.target)
        shutil.rmtree(self._place)

    def _has_others(self) -> bool:
        """Tell whether the temporary folder has something that no conversion put there, or lacks the plan of one."""
        found = {path.name for path in self._place.iterdir()} if self._place.exists() else set()
        return bool(found - {_RECORDS, _RESULT, PLAN_FILE, PLAN_FILE + _UNFINISHED}) or (
            _RESULT in found and PLAN_FILE not in found
        )

    @staticmethod
    def _write(path: Path, content: object) -> None:
        partial = path.with_name(path.name + _UNFINISHED)
        partial.write_text(json.dumps(content))
        partial.rename(path)


def check_space(target: Path, num_bytes: int) -> None:
    """Raise OSError unless the disk of `target` has room for `num_bytes` of tensors."""
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    needed, free = int(num_bytes * _SPACE_MARGIN), shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            f"{target}: {needed / 1e9:.2f} GB are needed, {parent} has {free / 1e9:.2f} GB free; nothing was written: "
            "make room or name another disk"
        )


def run_units(
    workplace: Workplace, units: list[Unit], *, workers: int, on_progress: Progress | None
) -> tuple[dict[str, object], int]:
    """Write the units that are not finished yet, several at a time.

    Returns:
        The record of every unit, and the bytes of those that were finished before.
    """
    results = workplace.finished()
    reused = sum(unit.num_bytes for unit in units if unit.name in results)
    missing = [unit for unit in units if unit.name not in results]
    check_space(workplace.target, sum(unit.num_bytes for unit in missing))
    workplace.begin()
    ticker = Ticker(on_progress, sum(unit.num_bytes for unit in units))
    ticker.advance(reused)
    with _no_checksums(), ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(unit.write, ticker): unit for unit in missing}
        try:
            for future in as_completed(futures):
                unit = futures[future]
                results[unit.name] = future.result()
                workplace.record(unit.name, results[unit.name])
        finally:
            # Reached with work left only after a failure or a Ctrl-C: the others stop at their next block.
            ticker.stop.set()
            pool.shutdown(cancel_futures=True)
    return results, reused


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Switch off torch.save's CRC-32, which torch.load never reads and which costs ten times the copy."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
