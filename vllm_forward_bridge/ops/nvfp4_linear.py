# SPDX-License-Identifier: Apache-2.0
"""Linear layer on NVFP4 weights and bf16 activations (W4A16); the gradient goes straight through to the bf16 master."""

# Legend: T packed tokens, K in features, N out features.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, humming_gemm, nvfp4_decode, operands
from vllm_forward_bridge.ops.arguments import check, require_master
from vllm_forward_bridge.ops.gradients import linear_gradients


@torch.library.custom_op("vllm_forward_bridge::nvfp4_linear", mutates_args=(), device_types="cpu")
def nvfp4_linear(
    x_TK: Tensor, codes_NB: Tensor, block_scale_NB: Tensor, global_scale: Tensor, weight_NK: Tensor | None = None,
    num_features: int = 0,
) -> Tensor:  # fmt: skip
    """Multiply bf16 activations by a decoded NVFP4 weight and round once.

    w = table[code] * f32(block_scale) (exact, 22 bits); y = bf16(f32(sum_k x[t, k] * w[n, k] * global_scale)).
    The global scale is one factor of the whole matrix, so it stands outside the sum.

    On CUDA codes and block scales are packed for the kernel by `operands.nvfp4_operands`, once for each version.

    Args:
        x_TK: bf16, contiguous; K a multiple of 16, at most 32,768.
        codes_NB: uint8 [N, K/2], two codes a byte, low nibble first.
        block_scale_NB: e4m3fn [N, K/16].
        global_scale: fp32 [] or [1]; multiplies.
        weight_NK: bf16 master; the forward never reads it. None where no gradient is wanted.
        num_features: N, since packed codes may hold more rows; 0 stands for the rows of the codes.

    Returns:
        y_TN: bf16.

    Raises:
        ValueError: an argument has another dtype, shape or layout; or, in the backward, there is no master.
    """
    check(
        "nvfp4_linear",
        nvfp4_decode.features_problem("x_TK", x_TK),
        x_TK=(x_TK, torch.bfloat16, "T K"),
        codes_NB=(codes_NB, torch.uint8, "N K/2"),
        block_scale_NB=(block_scale_NB, torch.float8_e4m3fn, "N K/16"),
        global_scale=(global_scale, torch.float32, ""),
        weight_NK=(weight_NK, torch.bfloat16, "N K"),
    )
    x_integers, x_unit = exact.fixed_point(x_TK, nvfp4_decode.activation_bits(x_TK.shape[-1]))
    sums_TN = exact.integer_matmul(x_integers, nvfp4_decode.decoded_integers(codes_NB, block_scale_NB))
    return sums_TN.mul_(x_unit).mul_(global_scale.double() * nvfp4_decode.UNIT).float().bfloat16()


nvfp4_linear.register_kernel("cuda")(humming_gemm.nvfp4_linear)


@nvfp4_linear.register_fake
def _(x_TK, codes_NB, block_scale_NB, global_scale, weight_NK=None, num_features=0) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], num_features or operands.num_rows(codes_NB))


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    x_TK, _, _, _, weight_NK, _ = inputs
    ctx.save_for_backward(x_TK, weight_NK)


def _backward(ctx, grad_y_TN: Tensor) -> tuple[Tensor | None, ...]:
    x_TK, weight_NK = ctx.saved_tensors
    require_master("nvfp4_linear", weight_NK)
    # An argument that keeps its default is not among the inputs.
    needs_x, _, _, _, needs_weight, *_ = ctx.needs_input_grad
    grad_x, grad_weight = linear_gradients(grad_y_TN, x_TK, weight_NK, needs_x=needs_x, needs_weight=needs_weight)
    return grad_x, None, None, None, grad_weight, None


nvfp4_linear.register_autograd(_backward, setup_context=_setup)
