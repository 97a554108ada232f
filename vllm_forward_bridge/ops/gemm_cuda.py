# SPDX-License-Identifier: Apache-2.0
"""BF16 and FP8 GEMMs by vLLM's kernels that keep a row's bits at every batch size."""

# T = packed tokens, K = in features, N = out features

import torch
from torch import Tensor

from vllm_forward_bridge.ops.launch import kernel_form
from vllm_forward_bridge.vllm_symbols import symbol


def bf16_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Run vLLM's persistent Triton GEMM: one tile, one K order for every T."""
    if not len(x_TK):
        return x_TK.new_empty(0, weight_NK.shape[0])
    return symbol("matmul_persistent")(kernel_form(x_TK), kernel_form(weight_NK).t())


def fp8_linear(
    x_TK: Tensor, codes_NK: Tensor, weight_scale: Tensor, input_scale: Tensor, weight_NK: Tensor | None = None
) -> Tensor:
    """Run vLLM's static quantisation and its CUTLASS GEMM.

    Raises:
        ValueError: K or N is not a multiple of 16; vLLM would fall back to another kernel.
    """
    N, K = codes_NK.shape
    if N % 16 or K % 16:
        raise ValueError(
            f"fp8_linear has a weight of {N} x {K}; the CUDA forward takes multiples of 16, because for others vLLM "
            "changes to a Triton kernel with other bits. Keep this layer in BF16 on the GPU"
        )
    if not len(x_TK):
        return x_TK.new_empty(0, N)
    input_scale, weight_scale = input_scale.reshape(1), weight_scale.reshape(1)
    codes_TK, _ = symbol("scaled_fp8_quant")(kernel_form(x_TK), input_scale)
    return symbol("cutlass_scaled_mm")(
        codes_TK, kernel_form(codes_NK).t(), scale_a=input_scale, scale_b=weight_scale, out_dtype=torch.bfloat16
    )
