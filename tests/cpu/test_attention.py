# SPDX-License-Identifier: Apache-2.0
"""attention and quantize_kv on the CPU."""

import pytest
import torch
from invariance import (
    THREAD_COUNTS,
    assert_gradcheck,
    assert_row_bits_ignore_batch,
    assert_within,
    bf16_step,
    num_threads,
)
from sequences import (
    CHUNK,
    EDGE_LENGTHS,
    HEAD_DIM,
    K_SCALE,
    V_SCALE,
    among_others,
    attention_inputs,
    cumulative,
    normal,
)

from vllm_forward_bridge.ops import attention, exact, quantize_kv
from vllm_forward_bridge.ops.attention import attention_gradients
from vllm_forward_bridge.ops.split_attention import merge
from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits
from vllm_forward_bridge.reference.attention import attention as plain
from vllm_forward_bridge.reference.attention import stored

SCALE = HEAD_DIM**-0.5
SPLITS = (8, 64, 2048)


def attend(q, k, v, query_counts, key_counts, split_tokens=2048):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    cu_seqlens = cumulative(query_counts), cumulative(key_counts)
    return attention(q, k, v, K_SCALE, V_SCALE, *cu_seqlens, SCALE, split_tokens)


def packed_reference(q, k, v, query_counts, key_counts):
    parts = zip(q.split(query_counts), k.split(key_counts), v.split(key_counts), strict=True)
    return torch.cat([plain(*part, K_SCALE, V_SCALE, SCALE) for part in parts])


def test_attention_opcheck():
    q, k, v = (value.requires_grad_() for value in attention_inputs(9))
    cu_seqlens = cumulative([2, 0, 4]), cumulative([2, 3, 4])
    torch.library.opcheck(attention, (q[:6].detach().requires_grad_(), k, v, K_SCALE, V_SCALE, *cu_seqlens, SCALE, 4))
    torch.library.opcheck(quantize_kv, (k.detach(), K_SCALE))


def test_quantize_kv_codes():
    x = torch.tensor([0.0, -0.0, 1.0, 1.0625, 1.1875, 447.0, 1e9, -1e9, 2.0**-10, 2.0**-11]).bfloat16()
    # Steps of 1/8 at 1, ties to even; saturation at 448; the smallest code is 2^-9 and half of it goes to even, zero.
    want = torch.tensor([0.0, -0.0, 1.0, 1.0, 1.25, 448.0, 448.0, -448.0, 0.0, 0.0])
    assert_same_bits(quantize_kv(x, torch.tensor(1.0)).float(), want, "codes")
    halved = quantize_kv(x / 2, torch.tensor(1.0)).float()
    assert_same_bits(quantize_kv(x, torch.tensor([2.0])).float(), halved, "scale")
    assert quantize_kv(torch.full((2,), torch.nan).bfloat16(), torch.tensor(1.0)).float().isnan().all()


def test_quantize_kv_keeps_the_fp32_scale():
    x = normal(4000, seed=0)
    rounded = quantize_kv(x, K_SCALE.bfloat16().float())
    assert not same_bits(quantize_kv(x, K_SCALE).view(torch.uint8), rounded.view(torch.uint8))


def test_quantize_kv_row_bits_ignore_batch():
    assert_row_bits_ignore_batch(lambda x: quantize_kv(x, K_SCALE).view(torch.uint8), normal(257, 2, HEAD_DIM, seed=0))


@pytest.mark.parametrize("split_tokens", SPLITS)
def test_attention_close_to_reference(split_tokens):
    query_counts, key_counts = [1, 70, 5, 33], [40, 70, 5, 90]
    q, _, _ = attention_inputs(sum(query_counts))
    _, k, v = attention_inputs(sum(key_counts), seed=10)
    want = packed_reference(q.double(), k.double(), v.double(), query_counts, key_counts)
    # A score is off by d times 2^-20 of the largest operands and a few fp32 steps, a weight by 2^-20 and as much as its
    # score, twice: above and below the fraction line. Then one rounding to bf16.
    score = HEAD_DIM * 2.0**-20 * q.abs().max().double() * k.abs().max().double() * SCALE
    weight = 2 * score + max(key_counts) * 2.0**-20
    bound = bf16_step(want) / 2 + 2 * weight * v.abs().max().double()
    assert_within(attend(q, k, v, query_counts, key_counts, split_tokens), want, bound, "attention")


