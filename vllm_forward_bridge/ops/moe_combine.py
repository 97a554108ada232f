# SPDX-License-Identifier: Apache-2.0
"""Add a token's expert rows in slot order, scale, and add the shared expert."""

# Legend: T packed tokens, H hidden, k top-k slots.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import triton_combine
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.gradients import wide


@torch.library.custom_op("vllm_forward_bridge::moe_combine", mutates_args=(), device_types="cpu")
def moe_combine(
    rows_TkH: Tensor, weights_Tk: Tensor, routed_scaling_factor: float, shared_TH: Tensor | None = None
) -> Tensor:
    """Combine expert rows in fp32 from slot 0 upwards.

    acc = ((w_0 r_0) + w_1 r_1) + ..., each product and each sum rounded to fp32; y = bf16(acc);
    y = bf16(y * factor); y = bf16(y + shared) where shared is given.

    Args:
        rows_TkH: bf16, contiguous; the row of slot j is f_expert(x_t), neither weighted nor summed.
        weights_Tk: fp32, contiguous.
        routed_scaling_factor: multiplies the routed sum.
        shared_TH: bf16, contiguous, or None.

    Returns:
        y_TH: bf16.

    Raises:
        ValueError: an argument has another dtype, shape or layout.
    """
    check(
        "moe_combine",
        rows_TkH=(rows_TkH, torch.bfloat16, "T k H"),
        weights_Tk=(weights_Tk, torch.float32, "T k"),
        shared_TH=(shared_TH, torch.bfloat16, "T H"),
    )
    sum_TH = rows_TkH[:, 0].float().mul_(weights_Tk[:, :1])
    for slot in range(1, rows_TkH.shape[1]):
        # bits: slot by slot and without a fused multiply-add; a sum over the slots would choose its own order.
        sum_TH += rows_TkH[:, slot].float().mul_(weights_Tk[:, slot : slot + 1])
    y_TH = sum_TH.bfloat16().float().mul_(routed_scaling_factor).bfloat16()
    return y_TH if shared_TH is None else (y_TH.float() + shared_TH.float()).bfloat16()


moe_combine.register_kernel("cuda")(triton_combine.moe_combine)


@moe_combine.register_fake
def _(rows_TkH, weights_Tk, routed_scaling_factor, shared_TH=None) -> Tensor:
    return rows_TkH.new_empty(rows_TkH.shape[0], rows_TkH.shape[2])


def moe_combine_gradients(
    grad_y_TH: Tensor, rows_TkH: Tensor, weights_Tk: Tensor, routed_scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights in fp32 (float64 for float64); the casts pass straight through."""
    grad_sum_T1H = (wide(grad_y_TH) * routed_scaling_factor).unsqueeze(1)
    return grad_sum_T1H * weights_Tk.unsqueeze(-1), (grad_sum_T1H * wide(rows_TkH)).sum(-1)


def _setup(ctx, inputs: tuple, output: Tensor) -> None:
    rows_TkH, weights_Tk, ctx.factor, _ = inputs
    ctx.save_for_backward(rows_TkH, weights_Tk)


def _backward(ctx, grad_y_TH: Tensor) -> tuple[Tensor | None, ...]:
    rows_TkH, weights_Tk = ctx.saved_tensors
    # An argument that keeps its default is not among the inputs.
    needs_rows, needs_weights, _, *needs_shared = ctx.needs_input_grad
    grad_rows, grad_weights = moe_combine_gradients(grad_y_TH, rows_TkH, weights_Tk, ctx.factor)
    return (
        grad_rows.to(rows_TkH.dtype) if needs_rows else None,
        grad_weights.to(weights_Tk.dtype) if needs_weights else None,
        None,
        grad_y_TH if any(needs_shared) else None,
    )


moe_combine.register_autograd(_backward, setup_context=_setup)
