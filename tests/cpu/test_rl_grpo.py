# SPDX-License-Identifier: Apache-2.0
"""Advantages, the clipped objective and the corrections, against values worked out by hand."""

import math

import pytest
import torch

from megatron.vllm_forward.rl.corrections import importance_weights
from megatron.vllm_forward.rl.grpo import STD_FLOOR, ObjectiveRule, clipped_objective, group_advantages

STEP_F32 = 2.0**-23


def test_advantages_are_centred_and_scaled_by_the_group():
    got = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 5.0, 7.0, 1.0]]))
    half = 0.5 / (0.5 + STD_FLOOR)
    spread = math.sqrt(5.0) + STD_FLOOR
    want = torch.tensor([[half, -half, -half, half], [-1 / spread, 1 / spread, 3 / spread, -3 / spread]])
    assert got.values_GK.dtype == torch.float32
    assert got.dropped == 0
    # float64 inside, one rounding to float32 on each side: half a step each at the largest value.
    assert (got.values_GK - want).abs().max() <= want.abs().max() * STEP_F32


def test_groups_without_variance_are_dropped_and_counted():
    # The mean of three times 0.1 is not 0.1 in binary: a test of std > 0 would keep this group.
    got = group_advantages(torch.tensor([[0.1, 0.1, 0.1], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64))
    assert got.kept_G.tolist() == [False, False, True]
    assert got.dropped == 2
    assert not got.values_GK[:2].any()
    assert got.values_GK[2].all()


def test_invalid_members_leave_the_statistics():
    rewards = torch.tensor([[1.0, 0.0, math.nan, 1e9], [1.0, 0.0, 0.5, 0.5]])
    valid = torch.tensor([[True, True, False, False], [True, False, False, False]])
    got = group_advantages(rewards, valid)
    half = torch.tensor(0.5 / (0.5 + STD_FLOOR), dtype=torch.float64).float()
    assert got.values_GK[0].tolist() == [half, -half, 0.0, 0.0]
    assert got.kept_G.tolist() == [True, False]  # one valid member has nothing to be compared with


@pytest.mark.parametrize(("rewards", "valid", "words"), [
    (torch.tensor([[0.0, math.inf]]), None, "(group, member) [0, 1] is inf"),
    (torch.zeros(3), None, "(3,)"),
    (torch.zeros(2, 3), torch.ones(2, 3), "torch.float32 (2, 3)"),
])  # fmt: skip
def test_advantages_rejects_bad_rewards(rewards, valid, words):
    with pytest.raises(ValueError) as error:
        group_advantages(rewards, valid)
    assert words in str(error.value)


def test_objective_clips_on_the_side_that_would_gain():
    ratio = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    old = torch.full((5,), -3.0)
    rule = ObjectiveRule(clip_lower=0.2, clip_upper=0.3)
    got = clipped_objective(rule, old + ratio.log(), old, advantage, torch.ones(5), torch.zeros(5))
    # min(r A, clip(r) A): 0.5, -0.8, 1.3, -1.5, 2.2
    assert got.clipped_T.tolist() == [False, True, True, False, False]
    want = torch.tensor([-0.5, 0.8, -1.3, 1.5, -2.2])
    # log then exp: each rounds once, the exponent's error is relative to |log ratio| + |old| <= 4.
    assert (got.loss_T - want).abs().max() <= 2.2 * 8 * STEP_F32
    assert not got.kl_T.any()


def test_objective_gradient_is_the_formula():
    current = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.0, -1.5, -1.5], dtype=torch.float64)
    advantage = torch.tensor([0.7, -0.3, 1.2, -0.4], dtype=torch.float64)
    weight = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64)
    reference = torch.tensor([-1.3, -1.7, -0.9, -1.5], dtype=torch.float64)
    rule = ObjectiveRule(clip_lower=0.2, clip_upper=0.2, kl_beta=0.1)
    got = clipped_objective(rule, current, old, advantage, weight, torch.zeros(4), reference)
    got.loss_T.sum().backward()
    ratio = (current - old).exp().detach()
    clipped = torch.tensor([False, True, True, False])  # ratios 1.11, 0.37 with A < 0, 2.7 with A > 0, 1
    assert got.clipped_T.tolist() == clipped.tolist()
    policy = torch.where(clipped, 0.0, -weight * advantage * ratio)
    kl = 0.1 * (1.0 - (reference - current).exp().detach())
    assert (current.grad - (policy + kl)).abs().max() <= 16 * 2.0**-52
    assert kl.abs().max() > 0


