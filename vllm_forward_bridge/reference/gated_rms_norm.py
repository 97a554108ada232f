# SPDX-License-Identifier: Apache-2.0
"""Gated norm with groups of channels."""

import torch
from torch import Tensor


def gated_rms_norm(y_TD: Tensor, gate_TD: Tensor, gain_D: Tensor, group_size: int, eps: float) -> Tensor:
    """Return norm(y * silu(gate)) * gain, mean square over groups of channels, rounded before and after the gain."""
    compute = torch.promote_types(y_TD.dtype, torch.float32)
    gated_TD = y_TD.to(compute) * torch.nn.functional.silu(gate_TD.to(compute))
    gated_TGd = gated_TD.unflatten(-1, (-1, group_size))
    scale = torch.rsqrt(gated_TGd.square().mean(dim=-1, keepdim=True) + eps)
    rounded_TD = (gated_TGd * scale).flatten(-2).to(y_TD.dtype)
    return (rounded_TD.to(compute) * gain_D.to(compute)).to(y_TD.dtype)
