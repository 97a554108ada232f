# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution with SiLU, one sequence at a time, in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv1d(x_LC: Tensor, weight_CW: Tensor, bias_C: Tensor, tail_WC: Tensor | None = None) -> Tensor:
    """Convolve one sequence: y_t = silu(bias + sum_j x_{t-W+1+j} * weight_j), without inner rounding.

    Args:
        x_LC: inputs of one sequence, any float dtype.
        weight_CW: the last column multiplies the row itself.
        bias_C: one bias a channel.
        tail_WC: the W - 1 inputs before the first row; None stands for zeros.

    Returns:
        y_LC in the dtype of x.
    """
    length, width = len(x_LC), weight_CW.shape[1]
    if tail_WC is None:
        tail_WC = x_LC.new_zeros(width - 1, x_LC.shape[1])
    extended = torch.cat([tail_WC, x_LC])
    total = bias_C + sum(extended[j : j + length] * weight_CW[:, j] for j in range(width))
    return functional.silu(total)
