# SPDX-License-Identifier: Apache-2.0
"""ssd_decay on the CPU."""

import pytest
import torch
from invariance import assert_row_bits_ignore_batch, assert_within

from vllm_forward_bridge.ops import ssd_decay
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.ssd_decay import ssd_decay as plain


def example(heads=257):
    return torch.randn(heads, generator=torch.Generator().manual_seed(0)) * 2


def test_ssd_decay_opcheck():
    torch.library.opcheck(ssd_decay, (example(5).requires_grad_(),))
    torch.library.opcheck(ssd_decay, (example(5).bfloat16().requires_grad_(),))


def test_ssd_decay_close_to_reference():
    want = plain(example().double())
    # One exponential in float64, rounded once to fp32.
    assert_within(ssd_decay(example()), want, 2.0**-24 * want.abs(), "decay")


def test_ssd_decay_reads_bf16_as_its_value():
    A_log_h = example().bfloat16()
    assert_same_bits(ssd_decay(A_log_h), ssd_decay(A_log_h.float()), "bf16 logarithm")


def test_ssd_decay_row_bits_ignore_batch():
    assert_row_bits_ignore_batch(ssd_decay, example())


def test_ssd_decay_grad_close():
    A_log_h = example(20).requires_grad_()
    wide = example(20).double().requires_grad_()
    (want,) = torch.autograd.grad(plain(wide).sum(), wide)
    ssd_decay(A_log_h).sum().backward()
    # fp32 exponential of an fp32 argument, off by at most two steps.
    assert_within(A_log_h.grad, want, 2.0**-22 * want.abs(), "gradient")


def test_ssd_decay_rejects_other_forms():
    with pytest.raises(ValueError, match="A_log_h is torch.float64"):
        ssd_decay(example(4).double())
    with pytest.raises(ValueError, match=r"A_log_h has shape \[2, 2\]"):
        ssd_decay(example(4).view(2, 2))
