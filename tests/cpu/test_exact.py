# SPDX-License-Identifier: Apache-2.0
"""The CPU building blocks: exact products, fixed trees, functions of one variable without a scalar tail."""

import math

import pytest
import torch
from invariance import THREAD_COUNTS, num_threads

from vllm_forward_bridge.ops import exact
from vllm_forward_bridge.parity.bits import assert_same_bits

FUNCTIONS = {
    exact.exp: torch.exp,
    exact.log: torch.log,
    exact.rsqrt: torch.rsqrt,
    exact.sigmoid: torch.sigmoid,
    exact.silu: torch.nn.functional.silu,
    exact.softplus: torch.nn.functional.softplus,
}
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


def arguments(function, count, seed=0):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10
    return values.abs() if function in (exact.log, exact.rsqrt) else values


@every_function
def test_function_bits_ignore_place_length_and_stride(function):
    values = arguments(function, 300)
    whole = function(values)
    for start in range(0, 40):
        for length in (1, 2, 7, 15, 16, 17, 63, 64, 65, 200):
            part = slice(start, start + length)
            assert_same_bits(function(values[part]), whole[part], f"{length} values from {start}")
    for stride in (2, 3, 5):
        assert_same_bits(function(values[1::stride]), whole[1::stride], f"every {stride}th value")
    assert_same_bits(function(values.view(20, 15).T), whole.view(20, 15).T, "transposed")


@every_function
def test_function_bits_ignore_threads_and_neighbours(function):
    values = arguments(function, 100_003)
    alone = torch.cat([function(part) for part in values.split(1_009)])
    for threads in THREAD_COUNTS:
        with num_threads(threads):
            assert_same_bits(function(values), alone, f"{threads} threads")
    for neighbour in (math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, 1e-40, 88.0, -104.0):
        among = torch.full((64, 37), neighbour)
        among[:, 11] = values[:64]
        assert_same_bits(function(among)[:, 11].contiguous(), alone[:64], f"beside {neighbour}")


@every_function
def test_function_is_the_rounded_double(function):
    values = arguments(function, 4_000, seed=1)
    want = FUNCTIONS[function](values.double())
    # One rounding to fp32 of a float64 result: half a step, and a little for the float64 function itself.
    step = torch.ldexp(torch.ones_like(want), torch.frexp(want).exponent - 24)
    assert want.abs().max() > 0
    assert ((function(values).double() - want).abs() <= 0.5001 * step.clamp(min=2.0**-149)).all()


def test_functions_keep_their_limits():
    edge = torch.tensor([-math.inf, -200.0, -0.0, 0.0, 200.0, math.inf])
    assert exact.exp(edge).tolist() == [0.0, 0.0, 1.0, 1.0, math.inf, math.inf]
    assert exact.sigmoid(edge).tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert exact.softplus(edge)[[0, 1, 4, 5]].tolist() == [0.0, 0.0, 200.0, math.inf]
    assert exact.log(torch.tensor([1.0, 0.0])).tolist() == [0.0, -math.inf]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matmul_bits_ignore_order_shape_and_threads(dtype):
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(65, 300, generator=generator).to(dtype)
    w_NK = torch.randn(129, 300, generator=generator).to(dtype)
    whole = exact.matmul(x_MK, w_NK)
    order_K = torch.randperm(300, generator=generator)
    assert_same_bits(exact.matmul(x_MK[:, order_K], w_NK[:, order_K]), whole, "terms in another order")
    for rows in (1, 2, 3, 7, 33):
        assert_same_bits(exact.matmul(x_MK[5 : 5 + rows], w_NK), whole[5 : 5 + rows], f"{rows} rows")
        assert_same_bits(exact.matmul(x_MK, w_NK[5 : 5 + rows]), whole[:, 5 : 5 + rows].contiguous(), f"{rows} columns")
    stacked = exact.matmul(x_MK.view(5, 13, 300), w_NK.expand(5, -1, -1))
    assert_same_bits(stacked.view(65, 129), whole, "as a batch of products")
    for threads in THREAD_COUNTS:
        with num_threads(threads):
            assert_same_bits(exact.matmul(x_MK, w_NK), whole, f"{threads} threads")


