# SPDX-License-Identifier: Apache-2.0
"""What the tests of the sequence ops share: inputs, packing, and places of a sequence among others."""

import torch
from torch import Tensor

CHUNK = 16
EDGE_LENGTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1)


def cumulative(lengths) -> Tensor:
    """Return cu_seqlens of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Return bf16 normal numbers."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def conv_inputs(tokens: int, channels: int = 24, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and bias of a convolution of four taps."""
    return normal(tokens, channels, seed=seed), normal(channels, 4, seed=seed + 1), normal(channels, seed=seed + 2)


def scan_inputs(tokens: int, heads: int = 4, head_dim: int = 8, groups: int = 2, state: int = 16, seed: int = 0):
    """Return the arguments of a scan by name, from x to dt_bias."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": normal(tokens, heads, head_dim, seed=seed + 1),
        "dt": normal(tokens, heads, seed=seed + 2),
        "A": -torch.exp(torch.randn(heads, generator=generator)),
        "B": normal(tokens, groups, state, seed=seed + 3),
        "C": normal(tokens, groups, state, seed=seed + 4),
        "D": normal(heads, seed=seed + 5),
        "dt_bias": normal(heads, seed=seed + 6) - 2,
    }


ROW_INPUTS = ("x", "dt", "B", "C")


def scan_rows(inputs: dict, rows) -> dict:
    """Return the inputs of these rows."""
    return {name: value[rows].contiguous() if name in ROW_INPUTS else value for name, value in inputs.items()}


def among_others(rows: tuple[Tensor, ...], others: tuple[Tensor, ...], lengths, place: int):
    """Pack a sequence at `place` between others of these lengths; return (packed, cu_seqlens, its slice)."""
    own = len(rows[0])
    before = sum(lengths[:place])
    packed = tuple(torch.cat([o[:before], r, o[before : sum(lengths)]]) for r, o in zip(rows, others, strict=True))
    return packed, cumulative([*lengths[:place], own, *lengths[place:]]), slice(before, before + own)


HEAD_DIM = 32
K_SCALE, V_SCALE = torch.tensor(0.0213), torch.tensor([0.0117])
"""Scales that bf16 cannot hold, in both accepted shapes."""


def attention_inputs(tokens: int, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of as many rows."""
    shapes = ((tokens, heads, HEAD_DIM), (tokens, kv_heads, HEAD_DIM), (tokens, kv_heads, HEAD_DIM))
    return tuple(normal(*shape, seed=seed + number) for number, shape in enumerate(shapes))
