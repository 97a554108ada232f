# SPDX-License-Identifier: Apache-2.0
"""Norm behind the Mamba scan: gate with SiLU, normalise by group, cast, multiply by the gain."""

# Legend: T packed tokens, D channels (groups of `group_size`).

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, triton_gated_norm
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.gradients import wide
from vllm_forward_bridge.ops.rms_norm import eps_problem, normalised, rms_norm_gradients


@torch.library.custom_op("vllm_forward_bridge::gated_rms_norm", mutates_args=(), device_types="cpu")
def gated_rms_norm(y_TD: Tensor, gate_TD: Tensor, gain_D: Tensor, group_size: int, eps: float) -> Tensor:
    """Gate, normalise each group of channels, and scale.

    u = f32(y) * silu(f32(gate)); v = bf16(u * rsqrt(mean over the group(u^2) + eps)); out = bf16(f32(v) * f32(gain)).

    Args:
        y_TD: bf16, contiguous: what the scan returns.
        gate_TD: bf16, contiguous: z of the input projection.
        gain_D: bf16, contiguous.
        group_size: channels that share one mean; divides D.
        eps: positive, added to the mean square.

    Returns:
        out_TD: bf16.

    Raises:
        ValueError: an argument has another dtype, shape or layout, group_size does not divide D, or eps is
            not positive.

    Source: vLLM 0.26.0 Mixer2RMSNormGated.forward_native (the path with more than one group).
    """
    check(
        "gated_rms_norm",
        eps_problem(eps),
        _group_problem(y_TD, group_size),
        y_TD=(y_TD, torch.bfloat16, "T D"),
        gate_TD=(gate_TD, torch.bfloat16, "T D"),
        gain_D=(gain_D, torch.bfloat16, "D"),
    )
    gated_TGd = exact.silu(gate_TD).mul_(y_TD.float()).unflatten(-1, (-1, group_size))
    # bits: rounded before the gain multiplies it, as vLLM does; one rounding at the end would be closer and wrong.
    rounded_TD = normalised(gated_TGd, eps).flatten(-2).bfloat16()
    return rounded_TD.float().mul_(gain_D.float()).bfloat16()


def _group_problem(y_TD: Tensor, group_size: int) -> str:
    channels = y_TD.shape[-1] if y_TD.dim() else 0
    if group_size > 0 and channels % group_size == 0:
        return ""
    return f"group_size is {group_size} with D = {channels}; a divisor of D is accepted: use D / n_groups"


gated_rms_norm.register_kernel("cuda")(triton_gated_norm.gated_rms_norm)


@gated_rms_norm.register_fake
def _(y_TD: Tensor, gate_TD: Tensor, gain_D: Tensor, group_size: int, eps: float) -> Tensor:
    return torch.empty_like(y_TD)


def gated_rms_norm_gradients(
    grad_TD: Tensor, y_TD: Tensor, gate_TD: Tensor, gain_D: Tensor, group_size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y, gate and gain, from the saved inputs, in fp32 (float64 for float64).

    The norm's own gradient gives grad_u; grad_y = grad_u silu(gate); grad_gate = grad_u y s (1 + gate (1 - s)), s its
    sigmoid. The two casts pass straight through.
    """
    y, gate = wide(y_TD), wide(gate_TD)
    sigmoid = torch.sigmoid(gate)
    groups = (-1, group_size)
    grad_u, grad_gain = rms_norm_gradients(
        grad_TD.unflatten(-1, groups), (y * gate * sigmoid).unflatten(-1, groups), gain_D.unflatten(-1, groups), eps
    )
    grad_u = grad_u.flatten(-2)
    return grad_u * gate * sigmoid, grad_u * y * sigmoid * (1 + gate * (1 - sigmoid)), grad_gain.flatten()


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    y_TD, gate_TD, gain_D, ctx.group_size, ctx.eps = inputs
    ctx.save_for_backward(y_TD, gate_TD, gain_D)


def _backward(ctx, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    gradients = gated_rms_norm_gradients(grad_TD, *saved, ctx.group_size, ctx.eps)
    needed = zip(gradients, saved, ctx.needs_input_grad[:3], strict=True)
    return *(gradient.to(value.dtype) if needs else None for gradient, value, needs in needed), None, None


gated_rms_norm.register_autograd(_backward, setup_context=_setup)
