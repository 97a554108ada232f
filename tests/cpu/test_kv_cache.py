# SPDX-License-Identifier: Apache-2.0
"""KVCache: however a sequence is cut and whatever pages it holds, its rows have the bits of one forward."""

import random

import pytest
import torch
from sequences import HEAD_DIM, K_SCALE, V_SCALE, attention_inputs, cumulative

from vllm_forward_bridge.ops import attention
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.state.kv_cache import KVCache, page_plan

SCALE = HEAD_DIM**-0.5


def cache_of_nan(num_pages, page_tokens):
    cache = KVCache(num_pages=num_pages, page_tokens=page_tokens, num_kv_heads=2, head_dim=HEAD_DIM, k_scale=K_SCALE,
                    v_scale=V_SCALE)  # fmt: skip
    for pages in (cache.key_pages_YZgd, cache.value_pages_YZgd):
        pages.view(torch.uint8).fill_(0x7F)
    return cache


@pytest.mark.parametrize(("page_tokens", "split_tokens"), [(1, 8), (4, 8), (16, 64), (16, 2048), (64, 8)])
def test_kv_cache_any_schedule(page_tokens, split_tokens):
    dice = random.Random(page_tokens)
    lengths = [33, 1, 70, 16, 17]
    q, k, v = attention_inputs(sum(lengths))
    starts = cumulative(lengths).tolist()
    want = attention(q, k, v, K_SCALE, V_SCALE, cumulative(lengths), cumulative(lengths), SCALE, split_tokens)
    free = list(range(sum(-(-length // page_tokens) for length in lengths)))
    cache = cache_of_nan(len(free), page_tokens)
    pages, done = [[] for _ in lengths], [0] * len(lengths)
    while done != lengths:
        for n in range(len(lengths)):
            if dice.random() < 0.05:
                # Preempted: its pages go to others, their codes still in them, and it starts again.
                free += pages[n]
                pages[n], done[n] = [], 0
        active = [n for n in range(len(lengths)) if done[n] < lengths[n] and dice.random() < 0.7]
        dice.shuffle(active)
        counts = [min(lengths[n] - done[n], dice.choice([1, 1, 2, 9, 40])) for n in active]
        for n, count in zip(active, counts, strict=True):
            while len(pages[n]) * page_tokens < done[n] + count:
                pages[n].append(free.pop(dice.randrange(len(free))))
        if active:
            plan = page_plan([pages[n] for n in active], [done[n] for n in active], counts, page_tokens=page_tokens)
            row = torch.cat([starts[n] + done[n] + torch.arange(c) for n, c in zip(active, counts, strict=True)])
            cache.write(plan, k[row], v[row])
            assert_same_bits(cache.attend(plan, q[row], SCALE, split_tokens), want[row], f"rows {row.tolist()}")
        for n, count in zip(active, counts, strict=True):
            done[n] += count


def test_kv_cache_ignores_padding():
    q, k, v = attention_inputs(9)
    want = attention(q, k, v, K_SCALE, V_SCALE, cumulative([9]), cumulative([9]), SCALE, 8)
    cache = cache_of_nan(3, 4)
    plan = page_plan([[2, 0, 1]], [0], [9], page_tokens=4)
    padded = [torch.cat([value, torch.full_like(value[:2], torch.nan)]) for value in (q, k, v)]
    cache.write(plan, *padded[1:])
    got = cache.attend(plan, padded[0], SCALE, 8)
    assert_same_bits(got[:9], want, "live rows")
    assert_same_bits(got[9:], torch.zeros_like(got[9:]), "padding")


def test_page_plan_rejects_wrong_pages():
    with pytest.raises(ValueError, match="page_plan cannot plan this forward") as error:
        page_plan([[0, 1], [1]], [0, 3], [5, 2], page_tokens=4)
    for part in ("sequence 1 reaches 5 tokens on 1 pages of 4; 2 pages or more", "no page twice is accepted"):
        assert part in str(error.value)
