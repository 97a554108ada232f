# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norm."""

import torch
from torch import Tensor


def rms_norm(x_TH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * gain, computed in at least fp32, cast once to x's dtype."""
    compute = torch.promote_types(x_TH.dtype, torch.float32)
    x = x_TH.to(compute)
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * gain_H.to(compute)).to(x_TH.dtype)
