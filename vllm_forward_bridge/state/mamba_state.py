# SPDX-License-Identifier: Apache-2.0
"""What a Mamba-2 layer keeps of every running sequence, and how a chunk is continued with the bits of a one-shot scan.

Kept: the fp32 state at the last chunk boundary, the rows since then (x, raw dt, B), the last inputs of the convolution.
A forward feeds those rows again in front of the new ones, so the scan always sees the chunk grid of the whole sequence;
C of a row that is fed again is zero: its output is not read, and the scan skips it.
"""

# T new tokens of a forward, S its sequences, N rows with those fed again, U rows fed again, K rows kept for the next
# forward; h heads, P head dim, G groups, n state size, Q chunk size, C conv channels, W conv width, Z slots.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge.ops.causal_conv1d import causal_conv1d
from vllm_forward_bridge.ops.ssd_scan import ssd_scan


@dataclass(frozen=True)
class ReplayPlan:
    """Index maps of one forward, the same for every Mamba layer; build it with `replay_plan`."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    slot_S: Tensor
    fresh_S: Tensor
    """True where the sequence starts here: whatever its slot holds is another sequence's."""
    cu_seqlens_S1: Tensor
    """Of the new rows."""
    cu_seqlens_replayed_S1: Tensor
    """Of new rows and rows fed again."""
    refed_from_U: Tensor
    """Row of the buffers [slots * chunk_size] behind each row fed again."""
    refed_at_U: Tensor
    new_at_T: Tensor
    kept_from_K: Tensor
    kept_at_K: Tensor
    tail_from_SW: Tensor
    """Where each sequence's next conv tail lies in [old tails | new rows]."""
    stored_V: Tensor
    """Sequences that start here or complete a chunk: only theirs is a new boundary state."""

    @property
    def num_replayed(self) -> int:
        """Rows the scan is given."""
        return len(self.new_at_T) + len(self.refed_at_U)


def replay_plan(
    slots: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    chunk_size: int,
    conv_width: int,
    device: torch.device | str = "cpu",
) -> ReplayPlan:
    """Plan a forward over any mix of whole prompts, chunks of prompts and single decode rows.

    Args:
        slots: place of each sequence's state; no slot twice.
        starts: rows of each sequence computed before; 0 starts the sequence afresh, whatever the slot holds.
        counts: new rows of each sequence, at least 1; they lie packed in this order.
        chunk_size: rows between state boundaries.
        conv_width: taps of the convolution.
        device: where the layers run.

    Raises:
        ValueError: lists every sequence that cannot be planned.
    """
    _check_plan(slots, starts, counts)
    slot_S, start_S, count_S = (torch.tensor(list(values)) for values in (slots, starts, counts))
    refed_S = start_S % chunk_size
    total_S = refed_S + count_S
    kept_S = total_S % chunk_size
    first_new_S, first_S = count_S.cumsum(0) - count_S, total_S.cumsum(0) - total_S
    refed_row_U, new_row_T, kept_row_K = (_offsets(counts_S) for counts_S in (refed_S, count_S, kept_S))
    refed_seq_U, new_seq_T, kept_seq_K = (_sequences(counts_S) for counts_S in (refed_S, count_S, kept_S))
    # The next tail is the last W - 1 rows of [old tail | new rows]; all old tails lie packed in front of all new rows.
    gap = conv_width - 1
    back_SW = count_S[:, None] - gap + torch.arange(gap)
    old_SW = torch.arange(len(slot_S))[:, None] * gap + gap + back_SW
    new_SW = len(slot_S) * gap + first_new_S[:, None] + back_SW
    tensors = {
        "slot_S": slot_S,
        "fresh_S": start_S == 0,
        "cu_seqlens_S1": _starts(count_S),
        "cu_seqlens_replayed_S1": _starts(total_S),
        "refed_from_U": slot_S[refed_seq_U] * chunk_size + refed_row_U,
        "refed_at_U": first_S[refed_seq_U] + refed_row_U,
        "new_at_T": first_S[new_seq_T] + refed_S[new_seq_T] + new_row_T,
        "kept_from_K": (first_S + total_S - kept_S)[kept_seq_K] + kept_row_K,
        "kept_at_K": slot_S[kept_seq_K] * chunk_size + kept_row_K,
        "tail_from_SW": torch.where(back_SW < 0, old_SW, new_SW),
        "stored_V": ((start_S == 0) | (total_S >= chunk_size)).nonzero()[:, 0],
    }
    return ReplayPlan(
        tuple(slots), tuple(starts), tuple(counts), **{name: tensor.to(device) for name, tensor in tensors.items()}
    )


def _check_plan(slots, starts, counts):
    problems = []
    if not len(slots) == len(starts) == len(counts) >= 1:
        problems.append(
            f"{len(slots)} slots, {len(starts)} starts, {len(counts)} counts; one of each a sequence is accepted, to "
            "know what to continue: pass equal lists"
        )
    if len(set(slots)) != len(slots):
        problems.append(
            f"slots are {list(slots)}; no slot twice is accepted, a slot holds one sequence: give each its own"
        )
    if any(slot < 0 for slot in slots) or any(start < 0 for start in starts) or any(count < 1 for count in counts):
        problems.append(
            f"slots {list(slots)}, starts {list(starts)}, counts {list(counts)}; slots and starts from 0, counts "
            "from 1 are accepted, a sequence without new rows has no place in a forward: leave it out"
        )
    if problems:
        raise ValueError("replay_plan cannot plan this forward:\n  - " + "\n  - ".join(problems))


