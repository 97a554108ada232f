# SPDX-License-Identifier: Apache-2.0
"""Linear layer on NVFP4 weights and bf16 activations."""

import torch
from torch import Tensor

# Code = 8 * sign + index; code 8 (minus zero) reads as 0.
CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantised(codes: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return fp32 [N, K] = table[code] * f32(block scale of its 16 columns) * global_scale."""
    low, high = codes & 15, codes >> 4
    codes_NK = torch.stack((low, high), dim=-1).flatten(-2)
    values_NK = torch.tensor(CODE_VALUES)[codes_NK.long()]
    return values_NK * block_scale.float().repeat_interleave(16, dim=-1) * global_scale


def nvfp4_linear(x_TK: Tensor, codes_NB: Tensor, block_scale_NB: Tensor, global_scale: Tensor) -> Tensor:
    """Return bf16(x @ dequantised weight^T), summed in fp32."""
    weight_NK = dequantised(codes_NB, block_scale_NB, global_scale)
    return (x_TK.float() @ weight_NK.T).to(torch.bfloat16)