def test_attention_scores_are_exact():
    # Halves that cancel, so large that what a rounded sum leaves over would decide the softmax.
    q, k, v = attention_inputs(40)
    q[..., HEAD_DIM // 2 :] = q[..., : HEAD_DIM // 2]
    k[..., HEAD_DIM // 2 :] = -k[..., : HEAD_DIM // 2]
    got = attend(q * 2.0**30, k, v, [40], [40], 8)
    assert_same_bits(got, attend(torch.zeros_like(q), k, v, [40], [40], 8), "scores of zero")


def test_attention_reads_keys_and_values_back_from_codes():
    # Negative control: without the codes the result is another one.
    q, k, v = attention_inputs(20)
    got = attend(q, k, v, [20], [20])
    read_back = stored(k.float(), K_SCALE).double(), stored(v.float(), V_SCALE).double()
    near, far = (
        torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for key, value in (read_back, (k.double(), v.double()))
    )
    assert (got.double() - near).abs().mean() < 0.2 * (got.double() - far).abs().mean()


@pytest.mark.parametrize("split_tokens", SPLITS)
@pytest.mark.parametrize("length", [*EDGE_LENGTHS, 129, 300])
def test_attention_row_bits_ignore_phase(length, split_tokens):
    q, k, v = attention_inputs(length)
    whole = attend(q, k, v, [length], [length], split_tokens)
    # 300 rows of four heads are two tasks when whole, so the cut into tasks is covered as well.
    for cut in range(0, length, 1 if length < 2 * CHUNK + 2 else length // 9):
        chunk = attend(q[cut:], k, v, [length - cut], [length], split_tokens)
        assert_same_bits(chunk, whole[cut:], f"the chunk from {cut}")
        decode = attend(q[cut : cut + 1], k[: cut + 1], v[: cut + 1], [1], [cut + 1], split_tokens)
        assert_same_bits(decode, whole[cut : cut + 1], f"row {cut} decoded")


@pytest.mark.parametrize("split_tokens", SPLITS)
def test_attention_row_bits_ignore_batch(split_tokens):
    lengths = (1, 100, 33)
    others = attention_inputs(sum(lengths), seed=20)
    for length in EDGE_LENGTHS:
        rows = attention_inputs(length)
        alone = attend(*rows, [length], [length], split_tokens)
        for place in range(4):
            for company in (others, tuple(torch.full_like(value, torch.nan) for value in others)):
                packed, _, own = among_others(rows, company, lengths, place)
                counts = [*lengths[:place], length, *lengths[place:]]
                got = attend(*packed, counts, counts, split_tokens)
                assert_same_bits(got[own], alone, f"{length} rows at place {place}")


def test_attention_bits_ignore_threads():
    lengths = [300, 1, 77, 40, 40, 40]
    q, k, v = attention_inputs(sum(lengths))
    with num_threads(1):
        want = attend(q, k, v, lengths, lengths, 64)
    for threads in THREAD_COUNTS:
        with num_threads(threads):
            assert_same_bits(attend(q, k, v, lengths, lengths, 64), want, f"{threads} threads")


@pytest.mark.parametrize("row", [0, 6, 7, 8, 20, 31])
def test_attention_rows_do_not_see_later_rows(row):
    q, k, v = attention_inputs(33)
    want = attend(q, k, v, [33], [33], 8)
    for later in (0.0, 2.0**40, torch.nan):
        changed = [value.clone() for value in (q, k, v)]
        for value in changed:
            value[row + 1 :] = later
        assert_same_bits(attend(*changed, [33], [33], 8)[: row + 1], want[: row + 1], f"later rows {later}")


@pytest.mark.parametrize("name", ["k", "v"])
def test_attention_nan_reaches_the_rows_that_see_it(name):
    q, k, v = attention_inputs(33)
    want = attend(q, k, v, [33], [33], 8)
    {"k": k, "v": v}[name][10, 1, 3] = torch.nan
    got = attend(q, k, v, [33], [33], 8)
    # KV head 1 serves query heads 2 and 3.
    assert_same_bits(got[:10], want[:10], "rows before it")
    assert_same_bits(got[:, :2].contiguous(), want[:, :2].contiguous(), "heads of the other KV head")
    assert got[10:, 2:].isnan().any(-1).all()


def by_hand(q_gd, codes_k_gLd, codes_v_gLd, split_tokens, order):
    """Return one row, as many query as KV heads: every split alone, then merged in the given order of splits."""
    factor = torch.tensor(K_SCALE.item() * SCALE)
    parts = []
    for keys, values in zip(codes_k_gLd.split(split_tokens, 1), codes_v_gLd.split(split_tokens, 1), strict=True):
        # q and the codes have few bits on common grids here, so these float64 sums are exact.
        scores = (keys.double() @ q_gd.double()[..., None]).float() * factor
        largest = scores.amax(1)
        weights = (exact.exp(scores - largest[:, None]).double() * 2.0**20).round() * 2.0**-20
        parts.append((largest, weights.sum(1).float(), (weights * values.double()).sum(1).float()))
    total = parts[order[0]]
    for split in order[1:]:
        total = merge(total, parts[split])
    return (total[2] / total[1] * V_SCALE).bfloat16()


def test_attention_merges_splits_by_position():
    length, heads, split_tokens = 200, 64, 8
    _, k, v = attention_inputs(length, heads, heads)
    # Weights near one and values that cancel: what the merge rounds away is then large beside the result.
    q = torch.randint(-2, 3, (length, heads, HEAD_DIM), generator=torch.Generator().manual_seed(3)).bfloat16() / 16
    v[length // 2 :] = -v[: length // 2]
    got = attend(q, k, v, [length], [length], split_tokens)[-1]
    codes = (quantize_kv(k, K_SCALE).float().transpose(0, 1), quantize_kv(v, V_SCALE).float().transpose(0, 1))
    splits = range(length // split_tokens)
    assert_same_bits(got, by_hand(q[-1], *codes, split_tokens, splits), "first split first")
    assert not same_bits(got, by_hand(q[-1], *codes, split_tokens, splits[::-1]))
    assert not same_bits(got, attend(q, k, v, [length], [length], 2 * split_tokens)[-1])


def test_merge_adds_from_the_left():
    values = torch.tensor([2.0**60, 1.0, -(2.0**60), 1.0])
    total = (torch.zeros(1), values[:1], values[:1])
    for value in values[1:].split(1):
        total = merge(total, (torch.zeros(1), value, value))
    assert_same_bits(total[1], torch.ones(1), "((huge + 1) - huge) + 1")
    assert_same_bits(total[2], torch.ones(1), "((huge + 1) - huge) + 1")


def test_merge_with_an_unseen_split_changes_nothing():
    seen = torch.tensor([-3.7]), torch.tensor([1.3]), torch.tensor([-0.2])
    unseen = torch.tensor([torch.finfo(torch.float32).min]), torch.zeros(1), torch.zeros(1)
    for got, want in zip(merge(seen, unseen), seen, strict=True):
        assert_same_bits(got, want, "merged with a split that the row does not see")


def test_attention_ignores_padding_and_empty_sequences():
    q, k, v = attention_inputs(20)
    want = attend(q[:12], k[:12], v[:12], [5, 7], [5, 7])
    for value in (q, k, v):
        value[12:] = torch.nan
    got = attend(q, k, v, [0, 5, 0, 7], [0, 5, 0, 7])
    assert_same_bits(got[:12], want, "rows before the padding")
    assert_same_bits(got[12:], torch.zeros_like(got[12:]), "padding")


def causal(q, k, v):
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    k, v = (value.repeat_interleave(2, dim=1).transpose(0, 1) for value in (k, v))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2) * SCALE).masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


def test_attention_backward_formula():
    query_counts, key_counts = [2, 1], [3, 4]
    q = normal(3, 4, 2, seed=1)
    k, v = normal(7, 2, 2, seed=2), normal(7, 2, 2, seed=3)

    def forward(q, k, v):
        parts = zip(q.split(query_counts), k.split(key_counts), v.split(key_counts), strict=True)
        return torch.cat([causal(*part) for part in parts])

    def gradients(grad, q, k, v):
        return attention_gradients(q, k, v, grad, query_counts, key_counts, SCALE)

    assert_gradcheck(forward, gradients, q, k, v)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True), (True, True, True)])
