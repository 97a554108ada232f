# SPDX-License-Identifier: Apache-2.0
"""Linear layer on e4m3 codes with static scales."""

import torch
from torch import Tensor


def fp8_linear(x_TK: Tensor, codes_NK: Tensor, weight_scale: Tensor, input_scale: Tensor) -> Tensor:
    """Return bf16(sum_k(e4m3(x / input_scale) * code) * (input_scale * weight_scale))."""
    scaled_TK = (x_TK.float() * (1.0 / input_scale)).clamp(-448.0, 448.0)
    x_codes_TK = scaled_TK.to(torch.float8_e4m3fn)
    sums_TN = x_codes_TK.float() @ codes_NK.float().T
    return (sums_TN * (input_scale * weight_scale)).to(torch.bfloat16)
