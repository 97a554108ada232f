# SPDX-License-Identifier: Apache-2.0
"""Activation of the experts: the square of the rectified input."""

import torch
from torch import Tensor

from vllm_forward_bridge.ops import triton_combine
from vllm_forward_bridge.ops.gradients import wide


@torch.library.custom_op("vllm_forward_bridge::relu_squared", mutates_args=(), device_types="cpu")
def relu_squared(x: Tensor) -> Tensor:
    """Square the positive part.

    y = bf16(r * r) with r = max(x, 0); the square of a bf16 number is exact in fp32, so there is one rounding.

    Args:
        x: bf16 of any shape.

    Returns:
        y: bf16 of the same shape.

    Raises:
        ValueError: x is not bf16.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(
            f"relu_squared cannot take this call:\n  - x is {x.dtype}; torch.bfloat16 is accepted, the GEMM before it "
            "rounds to bf16: convert it"
        )
    return rectified_square(x)


def rectified_square(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 in x's dtype, squared in at least fp32."""
    return wide(x).clamp(min=0.0).square().to(x.dtype)


relu_squared.register_kernel("cuda")(triton_combine.relu_squared)


@relu_squared.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def relu_squared_gradient(grad_y: Tensor, x: Tensor) -> Tensor:
    """Return grad_y * 2 max(x, 0) in fp32 (float64 for float64)."""
    return wide(grad_y) * wide(x).clamp(min=0.0) * 2


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_y: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return relu_squared_gradient(grad_y, x).to(x.dtype)


relu_squared.register_autograd(_backward, setup_context=_setup)
