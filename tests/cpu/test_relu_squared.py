# SPDX-License-Identifier: Apache-2.0
"""relu_squared on the CPU."""

import pytest
import torch
from invariance import assert_gradcheck, assert_row_bits_ignore_batch

from vllm_forward_bridge.ops import relu_squared
from vllm_forward_bridge.ops.relu_squared import relu_squared_gradient
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.relu_squared import relu_squared as plain


def example(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_relu_squared_opcheck():
    torch.library.opcheck(relu_squared, (example(5, 3).requires_grad_(),))


def test_relu_squared_rounds_the_exact_square_once():
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    got = relu_squared(finite)
    assert_same_bits(got, plain(finite.double()).float().bfloat16() + 0.0, "every finite bf16")
    assert not torch.signbit(got).any(), "no minus zero"


def test_relu_squared_row_bits_ignore_batch():
    assert_row_bits_ignore_batch(relu_squared, example(257, 131))


def test_relu_squared_backward_formula():
    assert_gradcheck(plain, relu_squared_gradient, example(5, 7))


def test_relu_squared_gradient_is_rounded_once():
    x = example(33, 7).requires_grad_()
    grad = example(33, 7).flip(0)
    relu_squared(x).backward(grad)
    want = (2 * grad.double() * x.detach().double().clamp(min=0)).float().bfloat16()
    assert_same_bits(x.grad + 0.0, want + 0.0, "a product of bf16 numbers is exact in fp32")


def test_relu_squared_rejects_fp32():
    with pytest.raises(ValueError, match="x is torch.float32; torch.bfloat16 is accepted"):
        relu_squared(torch.ones(3))
