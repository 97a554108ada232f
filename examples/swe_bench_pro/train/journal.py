# SPDX-License-Identifier: Apache-2.0
"""Finished episodes on disk, so that a killed run loses none: one file a step and rank, one line an episode.

A line is written and synced before its episode counts. Only the last line of a file can be torn, and a torn line is an
episode that runs again. An episode is used again only under the weights that sampled it, told by their digest.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from examples.swe_bench_pro.agent.episode import Episode
from examples.swe_bench_pro.agent.stream import TokenStream
from examples.swe_bench_pro.train.lines import append_line, read_lines


class Place(NamedTuple):
    """Which episode of a step."""

    slot: int
    """Group of the step."""
    attempt: int
    """0, or how often the group was replaced by another problem."""
    member: int


class EpisodeJournal:
    """All episodes of a run.

    Args:
        folder: of the run's episodes.
        rank: whose file is written; all ranks' files are read.
    """

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, step: int, place: Place, weights: str, episode: Episode) -> None:
        """Write one finished episode and wait until it is on disk."""
        record = {"place": list(place), "weights": weights, **vars(episode), "stream": episode.stream.to_record()}
        append_line(self._path(step), record)

    def read(self, step: int, weights: str) -> dict[Place, Episode]:
        """Return the step's finished episodes that these weights sampled; the last one of a place counts."""
        return {Place(*r["place"]): _episode(r) for r in self._records(step) if r["weights"] == weights}

    def every(self) -> Iterator[tuple[int, Place, Episode]]:
        """Yield all episodes of all steps, in the order of steps."""
        for step in sorted({int(path.name.split("_")[1].split(".")[0]) for path in self._folder.glob("step_*.jsonl")}):
            for record in self._records(step):
                yield step, Place(*record["place"]), _episode(record)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.rank_{self._rank:04d}.jsonl"

    def _records(self, step: int) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.glob(f"step_{step:06d}.rank_*.jsonl")):
            yield from read_lines(path)


def _episode(record: dict[str, Any]) -> Episode:
    fields = {name: value for name, value in record.items() if name not in ("place", "weights", "stream")}
    fields["suspicions"] = tuple(fields["suspicions"])
    return Episode(**fields, stream=TokenStream.from_record(record["stream"]))


def safe_name(text: str) -> str:
    """Return text that may be a file's, a container's and a control group's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)
