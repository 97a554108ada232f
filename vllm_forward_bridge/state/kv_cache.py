# SPDX-License-Identifier: Apache-2.0
"""Keys and values of an attention layer: e4m3 codes in pages that any sequence may hold, in any order."""

# T new tokens of a forward, S its sequences, q query heads, g KV heads, d head dim, Y pages, Z tokens each, B columns.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge.ops.attention import quantize_kv
from vllm_forward_bridge.ops.cached_attention import cached_attention


@dataclass(frozen=True)
class PagePlan:
    """Index maps of one forward, the same for every attention layer; build it with `page_plan`."""

    block_table_SB: Tensor
    """Pages of each sequence in order; -1 behind the last."""
    cu_seqlens_S1: Tensor
    kv_lens_S: Tensor
    row_T: Tensor
    """Row of the pool [pages * page_tokens] for each new token."""


def page_plan(
    pages: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    page_tokens: int,
    device: torch.device | str = "cpu",
) -> PagePlan:
    """Plan where a forward writes its keys and whose keys its rows read.

    Args:
        pages: pages of each sequence, in the order of positions; a page belongs to one sequence.
        starts: rows of each sequence computed before.
        counts: new rows of each sequence, at least 1; they lie packed in this order.
        page_tokens: positions of a page.
        device: where the layers run.

    Raises:
        ValueError: lists every sequence that has too few pages, and pages held twice.
    """
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    _check_pages(pages, ends, page_tokens)
    columns = max(len(held) for held in pages)
    block_table_SB = torch.tensor([[*held, *[-1] * (columns - len(held))] for held in pages], dtype=torch.int32)
    count_S = torch.tensor(list(counts))
    sequence_T = torch.repeat_interleave(torch.arange(len(count_S)), count_S)
    first_position_S = torch.tensor(list(starts)) - (count_S.cumsum(0) - count_S)
    position_T = torch.arange(len(sequence_T)) + first_position_S[sequence_T]
    row_T = block_table_SB[sequence_T, position_T // page_tokens].long() * page_tokens + position_T % page_tokens
    cu_seqlens_S1 = torch.tensor([0, *counts]).cumsum(0).int()
    kv_lens_S = torch.tensor(ends, dtype=torch.int32)
    return PagePlan(*(tensor.to(device) for tensor in (block_table_SB, cu_seqlens_S1, kv_lens_S, row_T)))


def _check_pages(pages, ends, page_tokens):
    problems = [
        f"sequence {number} reaches {end} tokens on {len(held)} pages of {page_tokens}; {-(-end // page_tokens)} "
        "pages or more are accepted, every key needs its row: claim them before the forward"
        for number, (held, end) in enumerate(zip(pages, ends, strict=True))
        if len(held) * page_tokens < end
    ]
    flat = [page for held in pages for page in held]
    if len(set(flat)) != len(flat):
        problems.append(
            f"pages are {[list(held) for held in pages]}; no page twice is accepted, a write would hit another: "
            "give each sequence its own"
        )
    if problems:
        raise ValueError("page_plan cannot plan this forward:\n  - " + "\n  - ".join(problems))


class KVCache:
    """The pool of one attention layer.

    Args:
        num_pages: pages Y.
        page_tokens: positions of a page.
        num_kv_heads: g.
        head_dim: d.
        k_scale: fp32 scalar, [] or [1], from the checkpoint.
        v_scale: fp32 scalar, [] or [1], from the checkpoint.
        device: where the layer runs.
    """

    def __init__(
        self, *, num_pages: int, page_tokens: int, num_kv_heads: int, head_dim: int, k_scale: Tensor, v_scale: Tensor,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        shape = (num_pages, page_tokens, num_kv_heads, head_dim)
        self.key_pages_YZgd, self.value_pages_YZgd = (
            torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)
        )
        self.k_scale, self.v_scale = k_scale, v_scale

    def write(self, plan: PagePlan, k_Tgd: Tensor, v_Tgd: Tensor) -> None:
        """Quantise the new keys and values and store them; rows past the plan's are padding."""
        live = len(plan.row_T)
        for pages, new, scale in (
            (self.key_pages_YZgd, k_Tgd, self.k_scale),
            (self.value_pages_YZgd, v_Tgd, self.v_scale),
        ):
            pages.view(torch.uint8).flatten(0, 1)[plan.row_T] = quantize_kv(new[:live], scale).view(torch.uint8)

    def attend(self, plan: PagePlan, q_Tqd: Tensor, softmax_scale: float, split_tokens: int) -> Tensor:
        """Return `cached_attention` of the new rows; write their keys first."""
        return cached_attention(
            q_Tqd, self.key_pages_YZgd, self.value_pages_YZgd, plan.block_table_SB, plan.cu_seqlens_S1, plan.kv_lens_S,
            self.k_scale, self.v_scale, softmax_scale, split_tokens,
        )  # fmt: skip
