# SPDX-License-Identifier: Apache-2.0
"""Attention over fixed splits of the keys on the CPU: the one arithmetic of `attention` and `cached_attention`.

A split is exact inside (integers in float64), so only the merge of splits has an order: that of positions.
"""

# T packed query rows, N stored keys, q query heads, g KV heads, d head dim; b tasks of a group, R their rows, L their
# keys, M rows of one KV head: R * q / g, K keys of one split.

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact

LARGEST_SPLIT = 1 << 15
"""Keys a split may have: 20 bits of the weight, 18 of a stored value and 15 of the count fill a float64."""
_GROUP_ELEMENTS = 1 << 18  # of the largest tensor of a group; changes time and memory, never bits
_FEWEST_ROWS = 64  # of a task whose sequence is long: fewer would decode the keys too often
_E4M3_NAN = 0x7F
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Group:
    """Tasks of like size; a task is some consecutive query rows of one sequence and the keys they see."""

    row_bR: Tensor
    """Packed query rows; a task with fewer repeats its first row, see `live_bR`."""
    live_bR: Tensor
    visible_bR: Tensor
    """Keys each row sees: its position + 1."""
    sequence_b: Tensor
    num_keys: int


def groups(
    query_counts: list[int], key_counts: list[int], num_heads: int, key_width: int, device: torch.device | str = "cpu"
) -> Iterator[Group]:
    """Cut the query rows into tasks and gather tasks of like size; sequences own consecutive packed rows.

    Args:
        query_counts: query rows of each sequence.
        key_counts: keys of each sequence; its queries are the last rows.
        num_heads: query heads.
        key_width: elements of one key over all KV heads.
        device: where the index maps are wanted.
    """
    tasks: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    start = 0
    for sequence, (queries, keys) in enumerate(zip(query_counts, key_counts, strict=True)):
        rows = max(_FEWEST_ROWS, _GROUP_ELEMENTS // (num_heads * max(keys, 1)))
        for first in range(0, queries, rows):
            count = min(rows, queries - first)
            seen = keys - queries + first + count
            size = (_next_power_of_two(count), _next_power_of_two(seen))
            tasks.setdefault(size, []).append((sequence, start + first, count, seen))
        start += queries
    for (rows, keys), alike in tasks.items():
        at_once = max(1, _GROUP_ELEMENTS // (keys * max(num_heads * rows, key_width)))
        for first in range(0, len(alike), at_once):
            yield _group(alike[first : first + at_once], device)


def _group(tasks: list[tuple[int, int, int, int]], device: torch.device | str) -> Group:
    sequence_b, first_b, count_b, seen_b = torch.tensor(tasks).unbind(1)
    offset_R = torch.arange(int(count_b.max()))
    live_bR = offset_R < count_b[:, None]
    row_bR = torch.where(live_bR, first_b[:, None] + offset_R, first_b[:, None])
    visible_bR = torch.where(live_bR, (seen_b - count_b)[:, None] + 1 + offset_R, 1)
    maps = (index.to(device) for index in (row_bR, live_bR, visible_bR, sequence_b))
    return Group(*maps, int(seen_b.max()))


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def attend(
    q_Tqd: Tensor, key_codes_Ngd: Tensor, value_codes_Ngd: Tensor, query_counts: list[int], key_counts: list[int],
    stored_at: Callable[[Tensor, Tensor], Tensor], k_scale: float, v_scale: float, softmax_scale: float,
    split_tokens: int,
) -> Tensor:  # fmt: skip
    """Attend with the last rows of each sequence; `stored_at(sequence_b1, position_bL)` tells where a key lies in N.

    The formula is in the docstring of `attention`.
    """
    out_Tqd = torch.zeros_like(q_Tqd)
    length_S = torch.tensor(key_counts)
    for group in groups(query_counts, key_counts, q_Tqd.shape[1], key_codes_Ngd[0].numel()):
        # A position past the end is read at the sequence's last key; no row sees it.
        last_b1 = length_S[group.sequence_b, None] - 1
        index_bL = stored_at(group.sequence_b[:, None], torch.arange(group.num_keys).minimum(last_b1))
        key_bgLd, value_bgLd = (
            codes.view(torch.uint8).index_select(0, index_bL.flatten()).unflatten(0, index_bL.shape).transpose(1, 2)
            for codes in (key_codes_Ngd, value_codes_Ngd)
        )
        query_bgMd = by_kv_head(q_Tqd[group.row_bR], key_bgLd.shape[1])
        repeats = query_bgMd.shape[2] // group.row_bR.shape[1]
        visible_b1M1 = group.visible_bR.repeat(1, repeats)[:, None, :, None]
        out_bgMd = _attend_group(query_bgMd, key_bgLd, value_bgLd, visible_b1M1, k_scale * softmax_scale, split_tokens)
        out_bRqd = by_row((out_bgMd * v_scale + 0.0).to(q_Tqd.dtype), group.row_bR.shape[1])
        out_Tqd[group.row_bR[group.live_bR]] = out_bRqd[group.live_bR]
    return out_Tqd


def by_kv_head(rows_bRqd: Tensor, num_kv_heads: int) -> Tensor:
    """Return [b, g, M, d]: the rows of all query heads that share a KV head, head by head."""
    return rows_bRqd.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def by_row(rows_bgMd: Tensor, num_rows: int) -> Tensor:
    """Undo `by_kv_head`."""
    return rows_bgMd.unflatten(2, (-1, num_rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_group(query_bgMd, key_bgLd, value_bgLd, visible_b1M1, score_scale, split_tokens):
    """Return acc / l in fp32, [b, g, M, d]; keys and values are bytes of e4m3 codes."""
    query_bgMd, unit_bgM1 = exact.fixed_point(query_bgMd, exact.FIXED_POINT_BITS)
    unit_bgM1 = unit_bgM1 * exact.E4M3_UNIT
    merged = None
    for first in range(0, key_bgLd.shape[2], split_tokens):
        key_bgKd, value_bgKd = (
            x[:, :, first : first + split_tokens].contiguous().view(torch.float8_e4m3fn) for x in (key_bgLd, value_bgLd)
        )
        scores_bgMK = exact.integer_matmul(query_bgMd, exact.e4m3_integers(key_bgKd))
        scores_bgMK = scores_bgMK.mul_(unit_bgM1).float().mul_(score_scale)
        position_K = torch.arange(first, first + scores_bgMK.shape[-1])
        hidden_b1MK = position_K >= visible_b1M1
        split = _split(scores_bgMK.masked_fill_(hidden_b1MK, -torch.inf), value_bgKd, hidden_b1MK)
        merged = split if merged is None else merge(merged, split)
    _, total_bgM1, weighted_bgMd = merged
    return weighted_bgMd / total_bgM1


def _split(scores_bgMK: Tensor, value_bgKd: Tensor, hidden_b1MK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 (largest score, sum of weights, weighted sum of value codes) of one split."""
    # bits: a row that sees nothing here gets a finite maximum, weights of zero, and leaves the merge unchanged.
    largest_bgM1 = scores_bgMK.amax(-1, keepdim=True).clamp(min=_LOWEST)
    bits = exact.FIXED_POINT_BITS
    # bits: the largest weight is 1, so one fixed grid serves every row; the sums below are then exact in any order.
    weight_bgMK = exact.exp(scores_bgMK - largest_bgM1).double().mul_(2.0**bits).round_()
    total_bgM1 = weight_bgMK.sum(-1, keepdim=True).mul_(2.0**-bits).float()
    integers_bgKd = exact.e4m3_integers(value_bgKd)
    nan_bgKd = (value_bgKd.view(torch.uint8) & _E4M3_NAN) == _E4M3_NAN
    has_nan = bool(nan_bgKd.any())
    if has_nan:
        integers_bgKd.masked_fill_(nan_bgKd, 0.0)
    weighted_bgMd = exact.integer_matmul(weight_bgMK, integers_bgKd.transpose(2, 3))
    weighted_bgMd = weighted_bgMd.mul_(2.0**-bits * exact.E4M3_UNIT).float()
    if has_nan:
        # 0 * NaN is NaN: a stored NaN must reach the rows that see it and no other.
        reached_bgMd = (~hidden_b1MK).double() @ nan_bgKd.double()
        weighted_bgMd.masked_fill_(reached_bgMd > 0, torch.nan)
    return largest_bgM1, total_bgM1, weighted_bgMd


def merge(left: tuple[Tensor, Tensor, Tensor], right: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge (m, l, acc) of the splits so far with the next split's, in fp32.

    m = max(m1, m2);  l = l1 * exp(m1 - m) + l2 * exp(m2 - m);  acc likewise.
    """
    largest = torch.maximum(left[0], right[0])
    from_left, from_right = exact.exp(left[0] - largest), exact.exp(right[0] - largest)
    return largest, left[1] * from_left + right[1] * from_right, left[2] * from_left + right[2] * from_right
