# SPDX-License-Identifier: Apache-2.0
"""Backward arithmetic that several ops share: the dtype it runs in, and the gradients of y = x W^T."""

# Legend: T tokens, N out features, K in features.

import torch
from torch import Tensor


def linear_gradients(
    grad_y_TN: Tensor, x_TK: Tensor, weight_NK: Tensor | None, *, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return (grad_y W, grad_y^T x), each cast to its operand's dtype, None where not needed.

    A quantised linear passes its bf16 master as W: the gradient goes straight through the quantisation.
    """
    grad_x = product(grad_y_TN, weight_NK, x_TK.dtype) if needs_x else None
    grad_weight = product(grad_y_TN.T, x_TK, weight_NK.dtype) if needs_weight else None
    return grad_x, grad_weight


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dtype(left @ right), multiplied and summed in fp32 (float64 for float64 operands).

    A GPU multiplies bf16 operands as they are and sums in fp32.
    """
    if left.is_cuda and left.dtype == right.dtype == dtype:
        return left @ right
    return (wide(left) @ wide(right)).to(dtype)


def wide(values: Tensor) -> Tensor:
    """Return values in the dtype a backward computes in: fp32, or float64 when the values are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
