# SPDX-License-Identifier: Apache-2.0
"""Exact ModelOpt formats: NVFP4, FP8, KV scales; deployment bytes and how they follow their masters."""

from vllm_forward_bridge.quantization.digest import BytesDigest, bytes_digest
from vllm_forward_bridge.quantization.fp8 import Fp8Bytes, e4m3_scale, fp8_dequantize, fp8_quantize
from vllm_forward_bridge.quantization.nvfp4 import (
    Nvfp4Bytes,
    nvfp4_dequantize,
    nvfp4_quantize,
    pack_codes,
    unpack_codes,
)
from vllm_forward_bridge.quantization.requantize import (
    RequantizeReport,
    requantize_f32,
    requantize_fp8,
    requantize_nvfp4,
)

__all__ = [
    "BytesDigest",
    "Fp8Bytes",
    "Nvfp4Bytes",
    "RequantizeReport",
    "bytes_digest",
    "e4m3_scale",
    "fp8_dequantize",
    "fp8_quantize",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "pack_codes",
    "requantize_f32",
    "requantize_fp8",
    "requantize_nvfp4",
    "unpack_codes",
]
