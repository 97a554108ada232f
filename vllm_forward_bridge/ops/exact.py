# SPDX-License-Identifier: Apache-2.0
"""CPU arithmetic whose bits depend on the operands alone: not on batch, place, length, stride or number of threads.

BLAS picks another summation order for another number of rows, vectorised functions treat the tail of a buffer
differently from its body, and long sums are split over threads. Here a product is exact (its order cannot matter), a
sum is one fixed tree of elementwise adds, and a function of one variable is only ever run by the vector loop.
"""

# Legend: ... any leading dims (broadcast), M rows, N output columns, K summed over.

import math
from collections.abc import Callable

import torch
from torch import Tensor

FIXED_POINT_BITS = 20
"""Magnitude bits an operand of `matmul` keeps, counted from the largest element of its row."""
E4M3_UNIT = 2.0**-9
"""Every e4m3fn value is a whole multiple of this, at most 448 / E4M3_UNIT = 229,376 times."""
_DOUBLE_BITS = 53
_E4M3_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double() / E4M3_UNIT
# Elementwise loops below torch's grain size (32,768) stay on one thread; every vector loop steps by a divisor of 64.
_SERIAL_ELEMENTS = 32768
_VECTOR_ELEMENTS = 64


def matmul(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """Multiply x by w transposed, in fixed point, without any rounding in the sum.

    xi = round(x / ux), wi = round(w / uw), ux and uw powers of two chosen per row so that |xi|, |wi| <= 2^20 (fewer
    bits above K = 8192); result = sum_k xi wi * ux * uw. The sum of integers stays within 2^53: float64 holds it.

    Args:
        x_MK: bf16 or fp32 [..., M, K].
        w_NK: bf16 or fp32 [..., N, K].

    Returns:
        float64 [..., M, N]; a row of x or w with a NaN or an infinity poisons its own row or column only.
    """
    bits = min(FIXED_POINT_BITS, (_DOUBLE_BITS - _ceil_log2(x_MK.shape[-1])) // 2)
    x_integers, x_unit = fixed_point(x_MK, bits)
    w_integers, w_unit = fixed_point(w_NK, bits)
    return integer_matmul(x_integers, w_integers).mul_(x_unit).mul_(w_unit.transpose(-1, -2))


def integer_matmul(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """Return x @ w^T of whole numbers held in float64; the caller keeps K * max|x| * max|w| within 2^53."""
    # bits: a zero sum may come out as -0.0 or 0.0, as the library starts its sum; adding 0.0 leaves only 0.0.
    return torch.matmul(x_MK, w_NK.transpose(-1, -2)).add_(0.0)


def fixed_point(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round each row (last dim) of bf16 or fp32 `values` to `bits` magnitude bits.

    Returns:
        (integers, unit): float64 whole numbers of the same shape with |integers| <= 2^bits, and float64 [..., 1] powers
        of two; values = integers * unit within unit / 2.
    """
    unit = _power_of_two_within(values).mul_(2.0 ** (1 - bits))
    return values.double().mul_(unit.reciprocal()).round_(), unit


def bits_left(num_summed: int, largest: int) -> int:
    """Return the magnitude bits the other operand may have: num_summed * largest * 2^bits <= 2^53, at most 20."""
    return min(FIXED_POINT_BITS, _DOUBLE_BITS - _ceil_log2(num_summed * largest))


def e4m3_integers(codes: Tensor) -> Tensor:
    """Return the e4m3fn `codes` as float64 whole numbers in units of 2^-9; NaN codes stay NaN."""
    return _E4M3_TABLE.index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)


def halving_sum(values: Tensor) -> Tensor:
    """Sum over the last dim by adding its second half to its first until one column is left.

    The tree depends on the length alone. Lengths that must agree are padded with zeros by the caller.
    """
    while (length := values.shape[-1]) > 1:
        half = (length + 1) // 2
        tail = values[..., half:]
        if length % 2:
            # The middle column has no partner and moves on as it is.
            values = torch.cat((values[..., : half - 1] + tail, values[..., half - 1 : half]), dim=-1)
        else:
            values = values[..., :half] + tail
    return values.squeeze(-1)


def exp(x: Tensor) -> Tensor:
    """Return fp32 e^x = f32(2^(f64(x) * log2 e))."""
    return _by_vector_loop(_exp, x).float()


def log(x: Tensor) -> Tensor:
    """Return fp32 ln x = f32(log2(f64(x)) * ln 2)."""
    return _by_vector_loop(torch.Tensor.log2_, x).mul_(math.log(2.0)).float()


def rsqrt(x: Tensor) -> Tensor:
    """Return fp32 f32(1 / sqrt(f64(x)))."""
    return _by_vector_loop(torch.Tensor.rsqrt_, x).float()


def sigmoid(x: Tensor) -> Tensor:
    """Return fp32 f32(1 / (1 + e^-x)), all but the last step in float64."""
    return _by_vector_loop(_exp, -x).add_(1.0).reciprocal_().float()


def silu(x: Tensor) -> Tensor:
    """Return fp32 f32(x / (1 + e^-x)), all but the last step in float64."""
    return x.double().div_(_by_vector_loop(_exp, -x).add_(1.0)).float()


def softplus(x: Tensor) -> Tensor:
    """Return fp32 f32(max(x, 0) + log1p(e^-|x|)), all but the last step in float64."""
    return _by_vector_loop(_log1p_exp, -x.abs()).add_(x.clamp(min=0.0)).float()


def _exp(values: Tensor) -> Tensor:
    return values.mul_(math.log2(math.e)).exp2_()


def _log1p_exp(values: Tensor) -> Tensor:
    return _exp(values).log1p_()


def _by_vector_loop(function_: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an in-place float64 function to a padded copy of x, in pieces that one thread does alone; float64."""
    if x.is_cuda:
        # A GPU thread computes its element alone, wherever that lies.
        return function_(x.to(torch.float64, copy=True))
    length = x.numel()
    # bits: a fresh buffer, whole vectors and serial pieces: no scalar tail, no stride and no split over threads.
    buffer = torch.ones(-(-length // _VECTOR_ELEMENTS) * _VECTOR_ELEMENTS, dtype=torch.float64)
    buffer[:length].view(x.shape).copy_(x)
    for start in range(0, length, _SERIAL_ELEMENTS):
        function_(buffer[start : start + _SERIAL_ELEMENTS])
    return buffer[:length].view(x.shape)


def _power_of_two_within(values: Tensor) -> Tensor:
    """Return float64 [..., 1]: the largest power of two, 2^-126 to 2^127, not above the row's largest magnitude.

    Read from the exponent bits of bf16 or fp32, so an infinity or a NaN in the row does not make it one.
    """
    if values.dtype == torch.bfloat16:
        largest = (values.view(torch.int16) & 0x7FFF).amax(-1, keepdim=True)
        power = (largest & 0x7F80).view(torch.bfloat16)
    else:
        largest = (values.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
        power = (largest & 0x7F800000).view(torch.float32)
    return power.double().clamp_(2.0**-126, 2.0**127)


def _ceil_log2(number: int) -> int:
    return (number - 1).bit_length()
