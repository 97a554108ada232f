# SPDX-License-Identifier: Apache-2.0
"""NVFP4 and e4m3 one number at a time, from the definition of their bits: an independent reference for the tests."""

import math

import numpy as np

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_value(code):
    """Return the number that eight bits mean: sign, four exponent bits (bias 7), three mantissa bits; no infinity."""
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = [e4m3_value(code) for code in range(127)]


def e4m3_code(value):
    """Return the code of the nearest number, half-way to the even code, saturating."""
    size = abs(value)
    nearest = min(range(127), key=lambda code: (abs(E4M3[code] - size), code % 2))
    return nearest | (128 if math.copysign(1.0, value) < 0 else 0)


def fp4_code(value):
    """Return the code of the nearest of the eight sizes, half-way to the even code; a sign bit below zero."""
    nearest = min(range(8), key=lambda code: (abs(FP4[code] - abs(value)), code % 2))
    return nearest | (8 if value < 0 else 0)


def nvfp4_block(block, global_scale, four_over_six):
    """Return (scale code, sixteen codes, two errors) of sixteen fp32 numbers; every step rounds to fp32 as stated."""
    f32 = np.float32
    amax = f32(max(abs(v) for v in block))
    unit = f32(global_scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        if not four_over_six:
            relatives = [amax / (f32(6) * unit)]
            relatives = [r if r != 0 else f32(1) for r in relatives]
        else:
            largest = (unit * f32(1536)) / f32(6)
            sizes = [(amax * f32(m)) / f32(6) for m in (1.0, 1.5)]
            relatives = [(s if s != 0 else f32(1)) * f32(256) / largest for s in sizes]
    choices = []
    for relative in relatives:
        scale_code = e4m3_code(float(min(max(relative, f32(2.0**-9)), f32(448))))
        step = f32(e4m3_value(scale_code)) * unit
        codes = [fp4_code(float(f32(v) / step)) for v in block]
        error = sum(
            (float(v) - (FP4[c & 7] * (-1 if c & 8 else 1)) * float(step)) ** 2
            for v, c in zip(block, codes, strict=True)
        )
        choices.append((error, scale_code, codes))
    best = choices[0] if len(choices) == 1 or choices[0][0] <= choices[1][0] else choices[1]
    return best[1], best[2], [choice[0] for choice in choices]
