# SPDX-License-Identifier: Apache-2.0
"""The random number of a token depends on seed and position alone, and is uniform."""

import math

import torch

from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.rollout.uniform import token_uniform

WORD = (1 << 64) - 1


def mixed(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def uniform_in_python(seed, position):
    return (mixed((mixed(seed) + 0x9E3779B97F4A7C15 * (position + 1)) & WORD) >> 11) * 2.0**-53


def test_token_uniform_is_the_formula_on_unbounded_integers():
    pairs = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 131071), (123456789, 4095), (2**62, 7)]
    want = torch.tensor([uniform_in_python(*pair) for pair in pairs], dtype=torch.float64)
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert_same_bits(token_uniform(seeds, positions), want, "uniform of (seed, position)")


def test_token_uniform_ignores_the_batch():
    seeds, positions = torch.arange(37), torch.arange(37) * 3
    whole = token_uniform(seeds, positions)
    for at in (0, 17, 36):
        alone = token_uniform(seeds[at : at + 1], positions[at : at + 1])
        assert_same_bits(alone, whole[at : at + 1], f"row {at}")


def test_token_uniform_is_uniform_and_uncorrelated():
    count = 200
    grid = token_uniform(torch.arange(count).repeat_interleave(count), torch.arange(count).repeat(count))
    assert len(grid.unique()) == count * count
    assert grid.min() >= 0
    assert grid.max() < 1
    # Of n uniform numbers the mean has standard deviation 1/sqrt(12 n), and neighbours correlate by 1/sqrt(n): 5 sigma.
    assert abs(grid.mean().item() - 0.5) < 5 / math.sqrt(12 * len(grid))
    centred = grid.view(count, count) - 0.5
    for left, right in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        assert abs((left * right).mean().item() * 12) < 5 / math.sqrt(left.numel())
