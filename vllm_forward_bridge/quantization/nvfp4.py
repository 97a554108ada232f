# SPDX-License-Identifier: Apache-2.0
"""NVFP4 as ModelOpt stores it: 4-bit codes, one e4m3 scale a 16-block, one fp32 scale a matrix.

Equal in bytes to nvidia-modelopt 0.47.0 `torch/quantization/qtensor/nvfp4_tensor.py` (dynamic path for the 448 rule,
static path for the four-over-six rule).
"""

# Legend: ... any stacked leading dims (experts), N out features, K in features (a multiple of 16).

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

BLOCK = 16
CODE_MAX = 6.0
CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ROUNDING_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SCALE_MAX = 448.0
SCALE_MIN = 2.0**-9
# A scale above this does not round to 448, so the block's largest value would be clipped harder than rounding clips it.
SCALE_OVERFLOW = 464.0


@dataclass(frozen=True)
class Nvfp4Bytes:
    """Stored form of one matrix or of a stack of matrices."""

    codes: Tensor
    """uint8 [..., N, K/2]; element 2j in the low nibble of byte j, element 2j+1 in the high one."""
    block_scale: Tensor
    """float8_e4m3fn [..., N, K/16]."""
    global_scale: Tensor
    """float32 [...]; multiplies."""
    input_scale: Tensor | None = None
    """float32 [...] of a W4A4 checkpoint; None for W4A16."""

    def map(self, function) -> "Nvfp4Bytes":
        """Return the bytes with `function` applied to each tensor that is there."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(value) for name, value in values.items() if value is not None})


def scale_ceiling(four_over_six: bool) -> float:
    """Return F of `global_scale = amax / (6 F)`: 448, or 256 with four-over-six, whose x1.5 needs the headroom."""
    return 256.0 if four_over_six else SCALE_MAX


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes 0..15, uint8 [..., K], two a byte, low nibble first: uint8 [..., K/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Undo `pack_codes`: uint8 [..., K/2] -> codes 0..15, uint8 [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def round_to_codes(scaled: Tensor) -> Tensor:
    """Round fp32 values in units of the block scale to codes 0..15, uint8 of the same shape.

    Nearest value of the table; half-way goes to the even code (up at 0.75, 1.75, 3.5, down at the other bounds);
    beyond 6 saturates. The sign bit is set for every value below zero: a small negative one becomes code 8, minus zero.
    """
    size = scaled.abs()
    index = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
    for place, bound in enumerate(ROUNDING_BOUNDS):
        # bits: half-way values go to the even code: bounds 1, 3 and 5 belong to the code above them.
        index += (size >= bound) if place % 2 else (size > bound)
    return index | ((scaled < 0).to(torch.uint8) << 3)


def nvfp4_quantize(weight: Tensor, *, global_scale: Tensor | None = None, four_over_six: bool) -> Nvfp4Bytes:
    """Quantise a weight by ModelOpt's rule.

    global_scale = amax(W) / (6 F); per block of 16: scale = e4m3(clamp(amax(block) / 6 / global_scale, 2^-9, 448));
    code = nearest(w / (f32(scale) * global_scale)). With four-over-six F is 256 and each block also tries a scale
    1.5 times as large (its largest code is then 4) and keeps it if the sum of squared errors is smaller.

    Args:
        weight: bf16 or fp32 [..., N, K], finite.
        global_scale: fp32 [...], fixed scales; None derives them from the weight.
        four_over_six: the rule of the checkpoint.

    Returns:
        Bytes without input_scale.

    Raises:
        ValueError: K is not a multiple of 16, or the weight has a NaN or an infinity.

    Source: nvidia-modelopt 0.47.0 NVFP4QTensor; calib/mse.py with multipliers 1.0 and 1.5.
    """
    _check_weight(weight)
    values = weight.float()
    if global_scale is None:
        global_scale = values.abs().amax(dim=(-2, -1)) / (CODE_MAX * scale_ceiling(four_over_six))
    blocks = values.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    # An all-zero matrix has global scale 0; its codes must be 0, not 0/0.
    unit = torch.where(global_scale > 0, global_scale, 1.0)[..., None, None]
    if not four_over_six:
        relative = amax / (CODE_MAX * unit)
        # bits: ModelOpt's dynamic path gives a zero block the relative scale 1.
        scale, codes = _encode(blocks, torch.where(relative == 0, 1.0, relative), unit)
    else:
        scale, codes = _encode_four_over_six(blocks, amax, unit)
    return Nvfp4Bytes(pack_codes(codes.flatten(-2)), scale, global_scale)


def nvfp4_dequantize(stored: Nvfp4Bytes, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Read the weight back: dtype((table[code] * f32(block_scale)) * global_scale), [..., N, K].

    The first product is exact (6 bits), so fp32 holds the correctly rounded value; bf16 rounds once more.
    """
    # One look-up decodes both nibbles of a byte: two fp32 values are moved as one 8-byte word.
    pairs = _pair_values(stored.codes.device).index_select(0, stored.codes.reshape(-1).int())
    blocks = pairs.view(torch.float32).view(*stored.block_scale.shape, BLOCK)
    blocks = blocks * stored.block_scale.float().unsqueeze(-1)
    return (blocks * stored.global_scale.float()[..., None, None, None]).flatten(-2).to(dtype)


