# SPDX-License-Identifier: Apache-2.0
"""cached_attention on the CPU: the bits of `attention`, whatever pages hold the keys."""

import pytest
import torch
from invariance import assert_inputs_unchanged, assert_within, bf16_step
from sequences import HEAD_DIM, K_SCALE, V_SCALE, attention_inputs, cumulative

from vllm_forward_bridge.ops import attention, cached_attention, quantize_kv
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.cached_attention import cached_attention as plain

SCALE = HEAD_DIM**-0.5
KEY_COUNTS = [1, 40, 17, 130, 64]
QUERY_COUNTS = [1, 1, 17, 30, 1]
NAN_CODE = 0x7F
# test_schema compares inputs before and after with allclose, which float8 tensors do not have.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def paged(k_Lgd, v_Lgd, key_counts, page_tokens, seed=0):
    """Return (key pages, value pages, block table); rows that hold no key hold NaN, pages lie in random order."""
    counts = [-(-count // page_tokens) for count in key_counts]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).int()
    table_SB = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    pools = [torch.full((len(order), page_tokens, *k_Lgd.shape[1:]), NAN_CODE, dtype=torch.uint8) for _ in range(2)]
    parts = zip(order[: sum(counts)].split(counts), k_Lgd.split(key_counts), v_Lgd.split(key_counts), strict=True)
    for number, (pages, *values) in enumerate(parts):
        table_SB[number, : len(pages)] = pages
        row_L = (pages[:, None].long() * page_tokens + torch.arange(page_tokens)).flatten()[: len(values[0])]
        for pool, value, scale in zip(pools, values, (K_SCALE, V_SCALE), strict=True):
            pool.flatten(0, 1)[row_L] = quantize_kv(value.contiguous(), scale).view(torch.uint8)
    return *(pool.view(torch.float8_e4m3fn) for pool in pools), table_SB


def packed_inputs():
    q, _, _ = attention_inputs(sum(QUERY_COUNTS))
    _, k, v = attention_inputs(sum(KEY_COUNTS), seed=10)
    return q, k, v


def attend_paged(q, pools_and_table, query_counts, key_counts, split_tokens):
    key_counts = torch.tensor(key_counts, dtype=torch.int32)
    return cached_attention(
        q, *pools_and_table, cumulative(query_counts), key_counts, K_SCALE, V_SCALE, SCALE, split_tokens
    )


def test_cached_attention_opcheck():
    q, k, v = attention_inputs(7)
    cu_seqlens, lengths = cumulative([2, 1]), torch.tensor([3, 4], dtype=torch.int32)
    arguments = (q[:3], *paged(k, v, [3, 4], 2), cu_seqlens, lengths, K_SCALE, V_SCALE, SCALE, 4)
    torch.library.opcheck(cached_attention, arguments, test_utils=OPCHECKS)
    assert_inputs_unchanged(cached_attention, *arguments)


@pytest.mark.parametrize("split_tokens", [8, 64, 2048])
@pytest.mark.parametrize("page_tokens", [1, 16, 48])
def test_cached_attention_same_bits_as_attention(page_tokens, split_tokens):
    q, k, v = packed_inputs()
    cu_seqlens = cumulative(QUERY_COUNTS), cumulative(KEY_COUNTS)
    want = attention(q, k, v, K_SCALE, V_SCALE, *cu_seqlens, SCALE, split_tokens)
    for seed in (0, 1):
        got = attend_paged(q, paged(k, v, KEY_COUNTS, page_tokens, seed), QUERY_COUNTS, KEY_COUNTS, split_tokens)
        assert_same_bits(got, want, f"pages of {page_tokens}, order {seed}")


def test_cached_attention_row_bits_ignore_batch():
    q, k, v = packed_inputs()
    pools_and_table = paged(k, v, KEY_COUNTS, 16)
    whole = attend_paged(q, pools_and_table, QUERY_COUNTS, KEY_COUNTS, 64).split(QUERY_COUNTS)
    *pools, table_SB = pools_and_table
    for order in ([3], [4, 3, 2, 1, 0], [1, 3, 0], [2, 2]):
        rows = torch.cat([q.split(QUERY_COUNTS)[number] for number in order])
        counts = [QUERY_COUNTS[number] for number in order], [KEY_COUNTS[number] for number in order]
        got = attend_paged(rows, (*pools, table_SB[order]), *counts, 64)
        assert_same_bits(got, torch.cat([whole[number] for number in order]), f"sequences {order}")


def test_cached_attention_close_to_reference():
    q, k, v = packed_inputs()
    key_pages, value_pages, table_SB = pools_and_table = paged(k, v, KEY_COUNTS, 16)
    got = attend_paged(q, pools_and_table, QUERY_COUNTS, KEY_COUNTS, 8).split(QUERY_COUNTS)
    for number in (1, 2, 3):
        pages, length = table_SB[number].tolist(), KEY_COUNTS[number]
        used = pages[: -(-length // 16)]
        rows = q.split(QUERY_COUNTS)[number].double()
        want = plain(rows, key_pages, value_pages, used, length, K_SCALE.double(), V_SCALE.double(), SCALE)
        # As in test_attention_close_to_reference.
        score = HEAD_DIM * 2.0**-20 * q.abs().max().double() * k.abs().max().double() * SCALE
        bound = bf16_step(want) / 2 + 2 * (2 * score + length * 2.0**-20) * v.abs().max().double()
        assert_within(got[number], want, bound, f"sequence {number}")


def test_cached_attention_rejects_wrong_arguments():
    q, k, v = packed_inputs()
    *pools, table_SB = paged(k, v, KEY_COUNTS, 16)
    with pytest.raises(ValueError, match=r"block_table\[3, 8\] is -1; 0 to 2\d is accepted"):
        attend_paged(q, (*pools, table_SB.masked_fill(torch.arange(9) == 8, -1)), QUERY_COUNTS, KEY_COUNTS, 8)
    with pytest.raises(ValueError, match="a sequence of 130 keys needs 9 pages of 16, but block_table has 8 columns"):
        attend_paged(q, (*pools, table_SB[:, :8].contiguous()), QUERY_COUNTS, KEY_COUNTS, 8)
    with pytest.raises(ValueError, match="names 5 sequences, block_table 5, kv_lens 4"):
        attend_paged(q, (*pools, table_SB), QUERY_COUNTS, KEY_COUNTS[:4], 8)
    with pytest.raises(ValueError, match="cached_attention cannot take this call") as error:
        attend_paged(q, (pools[0].float(), pools[1], table_SB), [1, 1, 18, 29, 1], KEY_COUNTS, 0)
    for part in ("split_tokens is 0; 1 to", "key_pages_YZgd is torch.float32"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="sequence 2 has 18 queries and 17 keys"):
        attend_paged(q, (*pools, table_SB), [1, 1, 18, 29, 1], KEY_COUNTS, 8)


def test_cached_attention_refuses_to_train():
    q, k, v = packed_inputs()
    with pytest.raises(ValueError, match="cached_attention: an input requires a gradient"):
        attend_paged(q.requires_grad_(), paged(k, v, KEY_COUNTS, 16), QUERY_COUNTS, KEY_COUNTS, 8)
