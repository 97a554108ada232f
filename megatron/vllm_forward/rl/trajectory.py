# SPDX-License-Identifier: Apache-2.0
"""What the loop trains on: trajectories in fixed order, and their packing into rows for Megatron.

T packed tokens of a row, S sequences of a row.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vllm_forward_bridge.rollout.protocol import Completion


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One flat list of token ids, and what is known about each token that the policy sampled."""

    group: int
    """Index of the problem within the step; members of a group share their problem."""
    member: int
    """Index within the group. (group, member) orders a batch, never the time of completion."""
    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    """One a token: True where the policy drew it. Only these count in gate, loss and metrics."""
    logprobs: tuple[float, ...]
    """One a token, exact float32 values of the rollout; NaN where not sampled."""
    phases: tuple[str, ...]
    """One a token: what computed its logits, `prefill` or `decode`; empty text where not sampled."""
    reward: float
    valid: bool = True
    """False leaves the statistics and the loss: the environment failed, not the policy."""
    weight_version: int
    expert_ids: Tensor | None = field(default=None, compare=False)
    """int64 [len(token_ids) - 1, MoE layers, k] when the rollout recorded its experts."""

    def __post_init__(self) -> None:
        problems = _trajectory_problems(self)
        if problems:
            raise ValueError(f"trajectory {(self.group, self.member)} is malformed:\n  - " + "\n  - ".join(problems))


def _trajectory_problems(given: Trajectory) -> list[str]:
    problems = []
    lengths = {name: len(getattr(given, name)) for name in ("token_ids", "sampled", "logprobs", "phases")}
    if len(set(lengths.values())) != 1:
        return [f"lengths are {lengths}; one entry a token is needed, or the gate would compare the wrong tokens"]
    if len(given.token_ids) < 2 or given.sampled[0]:
        problems.append("the first token must be a prompt token, followed by at least one more: it has no logprob")
    wrong = [at for at, own in enumerate(given.sampled) if own != math.isfinite(given.logprobs[at])]
    if wrong:
        problems.append(f"position {wrong[0]} ({len(wrong)} such): exactly the sampled tokens have a finite logprob")
    if given.valid and not math.isfinite(given.reward):
        problems.append(f"reward is {given.reward}; a valid trajectory needs a finite one, else set valid=False")
    rows = None if given.expert_ids is None else given.expert_ids.shape[0]
    if rows is not None and rows != len(given.token_ids) - 1:
        needed = len(given.token_ids) - 1
        problems.append(f"expert_ids has {rows} positions; {needed} are needed, the last token is never fed")
    return problems