def test_objective_on_policy_is_minus_the_advantage_exactly():
    torch.manual_seed(0)
    old = -torch.rand(100) * 9
    advantage = torch.randn(100)
    rule = ObjectiveRule(clip_lower=0.2, clip_upper=0.2)
    got = clipped_objective(rule, old.clone(), old, advantage, torch.ones(100), torch.ones(100))
    assert got.loss_T.tolist() == (-advantage).tolist()
    assert not got.clipped_T.any()


def test_entropy_bonus_has_the_gradient_of_the_entropy():
    torch.manual_seed(2)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    entropy = -(logprobs.exp() * logprobs).sum()
    (want,) = torch.autograd.grad(-0.3 * entropy, logits, retain_graph=True)
    # The expectation over all five tokens, each with its own probability, in place of a sample.
    zeros, ones = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    rule = ObjectiveRule(clip_lower=0.2, clip_upper=0.2, entropy_weight=0.3)
    got = clipped_objective(rule, logprobs, logprobs.detach(), zeros, ones, entropy.detach().expand(5))
    assert not got.loss_T.any()
    (grad,) = torch.autograd.grad((logprobs.detach().exp() * got.loss_T).sum(), logits)
    assert want.abs().max() > 0.01
    # Five products and sums of numbers below 4 on each side.
    assert (grad - want).abs().max() <= 10 * 4 * 2.0**-52


@pytest.mark.parametrize(("beta", "reference"), [(0.1, None), (0.0, torch.zeros(1))])
def test_objective_rejects_half_a_kl_term(beta, reference):
    rule = ObjectiveRule(clip_lower=0.2, clip_upper=0.2, kl_beta=beta)
    with pytest.raises(ValueError, match="needs both"):
        clipped_objective(rule, *[torch.zeros(1)] * 5, reference)


def test_corrections_have_their_analytic_values():
    rollout = torch.tensor([-2.0, -2.0, -2.0, -2.0])
    old = rollout + torch.tensor([0.0, math.log(1.5), math.log(3.0), math.log(0.25)])
    ratio = (old - rollout).exp()
    assert importance_weights(old, rollout, correction="none", cap=2.0).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert importance_weights(old, rollout, correction="tis", cap=2.0).tolist() == [1.0, ratio[1], 2.0, ratio[3]]
    assert importance_weights(old, rollout, correction="mis", cap=2.0).tolist() == [1.0, ratio[1], 0.0, ratio[3]]
    assert (ratio - torch.tensor([1.0, 1.5, 3.0, 0.25])).abs().max() <= 3.0 * 8 * STEP_F32


def test_corrections_are_exactly_one_where_bits_agree():
    torch.manual_seed(1)
    logprob = -torch.rand(1000) * 20
    for correction in ("none", "tis", "mis"):
        assert importance_weights(logprob, logprob.clone(), correction=correction, cap=1.0).eq(1.0).all()


def test_corrections_do_not_carry_a_gradient():
    old = torch.zeros(3, requires_grad=True)
    assert not importance_weights(old, torch.zeros(3), correction="tis", cap=2.0).requires_grad


def test_corrections_reject_an_unknown_name():
    with pytest.raises(ValueError, match="'icepop'"):
        importance_weights(torch.zeros(1), torch.zeros(1), correction="icepop", cap=2.0)