def code_values(device: torch.device) -> Tensor:
    """Return the value of each code, fp32 [16]; code 8 is plus zero, as in ModelOpt's table."""
    return torch.tensor(CODE_VALUES + tuple(0.0 - value for value in CODE_VALUES), device=device)


def _pair_values(device: torch.device) -> Tensor:
    """Return, for each byte, the fp32 values of its low and high nibble as one 8-byte word: float64 [256]."""
    values = code_values(device)
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1).view(torch.float64).view(256)


def _encode(blocks: Tensor, relative_scale: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    scale = relative_scale.clamp(SCALE_MIN, SCALE_MAX).to(torch.float8_e4m3fn)
    # bits: divide by the rounded product, as ModelOpt does; multiplying by a reciprocal rounds twice.
    return scale, round_to_codes(blocks / (scale.float() * unit).unsqueeze(-1))


def _encode_four_over_six(blocks: Tensor, amax: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    ceiling = scale_ceiling(four_over_six=True)
    largest = (unit * (CODE_MAX * ceiling)) / CODE_MAX
    choices = []
    for multiplier in (1.0, 1.5):
        size = (amax * multiplier) / CODE_MAX
        # bits: ModelOpt's static path replaces 0 before normalising, so a zero block's scale byte is usually 448.
        relative = torch.where(size == 0, 1.0, size) * ceiling / largest
        scale, codes = _encode(blocks, relative, unit)
        error = _squared_error(blocks, codes, scale, unit)
        choices.append((scale, codes, torch.where(relative > SCALE_OVERFLOW, torch.inf, error)))
    (scale_6, codes_6, error_6), (scale_4, codes_4, error_4) = choices
    take_4 = error_4 < error_6
    # torch.where does not take float8 on every device; the bytes are what is chosen.
    scale = torch.where(take_4, scale_4.view(torch.uint8), scale_6.view(torch.uint8)).view(torch.float8_e4m3fn)
    return scale, torch.where(take_4.unsqueeze(-1), codes_4, codes_6)


def _squared_error(blocks: Tensor, codes: Tensor, scale: Tensor, unit: Tensor) -> Tensor:
    error = blocks - code_values(codes.device)[codes.int()] * (scale.float() * unit).unsqueeze(-1)
    error = error * error
    # bits: a halving tree of elementwise adds, so that the choice is the same on every device and thread count.
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)


def _check_weight(weight: Tensor) -> None:
    problems = []
    if weight.dtype not in (torch.bfloat16, torch.float32):
        problems.append(f"its dtype is {weight.dtype}; bfloat16 or float32 is accepted")
    if weight.dim() < 2 or weight.shape[-1] % BLOCK:
        problems.append(f"its shape is {tuple(weight.shape)}; [..., N, K] with K a multiple of {BLOCK} is needed")
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        problems.append(f"{bad} of {weight.numel()} elements are NaN or infinite; find the step that made them")
    if problems:
        raise ValueError("this weight cannot be quantised to NVFP4:\n  - " + "\n  - ".join(problems))
