# SPDX-License-Identifier: Apache-2.0
"""Trajectories become the same rows whatever order they finished in."""

import math
import random

import pytest
import torch

from megatron.vllm_forward.rl.batch import compare_rows, make_batch
from megatron.vllm_forward.rl.layout import Layout
from megatron.vllm_forward.rl.settings import GrpoSettings
from megatron.vllm_forward.rl.trajectory import Trajectory, from_completion, pack, pad_rows, plan_rows, silent_row
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.rollout.protocol import Completion, SamplingParams


def trajectory(group, member, prompt=3, drawn=4, **changes):
    length = prompt + drawn
    values = {
        "token_ids": tuple(range(100 * group + 10 * member, 100 * group + 10 * member + length)),
        "sampled": (False,) * prompt + (True,) * drawn,
        "logprobs": (math.nan,) * prompt + tuple(-0.5 * (at + 1) for at in range(drawn)),
        "phases": ("",) * prompt + ("prefill",) + ("decode",) * (drawn - 1),
        "reward": 1.0,
        "weight_version": 7,
    }
    return Trajectory(group=group, member=member, **{**values, **changes})


def tensors_of(row):
    return {name: value for name, value in vars(row).items() if isinstance(value, torch.Tensor)}


def test_completion_becomes_a_trajectory():
    completion = Completion(
        request_id="r", prompt_ids=(5, 6), token_ids=(7, 8), logprobs=(-1.5, -0.25), phases=("prefill", "decode"),
        finish_reason="length", weight_version=3,
    )  # fmt: skip
    got = from_completion(completion, group=2, member=1, reward=0.5)
    assert (got.group, got.member, got.reward, got.valid, got.weight_version) == (2, 1, 0.5, True, 3)
    assert got.token_ids == (5, 6, 7, 8)
    assert got.sampled == (False, False, True, True)
    assert got.logprobs[2:] == (-1.5, -0.25)


def test_row_scores_the_next_token():
    row = pack([trajectory(0, 0), trajectory(0, 1, prompt=2, drawn=1)], [0.5, -1.0], 64)[0]
    assert row.tokens_T.tolist() == [0, 1, 2, 3, 4, 5, 10, 11]
    assert row.labels_T.tolist() == [1, 2, 3, 4, 5, 6, 11, 12]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert row.cu_seqlens_S1.tolist() == [0, 6, 8]
    assert row.cu_seqlens_S1.dtype == torch.int32
    assert row.sampled_T.tolist() == [False, False, True, True, True, True, False, True]
    assert row.rollout_logprob_T.tolist() == [0, 0, -0.5, -1.0, -1.5, -2.0, 0, -0.5]
    assert row.advantage_T.tolist() == [0.5] * 6 + [-1.0] * 2
    assert row.num_sampled == 5
    assert row.slices() == [slice(0, 6), slice(6, 8)]


def test_order_of_completion_does_not_change_the_batch():
    made = [trajectory(group, member, prompt=2 + group, drawn=1 + member) for group in range(4) for member in range(3)]
    advantages = {(t.group, t.member): 0.1 * t.group - 0.3 * t.member for t in made}
    want = pack(made, [advantages[t.group, t.member] for t in made], 20)
    assert len(want) > 2
    for seed in range(5):
        arrived = made[:]
        random.Random(seed).shuffle(arrived)
        assert arrived != made
        got = pack(arrived, [advantages[t.group, t.member] for t in arrived], 20)
        assert len(got) == len(want)
        for got_row, want_row in zip(got, want, strict=True):
            for name, value in tensors_of(want_row).items():
                assert_same_bits(getattr(got_row, name), value, name)


def test_rows_fill_in_order():
    assert plan_rows([4, 4, 4, 9, 1, 1], 9) == [[0, 1], [2], [3], [4, 5]]
    assert plan_rows([], 9) == []


def test_rows_reject_a_long_trajectory():
    with pytest.raises(ValueError, match="2 trajectories are longer than a row of 9 tokens, first number 1 with 10"):
        plan_rows([4, 10, 12], 9)


def test_padding_is_a_sequence_of_its_own():
    short, long = pack([trajectory(0, 0), trajectory(1, 0, drawn=9)], [1.0, 1.0], 11)
    padded, same = pad_rows([short, long], 11)
    assert same is long
    assert padded.cu_seqlens_S1.tolist() == [0, 6, 11]
    assert len(padded.tokens_T) == len(padded.labels_T) == len(padded.positions_T) == 11
    assert padded.num_sampled == short.num_sampled
    assert not padded.sampled_T[6:].any()


def test_rows_of_a_batch_are_as_long_as_sequence_parallel_needs():
    settings = GrpoSettings(prompts_per_step=1, group_size=3, row_tokens=64, sampling=SamplingParams())
    own = [trajectory(0, member, drawn=3 + member, reward=float(member)) for member in range(3)]
    fed = sum(len(each.token_ids) - 1 for each in own)
    assert fed == 18
    for multiple, length in ((1, 18), (2, 18), (4, 20), (5, 20)):
        batch = make_batch(own, settings, Layout(row_multiple=multiple))
        for (row,) in (batch.rows, batch.kept):
            assert len(row.tokens_T) == length
            assert not row.sampled_T[fed:].any()
            assert not row.advantage_T[fed:].any()
            assert row.num_sampled == 3 + 4 + 5
            metrics = compare_rows([row], [row.rollout_logprob_T], settings.group_size)
            assert (metrics.count, metrics.mismatches) == (3 + 4 + 5, 0)


def test_silent_row_is_short_and_counts_nothing():
    silent = silent_row([trajectory(0, 0), trajectory(0, 1, drawn=1)], 64)
    assert len(silent.tokens_T) == 3
    assert silent.num_sampled == 0
    assert silent.slices() == []
    assert not silent.advantage_T.any()
    assert not silent.rollout_logprob_T.any()


def test_expert_ids_follow_their_tokens_and_padding_repeats_none():
    first, second = torch.randint(8, (6, 2, 3)), torch.randint(8, (3, 2, 3))
    row = pack([trajectory(0, 1, drawn=1, expert_ids=second), trajectory(0, 0, expert_ids=first)], [1.0, 1.0], 64)[0]
    assert_same_bits(row.expert_ids_TLk, torch.cat([first, second]), "experts are in the order of the tokens")
    padded = pad_rows([row], 12)[0]
    assert padded.expert_ids_TLk.shape == (12, 2, 3)
    assert all(len(set(slots)) == 3 for token in padded.expert_ids_TLk[9:].tolist() for slots in token)
    assert pack([trajectory(0, 0, expert_ids=first), trajectory(0, 1)], [1.0, 1.0], 64)[0].expert_ids_TLk is None


@pytest.mark.parametrize(("changes", "words"), [
    ({"sampled": (True,) * 7}, "the first token must be a prompt token"),
    ({"logprobs": (math.nan,) * 7}, "position 3 (4 such)"),
    ({"logprobs": (-1.0,) * 7}, "position 0 (3 such)"),
    ({"phases": ()}, "'phases': 0"),
    ({"reward": math.nan}, "reward is nan"),
    ({"expert_ids": torch.zeros(7, 2, 3)}, "expert_ids has 7 positions; 6 are needed"),
])  # fmt: skip
def test_trajectory_rejects_what_the_gate_could_not_compare(changes, words):
    with pytest.raises(ValueError) as error:
        trajectory(0, 0, **changes)
    assert words in str(error.value)
