# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d on the CPU."""

import pytest
import torch
from invariance import THREAD_COUNTS, assert_gradcheck, assert_within, bf16_step, num_threads
from sequences import EDGE_LENGTHS, among_others, conv_inputs, cumulative, normal

from vllm_forward_bridge.ops import causal_conv1d, exact
from vllm_forward_bridge.ops.causal_conv1d import causal_conv1d_backward
from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits
from vllm_forward_bridge.reference.causal_conv1d import causal_conv1d as plain


def packed_reference(x_TC, weight_CW, bias_C, lengths, tails=None):
    tails = [None] * len(lengths) if tails is None else tails
    return torch.cat([plain(x, weight_CW, bias_C, tail) for x, tail in zip(x_TC.split(lengths), tails, strict=True)])


def test_causal_conv1d_opcheck():
    x_TC, weight_CW, bias_C = (value.requires_grad_() for value in conv_inputs(9, 8))
    torch.library.opcheck(causal_conv1d, (x_TC, weight_CW, bias_C, cumulative([4, 0, 5]), None))
    torch.library.opcheck(causal_conv1d, (x_TC, weight_CW, bias_C, cumulative([4, 5]), normal(2, 3, 8, seed=9)))


def test_causal_conv1d_close_to_reference():
    lengths = [1, 2, 3, 4, 40]
    x_TC, weight_CW, bias_C = conv_inputs(sum(lengths))
    tail_SWC = normal(len(lengths), 3, x_TC.shape[1], seed=7)
    want = packed_reference(x_TC.double(), weight_CW.double(), bias_C.double(), lengths, tail_SWC.double())
    largest = packed_reference(x_TC.double().abs(), weight_CW.double().abs(), bias_C.double().abs(), lengths,
                               tail_SWC.double().abs())
    # Four products rounded to bf16, half a step each, through SiLU whose slope is below 1.1; then one rounding to bf16.
    bound = bf16_step(want) / 2 + 1.1 * 4 * 2.0**-8 * (largest + 1)
    assert_within(causal_conv1d(x_TC, weight_CW, bias_C, cumulative(lengths), tail_SWC), want, bound, "convolution")


def test_causal_conv1d_rounds_each_product():
    x_TC, weight_CW, bias_C = conv_inputs(50)
    extended = torch.cat([x_TC.new_zeros(3, x_TC.shape[1]), x_TC])
    rounded = wide = bias_C.float().expand(50, -1)
    for j in range(4):
        rounded = rounded + (extended[j : j + 50].float() * weight_CW[:, j].float()).bfloat16().float()
        wide = wide + extended[j : j + 50].float() * weight_CW[:, j].float()
    got = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([50]), None)
    assert_same_bits(got, exact.silu(rounded).bfloat16(), "products are bf16")
    assert (got != exact.silu(wide).bfloat16()).float().mean() > 0.1


def test_causal_conv1d_adds_the_oldest_tap_first():
    x_TC = torch.tensor([[2.0**60], [1.0], [-(2.0**60)], [1.0]]).bfloat16()
    weight_CW, bias_C = torch.ones(1, 4).bfloat16(), torch.zeros(1).bfloat16()
    got = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([4]), None)[3]
    assert_same_bits(got, exact.silu(torch.ones(1)).bfloat16(), "((huge + 1) - huge) + 1")


@pytest.mark.parametrize("length", EDGE_LENGTHS)
def test_causal_conv1d_row_bits_ignore_batch(length):
    x_TC, weight_CW, bias_C = conv_inputs(length)
    alone = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([length]), None)
    others = normal(60, x_TC.shape[1], seed=5)
    for place in range(4):
        for other in (others, torch.full_like(others, torch.nan)):
            (rows,), cu_seqlens, own = among_others((x_TC,), (other,), (1, 9, 50), place)
            got = causal_conv1d(rows, weight_CW, bias_C, cu_seqlens, None)[own]
            assert_same_bits(got, alone, f"{length} rows at place {place}")


def test_causal_conv1d_bits_ignore_threads():
    x_TC, weight_CW, bias_C = conv_inputs(3000, 96)
    with num_threads(1):
        want = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([1000, 2000]), None)
    for threads in THREAD_COUNTS:
        with num_threads(threads):
            got = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([1000, 2000]), None)
            assert_same_bits(got, want, f"{threads} threads")


