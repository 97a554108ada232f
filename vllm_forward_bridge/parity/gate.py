# SPDX-License-Identifier: Apache-2.0
"""The gate before each update: every sampled token's logprob has equal bits on every rank, or the run stops."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed

from vllm_forward_bridge.parity.metrics import PHASES, FirstDifference, ParityMetrics, merge, table


class ParityError(RuntimeError):
    """Trainer and rollout differ; `metrics` says how much, over all ranks."""

    def __init__(self, message: str, metrics: ParityMetrics) -> None:
        super().__init__(message)
        self.metrics = metrics


class Gate:
    """Judge each step's metrics over all ranks and count what was seen.

    Args:
        on_difference: `stop` raises; `correct` returns the metrics, for a run whose differences a correction handles.
        group: process group to sync over; None for one process. Every rank must call `check` at every step.
        device: where the exchanged numbers live; a CUDA device for an NCCL group.
    """

    def __init__(
        self,
        *,
        on_difference: Literal["stop", "correct"] = "stop",
        group: torch.distributed.ProcessGroup | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if on_difference not in ("stop", "correct"):
            raise ValueError(
                f"on_difference is {on_difference!r}; 'stop' and 'correct' are accepted, there is no way to ignore a "
                "difference: choose 'correct' for a baseline run"
            )
        self.on_difference = on_difference
        self.group = group
        self.device = torch.device(device)
        self.steps = 0
        self.total = merge([])

    def check(self, local: ParityMetrics, *, step: int) -> ParityMetrics:
        """Merge the ranks' metrics and let the step pass, or raise the same error on every rank.

        Returns:
            The metrics over all ranks, equal on each.

        Raises:
            ParityError: no token was compared on any rank; or bits differ and `on_difference` is `stop`.
        """
        parts = gather_metrics(local, self.group, self.device)
        merged = merge(parts)
        self.steps += 1
        self.total = merge([self.total, merged])
        if merged.count == 0:
            raise ParityError(
                f"step {step}: no sampled token was compared on any rank; at least one is needed, because an empty "
                "comparison proves nothing: check what the rollout returned",
                merged,
            )
        if merged.mismatches and self.on_difference == "stop":
            raise ParityError(_report(step, merged, parts), merged)
        return merged


def gather_metrics(
    local: ParityMetrics, group: torch.distributed.ProcessGroup | None, device: torch.device
) -> list[ParityMetrics]:
    """Collect every rank's metrics in rank order; float64 carries the counts, float32 values and sums exactly."""
    if group is None:
        return [local]
    mine = torch.tensor(_pack(local), dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(rows, mine, group=group)
    return [_unpack(row) for row in torch.stack(rows).tolist()]


def _report(step: int, merged: ParityMetrics, parts: Sequence[ParityMetrics]) -> str:
    rows = [(f"rank {rank}", part) for rank, part in enumerate(parts)] if len(parts) > 1 else []
    worst = max(range(len(parts)), key=lambda rank: parts[rank].mismatches)
    return (
        f"step {step}: {merged.mismatches} of {merged.count} sampled tokens have another logprob in the trainer than "
        f"in the rollout ({merged.decode_mismatches} of them decoded, {merged.invalid} missing or not finite)\n"
        f"{table([*rows, ('all', merged)], first_column='rank')}\n"
        f"first difference, rank {worst}: {merged.first}\n"
        "Equal bits are needed, because the gradient is taken for the policy that acted. Record both sides and run "
        "tools/first_difference.py to find the op; on_difference = 'correct' goes on with a correction."
    )


_NUMBERS = (
    "count", "mismatches", "invalid", "decode_mismatches",
    "max_finite", "sum_absolute", "mean_signed", "squared_deviations", "sum_k3",
)  # fmt: skip
_INTEGERS = 4


def _pack(m: ParityMetrics) -> list[float]:
    first = [0.0] * 8
    if m.first is not None:
        f = m.first
        sides = [(0.0, 0.0) if value is None else (1.0, value) for value in (f.rollout, f.trainer)]
        first = [1.0, float(f.sample), float(f.position), float(PHASES.index(f.phase)), *sides[0], *sides[1]]
    return [float(getattr(m, name)) for name in _NUMBERS] + first


def _unpack(row: list[float]) -> ParityMetrics:
    numbers = {
        name: int(value) if index < _INTEGERS else value
        for index, (name, value) in enumerate(zip(_NUMBERS, row, strict=False))
    }
    present, sample, position, phase, has_rollout, rollout, has_trainer, trainer = row[len(_NUMBERS) :]
    first = None
    if present:
        first = FirstDifference(
            sample=int(sample),
            position=int(position),
            phase=PHASES[int(phase)],
            rollout=rollout if has_rollout else None,
            trainer=trainer if has_trainer else None,
        )
    return ParityMetrics(first=first, **numbers)
