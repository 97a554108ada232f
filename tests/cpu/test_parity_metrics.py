# SPDX-License-Identifier: Apache-2.0
"""The metrics count every token, compare bits, and drop nothing that is missing or not finite."""

import math

import pytest
import torch

from vllm_forward_bridge.parity.metrics import compare_logprobs, merge, table

NEXT_AFTER_MINUS_ONE = torch.tensor(-1.0).nextafter(torch.tensor(0.0)).item()


def test_equal_bits_are_exactly_zero():
    rollout = [(-1.0, -2.5), (-0.25,)]
    metrics = compare_logprobs(rollout, [torch.tensor(row) for row in rollout])
    assert metrics.is_zero
    assert (metrics.count, metrics.max, metrics.mean, metrics.std, metrics.k3_kl) == (3, 0.0, 0.0, 0.0, 0.0)
    assert metrics.first is None


def test_one_last_bit_is_a_mismatch_with_its_place_and_phase():
    phases = [("prefill", "decode"), ("prefill", "decode")]
    metrics = compare_logprobs(
        [(-3.0, -2.0), (-4.0, -1.0)], [(-3.0, -2.0), (-4.0, NEXT_AFTER_MINUS_ONE)], phases=phases, samples=[7, 9]
    )
    assert not metrics.is_zero
    assert (metrics.mismatches, metrics.decode_mismatches, metrics.invalid) == (1, 1, 0)
    assert metrics.max == NEXT_AFTER_MINUS_ONE + 1.0 > 0
    assert (metrics.first.sample, metrics.first.position, metrics.first.phase) == (9, 1, "decode")
    assert "rollout -1.0, trainer -0.99999" in str(metrics.first)


def test_minus_zero_is_not_zero():
    metrics = compare_logprobs([(-0.0,)], [(0.0,)])
    assert metrics.mismatches == 1
    assert metrics.max == 0.0
    assert not metrics.is_zero


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("both", [True, False])
def test_values_that_are_not_finite_are_mismatches_even_if_equal(value, both):
    metrics = compare_logprobs([(-1.0, value)], [(-1.0, value if both else -1.0)])
    assert (metrics.count, metrics.mismatches, metrics.invalid) == (2, 1, 1)
    assert metrics.max == metrics.mean == metrics.std == metrics.k3_kl == math.inf


@pytest.mark.parametrize(
    ("rollout", "trainer", "count", "mismatches"),
    [
        ([(-1.0, -2.0)], [(-1.0,)], 2, 1),
        ([(-1.0,)], [(-1.0, -2.0)], 2, 1),
        ([(-1.0,), (-2.0, -3.0)], [(-1.0,)], 3, 2),
        ([], [(-1.0,)], 1, 1),
    ],
)
def test_missing_tokens_and_samples_are_mismatches(rollout, trainer, count, mismatches):
    metrics = compare_logprobs(rollout, trainer)
    assert (metrics.count, metrics.mismatches, metrics.invalid) == (count, mismatches, mismatches)
    assert metrics.max == math.inf
    assert "missing" in str(metrics.first)


def test_nothing_compared_is_not_zero():
    assert not compare_logprobs([], []).is_zero
    assert not compare_logprobs([()], [()]).is_zero


def test_moments_follow_the_formulas():
    rollout, trainer = [(-1.0, -2.0, -3.0)], [(-1.5, -2.0, -2.0)]
    metrics = compare_logprobs(rollout, trainer)
    d = [-0.5, 0.0, 1.0]
    mean = sum(d) / 3
    assert metrics.max == 1.0
    assert metrics.mean == 0.5
    assert math.isclose(metrics.std, math.sqrt(sum((x - mean) ** 2 for x in d) / 3), rel_tol=1e-15)
    assert math.isclose(metrics.k3_kl, sum(math.exp(x) - 1 - x for x in d) / 3, rel_tol=1e-12)


def test_merge_equals_one_comparison_and_takes_the_worst_first_difference():
    generator = torch.Generator().manual_seed(3)
    rollout = [torch.randn(n, generator=generator) for n in (5, 1, 9, 3)]
    trainer = [row.clone() for row in rollout]
    trainer[0][2] += 0.125
    trainer[2][4:7] -= 0.5
    whole = compare_logprobs(rollout, trainer)
    parts = merge([compare_logprobs(rollout[i : i + 1], trainer[i : i + 1], samples=[i]) for i in range(4)])
    assert (parts.count, parts.mismatches) == (whole.count, whole.mismatches) == (18, 4)
    assert parts.max == whole.max
    # two sums of 18 float64 terms in another order
    assert math.isclose(parts.mean, whole.mean, rel_tol=18 * 2**-52)
    assert math.isclose(parts.std, whole.std, rel_tol=4 * 18 * 2**-52)
    assert (whole.first.sample, whole.first.position) == (0, 2)
    assert (parts.first.sample, parts.first.position) == (2, 4)


def test_values_that_are_not_float32_are_refused():
    with pytest.raises(ValueError, match="0.1 is not a float32 value"):
        compare_logprobs([(-0.1,)], [(-0.5,)])
    with pytest.raises(ValueError, match="bfloat16"):
        compare_logprobs([(-0.5,)], [torch.tensor([-0.5], dtype=torch.bfloat16)])


def test_table_prints_zero_only_for_zero():
    tiny = compare_logprobs([(-1.0,)], [(NEXT_AFTER_MINUS_ONE,)])
    zero = compare_logprobs([(-1.0,)], [(-1.0,)])
    head, first, second = table([("1", zero), ("2", tiny)]).splitlines()
    assert head.split() == ["step", "tokens", "mismatches", "invalid", "max", "mean", "std", "k3", "KL"]
    assert first.split() == ["1", "1", "0", "0", "0", "0", "0", "0"]
    assert second.split()[:5] == ["2", "1", "1", "0", "5.960e-08"]