@pytest.mark.parametrize("cut", range(1, 10))
def test_causal_conv1d_continues_from_its_tail(cut):
    x_TC, weight_CW, bias_C = conv_inputs(10)
    whole = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([10]), None)
    tail_SWC = torch.cat([x_TC.new_zeros(3, x_TC.shape[1]), x_TC[:cut]])[-3:][None]
    rest = causal_conv1d(x_TC[cut:].contiguous(), weight_CW, bias_C, cumulative([10 - cut]), tail_SWC.contiguous())
    assert_same_bits(rest, whole[cut:], f"cut at {cut}")


def test_causal_conv1d_ignores_padding():
    x_TC, weight_CW, bias_C = conv_inputs(12)
    want = causal_conv1d(x_TC[:9].contiguous(), weight_CW, bias_C, cumulative([4, 5]), None)
    x_TC[9:] = torch.nan
    got = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([4, 5]), None)
    assert_same_bits(got[:9], want, "rows before the padding")
    assert_same_bits(got[9:], torch.zeros_like(got[9:]), "padding")


def test_causal_conv1d_backward_formula():
    lengths = [1, 5, 2]
    values = conv_inputs(8, 3)
    tail_SWC = normal(3, 3, 3, seed=8).double()

    def gradients(grad, x, weight, bias):
        return causal_conv1d_backward(grad, x, weight, bias, cumulative(lengths), tail_SWC)

    assert_gradcheck(lambda x, w, b: packed_reference(x, w, b, lengths, tail_SWC), gradients, *values)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True), (True, True, True)])
def test_causal_conv1d_grads_close(needs):
    lengths = [1, 30, 9]
    values = conv_inputs(40)
    grad_TC = normal(40, 24, seed=6)
    wide = [value.double().requires_grad_() for value in values]
    want = torch.autograd.grad(packed_reference(*wide, lengths), wide, grad_TC.double())
    leaves = [value.requires_grad_(need) for value, need in zip(values, needs, strict=True)]
    causal_conv1d(*leaves, cumulative(lengths), None).backward(grad_TC)
    for value, gradient in zip(leaves, want, strict=True):
        if value.requires_grad:
            # Sums of at most 40 * 4 fp32 terms of the size of the largest gradient, then one rounding to bf16.
            bound = bf16_step(gradient) / 2 + 160 * 2.0**-23 * gradient.abs().max()
            assert_within(value.grad, gradient, bound, "gradient")
        else:
            assert value.grad is None


def test_causal_conv1d_differs_across_a_boundary():
    # Negative control: the boundary between sequences is what keeps rows apart.
    x_TC, weight_CW, bias_C = conv_inputs(20)
    one = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([20]), None)
    two = causal_conv1d(x_TC, weight_CW, bias_C, cumulative([10, 10]), None)
    assert_same_bits(two[:10], one[:10], "rows before the boundary")
    assert not same_bits(two[10:13], one[10:13])
    assert_same_bits(two[13:], one[13:], "rows that do not reach the boundary")


def test_causal_conv1d_rejects_wrong_arguments():
    x_TC, weight_CW, bias_C = conv_inputs(9, 8)
    with pytest.raises(ValueError, match="causal_conv1d cannot take this call") as error:
        causal_conv1d(x_TC.float(), weight_CW[:4], bias_C, cumulative([4, 8]), normal(2, 2, 8, seed=0))
    for part in ("x_TC is torch.float32", "C = 4, but C = 8 in x_TC", "ends at 12; up to 9", "tail_SWC has 2 rows"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"cu_seqlens_S1 is \[1, 4\]; 0 first"):
        causal_conv1d(x_TC, weight_CW, bias_C, torch.tensor([1, 4], dtype=torch.int32), None)
    with pytest.raises(ValueError, match="cu_seqlens_S1 is torch.int64"):
        causal_conv1d(x_TC, weight_CW, bias_C, torch.tensor([0, 4]), None)


def test_causal_conv1d_rejects_a_trained_tail():
    x_TC, weight_CW, bias_C = conv_inputs(4, 8)
    tail_SWC = normal(1, 3, 8, seed=0).requires_grad_()
    with pytest.raises(ValueError, match="tail requires a gradient"):
        causal_conv1d(x_TC, weight_CW, bias_C, cumulative([4]), tail_SWC)
