# SPDX-License-Identifier: Apache-2.0
"""Causal attention over a paged cache of e4m3 codes; forward only, one arithmetic with `attention`."""

# T packed query rows, S sequences, q query heads, g KV heads, d head dim, Y pages, Z tokens a page, B table columns.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import fa3, packed, split_attention
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.attention import head_problems, key_count_problems, split_problems


@torch.library.custom_op("vllm_forward_bridge::cached_attention", mutates_args=(), device_types="cpu")
def cached_attention(
    q_Tqd: Tensor, key_pages_YZgd: Tensor, value_pages_YZgd: Tensor, block_table_SB: Tensor, cu_seqlens_q_S1: Tensor,
    kv_lens_S: Tensor, k_scale: Tensor, v_scale: Tensor, softmax_scale: float, split_tokens: int,
) -> Tensor:  # fmt: skip
    """Attend with the last rows of each sequence to its stored keys, their own included.

    The formula is that of `attention`; position p of a sequence lies in page block_table[sequence, p // Z], row p % Z.

    Args:
        q_Tqd: bf16; rows past cu_seqlens_q[-1] are padding, zero in the result.
        key_pages_YZgd: float8_e4m3fn codes.
        value_pages_YZgd: float8_e4m3fn codes.
        block_table_SB: int32; entries past a sequence's last page are not read.
        cu_seqlens_q_S1: int32 [S + 1].
        kv_lens_S: int32, stored keys of each sequence, the new rows' included.
        k_scale: fp32 scalar, [] or [1].
        v_scale: fp32 scalar, [] or [1].
        softmax_scale: factor of the scores.
        split_tokens: keys a split; part of the numeric contract.

    Returns:
        out_Tqd, bf16, independent of the page size and of which pages hold a sequence.

    Raises:
        ValueError: lists every argument that is not accepted.
    """
    problems = packed.cu_seqlens_problems("cu_seqlens_q", cu_seqlens_q_S1, len(q_Tqd))
    problems += head_problems(q_Tqd, key_pages_YZgd.shape[-2:-1]) + split_problems(split_tokens)
    if not problems:
        problems += _table_problems(block_table_SB, kv_lens_S, cu_seqlens_q_S1, key_pages_YZgd)
    e4m3, fp32, int32 = torch.float8_e4m3fn, torch.float32, torch.int32
    check(
        "cached_attention", *problems, q_Tqd=(q_Tqd, torch.bfloat16, "T q d"),
        key_pages_YZgd=(key_pages_YZgd, e4m3, "Y Z g d"), value_pages_YZgd=(value_pages_YZgd, e4m3, "Y Z g d"),
        block_table_SB=(block_table_SB, int32, "S B"), kv_lens_S=(kv_lens_S, int32, "S"),
        k_scale=(k_scale, fp32, ""), v_scale=(v_scale, fp32, ""),
    )  # fmt: skip
    page_tokens, table_SB = key_pages_YZgd.shape[1], block_table_SB.long()

    def stored_at(sequence_b1, position_bL):
        return table_SB[sequence_b1, position_bL // page_tokens] * page_tokens + position_bL % page_tokens

    return split_attention.attend(
        q_Tqd, key_pages_YZgd.flatten(0, 1), value_pages_YZgd.flatten(0, 1),
        cu_seqlens_q_S1.diff().tolist(), kv_lens_S.tolist(), stored_at,
        k_scale.item(), v_scale.item(), softmax_scale, split_tokens,
    )  # fmt: skip


cached_attention.register_kernel("cuda")(fa3.cached_attention)


@cached_attention.register_fake
def _(q_Tqd, key_pages, value_pages, block_table, cu_seqlens_q, kv_lens, k_scale, v_scale, softmax_scale, split_tokens):
    return torch.empty_like(q_Tqd)


def _table_problems(block_table_SB, kv_lens_S, cu_seqlens_q_S1, key_pages_YZgd):
    sequences = len(cu_seqlens_q_S1) - 1
    if len(block_table_SB) != sequences or len(kv_lens_S) != sequences:
        return [
            f"cu_seqlens_q names {sequences} sequences, block_table {len(block_table_SB)}, kv_lens {len(kv_lens_S)}; "
            "one row a sequence is accepted, to know whose keys a query sees: build all three from the same batch"
        ]
    num_pages, page_tokens = key_pages_YZgd.shape[:2]
    problems = key_count_problems(cu_seqlens_q_S1.diff().tolist(), kv_lens_S.tolist())
    pages_S = (kv_lens_S + page_tokens - 1) // page_tokens
    if int(pages_S.max()) > block_table_SB.shape[1]:
        return [*problems, (
            f"a sequence of {int(kv_lens_S.max())} keys needs {int(pages_S.max())} pages of {page_tokens}, but "
            f"block_table has {block_table_SB.shape[1]} columns; one a page is accepted, to find the keys: widen it"
        )]  # fmt: skip
    read_SB = torch.arange(block_table_SB.shape[1]) < pages_S[:, None]
    wrong_SB = read_SB & ((block_table_SB < 0) | (block_table_SB >= num_pages))
    if wrong_SB.any():
        sequence, column = wrong_SB.nonzero()[0].tolist()
        problems.append(
            f"block_table[{sequence}, {column}] is {int(block_table_SB[sequence, column])}; 0 to {num_pages - 1} is "
            "accepted, the pages of the pool: allocate the page before the call"
        )
    return problems


def _setup(ctx, inputs, output):
    if any(ctx.needs_input_grad):
        raise ValueError(
            "cached_attention: an input requires a gradient; only constants are accepted, as stored codes have no "
            "gradient: train with attention, or call this under torch.no_grad()"
        )


def _backward(ctx, grad_Tqd):
    raise AssertionError("cached_attention refuses inputs that require a gradient")


cached_attention.register_autograd(_backward, setup_context=_setup)
