# SPDX-License-Identifier: Apache-2.0
"""Numbers of a step: sums over this rank's tokens first, then over ranks, then the record that the journal keeps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron.vllm_forward.rl.grpo import Objective
from megatron.vllm_forward.rl.layout import Layout
from megatron.vllm_forward.rl.trajectory import Trajectory
from vllm_forward_bridge.parity.metrics import ParityMetrics

_SUMS = ("tokens", "loss", "ratio", "clipped", "kl", "weight", "weights_off_one", "weights_zero")


@dataclass
class ObjectiveSums:
    """Sums of the objective over trained tokens, and the largest distance of a ratio from one."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    ratio_deviation: float = 0.0

    def add(self, objective: Objective, weight_N: Tensor) -> None:
        """Add the counted tokens of one row."""
        ratio_N = objective.ratio_T.double()
        parts = {
            "tokens": float(len(ratio_N)),
            "loss": objective.loss_T.detach().double().sum().item(),
            "ratio": ratio_N.sum().item(),
            "clipped": objective.clipped_T.sum().item(),
            "kl": objective.kl_T.double().sum().item(),
            "weight": weight_N.double().sum().item(),
            "weights_off_one": (weight_N != 1).sum().item(),
            "weights_zero": (weight_N == 0).sum().item(),
        }
        for name, value in parts.items():
            self.sums[name] += value
        if len(ratio_N):
            self.ratio_deviation = max(self.ratio_deviation, (ratio_N - 1).abs().max().item())

    def over(self, layout: Layout) -> dict[str, float]:
        """Return means per trained token over all ranks, under the names of the record."""
        # Tensor ranks hold the same logprobs; one of them counts.
        mine = [self.sums[name] if layout.speaks else 0.0 for name in _SUMS]
        sums = dict(zip(_SUMS, layout.total(mine), strict=True))
        tokens = sums.pop("tokens")
        means = {name: value / tokens if tokens else 0.0 for name, value in sums.items()}
        return {
            "trained_tokens": int(tokens),
            "loss": means["loss"],
            "ratio": means["ratio"],
            "ratio_deviation": layout.largest([self.ratio_deviation])[0],
            "clip_fraction": means["clipped"],
            "kl": means["kl"],
            "weight": means["weight"],
            "weights_off_one": means["weights_off_one"],
            "weights_zero": means["weights_zero"],
        }


def parity_record(metrics: ParityMetrics) -> dict[str, float | int | None]:
    """Name the gate's numbers for the record; None where no finite number describes them."""
    moments = {"max": metrics.max, "mean": metrics.mean, "std": metrics.std, "k3_kl": metrics.k3_kl}
    finite = {name: value if math.isfinite(value) else None for name, value in moments.items()}
    return {"compared": metrics.count, "mismatches": metrics.mismatches, "invalid": metrics.invalid, **finite}


def sample_record(
    layout: Layout, own: Sequence[Trajectory], dropped_groups: int, entropies: Sequence[tuple[float, int]]
) -> dict[str, float | int]:
    """Sum this rank's trajectories and entropies over ranks.

    Args:
        layout: replicas hold the same trajectories, so one of each set counts them.
        own: trajectories that this data rank trains on.
        dropped_groups: its groups without variance.
        entropies: sum over sampled tokens and their count, for each scored row; empty where a rank has no logits.
    """
    counts = layout.replica_rank == 0
    valid = [trajectory for trajectory in own if trajectory.valid]
    mine = (
        sum(sum(t.sampled) for t in own),
        len(own),
        len(own) - len(valid),
        sum(t.reward for t in valid),
        dropped_groups,
        len({t.group for t in own}),
    )
    speaks = entropies if layout.speaks else ()
    entropy = (sum(value for value, _ in speaks), sum(count for _, count in speaks))
    tokens, trajectories, invalid, reward, dropped, groups, nats, scored = layout.total(
        [float(value) for value in (*(mine if counts else (0,) * 6), *entropy)]
    )
    graded = trajectories - invalid
    return {
        "tokens": int(tokens),
        "trajectories": int(trajectories),
        "invalid_trajectories": int(invalid),
        "reward": reward / graded if graded else 0.0,
        "groups": int(groups),
        "dropped_groups": int(dropped),
        "entropy": nats / scored if scored else 0.0,
    }


def time_record(seconds: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Name the times of the phases and derive the step's rate."""
    whole = sum(seconds.values())
    phases = {f"seconds_{name}": round(value, 4) for name, value in seconds.items()}
    return {**phases, "seconds_step": round(whole, 4), "tokens_per_s": tokens / whole}
