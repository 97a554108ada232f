# SPDX-License-Identifier: Apache-2.0
"""Linear layer without quantisation: y = bf16(x W^T)."""

# Legend: T packed tokens, K in features, N out features.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, gemm_cuda
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.gradients import linear_gradients


@torch.library.custom_op("vllm_forward_bridge::bf16_linear", mutates_args=(), device_types="cpu")
def bf16_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Multiply by a bf16 weight and round once.

    y = bf16(f32(sum_k x[t, k] * weight[n, k])), the sum accurate to fp32 or better.

    Args:
        x_TK: bf16, contiguous.
        weight_NK: bf16, contiguous.

    Returns:
        y_TN: bf16.

    Raises:
        ValueError: an argument has another dtype, shape or layout.
    """
    check("bf16_linear", x_TK=(x_TK, torch.bfloat16, "T K"), weight_NK=(weight_NK, torch.bfloat16, "N K"))
    return exact.matmul(x_TK, weight_NK).float().bfloat16()


bf16_linear.register_kernel("cuda")(gemm_cuda.bf16_linear)


@bf16_linear.register_fake
def _(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_y_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_TK, weight_NK = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad
    return linear_gradients(grad_y_TN, x_TK, weight_NK, needs_x=needs_x, needs_weight=needs_weight)


bf16_linear.register_autograd(_backward, setup_context=_setup)
