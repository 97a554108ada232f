# SPDX-License-Identifier: Apache-2.0
"""Gated, grouped RMS norm in Triton: one (row, group) a program.

Rounds where vLLM's `Mixer2RMSNormGated.forward_native` rounds: to bf16 before the weight is multiplied.
"""

# T = packed tokens, D = channels

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_forward_bridge.ops.launch import NO_FUSION, kernel_form, next_power_of_2, require_dtype

_NUM_WARPS = 4


@triton.jit
def _gated_rms_norm_kernel(
    y_ptr, gate_ptr, gain_ptr, out_ptr, eps, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(1) * GROUP
    row = tl.program_id(0).to(tl.int64) * D + first
    columns = tl.arange(0, BLOCK)
    live = columns < GROUP
    y = tl.load(y_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
    u = y * tl.div_rn(gate, 1.0 + tl.exp(-gate))
    mean_square = tl.div_rn(tl.sum(u * u, axis=0), GROUP * 1.0)
    # bits: rounded here, before the gain.
    v = (u * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))).to(out_ptr.dtype.element_ty)
    gain = tl.load(gain_ptr + first + columns, mask=live, other=0.0).to(tl.float32)
    out = v.to(tl.float32) * gain
    tl.store(out_ptr + row + columns, out.to(out_ptr.dtype.element_ty), mask=live)


def gated_rms_norm(y_TD: Tensor, gate_TD: Tensor, gain_D: Tensor, group_size: int, eps: float) -> Tensor:
    """Launch the norm; see `ops.gated_rms_norm` for the formula."""
    for name, values in (("y", y_TD), ("gate", gate_TD), ("gain", gain_D)):
        require_dtype(values, torch.bfloat16, name, "gated_rms_norm")
    y_TD, gate_TD, gain_D = kernel_form(y_TD), kernel_form(gate_TD), kernel_form(gain_D)
    out_TD = torch.empty_like(y_TD)
    T, D = y_TD.shape
    if T:
        _gated_rms_norm_kernel[(T, D // group_size)](
            y_TD, gate_TD, gain_D, out_TD, eps,
            D=D, GROUP=group_size, BLOCK=next_power_of_2(group_size), num_warps=_NUM_WARPS, **NO_FUSION,
        )  # fmt: skip
    return out_TD
