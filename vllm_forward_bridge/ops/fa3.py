# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 as both sides call it: always paged, causal, one split, bf16 pages that hold e4m3 code values.

FA3 keeps its key tile at decode only for paged KV; without a block table, or with FP8 pages, decode and prefill differ.
Pages hold f32(code) as bf16, which is exact; k_scale goes into the softmax scale, v_scale multiplies the bf16 output.
"""

# T = packed query tokens, L = packed keys, S = sequences, q = query heads, g = KV heads, d = head dim

import torch
from torch import Tensor

from vllm_forward_bridge.ops.launch import kernel_form
from vllm_forward_bridge.vllm_symbols import symbol

PAGE_TOKENS = 128
HEAD_DIMS = range(65, 129)
"""At 64 and below FA3 drops the causal mask for a single query row, above 128 its key tile is another."""


def paged_attention(
    q_Tqd: Tensor, key_pages: Tensor, value_pages: Tensor, block_table: Tensor, cu_seqlens_q_S1: Tensor,
    kv_lens_S: Tensor, *, max_query_len: int, max_kv_len: int, softmax_scale: float, v_scale: Tensor,
) -> Tensor:  # fmt: skip
    """Attend with each sequence's last rows as queries.

    out = bf16(f32(FA3(q, K_code, V_code, scale = softmax_scale)) * v_scale);  softmax_scale already holds k_scale.

    Args:
        q_Tqd: bf16; rows past the last sequence give zeros.
        key_pages: bf16 [pages, page_tokens, g, d], values of e4m3 codes.
        value_pages: as key_pages.
        block_table: int32 [S, pages of the longest sequence].
        cu_seqlens_q_S1: int32; a sequence's queries are its last rows.
        kv_lens_S: int32.
        max_query_len: bound, a host integer.
        max_kv_len: bound, a host integer.
        softmax_scale: d^-0.5 times k_scale.
        v_scale: f32 scalar tensor.

    Raises:
        ValueError: a head dim outside 65..128.
    """
    if q_Tqd.shape[-1] not in HEAD_DIMS:
        raise ValueError(
            f"attention head_dim is {q_Tqd.shape[-1]}; the CUDA forward takes {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, "
            "because FA3 keeps one key tile in prefill and decode only there. Use a model with head_dim 128"
        )
    out_Tqd = torch.zeros_like(q_Tqd)
    if not len(q_Tqd):
        return out_Tqd
    symbol("flash_attn_varlen_func")(
        kernel_form(q_Tqd), key_pages, value_pages,
        max_seqlen_q=max_query_len, cu_seqlens_q=cu_seqlens_q_S1, max_seqlen_k=max_kv_len, seqused_k=kv_lens_S,
        softmax_scale=softmax_scale, causal=True, block_table=block_table, out=out_Tqd,
        num_splits=1,  # bits: a split count that follows the batch changes the merge order
        fa_version=3,
    )  # fmt: skip
    return (out_Tqd.float() * v_scale).to(q_Tqd.dtype)


def to_pages(
    codes_Lgd: Tensor, cu_seqlens_k_S1: Tensor, max_kv_len: int, page_tokens: int = PAGE_TOKENS
) -> tuple[Tensor, Tensor]:
    """Copy packed e4m3 codes into bf16 pages, each sequence from the start of a page.

    Returns:
        (pages bf16 [L // page_tokens + S, page_tokens, g, d], block_table int32 [S, pages of the longest sequence]).
    """
    lengths_S = cu_seqlens_k_S1.diff()
    num_sequences, device = len(lengths_S), codes_Lgd.device
    pages_S = (lengths_S + page_tokens - 1) // page_tokens
    first_page_S = torch.cumsum(pages_S, 0, dtype=torch.int64) - pages_S
    num_pages = len(codes_Lgd) // page_tokens + num_sequences
    pages = torch.zeros(num_pages * page_tokens, *codes_Lgd.shape[1:], dtype=torch.bfloat16, device=device)
    row_L = torch.arange(len(codes_Lgd), device=device)
    sequence_L = torch.searchsorted(cu_seqlens_k_S1[1:].long(), row_L, right=True).clamp(max=num_sequences - 1)
    slot_L = first_page_S[sequence_L] * page_tokens + row_L - cu_seqlens_k_S1[sequence_L]
    # Rows past the last sequence are padding: they go to the last page, which no sequence needs then.
    slot_L = torch.where(row_L < cu_seqlens_k_S1[-1], slot_L, num_pages * page_tokens - 1)
    pages[slot_L] = codes_Lgd.to(torch.bfloat16)
    width = -(-max_kv_len // page_tokens)
    table = first_page_S[:, None] + torch.arange(width, device=device)
    return pages.view(num_pages, page_tokens, *codes_Lgd.shape[1:]), table.clamp(max=num_pages - 1).int()


def quantize_kv(x: Tensor, scale: Tensor) -> Tensor:
    """Return e4m3fn(clamp(f32(x) / scale, -448, 448)), elementwise."""
    return (x.float() / scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)


def attention(
    q_Tqd: Tensor, k_Lgd: Tensor, v_Lgd: Tensor, k_scale: Tensor, v_scale: Tensor, cu_seqlens_q_S1: Tensor,
    cu_seqlens_k_S1: Tensor, softmax_scale: float, split_tokens: int,
) -> Tensor:  # fmt: skip
    """Run `ops.attention`: quantise, page, attend. FA3 takes all keys as one split, whatever `split_tokens` is."""
    # The host needs both bounds; one copy brings them and k_scale.
    longest = [cu_seqlens_q_S1.diff().max(), cu_seqlens_k_S1.diff().max()]
    bounds = torch.stack([*(length.double() for length in longest), k_scale.reshape(()).double()])
    max_query_len, max_kv_len, host_k_scale = bounds.tolist()
    key_pages, block_table = to_pages(quantize_kv(k_Lgd, k_scale), cu_seqlens_k_S1, int(max_kv_len))
    value_pages, _ = to_pages(quantize_kv(v_Lgd, v_scale), cu_seqlens_k_S1, int(max_kv_len))
    return paged_attention(
        q_Tqd, key_pages, value_pages, block_table, cu_seqlens_q_S1, cu_seqlens_k_S1.diff(),
        max_query_len=int(max_query_len), max_kv_len=int(max_kv_len),
        softmax_scale=softmax_scale * host_k_scale, v_scale=v_scale,
    )  # fmt: skip


def cached_attention(
    q_Tqd: Tensor, key_pages_YZgd: Tensor, value_pages_YZgd: Tensor, block_table_SB: Tensor, cu_seqlens_q_S1: Tensor,
    kv_lens_S: Tensor, k_scale: Tensor, v_scale: Tensor, softmax_scale: float, split_tokens: int,
) -> Tensor:  # fmt: skip
    """Run `ops.cached_attention` on pages of codes; FA3 reads a bf16 copy of them."""
    max_query_len, max_kv_len = int(cu_seqlens_q_S1.diff().max()), int(kv_lens_S.max())
    return paged_attention(
        q_Tqd, key_pages_YZgd.to(torch.bfloat16), value_pages_YZgd.to(torch.bfloat16), block_table_SB,
        cu_seqlens_q_S1, kv_lens_S, max_query_len=max_query_len, max_kv_len=max_kv_len,
        softmax_scale=softmax_scale * k_scale.item(), v_scale=v_scale,
    )  # fmt: skip
