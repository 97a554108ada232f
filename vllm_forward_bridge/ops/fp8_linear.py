# SPDX-License-Identifier: Apache-2.0
"""Linear layer on e4m3 codes with static scales; the gradient goes straight through to the bf16 master weight."""

# Legend: T packed tokens, K in features, N out features.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, gemm_cuda
from vllm_forward_bridge.ops.arguments import check, require_master
from vllm_forward_bridge.ops.gradients import linear_gradients
from vllm_forward_bridge.quantization.fp8 import E4M3_MAX


@torch.library.custom_op("vllm_forward_bridge::fp8_linear", mutates_args=(), device_types="cpu")
def fp8_linear(
    x_TK: Tensor, codes_NK: Tensor, weight_scale: Tensor, input_scale: Tensor, weight_NK: Tensor | None = None
) -> Tensor:
    """Quantise the input with a static scale, multiply codes, rescale once.

    xq = e4m3(clamp(f32(x) * (1 / input_scale), -448, 448));
    y = bf16(f32(sum_k xq[t, k] * codes[n, k]) * (input_scale * weight_scale)), each product of the last line in fp32.

    Args:
        x_TK: bf16, contiguous.
        codes_NK: e4m3fn, contiguous.
        weight_scale: fp32 [] or [1], positive.
        input_scale: fp32 [] or [1], positive.
        weight_NK: bf16 master; the forward never reads it. None where no gradient is wanted.

    Returns:
        y_TN: bf16.

    Raises:
        ValueError: an argument has another dtype, shape or layout; or, in the backward, there is no master.
    """
    check(
        "fp8_linear",
        _features_problem(x_TK),
        x_TK=(x_TK, torch.bfloat16, "T K"),
        codes_NK=(codes_NK, torch.float8_e4m3fn, "N K"),
        weight_scale=(weight_scale, torch.float32, ""),
        input_scale=(input_scale, torch.float32, ""),
        weight_NK=(weight_NK, torch.bfloat16, "N K"),
    )
    # bits: a product with the reciprocal, as vLLM's static quantisation does; a division rounds differently.
    scaled_TK = (x_TK.float() * input_scale.reciprocal()).clamp_(-E4M3_MAX, E4M3_MAX)
    x_integers = exact.e4m3_integers(scaled_TK.to(torch.float8_e4m3fn))
    sums_TN = exact.integer_matmul(x_integers, exact.e4m3_integers(codes_NK)).mul_(exact.E4M3_UNIT**2)
    # bits: the sum is rounded to fp32 before the scales touch it, as an fp32 accumulator is.
    return sums_TN.float().mul_(input_scale * weight_scale).bfloat16()


def _features_problem(x_TK: Tensor) -> str:
    # bits: e4m3 integers have 18 bits, so the sum of up to 2^17 products is exact in float64 as it stands.
    if x_TK.dim() and x_TK.shape[-1] > 1 << 17:
        return f"x_TK has K = {x_TK.shape[-1]}; up to 131072 is accepted, longer sums are not exact: split the layer"
    return ""


fp8_linear.register_kernel("cuda")(gemm_cuda.fp8_linear)


@fp8_linear.register_fake
def _(x_TK, codes_NK, weight_scale, input_scale, weight_NK=None) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], codes_NK.shape[0])


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    x_TK, _, _, _, weight_NK = inputs
    ctx.save_for_backward(x_TK, weight_NK)


def _backward(ctx, grad_y_TN: Tensor) -> tuple[Tensor | None, ...]:
    x_TK, weight_NK = ctx.saved_tensors
    require_master("fp8_linear", weight_NK)
    needs_x, _, _, _, needs_weight = ctx.needs_input_grad
    grad_x, grad_weight = linear_gradients(grad_y_TN, x_TK, weight_NK, needs_x=needs_x, needs_weight=needs_weight)
    return grad_x, None, None, None, grad_weight


fp8_linear.register_autograd(_backward, setup_context=_setup)
