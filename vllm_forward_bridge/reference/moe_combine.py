# SPDX-License-Identifier: Apache-2.0
"""Weighted sum of a token's expert rows."""

import torch
from torch import Tensor


def moe_combine(
    rows_TkH: Tensor, weights_Tk: Tensor, routed_scaling_factor: float, shared_TH: Tensor | None = None
) -> Tensor:
    """Return (w_0 r_0 + w_1 r_1 + ...) * factor + shared, the sum in slot order and rounded after each step."""
    compute = torch.promote_types(rows_TkH.dtype, torch.float32)
    total_TH = torch.zeros_like(rows_TkH[:, 0], dtype=compute)
    for slot in range(rows_TkH.shape[1]):
        total_TH = total_TH + weights_Tk[:, slot, None] * rows_TkH[:, slot].to(compute)
    y_TH = total_TH.to(rows_TkH.dtype) * routed_scaling_factor
    return y_TH if shared_TH is None else y_TH + shared_TH
