# SPDX-License-Identifier: Apache-2.0
"""Add to the residual stream, then normalise the sum that the stream really carries."""

# Legend: T packed tokens, H hidden.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import triton_rms_norm
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.gradients import wide
from vllm_forward_bridge.ops.rms_norm import eps_problem, normalised, rms_norm_gradients


@torch.library.custom_op("vllm_forward_bridge::fused_add_rms_norm", mutates_args=(), device_types="cpu")
def fused_add_rms_norm(x_TH: Tensor, residual_TH: Tensor, gain_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add, round, and normalise the rounded sum.

    s = bf16(f32(x) + f32(residual)); y = bf16((f32(s) * rsqrt(mean(f32(s)^2) + eps)) * f32(gain)).

    Args:
        x_TH: bf16, contiguous: what the last layer adds.
        residual_TH: bf16, contiguous: the stream before it.
        gain_H: bf16, contiguous.
        eps: positive, added to the mean square.

    Returns:
        (y_TH, s_TH): bf16, the normalised rows and the new stream.

    Raises:
        ValueError: an argument has another dtype, shape or layout, or eps is not positive.
    """
    check(
        "fused_add_rms_norm",
        eps_problem(eps),
        x_TH=(x_TH, torch.bfloat16, "T H"),
        residual_TH=(residual_TH, torch.bfloat16, "T H"),
        gain_H=(gain_H, torch.bfloat16, "H"),
    )
    # bits: the norm sees the rounded sum, the only tensor that crosses a layer, a pipeline stage or a recompute.
    sum_TH = (x_TH.float() + residual_TH.float()).bfloat16()
    return normalised(sum_TH.float(), eps).mul_(gain_H.float()).bfloat16(), sum_TH


fused_add_rms_norm.register_kernel("cuda")(triton_rms_norm.fused_add_rms_norm)


@fused_add_rms_norm.register_fake
def _(x_TH: Tensor, residual_TH: Tensor, gain_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TH), torch.empty_like(x_TH)


def _setup(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, _, gain_H, ctx.eps = inputs
    ctx.save_for_backward(output[1], gain_H)


def _backward(ctx, grad_y_TH: Tensor, grad_sum_TH: Tensor) -> tuple[Tensor | None, ...]:
    sum_TH, gain_H = ctx.saved_tensors
    needs_x, needs_residual, needs_gain, _ = ctx.needs_input_grad
    grad_through_norm, grad_gain = rms_norm_gradients(grad_y_TH, sum_TH, gain_H, ctx.eps)
    grad = (grad_through_norm + wide(grad_sum_TH)).to(sum_TH.dtype)
    return (
        grad if needs_x else None,
        grad if needs_residual else None,
        grad_gain.to(gain_H.dtype) if needs_gain else None,
        None,
    )


fused_add_rms_norm.register_autograd(_backward, setup_context=_setup)
