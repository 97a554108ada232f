# SPDX-License-Identifier: Apache-2.0
"""fused_add_rms_norm on the CPU."""

import pytest
import torch
from invariance import assert_gradcheck, assert_norm_grads_close, assert_row_bits_ignore_batch

from vllm_forward_bridge.ops import fused_add_rms_norm, rms_norm
from vllm_forward_bridge.ops.rms_norm import rms_norm_gradients
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.fused_add_rms_norm import fused_add_rms_norm as plain

EPS = 1e-5


def example(num_tokens=257, hidden=192):
    generator = torch.Generator().manual_seed(0)
    x_TH, residual_TH = torch.randn(2, num_tokens, hidden, generator=generator).bfloat16()
    return x_TH.clone(), residual_TH.clone(), (torch.rand(hidden, generator=generator) + 0.5).bfloat16()


def test_fused_add_rms_norm_opcheck():
    arguments = [value.requires_grad_() for value in example(5, 16)]
    torch.library.opcheck(fused_add_rms_norm, (*arguments, EPS))


def test_fused_add_rms_norm_is_the_norm_of_the_rounded_sum():
    x_TH, residual_TH, gain_H = example()
    y_TH, sum_TH = fused_add_rms_norm(x_TH, residual_TH, gain_H, EPS)
    assert_same_bits(sum_TH, x_TH + residual_TH, "the new residual stream")
    assert_same_bits(y_TH, rms_norm(sum_TH, gain_H, EPS), "the norm")
    exact_sum = x_TH.float() + residual_TH.float()
    unrounded = exact_sum * torch.rsqrt(exact_sum.square().mean(-1, keepdim=True) + EPS) * gain_H.float()
    assert (y_TH != unrounded.bfloat16()).any(), "this input cannot tell the rounded sum from the fp32 sum"


def test_fused_add_rms_norm_backward_formula():
    def through_norm(x, residual, gain):
        return plain(x, residual, gain, EPS)[0]

    def gradients(grad_y, x, residual, gain):
        grad, grad_gain = rms_norm_gradients(grad_y, x + residual, gain, EPS)
        return grad, grad, grad_gain

    assert_gradcheck(through_norm, gradients, *example(4, 7))


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
def test_fused_add_rms_norm_grads_close(needs):
    values = example(33)
    grads = tuple(torch.randn(2, 33, 192, generator=torch.Generator().manual_seed(1)).bfloat16())
    _, sum_TH = plain(*values, EPS)
    wide = [value.double().requires_grad_() for value in values]
    # Straight through the rounding of the sum: the reference sees the rounded sum and passes its gradient to both.
    residual = wide[1] + (sum_TH.double() - (wide[0] + wide[1])).detach()
    want = torch.autograd.grad(plain(wide[0], residual, wide[2], EPS), wide, [grad.double() for grad in grads])
    for value, needed in zip(values, needs, strict=True):
        value.requires_grad_(needed)
    torch.autograd.backward(fused_add_rms_norm(*values, EPS), grads)
    assert_norm_grads_close(values, want)


def test_fused_add_rms_norm_one_output_may_go_unused():
    for used in (0, 1):
        values = [value.requires_grad_() for value in example(5)]
        fused_add_rms_norm(*values, EPS)[used].float().square().sum().backward()
        assert_same_bits(values[0].grad, values[1].grad, "both addends have one gradient")
        assert values[0].grad.any()
        assert bool(values[2].grad.any()) == (used == 0)


def test_fused_add_rms_norm_row_bits_ignore_batch():
    x_TH, residual_TH, gain_H = example()
    assert_row_bits_ignore_batch(lambda x, residual: fused_add_rms_norm(x, residual, gain_H, EPS), x_TH, residual_TH)


def test_fused_add_rms_norm_rejects_wrong_arguments():
    x_TH, residual_TH, gain_H = example(4, 16)
    with pytest.raises(ValueError, match="fused_add_rms_norm cannot take this call") as error:
        fused_add_rms_norm(x_TH, residual_TH[:3], gain_H.float(), -1.0)
    for part in ("eps is -1.0", "T = 3, but T = 4 in x_TH", "gain_H is torch.float32"):
        assert part in str(error.value)
