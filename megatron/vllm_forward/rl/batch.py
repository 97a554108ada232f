# SPDX-License-Identifier: Apache-2.0
"""The batch of one step on this rank: all rows for the gate, and the rows that are worth training on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.vllm_forward.rl.corrections import importance_weights
from megatron.vllm_forward.rl.grpo import group_advantages
from megatron.vllm_forward.rl.layout import Layout
from megatron.vllm_forward.rl.settings import GrpoSettings
from megatron.vllm_forward.rl.trajectory import Row, Trajectory, pack, pad_rows, silent_row
from vllm_forward_bridge.config import GateSection
from vllm_forward_bridge.parity.metrics import ParityMetrics, compare_logprobs

Key = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """What one rank scores and trains on in a step. Equal rows in number and length on every rank."""

    trajectories: tuple[Trajectory, ...]
    """Ordered by (group, member)."""
    dropped_groups: int
    rows: tuple[Row, ...]
    """All trajectories: the gate leaves no sampled token out."""
    kept: tuple[Row, ...]
    """Valid trajectories of groups with variance; empty on every rank if no rank has any."""


def make_batch(trajectories: Sequence[Trajectory], settings: GrpoSettings, layout: Layout) -> Batch:
    """Order, weigh and pack the trajectories of this rank's groups. Collective: all ranks get equally many rows.

    Raises:
        ValueError: a member is missing, there is one too many, or a trajectory does not fit a row.
    """
    own = tuple(sorted(trajectories, key=_key))
    groups, members = layout.own_groups(settings.prompts_per_step), range(settings.group_size)
    wanted = [(group, member) for group in groups for member in members]
    _check_complete(own, wanted)
    shape = (-1, settings.group_size)
    rewards_GK = torch.tensor([t.reward for t in own], dtype=torch.float64).reshape(shape)
    valid_GK = torch.tensor([t.valid for t in own]).reshape(shape)
    advantages = group_advantages(rewards_GK, valid_GK)
    values = advantages.values_GK.flatten().tolist()
    worth = (advantages.kept_G[:, None] & valid_GK).flatten().tolist()
    kept = [(t, value) for t, value, keep in zip(own, values, worth, strict=True) if keep]
    return Batch(
        trajectories=own,
        dropped_groups=advantages.dropped,
        rows=_in_step(pack(own, values, settings.row_tokens), own, settings, layout),
        kept=_in_step(pack([t for t, _ in kept], [v for _, v in kept], settings.row_tokens), own, settings, layout),
    )


def _key(trajectory: Trajectory) -> Key:
    return trajectory.group, trajectory.member


def _check_complete(own: Sequence[Trajectory], wanted: Sequence[Key]) -> None:
    have, want = Counter(map(_key, own)), Counter(wanted)
    if have != want:
        missing, extra = sorted((want - have).elements()), sorted((have - want).elements())
        raise ValueError(
            f"(group, member) missing: {missing}; not asked for: {extra}: every member of this rank's groups must come "
            "back exactly once; an episode that failed comes back with valid=False"
        )


def _in_step(rows: list[Row], own: Sequence[Trajectory], settings: GrpoSettings, layout: Layout) -> tuple[Row, ...]:
    # Ranks of one expert-parallel group exchange tokens in every layer, stages exchange fixed shapes: a rank with fewer
    # or shorter rows would leave the others waiting.
    number = int(layout.largest([len(rows)])[0])
    rows = rows + [silent_row(own, settings.row_tokens)] * (number - len(rows))
    length = int(layout.largest([max((len(row.tokens_T) for row in rows), default=0)])[0])
    length += -length % layout.row_multiple
    return tuple(pad_rows(rows, length))


def by_trajectory(rows: Sequence[Row], values: Sequence[Tensor]) -> dict[Key, Tensor]:
    """Cut per-row values into the trajectories' own; empty if this rank has no values."""
    return {
        _key(trajectory): value_T[where]
        for row, value_T in zip(rows, values, strict=False)
        for trajectory, where in zip(row.trajectories, row.slices(), strict=True)
    }


def with_old_logprobs(rows: Sequence[Row], old: Mapping[Key, Tensor] | None, section: GateSection) -> list[Row]:
    """Give rows their old logprobs and the weights that correct for the rollout.

    Args:
        rows: rows to train on.
        old: the trainer's logprobs by trajectory; None takes the rollout's, which a certificate has to allow. Empty on
            a rank without the output layer, which computes no loss.
        section: names the correction.
    """
    return [_with_old(row, row.rollout_logprob_T if old is None else _gather(row, old), section) for row in rows]


def _gather(row: Row, old: Mapping[Key, Tensor]) -> Tensor:
    old_T = torch.zeros_like(row.rollout_logprob_T)
    for trajectory, where in zip(row.trajectories, row.slices(), strict=True):
        if _key(trajectory) in old:
            old_T[where] = old[_key(trajectory)].to(old_T.device)
    return old_T


def _with_old(row: Row, old_T: Tensor, section: GateSection) -> Row:
    weight_T = importance_weights(
        old_T, row.rollout_logprob_T, correction=section.correction, cap=section.correction_cap
    )
    return replace(row, old_logprob_T=old_T, weight_T=weight_T)


def compare_rows(rows: Sequence[Row], logprobs: Sequence[Tensor], group_size: int) -> ParityMetrics:
    """Compare what the trainer computed for every sampled token with what the rollout reported.

    Args:
        rows: the rows that were scored; padding and silent rows have no trajectory and no sampled token.
        logprobs: the trainer's, float32, one tensor a row; a row without one counts as missing.
        group_size: numbers the samples for the report: group * group_size + member.
    """
    trainer = by_trajectory(rows, logprobs)
    sides: tuple[list, list] = ([], [])
    phases, samples = [], []
    for row in rows:
        for trajectory, where in zip(row.trajectories, row.slices(), strict=True):
            sampled_T = row.sampled_T[where]
            sides[0].append(row.rollout_logprob_T[where][sampled_T])
            sides[1].append(trainer[_key(trajectory)].cpu()[sampled_T] if _key(trajectory) in trainer else ())
            phases.append([phase for phase, own in zip(trajectory.phases, trajectory.sampled, strict=True) if own])
            samples.append(trajectory.group * group_size + trajectory.member)
    return compare_logprobs(*sides, phases=phases, samples=samples)
