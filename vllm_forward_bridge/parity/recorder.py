# SPDX-License-Identifier: Apache-2.0
"""Record what every contract op returned, row by row, so that two runs can be compared op by op.

Both sides call the same ops in the same order, so the recorder listens to the ops themselves and no model needs a hook:
a layer ends where an op of `NORMS` begins the next one, and a point is named `layer.op.place in the layer`. Rows are
named by (sample, position); a run that computes a sample in pieces records the same rows as one that computes it whole.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_forward_bridge.parity.bits import integer_view

NAMESPACE = "vllm_forward_bridge"
NORMS = ("rms_norm", "fused_add_rms_norm")
_SAME_ARITHMETIC = {"cached_attention": "attention"}
"""An op whose result must equal another one's is recorded under the other's name."""


@dataclass
class Point:
    """One output of one op in one layer; row i belongs to (samples[i], positions[i])."""

    samples: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class OpRecorder(TorchDispatchMode):
    """Record the contract's ops inside `with recorder.rows(samples, positions):`, one forward each time."""

    def __init__(self) -> None:
        super().__init__()
        self.points: dict[str, Point] = {}
        self._rows: tuple[Tensor, Tensor] | None = None
        self._layer = -1
        self._places: dict[str, int] = {}

    @contextlib.contextmanager
    def rows(self, samples_T: Tensor, positions_T: Tensor) -> Iterator[None]:
        """Record one forward over these rows; an output with another number of rows is left out.

        Args:
            samples_T: int64 sample of each packed row; negative marks padding, which is not recorded.
            positions_T: int64 position of the row in its sample.
        """
        self._rows, self._layer, self._places = (samples_T.cpu(), positions_T.cpu()), -1, {}
        try:
            with self:
                yield
        finally:
            self._rows = None

    def narrow(self, rows_R: Tensor) -> None:
        """Say that the rest of this forward computes these rows only, as an output layer on the last rows does."""
        samples_T, positions_T = self._rows
        rows_R = rows_R.cpu()
        self._rows = samples_T[rows_R], positions_T[rows_R]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the op and record its outputs if it is one of the contract's."""
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:
            self._record(func.__name__.partition(".")[0], tree_leaves(outputs))
        return outputs

    def save(self, path: str | Path) -> None:
        """Write everything recorded so far to one safetensors file."""
        tensors, order = {}, []
        for name, point in self.points.items():
            order.append(name)
            tensors[f"{name}/samples"] = torch.cat(point.samples)
            tensors[f"{name}/positions"] = torch.cat(point.positions)
            tensors[f"{name}/values"] = torch.cat(point.values)
        save_file(tensors, path, metadata={"order": json.dumps(order)})

    def _record(self, op: str, outputs: list[Tensor]) -> None:
        if op in NORMS:
            self._layer += 1
            self._places = {}
        op = _SAME_ARITHMETIC.get(op, op)
        place = self._places.get(op, 0)
        self._places[op] = place + 1
        samples_T, positions_T = self._rows
        live_T = samples_T >= 0
        for number, output in enumerate(outputs):
            if output.dim() and len(output) == len(samples_T):
                suffix = f".{number}" if len(outputs) > 1 else ""
                point = self.points.setdefault(f"{self._layer}.{op}.{place}{suffix}", Point())
                point.samples.append(samples_T[live_T])
                point.positions.append(positions_T[live_T])
                point.values.append(output.detach().cpu()[live_T].clone())


@dataclass(frozen=True)
class PointDifference:
    """How one point of two recordings compares over the rows that both have."""

    name: str
    common_rows: int
    differing_rows: int
    differing_elements: int
    elements: int
    largest: float
    """Largest absolute difference; NaN if a NaN is among them."""
    first: tuple[int, int] | None
    """Sample and position of the first differing row."""


def compare_recordings(left: str | Path, right: str | Path) -> tuple[list[PointDifference], list[str]]:
    """Compare two recordings point by point, in the order in which the left one was computed.

    Returns:
        The comparison of each point that both have, and the names of the points that one side lacks.

    Raises:
        ValueError: a point has another dtype or row shape on the two sides, or the recordings share no row.
    """
    with safe_open(left, "pt") as a, safe_open(right, "pt") as b:
        order, others = (json.loads(file.metadata()["order"]) for file in (a, b))
        compared = [_compare_point(name, _point(a, name), _point(b, name)) for name in order if name in others]
    lonely = [f"{name} (left only)" for name in order if name not in others]
    lonely += [f"{name} (right only)" for name in others if name not in order]
    if not any(point.common_rows for point in compared):
        raise ValueError(
            f"{left} and {right} share no row of any op; rows are matched by (sample, position), so both runs must "
            "record the same samples: record again with the same sample numbers"
        )
    return compared, lonely


def _point(file, name: str) -> tuple[dict[tuple[int, int], int], Tensor]:
    rows = zip(file.get_tensor(f"{name}/samples").tolist(), file.get_tensor(f"{name}/positions").tolist(), strict=True)
    # A row that was computed again, as after a preemption, stands for its last computation.
    return {row: at for at, row in enumerate(rows)}, file.get_tensor(f"{name}/values")


def _compare_point(name: str, left: tuple[dict, Tensor], right: tuple[dict, Tensor]) -> PointDifference:
    common = sorted(left[0].keys() & right[0].keys())
    a, b = (values[[rows[row] for row in common]] for rows, values in (left, right))
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(
            f"{name}: {a.dtype} {tuple(a.shape)} on the left, {b.dtype} {tuple(b.shape)} on the right; an op returns "
            "one form, so these are recordings of different models: record both with the same checkpoint"
        )
    a, b = (values.reshape(len(common), math.prod(values.shape[1:])) for values in (a, b))
    differs = integer_view(a) != integer_view(b)
    rows = differs.any(1).nonzero().flatten().tolist()
    distance = (a.double() - b.double()).abs()[differs]
    return PointDifference(
        name=name,
        common_rows=len(common),
        differing_rows=len(rows),
        differing_elements=int(differs.sum()),
        elements=differs.numel(),
        largest=distance.max().item() if rows else 0.0,
        first=common[rows[0]] if rows else None,
    )
