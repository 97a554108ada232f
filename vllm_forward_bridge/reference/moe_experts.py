# SPDX-License-Identifier: Apache-2.0
"""A token's experts, one after the other, on dequantised weights."""

import torch
from torch import Tensor

from vllm_forward_bridge.reference.relu_squared import relu_squared


def moe_experts(x_TH: Tensor, expert_ids_Tk: Tensor, fc1_weight_EFH: Tensor, fc2_weight_EHF: Tensor) -> Tensor:
    """Return rows_TkH = W2[e] relu_squared(W1[e] x); rounded to x's dtype after each GEMM and after the square.

    The weights are dequantised (`reference.nvfp4_linear.dequantised`); an id of -1 gives a row of zeros.
    """
    compute = torch.promote_types(x_TH.dtype, torch.float32)
    rows = []
    for x_H, expert_ids_k in zip(x_TH, expert_ids_Tk.tolist(), strict=True):
        for expert in expert_ids_k:
            if expert < 0:
                rows.append(torch.zeros_like(x_H))
                continue
            first_F = (fc1_weight_EFH[expert].to(compute) @ x_H.to(compute)).to(x_H.dtype)
            squared_F = relu_squared(first_F)
            rows.append((fc2_weight_EHF[expert].to(compute) @ squared_F.to(compute)).to(x_H.dtype))
    return torch.stack(rows).view(*expert_ids_Tk.shape, -1)
