# SPDX-License-Identifier: Apache-2.0
"""rms_norm on the CPU."""

import pytest
import torch
from invariance import assert_gradcheck, assert_norm_grads_close, assert_row_bits_ignore_batch, assert_within, bf16_step

from vllm_forward_bridge.ops import rms_norm
from vllm_forward_bridge.ops.rms_norm import rms_norm_gradients
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.rms_norm import rms_norm as plain

EPS = 1e-5


def example(num_tokens=257, hidden=192):
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(num_tokens, hidden, generator=generator) * 3
    return x_TH.bfloat16(), (torch.rand(hidden, generator=generator) + 0.5).bfloat16()


def test_rms_norm_opcheck():
    x_TH, gain_H = example(5, 16)
    torch.library.opcheck(rms_norm, (x_TH.requires_grad_(), gain_H.requires_grad_(), EPS))


def test_rms_norm_backward_formula():
    def gradients(grad_y, x, gain):
        return rms_norm_gradients(grad_y, x, gain, EPS)

    assert_gradcheck(lambda x, gain: plain(x, gain, EPS), gradients, *example(4, 7))


@pytest.mark.parametrize(("x_needs", "gain_needs"), [(True, False), (False, True), (True, True)])
def test_rms_norm_grads_close(x_needs, gain_needs):
    x_TH, gain_H = example(33)
    grad_TH = torch.randn(33, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = [value.double().requires_grad_() for value in (x_TH, gain_H)]
    want = torch.autograd.grad(plain(*wide, EPS), wide, grad_TH.double())
    rms_norm(x_TH.requires_grad_(x_needs), gain_H.requires_grad_(gain_needs), EPS).backward(grad_TH)
    assert_norm_grads_close((x_TH, gain_H), want)


def test_rms_norm_close_to_reference():
    x_TH, gain_H = example()
    want = plain(x_TH.double(), gain_H.double(), EPS)
    # A handful of fp32 roundings and a tree of 8 levels, under 2^-20 of the value; then one rounding to bf16.
    assert_within(rms_norm(x_TH, gain_H, EPS), want, bf16_step(want) / 2 + 2.0**-20 * want.abs(), "norm")


def test_rms_norm_rounds_once():
    # A second rounding, before the gain, would show in about a quarter of the elements.
    x_TH, gain_H = example()
    twice = (plain(x_TH, torch.ones_like(gain_H), EPS).float() * gain_H.float()).bfloat16()
    got = rms_norm(x_TH, gain_H, EPS)
    assert (got != twice).float().mean() > 0.1
    assert (got != plain(x_TH, gain_H, EPS)).float().mean() < 0.001


def test_rms_norm_row_bits_ignore_batch():
    x_TH, gain_H = example()
    assert_row_bits_ignore_batch(lambda x: rms_norm(x, gain_H, EPS), x_TH)


def test_rms_norm_of_zeros_is_zero():
    zeros = torch.zeros(3, 16, dtype=torch.bfloat16)
    assert_same_bits(rms_norm(zeros, example(1, 16)[1], EPS), zeros, "norm of zeros")


def test_rms_norm_rejects_wrong_arguments():
    x_TH, gain_H = example(4, 16)
    with pytest.raises(ValueError, match="rms_norm cannot take this call") as error:
        rms_norm(x_TH.double(), gain_H[:8], 0.0)
    for part in ("eps is 0.0", "x_TH is torch.float64", "H = 8, but H = 16 in x_TH"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"x_TH has strides \(1, 4\)"):
        rms_norm(x_TH.T.contiguous().T, gain_H, EPS)
