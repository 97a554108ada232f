# SPDX-License-Identifier: Apache-2.0
"""MambaState: however a sequence is cut, batched, moved or restarted, its rows have the bits of one forward."""

import random

import pytest
import torch
from sequences import CHUNK, ROW_INPUTS, conv_inputs, cumulative, scan_inputs

from vllm_forward_bridge.ops import causal_conv1d, ssd_scan
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.state.mamba_state import MambaState, replay_plan

HEADS, HEAD_DIM, GROUPS, STATE = 4, 8, 2, 16
CHANNELS = HEADS * HEAD_DIM + 2 * GROUPS * STATE


class Layer:
    """A layer's inputs for packed sequences, its one-shot outputs, and a state whose slots start as NaN."""

    def __init__(self, lengths, chunk_size, num_slots):
        self.lengths, self.chunk_size = lengths, chunk_size
        self.starts = cumulative(lengths).tolist()
        self.conv = conv_inputs(sum(lengths), CHANNELS)
        self.inputs = scan_inputs(sum(lengths), HEADS, HEAD_DIM, GROUPS, STATE)
        self.want_conv = causal_conv1d(*self.conv, cumulative(lengths), None)
        self.want, _ = ssd_scan(*self.inputs.values(), cumulative(lengths), chunk_size, None)
        self.state = MambaState(
            num_slots=num_slots, num_heads=HEADS, head_dim=HEAD_DIM, num_groups=GROUPS, state_size=STATE, conv_width=4,
            chunk_size=chunk_size,
        )  # fmt: skip
        for kept in (self.state.boundary_state_ZhPn, self.state.conv_tail_ZWC, *self.state.buffers):
            kept.fill_(torch.nan)

    def forward(self, work, padding=0):
        """Run (sequence, slot, start, count) rows in one forward and compare each with the one-shot output."""
        _, slots, starts, counts = zip(*work, strict=True)
        plan = replay_plan(slots, starts, counts, chunk_size=self.chunk_size, conv_width=4)
        rows = torch.cat([self.starts[n] + start + torch.arange(count) for n, _, start, count in work])
        conv = self.state.convolve(plan, padded(self.conv[0][rows], padding), *self.conv[1:])
        inputs = {k: padded(v[rows], padding) if k in ROW_INPUTS else v for k, v in self.inputs.items()}
        y = self.state.scan(plan, *inputs.values())
        assert_same_bits(conv[: len(rows)], self.want_conv[rows], f"convolution of {work}")
        assert_same_bits(y[: len(rows)], self.want[rows], f"scan of {work}")
        assert_same_bits(y[len(rows) :], torch.zeros_like(y[len(rows) :]), "padding")


def padded(rows, count):
    return torch.cat([rows, torch.full_like(rows[:1].expand(count, *rows.shape[1:]), torch.nan)])


@pytest.mark.parametrize("chunk_size", [CHUNK, 128])
def test_mamba_state_every_cut_of_a_prompt_then_decode(chunk_size):
    length = 2 * chunk_size + 1
    step = 1 if chunk_size == CHUNK else 16
    cuts = range(1, length, step)
    layer = Layer([length] * len(cuts), chunk_size, len(cuts))
    layer.forward([(n, n, 0, cut) for n, cut in enumerate(cuts)])
    # A chunk of three rows, then decode: sequences end one after the other, so the batch shrinks.
    position = list(cuts)
    while any(start < length for start in position):
        count = 3 if position[0] == cuts[0] else 1
        work = [(n, n, start, min(count, length - start)) for n, start in enumerate(position) if start < length]
        layer.forward(work)
        position = [min(start + count, length) for start in position]
        if chunk_size == 128 and position[0] > cuts[0] + 5:
            # Enough single rows of a long chunk; the rest as one chunk across the boundaries.
            layer.forward([(n, n, start, length - start) for n, start in enumerate(position) if start < length])
            break


@pytest.mark.parametrize("seed", range(4))
def test_mamba_state_any_schedule(seed):
    dice = random.Random(seed)
    lengths = [2 * CHUNK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 1, 50]
    layer = Layer(lengths, CHUNK, 8)
    slots, done = dice.sample(range(8), len(lengths)), [0] * len(lengths)
    while done != lengths:
        for n in range(len(lengths)):
            if dice.random() < 0.05:
                # Preempted: its slot goes to whoever comes, and it starts again from its first row in another one.
                slots[n], done[n] = dice.choice([slot for slot in range(8) if slot not in slots]), 0
        active = [n for n in range(len(lengths)) if done[n] < lengths[n] and dice.random() < 0.7]
        dice.shuffle(active)
        counts = {n: min(lengths[n] - done[n], dice.choice([1, 1, 2, 5, CHUNK, 20])) for n in active}
        if active:
            layer.forward([(n, slots[n], done[n], counts[n]) for n in active], padding=dice.choice([0, 3]))
        for n in active:
            done[n] += counts[n]


def test_mamba_state_refuses_a_plan_that_does_not_continue():
    layer = Layer([20, 20], CHUNK, 2)
    layer.forward([(0, 0, 0, 7)])
    with pytest.raises(ValueError, match="slot 0 holds 7 rows, the plan starts at 8; that row, or 0"):
        layer.forward([(0, 0, 8, 1)])
    with pytest.raises(ValueError, match="slot 1 holds 0 rows, the plan starts at 7"):
        layer.forward([(0, 1, 7, 1)])
    layer.forward([(0, 0, 7, 13), (1, 1, 0, 2)])


def test_replay_plan_rejects_wrong_work():
    with pytest.raises(ValueError, match="replay_plan cannot plan this forward") as error:
        replay_plan([1, 1], [0, -1], [2, 0], chunk_size=CHUNK, conv_width=4)
    for part in ("slots are [1, 1]; no slot twice", "starts [0, -1], counts [2, 0]; slots and starts from 0"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="0 slots, 0 starts, 0 counts; one of each"):
        replay_plan([], [], [], chunk_size=CHUNK, conv_width=4)
