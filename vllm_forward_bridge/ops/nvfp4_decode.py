# SPDX-License-Identifier: Apache-2.0
"""NVFP4 bytes as exact whole numbers, for products that must not round."""

# Legend: ... any leading dims (experts), N out features, K in features.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact
from vllm_forward_bridge.quantization.nvfp4 import BLOCK, CODE_VALUES

UNIT = exact.E4M3_UNIT / 2
"""Code times block scale is a whole multiple of this: codes are multiples of 1/2, scales of 2^-9."""
LARGEST = int(6.0 * 448.0 / UNIT)
"""The largest of those multiples."""
MAX_FEATURES = 32768
"""Above this K the activation would keep fewer than 16 bits beside the weight in an exact sum."""

_DOUBLED = torch.tensor(CODE_VALUES + tuple(0.0 - value for value in CODE_VALUES)) * 2.0
# [256] words of 8 bytes, each two fp32: the doubled values of the low and of the high nibble.
_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), dim=-1).view(torch.float64).view(256)


def activation_bits(num_features: int) -> int:
    """Return the fixed-point bits of an activation row of `num_features` that multiplies NVFP4 integers exactly."""
    return exact.bits_left(num_features, LARGEST)


def features_problem(name: str, x: Tensor) -> str:
    """Say what is wrong with the in-features (last dim) of x, or return an empty string."""
    num_features = x.shape[-1] if x.dim() else 0
    if num_features % BLOCK or not 0 < num_features <= MAX_FEATURES:
        return (
            f"{name} has K = {num_features}; a multiple of {BLOCK} up to {MAX_FEATURES} is accepted, one scale serves "
            f"{BLOCK} columns and longer sums are not exact: use another weight format for this layer"
        )
    return ""


def decoded_integers(codes: Tensor, block_scale: Tensor) -> Tensor:
    """Return float64 [..., N, K] whole numbers: table[code] * f32(block_scale) in units of 2^-10; nothing rounds.

    Args:
        codes: uint8 [..., N, K/2], low nibble first; code 8 is 0.
        block_scale: e4m3fn [..., N, K/16].
    """
    # One look-up decodes both nibbles of a byte: the pair of fp32 values is moved as one 8-byte word.
    pairs = _PAIRS.index_select(0, codes.reshape(-1).int())
    blocks = pairs.view(torch.float32).view(*block_scale.shape, BLOCK)
    # At most 22 bits, so fp32 holds the product exactly.
    return (blocks * exact.e4m3_integers(block_scale).float().unsqueeze(-1)).flatten(-2).double()
