# SPDX-License-Identifier: Apache-2.0
"""What the quantised ops take as weights on each device: a checkpoint's bytes, or a copy packed for the kernel.

A module that owns bytes asks once for each version and keeps the result; the op itself caches nothing.
"""

# N out features, K in features

from torch import Tensor

from vllm_forward_bridge.ops import humming_gemm


def nvfp4_operands(codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, block_scale) as `nvfp4_linear` and `moe_experts` take them on the device of `codes`.

    Args:
        codes: uint8 [..., N, K/2]; a leading dim is the experts.
        block_scale: e4m3fn [..., N, K/16].

    Returns:
        The arguments themselves on the CPU; a packed copy on CUDA.
    """
    if not codes.is_cuda:
        return codes, block_scale
    return humming_gemm.pack_nvfp4(codes, block_scale)


def num_rows(codes: Tensor) -> int:
    """Return the rows of a weight's codes; packed ones count the rows that fill the last tile."""
    return codes.shape[-1] // 2 if humming_gemm.is_packed(codes) else codes.shape[-2]


def num_columns(codes: Tensor) -> int:
    """Return K, the in features of a weight's codes."""
    return codes.shape[-2] * humming_gemm.BLOCK if humming_gemm.is_packed(codes) else codes.shape[-1] * 2
