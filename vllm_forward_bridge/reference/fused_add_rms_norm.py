# SPDX-License-Identifier: Apache-2.0
"""Residual add followed by a norm of the rounded sum."""

from torch import Tensor

from vllm_forward_bridge.reference.rms_norm import rms_norm


def fused_add_rms_norm(x_TH: Tensor, residual_TH: Tensor, gain_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm of the sum, the sum), the sum in x's dtype."""
    sum_TH = x_TH + residual_TH
    return rms_norm(sum_TH, gain_H, eps), sum_TH
