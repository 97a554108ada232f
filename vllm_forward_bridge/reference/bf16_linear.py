# SPDX-License-Identifier: Apache-2.0
"""y = x W^T, one rounding."""

import torch
from torch import Tensor


def bf16_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight^T, computed in at least fp32, in x's dtype."""
    compute = torch.promote_types(x_TK.dtype, torch.float32)
    return (x_TK.to(compute) @ weight_NK.to(compute).T).to(x_TK.dtype)
