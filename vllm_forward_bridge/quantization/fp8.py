# SPDX-License-Identifier: Apache-2.0
"""FP8 e4m3 as ModelOpt stores it: codes, one fp32 scale a matrix, a static input scale; the KV cache's scales."""

# Legend: ... any stacked leading dims, N out features, K in features.

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
# Up to here a value rounds to 448; beyond, it is clipped by more than rounding.
E4M3_OVERFLOW = 464.0


@dataclass(frozen=True)
class Fp8Bytes:
    """Stored form of one matrix."""

    codes: Tensor
    """float8_e4m3fn [..., N, K]."""
    weight_scale: Tensor
    """float32 [...]; multiplies."""
    input_scale: Tensor
    """float32 [...]; the activation is divided by it."""


def e4m3_scale(amax: Tensor) -> Tensor:
    """Return fp32 amax / 448: ModelOpt's scale of a weight, activation or KV cache of largest magnitude `amax`."""
    return amax.float() / E4M3_MAX


def fp8_quantize(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return codes e4m3fn [..., N, K] = e4m3(clamp(f32(w) / scale, +-448)); e4m3 rounds half to even.

    Args:
        weight: bf16 or fp32 [..., N, K], finite.
        weight_scale: fp32 [...] or [..., 1], positive.

    Raises:
        ValueError: the weight has a NaN or an infinity, or a scale is not positive.
    """
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise ValueError(
            f"{bad} of {weight.numel()} are NaN or infinite; e4m3 cannot hold them; find the step that made them"
        )
    if not bool((weight_scale > 0).all()):
        raise ValueError(f"weight_scale is {weight_scale.tolist()}; it must be positive, codes are w / scale")
    # bits: a division, as ModelOpt does; multiplying by 1/scale rounds twice.
    scaled = weight.float() / _over_matrix(weight_scale, weight)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def fp8_dequantize(codes: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Read the weight back: dtype(f32(code) * scale)."""
    return (codes.float() * _over_matrix(weight_scale, codes)).to(dtype)


def exceeds_e4m3(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Tell, per element, whether `fp8_quantize` clips it by more than rounding: |w| > 464 * scale."""
    return weight.float().abs() > E4M3_OVERFLOW * _over_matrix(weight_scale, weight)


def _over_matrix(scale: Tensor, weight: Tensor) -> Tensor:
    """Give `scale` two trailing dims; a scalar may be stored with shape [] or [1]."""
    scale = scale.float()
    return scale.reshape(()) if scale.numel() == 1 else scale.reshape(*weight.shape[:-2], 1, 1)
