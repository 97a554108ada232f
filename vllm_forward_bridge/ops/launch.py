# SPDX-License-Identifier: Apache-2.0
"""What every Triton launch here has in common: inputs of one form, so that one binary serves every caller.

Triton compiles another binary when a pointer is not 16-byte aligned or a stride changes, and another binary may
reduce in another order. So kernels get contiguous, aligned tensors, sizes as constants, and no fused multiply-add.
"""

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
NO_FUSION = {"enable_fp_fusion": False}
"""Launch option: a product is rounded before it is added, as the formulas say."""


def kernel_form(values: Tensor) -> Tensor:
    """Return `values` contiguous and aligned; copies only if it is not."""
    values = values.contiguous()
    if values.data_ptr() % ALIGNMENT_BYTES:
        return values.clone()
    return values


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def require_dtype(values: Tensor, dtype: torch.dtype, name: str, op: str) -> None:
    """Raise unless `values` has the dtype that the CUDA forward of `op` is written for."""
    if values.dtype != dtype:
        raise ValueError(
            f"{op}: {name} is {values.dtype}; the CUDA forward takes {dtype} only. Cast it before the call"
        )
