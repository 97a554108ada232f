# SPDX-License-Identifier: Apache-2.0
"""The random number of a sampled token: a function of the request's seed and the token's position alone.

A generator with a state would make a token depend on how many numbers were drawn before it, so on the batch, on
preemption and on aborted neighbours. Integer arithmetic only: the same number on every device.
"""

# Legend: T = rows.

import torch
from torch import Tensor

_STRIDE = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MANTISSA_BITS = 53


def token_uniform(seed_T: Tensor, position_T: Tensor) -> Tensor:
    """Return a number in [0, 1) for each (seed, position).

    x = mix(mix(seed) + stride * (position + 1)) modulo 2^64; result = (x >> 11) * 2^-53, so every result is exact.

    Args:
        seed_T: int64, >= 0; one a request.
        position_T: int64, >= 0: index of the sampled token in its sequence, the prompt counted.

    Returns:
        float64 [T], on the device of the arguments.

    Source: the finaliser is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    x_T = _mix(_mix(seed_T) + (position_T + 1) * _signed(_STRIDE))
    return _shifted_right(x_T, 64 - _MANTISSA_BITS).double() * 2.0**-_MANTISSA_BITS


def _mix(x: Tensor) -> Tensor:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        x = (x ^ _shifted_right(x, shift)) * _signed(multiplier)
    return x ^ _shifted_right(x, _SHIFTS[-1])


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    # int64's own shift copies the sign bit down; the mask makes it the unsigned shift.
    return torch.bitwise_right_shift(x, bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