def from_completion(completion: Completion, *, group: int, member: int, reward: float) -> Trajectory:
    """Make a single-turn trajectory of a prompt and its completion."""
    prompt = len(completion.prompt_ids)
    return Trajectory(
        group=group,
        member=member,
        token_ids=completion.prompt_ids + completion.token_ids,
        sampled=(False,) * prompt + (True,) * len(completion.token_ids),
        logprobs=(math.nan,) * prompt + completion.logprobs,
        phases=("",) * prompt + completion.phases,
        reward=reward,
        valid=completion.finish_reason != "aborted",
        weight_version=completion.weight_version,
        expert_ids=completion.expert_ids,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One packed row: a microbatch of Megatron. Position t scores the label that follows token t."""

    tokens_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    cu_seqlens_S1: Tensor
    sampled_T: Tensor
    """bool: the label was sampled by the policy."""
    rollout_logprob_T: Tensor
    """float32; 0 where not sampled."""
    advantage_T: Tensor
    trajectories: tuple[Trajectory, ...]
    """One for each of the first sequences; sequences of padding have none."""
    expert_ids_TLk: Tensor | None = None
    old_logprob_T: Tensor | None = None
    weight_T: Tensor | None = None

    @property
    def num_sampled(self) -> int:
        """Count the tokens that the loss averages over."""
        return int(self.sampled_T.sum())

    def slices(self) -> list[slice]:
        """Return where each trajectory lies."""
        bounds = self.cu_seqlens_S1.tolist()
        return [slice(bounds[at], bounds[at + 1]) for at in range(len(self.trajectories))]

    def to(self, device: torch.device) -> "Row":
        """Return the row with its tensors on `device`."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def plan_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Assign sequences to rows in their order, opening a row when the next one does not fit.

    Raises:
        ValueError: names every sequence that is longer than a row.
    """
    long = [at for at, length in enumerate(lengths) if length > row_tokens]
    if long:
        raise ValueError(
            f"{len(long)} trajectories are longer than a row of {row_tokens} tokens, first number {long[0]} with "
            f"{lengths[long[0]]}: raise --seq-length, or end episodes earlier"
        )
    rows: list[list[int]] = []
    used = row_tokens + 1
    for at, length in enumerate(lengths):
        if used + length > row_tokens:
            rows.append([])
            used = 0
        rows[-1].append(at)
        used += length
    return rows


def pack(trajectories: Sequence[Trajectory], advantages: Sequence[float], row_tokens: int) -> list[Row]:
    """Pack trajectories into rows, ordered by (group, member), whatever order they arrived in.

    A trajectory of n tokens feeds n - 1: the last sampled token has no successor to score.
    """
    order = sorted(range(len(trajectories)), key=lambda at: (trajectories[at].group, trajectories[at].member))
    plan = plan_rows([len(trajectories[at].token_ids) - 1 for at in order], row_tokens)
    return [
        _row([trajectories[order[at]] for at in members], [advantages[order[at]] for at in members]) for members in plan
    ]


def _row(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> Row:
    lengths = [len(t.token_ids) - 1 for t in trajectories]
    cumulative = torch.tensor([0, *lengths]).cumsum(0)
    sampled_T = _flat((t.sampled[1:] for t in trajectories), torch.bool)
    logprob_T = _flat((t.logprobs[1:] for t in trajectories), torch.float32)
    recorded = all(t.expert_ids is not None for t in trajectories)
    return Row(
        tokens_T=_flat((t.token_ids[:-1] for t in trajectories), torch.int64),
        labels_T=_flat((t.token_ids[1:] for t in trajectories), torch.int64),
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens_S1=cumulative.to(torch.int32),
        sampled_T=sampled_T,
        rollout_logprob_T=torch.where(sampled_T, logprob_T, 0.0),
        advantage_T=torch.tensor(advantages, dtype=torch.float32).repeat_interleave(torch.tensor(lengths)),
        trajectories=tuple(trajectories),
        expert_ids_TLk=torch.cat([t.expert_ids for t in trajectories]) if recorded else None,
    )


def _flat(parts: Iterable[Sequence], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for part in parts for value in part], dtype=dtype)


def silent_row(trajectories: Sequence[Trajectory], row_tokens: int) -> Row:
    """Return a short row without sampled tokens: it runs, so that ranks stay in step, but teaches nothing."""
    shortest = min(trajectories, key=lambda trajectory: len(trajectory.token_ids))
    row = pack([shortest], [0.0], row_tokens)[0]
    silent_T, zero_T = torch.zeros_like(row.sampled_T), torch.zeros_like(row.rollout_logprob_T)
    return replace(row, trajectories=(), sampled_T=silent_T, rollout_logprob_T=zero_T)


def pad_rows(rows: Sequence[Row], length: int) -> list[Row]:
    """Lengthen rows to `length` by one more sequence of padding, so that pipeline stages exchange equal shapes."""
    return [row if len(row.tokens_T) == length else _padded(row, length - len(row.tokens_T)) for row in rows]


def _padded(row: Row, missing: int) -> Row:
    grown = {
        name: torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
        for name, value in vars(row).items()
        if isinstance(value, Tensor) and name not in ("cu_seqlens_S1", "expert_ids_TLk")
    }
    grown["positions_T"] = torch.cat([row.positions_T, torch.arange(missing)])
    grown["cu_seqlens_S1"] = torch.cat([row.cu_seqlens_S1, row.cu_seqlens_S1[-1:] + missing])
    if row.expert_ids_TLk is not None:
        # The experts of padding are any distinct ones: a router never chooses one twice.
        first_L = torch.arange(row.expert_ids_TLk.shape[2]).expand(missing, *row.expert_ids_TLk.shape[1:])
        grown["expert_ids_TLk"] = torch.cat([row.expert_ids_TLk, first_L])
    return replace(row, **grown)
