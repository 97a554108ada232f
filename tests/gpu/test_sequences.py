# SPDX-License-Identifier: Apache-2.0
"""Convolution, scan, attention: same bits for one-shot prefill, chunks, steps, packed or alone, poisoned tails."""

import pytest
import torch
from row_cases import normal
from shapes import (
    CHUNK,
    CONV_CHANNELS,
    CONV_WIDTH,
    GROUPS,
    HEAD_DIM,
    KV_HEADS,
    MAMBA_HEAD_DIM,
    MAMBA_HEADS,
    QUERY_HEADS,
    STATE,
)

from vllm_forward_bridge import ops
from vllm_forward_bridge.ops import fa3
from vllm_forward_bridge.parity.bits import assert_same_bits

LENGTHS = (1, 3, 127, 128, 129, 257, 700, 900)
SPLIT = 2048


def cumulative(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


def starts(lengths):
    return cumulative(lengths).tolist()[:-1]


@pytest.fixture
def conv_weights():
    return normal(CONV_CHANNELS, CONV_WIDTH, scale=0.5), normal(CONV_CHANNELS, scale=0.1, seed=1)


def test_causal_conv1d_is_one_arithmetic_in_every_phase(conv_weights):
    x = normal(sum(LENGTHS), CONV_CHANNELS, seed=2)
    whole = ops.causal_conv1d(x, *conv_weights, cumulative(LENGTHS), None)
    for start, length in zip(starts(LENGTHS), LENGTHS, strict=True):
        rows, want = x[start : start + length], whole[start : start + length]
        alone = ops.causal_conv1d(rows.clone(), *conv_weights, cumulative([length]), None)
        assert_same_bits(alone, want, f"conv of {length} rows alone and packed")
        for cut in {1, 2, length // 2, length - 1} & set(range(1, length)):
            before = torch.cat([torch.zeros_like(rows[: CONV_WIDTH - 1]), rows[:cut]])[-(CONV_WIDTH - 1) :][
                None
            ].contiguous()
            rest = ops.causal_conv1d(rows[cut:].clone(), *conv_weights, cumulative([length - cut]), before)
            assert_same_bits(rest, want[cut:], f"conv of {length} rows continued at {cut}")


def test_causal_conv1d_ignores_padding(conv_weights):
    x = normal(80, CONV_CHANNELS, seed=3)
    want = ops.causal_conv1d(x[:50].clone(), *conv_weights, cumulative([20, 30]), None)
    x[50:] = float("nan")
    got = ops.causal_conv1d(x, *conv_weights, cumulative([20, 30]), None)
    assert_same_bits(got[:50], want, "conv beside rows of NaN")
    assert not got[50:].any()


def scan_inputs(rows, seed=0):
    return (
        normal(rows, MAMBA_HEADS, MAMBA_HEAD_DIM, seed=seed),
        normal(rows, MAMBA_HEADS, scale=0.5, seed=seed + 1),
        normal(rows, GROUPS, STATE, seed=seed + 2),
        normal(rows, GROUPS, STATE, seed=seed + 3),
    )


@pytest.fixture
def scan_weights():
    A = -torch.rand(MAMBA_HEADS, device="cuda", generator=torch.Generator("cuda").manual_seed(5)) * 4 - 0.1
    return A, normal(MAMBA_HEADS, seed=6), normal(MAMBA_HEADS, seed=7)


def scan(inputs, weights, lengths, state=None):
    x, dt, B, C = inputs
    A, D, bias = weights
    return ops.ssd_scan(x, dt, A, B, C, D, bias, cumulative(lengths), CHUNK, state)


def test_ssd_scan_packed_and_alone(scan_weights):
    inputs = scan_inputs(sum(LENGTHS))
    whole, states = scan(inputs, scan_weights, LENGTHS)
    for index, (start, length) in enumerate(zip(starts(LENGTHS), LENGTHS, strict=True)):
        y, state = scan(tuple(v[start : start + length].clone() for v in inputs), scan_weights, [length])
        assert_same_bits(y, whole[start : start + length], f"scan of {length} rows alone and packed")
        assert_same_bits(state[0], states[index], f"boundary state of {length} rows alone and packed")


@pytest.mark.parametrize("length", [100, 300, 513])
def test_ssd_scan_replay_from_the_boundary_is_decode(scan_weights, length):
    inputs = scan_inputs(length, seed=10)
    whole, _ = scan(inputs, scan_weights, [length])
    for last in [*range(0, length, 7), CHUNK - 1, CHUNK, length - 1]:
        if last >= length:
            continue
        boundary = last // CHUNK * CHUNK
        _, state = scan(tuple(v[:boundary].clone() for v in inputs), scan_weights, [boundary])
        replayed = tuple(v[boundary : last + 1].clone() for v in inputs)
        replayed[3][:-1] = 0  # decode keeps no C of earlier rows
        y, _ = scan(replayed, scan_weights, [last + 1 - boundary], state)
        assert_same_bits(y[-1], whole[last], f"row {last} by replay from {boundary} and in one scan of {length}")


def test_ssd_scan_many_replays_at_once(scan_weights):
    lengths = [1 + (37 * i) % 300 for i in range(64)]
    inputs = scan_inputs(sum(lengths), seed=20)
    whole, _ = scan(inputs, scan_weights, lengths)
    boundaries = [(length - 1) // CHUNK * CHUNK for length in lengths]
    first = [[v[s : s + b] for s, b in zip(starts(lengths), boundaries, strict=True)] for v in inputs]
    _, state = scan(tuple(torch.cat(v) for v in first), scan_weights, boundaries)
    rest = [[v[s + b : s + n] for s, b, n in zip(starts(lengths), boundaries, lengths, strict=True)] for v in inputs]
    counts = [n - b for n, b in zip(lengths, boundaries, strict=True)]
    y, _ = scan(tuple(torch.cat(v) for v in rest), scan_weights, counts, state)
    ends = torch.tensor(counts).cumsum(0) - 1
    want = whole[torch.tensor(lengths).cumsum(0) - 1]
    assert_same_bits(y[ends], want, "the last rows of 64 sequences replayed together")


def test_ssd_scan_ignores_padding(scan_weights):
    inputs = scan_inputs(200, seed=30)
    want, _ = scan(tuple(v[:150].clone() for v in inputs), scan_weights, [20, 130])
    for v in inputs:
        v[150:] = float("nan")
    got, state = scan(inputs, scan_weights, [20, 130])
    assert_same_bits(got[:150], want, "scan beside rows of NaN")
    assert not got[150:].any()
    assert state.isfinite().all()


KV_LENGTHS = (1, 5, 8, 127, 128, 129, 130, 700, 2049)


def attention_inputs(rows, seed=0):
    return (
        normal(rows, QUERY_HEADS, HEAD_DIM, seed=seed),
        normal(rows, KV_HEADS, HEAD_DIM, seed=seed + 1),
        normal(rows, KV_HEADS, HEAD_DIM, seed=seed + 2),
    )


def attend(q, k, v, query_lengths, key_lengths):
    k_scale, v_scale = (torch.tensor(s, device="cuda") for s in (0.0123, 0.0456))  # no bf16 numbers
    return ops.attention(
        q, k, v, k_scale, v_scale, cumulative(query_lengths), cumulative(key_lengths), HEAD_DIM**-0.5, SPLIT
    )


def test_attention_is_one_arithmetic_in_every_phase():
    q, k, v = attention_inputs(sum(KV_LENGTHS))
    whole = attend(q, k, v, KV_LENGTHS, KV_LENGTHS)
    for start, length in zip(starts(KV_LENGTHS), KV_LENGTHS, strict=True):
        keys, values, want = (
            k[start : start + length].clone(),
            v[start : start + length].clone(),
            whole[start : start + length],
        )
        queries = q[start : start + length]
        for new in {1, 2, 7, 8, 9, 64, 129, length} & set(range(1, length + 1)):
            got = attend(queries[length - new :].clone(), keys, values, [new], [length])
            assert_same_bits(
                got, want[length - new :], f"the last {new} of {length} rows alone and in one packed prefill"
            )


def test_attention_decodes_together_and_beside_a_prefill():
    lengths = [1 + (61 * i) % 1500 for i in range(63)]
    q, k, v = attention_inputs(sum(lengths), seed=40)
    whole = attend(q, k, v, lengths, lengths)
    last = torch.tensor(lengths).cumsum(0) - 1
    together = attend(q[last].clone(), k, v, [1] * 63, lengths)
    assert_same_bits(together, whole[last], "63 decodes in one call")
    for rows in (2, 9, 129):
        extra = attention_inputs(rows, seed=50)
        mixed = attend(
            torch.cat([q[last], extra[0]]),
            torch.cat([k, extra[1]]),
            torch.cat([v, extra[2]]),
            [1] * 63 + [rows],
            [*lengths, rows],
        )
        assert_same_bits(mixed[:63], whole[last], f"63 decodes beside a prefill of {rows}")


@pytest.mark.parametrize("page_tokens", [16, 128, 6784])
def test_paged_attention_ignores_page_size_order_and_free_pages(page_tokens):
    lengths = list(KV_LENGTHS)
    q, k, v = attention_inputs(sum(lengths), seed=60)
    cu = cumulative(lengths)
    scale, one = HEAD_DIM**-0.5, torch.ones((), device="cuda")
    codes = [fa3.quantize_kv(x, one) for x in (k, v)]

    def run(page, shuffle, beside=False):
        pages, table = zip(*(fa3.to_pages(c, cu, max(lengths), page) for c in codes), strict=True)
        pages, table = list(pages), table[0]
        if beside:  # keys and values of a page side by side, as vLLM lays them out
            pages = torch.cat(pages, dim=-1).split(HEAD_DIM, dim=-1)
        if shuffle:
            order = torch.randperm(len(pages[0]), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order), device="cuda")
            pages = [torch.cat([p[order], torch.full_like(p[:3], float("nan"))]) for p in pages]
            table = place[table.long()].int()
        return fa3.paged_attention(
            q,
            *pages,
            table,
            cu,
            cu.diff(),
            max_query_len=max(lengths),
            max_kv_len=max(lengths),
            softmax_scale=scale,
            v_scale=one,
        )

    want = run(fa3.PAGE_TOKENS, False)
    assert_same_bits(run(page_tokens, False), want, f"pages of {page_tokens} and of {fa3.PAGE_TOKENS}")
    assert_same_bits(run(page_tokens, True), want, f"shuffled pages of {page_tokens} beside pages of NaN")
    assert_same_bits(run(page_tokens, False, beside=True), want, f"pages of {page_tokens} with values beside keys")