def _offsets(counts_S: Tensor) -> Tensor:
    return torch.arange(int(counts_S.sum())) - (counts_S.cumsum(0) - counts_S)[_sequences(counts_S)]


def _sequences(counts_S: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts_S)), counts_S)


def _starts(counts_S: Tensor) -> Tensor:
    return torch.cat([counts_S.new_zeros(1), counts_S.cumsum(0)]).int()


class MambaState:
    """The state of one Mamba-2 layer for `num_slots` sequences.

    Args:
        num_slots: sequences at once.
        num_heads: heads h.
        head_dim: P.
        num_groups: G.
        state_size: n.
        conv_width: W.
        chunk_size: Q.
        device: where the layer runs.
    """

    def __init__(
        self, *, num_slots: int, num_heads: int, head_dim: int, num_groups: int, state_size: int, conv_width: int,
        chunk_size: int, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        rows, bf16 = num_slots * chunk_size, {"dtype": torch.bfloat16, "device": device}
        channels = num_heads * head_dim + 2 * num_groups * state_size
        self.chunk_size = chunk_size
        self.boundary_state_ZhPn = torch.zeros(num_slots, num_heads, head_dim, state_size, device=device)
        self.conv_tail_ZWC = torch.zeros(num_slots, conv_width - 1, channels, **bf16)
        self.buffers = (
            torch.zeros(rows, num_heads, head_dim, **bf16),
            torch.zeros(rows, num_heads, **bf16),
            torch.zeros(rows, num_groups, state_size, **bf16),
        )
        """x, raw dt and B of each slot's rows since its boundary, [slots * chunk_size, ...]."""
        self._next_conv = [0] * num_slots
        self._next_scan = [0] * num_slots

    def convolve(self, plan: ReplayPlan, xBC_TC: Tensor, weight_CW: Tensor, bias_C: Tensor) -> Tensor:
        """Run `causal_conv1d` on the new rows behind each sequence's tail, and keep the new tails."""
        self._advance("convolve", self._next_conv, plan)
        tail_SWC = self.conv_tail_ZWC[plan.slot_S].masked_fill_(plan.fresh_S[:, None, None], 0.0)
        y_TC = causal_conv1d(xBC_TC, weight_CW, bias_C, plan.cu_seqlens_S1, tail_SWC)
        self.conv_tail_ZWC[plan.slot_S] = torch.cat([tail_SWC.flatten(0, 1), xBC_TC])[plan.tail_from_SW]
        return y_TC

    def scan(
        self, plan: ReplayPlan, x_ThP: Tensor, dt_Th: Tensor, A_h: Tensor, B_TGn: Tensor, C_TGn: Tensor, D_h: Tensor,
        dt_bias_h: Tensor,
    ) -> Tensor:  # fmt: skip
        """Run `ssd_scan` from the boundary over the kept and the new rows; keep what the next forward needs.

        Returns:
            y_ThP of the new rows.
        """
        self._advance("scan", self._next_scan, plan)
        live = len(plan.new_at_T)
        replayed = []
        for buffer, new in zip(self.buffers, (x_ThP, dt_Th, B_TGn), strict=True):
            rows = new.new_empty(plan.num_replayed, *new.shape[1:])
            rows.index_copy_(0, plan.refed_at_U, buffer.index_select(0, plan.refed_from_U))
            rows.index_copy_(0, plan.new_at_T, new[:live])
            replayed.append(rows)
        C_NGn = C_TGn.new_zeros(plan.num_replayed, *C_TGn.shape[1:])
        C_NGn.index_copy_(0, plan.new_at_T, C_TGn[:live])
        state_ShPn = self.boundary_state_ZhPn.index_select(0, plan.slot_S)
        if 0 in plan.starts:
            state_ShPn.masked_fill_(plan.fresh_S[:, None, None, None], 0.0)
        x_NhP, dt_Nh, B_NGn = replayed
        y_NhP, state_ShPn = ssd_scan(
            x_NhP, dt_Nh, A_h, B_NGn, C_NGn, D_h, dt_bias_h, plan.cu_seqlens_replayed_S1, self.chunk_size, state_ShPn
        )
        stored = state_ShPn.index_select(0, plan.stored_V)
        self.boundary_state_ZhPn.index_copy_(0, plan.slot_S[plan.stored_V], stored)
        for buffer, rows in zip(self.buffers, replayed, strict=True):
            buffer.index_copy_(0, plan.kept_at_K, rows.index_select(0, plan.kept_from_K))
        y_ThP = torch.zeros_like(x_ThP)
        y_ThP[:live] = y_NhP[plan.new_at_T]
        return y_ThP

    def _advance(self, call: str, next_start: list[int], plan: ReplayPlan) -> None:
        """Move every sequence on, or raise if a plan does not continue what its slot holds."""
        wrong = [
            f"slot {slot} holds {next_start[slot]} rows, the plan starts at {start}; that row, or 0 to start afresh, "
            "is accepted, any other prefix has another state: plan a step once, and restart a preempted sequence at 0"
            for slot, start in zip(plan.slots, plan.starts, strict=True)
            if start not in (0, next_start[slot])
        ]
        if wrong:
            raise ValueError(f"MambaState.{call} cannot continue:\n  - " + "\n  - ".join(wrong))
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            next_start[slot] = start + count