def test_attention_grads_close(needs):
    query_counts, key_counts = [1, 33, 10], [20, 33, 12]
    q, _, _ = attention_inputs(sum(query_counts))
    _, k, v = attention_inputs(sum(key_counts), seed=10)
    grad = normal(*q.shape, seed=12)
    # Straight through the codes: the gradient of the stored keys and values is that of the given ones.
    read_back = [q.double(), stored(k.double(), K_SCALE), stored(v.double(), V_SCALE)]
    q64, k64, v64 = leaves = [value.detach().requires_grad_() for value in read_back]
    parts = zip(q64.split(query_counts), k64.split(key_counts), v64.split(key_counts), strict=True)
    out = torch.cat([causal(*part) for part in parts])
    want = torch.autograd.grad(out, leaves, grad.double())
    values = [value.requires_grad_(need) for value, need in zip((q, k, v), needs, strict=True)]
    attend(*values, query_counts, key_counts, 8).backward(grad)
    for value, gradient in zip(values, want, strict=True):
        if value.requires_grad:
            # fp32 sums over keys, rows and the head dim, of terms of the size of the largest gradient.
            bound = bf16_step(gradient) / 2 + (2 * HEAD_DIM + 45) * 2.0**-23 * 4 * gradient.abs().max()
            assert_within(value.grad, gradient, bound, "gradient")
        else:
            assert value.grad is None


def test_attention_rejects_wrong_arguments():
    q, k, v = attention_inputs(6, heads=3)
    with pytest.raises(ValueError, match="attention cannot take this call") as error:
        attend(q, k.float(), v[:5], [3, 3], [5, 1], 1 << 20)
    for part in (
        "sequence 1 has 3 queries and 1 keys", "3 query heads with 2 KV heads", "split_tokens is 1048576; 1 to 32768",
        "k_Lgd is torch.float32", "L = 5, but L = 6 in k_Lgd",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"k_scale is torch.bfloat16; torch.float32 is accepted"):
        attention(q, k, v, K_SCALE.bfloat16(), V_SCALE, cumulative([6]), cumulative([6]), SCALE, 8)
    with pytest.raises(ValueError, match="quantize_kv cannot take this call"):
        quantize_kv(k, K_SCALE.expand(2).contiguous())
