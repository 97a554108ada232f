# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norm: fp32 inside, one rounding at the end."""

# Legend: T packed tokens, H hidden.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, triton_rms_norm
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.gradients import wide


@torch.library.custom_op("vllm_forward_bridge::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x_TH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square and multiply by the gain.

    y = bf16((f32(x) * rsqrt(mean(f32(x)^2) + eps)) * f32(gain)); everything inside the cast is fp32.

    Args:
        x_TH: bf16, contiguous.
        gain_H: bf16, contiguous.
        eps: positive, added to the mean square.

    Returns:
        y_TH: bf16.

    Raises:
        ValueError: an argument has another dtype, shape or layout, or eps is not positive.
    """
    check("rms_norm", eps_problem(eps), x_TH=(x_TH, torch.bfloat16, "T H"), gain_H=(gain_H, torch.bfloat16, "H"))
    return normalised(x_TH.float(), eps).mul_(gain_H.float()).bfloat16()


def normalised(values: Tensor, eps: float) -> Tensor:
    """Return fp32 values * rsqrt(mean(values^2) + eps) over the last dim; CPU."""
    # bits: a halving tree, since torch's mean adds a single row in another order than many rows.
    mean_square = exact.halving_sum(values * values).div_(values.shape[-1])
    return values * exact.rsqrt(mean_square.add_(eps)).unsqueeze(-1)


def eps_problem(eps: float) -> str:
    """Say what is wrong with eps, or return an empty string."""
    if eps > 0.0:
        return ""
    return f"eps is {eps}; a positive number is accepted, a zero row would divide by zero: take the model's"


rms_norm.register_kernel("cuda")(triton_rms_norm.rms_norm)


@rms_norm.register_fake
def _(x_TH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x_TH)


def rms_norm_gradients(grad_y_TH: Tensor, x_TH: Tensor, gain_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gain, from the saved input, in fp32 (float64 for float64).

    With r = rsqrt(mean(x^2) + eps), n = x r, h = grad_y gain: grad_x = r (h - n mean(h n)); grad_gain = sum_T grad_y n.
    """
    x, grad_y = wide(x_TH), wide(grad_y_TH)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit = x * scale
    through_gain = grad_y * wide(gain_H)
    grad_x = scale * (through_gain - unit * (through_gain * unit).mean(-1, keepdim=True))
    return grad_x, (grad_y * unit).sum(0)


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    x_TH, gain_H, ctx.eps = inputs
    ctx.save_for_backward(x_TH, gain_H)


def _backward(ctx, grad_y_TH: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_TH, gain_H = ctx.saved_tensors
    grad_x, grad_gain = rms_norm_gradients(grad_y_TH, x_TH, gain_H, ctx.eps)
    needs_x, needs_gain, _ = ctx.needs_input_grad
    return grad_x.to(x_TH.dtype) if needs_x else None, grad_gain.to(gain_H.dtype) if needs_gain else None, None


rms_norm.register_autograd(_backward, setup_context=_setup)
