# SPDX-License-Identifier: Apache-2.0
"""gated_rms_norm on the CPU."""

import pytest
import torch
from invariance import assert_gradcheck, assert_norm_grads_close, assert_row_bits_ignore_batch, assert_within, bf16_step

from vllm_forward_bridge.ops import gated_rms_norm
from vllm_forward_bridge.ops.gated_rms_norm import gated_rms_norm_gradients
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.gated_rms_norm import gated_rms_norm as plain

EPS = 1e-5


def example(num_tokens=257, channels=512):
    generator = torch.Generator().manual_seed(0)
    y_TD, gate_TD = torch.randn(2, num_tokens, channels, generator=generator).mul_(2).bfloat16()
    return y_TD.clone(), gate_TD.clone(), (torch.rand(channels, generator=generator) + 0.5).bfloat16()


def test_gated_rms_norm_opcheck():
    arguments = [value.requires_grad_() for value in example(5, 16)]
    torch.library.opcheck(gated_rms_norm, (*arguments, 8, EPS))


def test_gated_rms_norm_backward_formula():
    def gradients(grad, y, gate, gain):
        return gated_rms_norm_gradients(grad, y, gate, gain, 4, EPS)

    assert_gradcheck(lambda y, gate, gain: plain(y, gate, gain, 4, EPS), gradients, *example(3, 12))


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
def test_gated_rms_norm_grads_close(needs):
    values = example(33)
    grad_TD = torch.randn(33, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = [value.double().requires_grad_() for value in values]
    want = torch.autograd.grad(plain(*wide, 256, EPS), wide, grad_TD.double())
    for value, needed in zip(values, needs, strict=True):
        value.requires_grad_(needed)
    gated_rms_norm(*values, 256, EPS).backward(grad_TD)
    assert_norm_grads_close(values, want)


def test_gated_rms_norm_close_to_reference():
    values = example()
    want = plain(*values, 256, EPS)
    # The value before the first rounding differs by a few fp32 steps, so at most one bf16 step crosses; the gain
    # multiplies that step, and the second rounding may cross one more.
    assert_within(gated_rms_norm(*values, 256, EPS), want, 2 * bf16_step(want), "norm")
    assert (gated_rms_norm(*values, 256, EPS) != want).float().mean() < 0.001


def test_gated_rms_norm_rounds_before_the_gain():
    y_TD, gate_TD, gain_D = example()
    got = gated_rms_norm(y_TD, gate_TD, gain_D, 256, EPS)
    without_gain = gated_rms_norm(y_TD, gate_TD, torch.ones_like(gain_D), 256, EPS)
    assert_same_bits(got, (without_gain.float() * gain_D.float()).bfloat16(), "gain on the rounded norm")


def test_gated_rms_norm_groups_are_apart():
    y_TD, gate_TD, gain_D = example(3)
    got = gated_rms_norm(y_TD, gate_TD, gain_D, 128, EPS)
    for group in range(4):
        part = slice(group * 128, (group + 1) * 128)
        y, gate = y_TD[:, part].contiguous(), gate_TD[:, part].contiguous()
        alone = gated_rms_norm(y, gate, gain_D[part].contiguous(), 128, EPS)
        assert_same_bits(alone, got[:, part].contiguous(), f"group {group} alone")


def test_gated_rms_norm_row_bits_ignore_batch():
    y_TD, gate_TD, gain_D = example()
    assert_row_bits_ignore_batch(lambda y, gate: gated_rms_norm(y, gate, gain_D, 256, EPS), y_TD, gate_TD)


def test_gated_rms_norm_rejects_wrong_arguments():
    y_TD, gate_TD, gain_D = example(4, 16)
    with pytest.raises(ValueError, match="gated_rms_norm cannot take this call") as error:
        gated_rms_norm(y_TD, gate_TD[:, :8].contiguous(), gain_D.half(), 5, 0.0)
    for part in ("eps is 0.0", "group_size is 5 with D = 16", "D = 8, but D = 16 in y_TD", "gain_D is torch.float16"):
        assert part in str(error.value)