@pytest.mark.parametrize("num_summed", [1, 16, 8192, 8193, 100_000])
def test_matmul_is_exact_at_the_largest_sum(num_summed):
    # All products at the top of the fixed-point range: one bit too many would make the sum round.
    x_1K = torch.full((1, num_summed), 2.0 - 2.0**-7, dtype=torch.bfloat16)
    x_1K[0, -1] = 2.0**-7
    product = exact.matmul(x_1K, x_1K)
    want = (num_summed - 1) * (2.0 - 2.0**-7) ** 2 + (2.0**-14)
    assert product.item() == want


def test_matmul_error_is_that_of_fp32():
    generator = torch.Generator().manual_seed(3)
    x_MK = torch.randn(64, 2688, generator=generator)
    w_NK = torch.randn(96, 2688, generator=generator)
    want = x_MK.double() @ w_NK.double().T
    # Each operand is off by at most half a unit, 2^-20 of its row's largest; errors of K terms add like a random walk.
    largest = x_MK.abs().amax(-1, keepdim=True).double() * w_NK.abs().amax(-1).double()
    assert ((exact.matmul(x_MK, w_NK) - want).abs() <= 6 * math.sqrt(2688) * 2.0**-20 * largest).all()


def test_matmul_never_returns_minus_zero():
    for x, w in ((-0.0, 1.0), (0.0, -1.0), (-0.0, -1.0)):
        for rows in (1, 2, 9):
            product = exact.matmul(torch.full((rows, 32), x), torch.full((rows, 32), w))
            assert_same_bits(product, torch.zeros(rows, rows, dtype=torch.float64), f"{x} times {w}")
    x_1K = torch.tensor([[1.0, -1.0]])
    assert_same_bits(exact.matmul(x_1K, x_1K.abs()), torch.zeros(1, 1, dtype=torch.float64), "a sum that cancels")


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_matmul_poison_stays_in_its_row(poison):
    generator = torch.Generator().manual_seed(0)
    x_MK, w_NK = torch.randn(17, 64, generator=generator), torch.randn(33, 64, generator=generator)
    want = exact.matmul(x_MK, w_NK)
    x_MK[3, 5] = w_NK[7, 60] = poison
    got = exact.matmul(x_MK, w_NK)
    assert not got[3].isfinite().any()
    assert not got[:, 7].isfinite().any()
    rows, columns = torch.arange(17) != 3, torch.arange(33) != 7
    assert_same_bits(got[rows][:, columns], want[rows][:, columns], "all other rows and columns")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [2.0**-133, 2.0**-126, 1e-3, 1.0, 1e30])
def test_fixed_point_keeps_its_promise(dtype, scale):
    values = (torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    values[4] = 0.0
    integers, unit = exact.fixed_point(values, 20)
    assert_same_bits(integers, integers.round(), "integers are whole")
    assert integers.abs().max() <= 2**20
    assert ((integers * unit - values.double()).abs() <= unit / 2).all()
    largest = values.double().abs().amax(-1)
    normal = largest >= 2.0**-126
    assert (integers.abs().amax(-1)[normal] >= 2**19).all()
    assert not integers[4].any()


def test_e4m3_integers_hold_every_code():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert_same_bits(exact.e4m3_integers(codes), codes.double() * 512, "every e4m3 code in units of 2^-9")


def test_halving_sum_adds_the_second_half_to_the_first():
    probe = torch.tensor([1e20, 1.0, -1e20, 1.0])  # the tree gives (1e20 - 1e20) + (1 + 1); left to right gives 1
    assert exact.halving_sum(probe).item() == 2.0
    assert exact.halving_sum(torch.tensor([1.0, 1e20, -1e20])).item() == 1.0 - 1e20 + 1e20
    for length in (1, 2, 3, 5, 6, 7, 31, 192):
        counts = torch.arange(1.0, length + 1).expand(3, -1)
        assert exact.halving_sum(counts).tolist() == [length * (length + 1) / 2] * 3


def test_halving_sum_bits_ignore_batch():
    values = torch.randn(257, 192, generator=torch.Generator().manual_seed(0))
    whole = exact.halving_sum(values)
    for rows in (1, 2, 3, 17, 64):
        assert_same_bits(exact.halving_sum(values[9 : 9 + rows]), whole[9 : 9 + rows], f"{rows} rows")
    assert_same_bits(exact.halving_sum(values.T.contiguous().T), whole, "column by column in memory")
