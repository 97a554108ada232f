# SPDX-License-Identifier: Apache-2.0
"""Squared ReLU and the slot-order combine of expert rows in Triton; every element is computed alone."""

# T = packed tokens, k = top-k slots, H = hidden

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_forward_bridge.ops.launch import NO_FUSION, kernel_form, require_dtype

_BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def _relu_squared_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    r = tl.where(x > 0.0, x, tl.where(x == x, 0.0, x))  # a NaN stays visible
    tl.store(out_ptr + at, (r * r).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _combine_kernel(
    rows_ptr, weights_ptr, shared_ptr, out_ptr, factor, H: tl.constexpr, TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < H
    # bits: ((w0*r0) + w1*r1) + ..., every product rounded before it is added.
    total = tl.load(weights_ptr + token * TOP_K) * tl.load(
        rows_ptr + token * TOP_K * H + columns, mask=live, other=0.0
    ).to(tl.float32)
    for slot in tl.static_range(1, TOP_K):
        row = tl.load(rows_ptr + (token * TOP_K + slot) * H + columns, mask=live, other=0.0).to(tl.float32)
        total = total + tl.load(weights_ptr + token * TOP_K + slot) * row
    out = total.to(out_ptr.dtype.element_ty)
    # bits: three roundings: the combine, the factor, the shared expert.
    out = (out.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * H + columns, mask=live, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) + shared).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * H + columns, out, mask=live)


def relu_squared(x: Tensor) -> Tensor:
    """Launch bf16(max(x, 0)^2)."""
    require_dtype(x, torch.bfloat16, "x", "relu_squared")
    x = kernel_form(x)
    out = torch.empty_like(x)
    if x.numel():
        _relu_squared_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), BLOCK=_BLOCK, num_warps=4)
    return out


def moe_combine(
    rows_TkH: Tensor, weights_Tk: Tensor, routed_scaling_factor: float, shared_TH: Tensor | None = None
) -> Tensor:
    """Launch the combine; see `ops.moe_combine` for the formula."""
    require_dtype(rows_TkH, torch.bfloat16, "rows", "moe_combine")
    require_dtype(weights_Tk, torch.float32, "weights", "moe_combine")
    rows_TkH, weights_Tk = kernel_form(rows_TkH), kernel_form(weights_Tk)
    T, top_k, H = rows_TkH.shape
    out_TH = torch.empty(T, H, dtype=rows_TkH.dtype, device=rows_TkH.device)
    if T:
        _combine_kernel[(T, triton.cdiv(H, _BLOCK))](
            rows_TkH, weights_Tk, out_TH if shared_TH is None else kernel_form(shared_TH), out_TH,
            routed_scaling_factor, H=H, TOP_K=top_k, HAS_SHARED=shared_TH is not None, BLOCK=_BLOCK, num_warps=4,
            **NO_FUSION,
        )  # fmt: skip
    return out_TH
