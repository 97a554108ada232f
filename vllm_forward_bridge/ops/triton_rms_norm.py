# SPDX-License-Identifier: Apache-2.0
"""RMS norm and fused add + RMS norm in Triton: one row a program, the block fixed by the width alone.

vLLM's own `rms_norm` chooses its block by the number of tokens, so a row's bits would depend on the batch.
"""

# T = packed tokens, H = hidden

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_forward_bridge.ops.launch import NO_FUSION, kernel_form, next_power_of_2, require_dtype

_NUM_WARPS = 8


@triton.jit
def _inverse_rms(values, eps, H: tl.constexpr):
    mean_square = tl.div_rn(tl.sum(values * values, axis=0), H * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))


@triton.jit
def _rms_norm_kernel(x_ptr, gain_ptr, y_ptr, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * H
    columns = tl.arange(0, BLOCK)
    live = columns < H
    x = tl.load(x_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + columns, mask=live, other=0.0).to(tl.float32)
    y = x * _inverse_rms(x, eps, H) * gain
    tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _fused_add_rms_norm_kernel(x_ptr, residual_ptr, gain_ptr, y_ptr, s_ptr, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * H
    columns = tl.arange(0, BLOCK)
    live = columns < H
    x = tl.load(x_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
    # bits: the sum is rounded before it is normalised; only this rounded sum crosses a layer.
    s = (x + residual).to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + row + columns, s, mask=live)
    s = s.to(tl.float32)
    gain = tl.load(gain_ptr + columns, mask=live, other=0.0).to(tl.float32)
    y = s * _inverse_rms(s, eps, H) * gain
    tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask=live)


def rms_norm(x_TH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    """Launch the norm; see `ops.rms_norm` for the formula."""
    require_dtype(x_TH, torch.bfloat16, "x", "rms_norm")
    require_dtype(gain_H, torch.bfloat16, "gain", "rms_norm")
    x_TH, gain_H = kernel_form(x_TH), kernel_form(gain_H)
    y_TH = torch.empty_like(x_TH)
    T, H = x_TH.shape
    if T:
        _rms_norm_kernel[(T,)](
            x_TH, gain_H, y_TH, eps, H=H, BLOCK=next_power_of_2(H), num_warps=_NUM_WARPS, **NO_FUSION
        )
    return y_TH


def fused_add_rms_norm(x_TH: Tensor, residual_TH: Tensor, gain_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launch the fused norm; see `ops.fused_add_rms_norm` for the formula."""
    for name, values in (("x", x_TH), ("residual", residual_TH), ("gain", gain_H)):
        require_dtype(values, torch.bfloat16, name, "fused_add_rms_norm")
    x_TH, residual_TH, gain_H = kernel_form(x_TH), kernel_form(residual_TH), kernel_form(gain_H)
    y_TH, s_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    T, H = x_TH.shape
    if T:
        _fused_add_rms_norm_kernel[(T,)](
            x_TH, residual_TH, gain_H, y_TH, s_TH, eps, H=H, BLOCK=next_power_of_2(H), num_warps=_NUM_WARPS, **NO_FUSION
        )
    return y_TH, s_TH
