# SPDX-License-Identifier: Apache-2.0
"""Causal attention over packed sequences whose keys and values are read back from the e4m3 codes a cache would hold.

Queries and softmax weights are never quantised. Same arithmetic as `cached_attention`, so a row's bits do not tell
whether it was prefilled, chunked or decoded.
"""

# T packed query rows, L packed keys, S sequences, q query heads, g KV heads, d head dim.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import fa3, packed, split_attention
from vllm_forward_bridge.ops.arguments import check

E4M3_LARGEST = 448.0


@torch.library.custom_op("vllm_forward_bridge::quantize_kv", mutates_args=(), device_types="cpu")
def quantize_kv(x: Tensor, scale: Tensor) -> Tensor:
    """Return e4m3fn(clamp(f32(x) / scale, -448, 448)), ties to even: the codes a KV cache stores.

    Args:
        x: bf16, any shape, contiguous.
        scale: fp32 scalar, [] or [1], the checkpoint's k_scale or v_scale.

    Returns:
        float8_e4m3fn of the same shape.

    Raises:
        ValueError: lists every dtype, shape or layout that is not accepted.

    Source: vLLM 0.26.0, reshape_and_cache_flash with kv_cache_dtype fp8_e4m3.
    """
    check("quantize_kv", x=(x, torch.bfloat16, " ".join("abcdef"[: x.dim()])), scale=(scale, torch.float32, ""))
    return (x.float() / scale).clamp_(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).view(x.shape)


quantize_kv.register_kernel("cuda")(fa3.quantize_kv)


@quantize_kv.register_fake
def _(x, scale):
    return torch.empty_like(x, dtype=torch.float8_e4m3fn)


@torch.library.custom_op("vllm_forward_bridge::attention", mutates_args=(), device_types="cpu")
def attention(
    q_Tqd: Tensor, k_Lgd: Tensor, v_Lgd: Tensor, k_scale: Tensor, v_scale: Tensor,
    cu_seqlens_q_S1: Tensor, cu_seqlens_k_S1: Tensor, softmax_scale: float, split_tokens: int,
) -> Tensor:  # fmt: skip
    """Attend causally; a sequence's queries are the last rows of its keys.

    kc, vc = codes of k / k_scale, v / v_scale (`quantize_kv`). For each split of `split_tokens` keys, counted from
    position 0: s = f32(q.kc) * f32(k_scale * softmax_scale);  m = max s;  p = exp(s - m) rounded to 2^-20;
    l = f32(sum p);  acc = f32(sum p vc). Splits merge in order in fp32 (`split_attention.merge`);
    out = bf16(acc / l * v_scale).
    q.kc is exact on q rounded to 20 bits below its row's largest element; the sums over p are exact.

    Args:
        q_Tqd: bf16; rows past cu_seqlens_q[-1] are padding, zero in the result.
        k_Lgd: bf16; KV head i serves query heads i * q / g and following.
        v_Lgd: bf16.
        k_scale: fp32 scalar, [] or [1].
        v_scale: fp32 scalar, [] or [1].
        cu_seqlens_q_S1: int32 [S + 1].
        cu_seqlens_k_S1: int32 [S + 1]; a sequence has at least as many keys as queries.
        softmax_scale: factor of the scores, d ** -0.5 as a rule.
        split_tokens: keys a split; part of the numeric contract.

    Returns:
        out_Tqd, bf16. A row's bits depend on itself and on the keys and values up to its position, nothing else.

    Raises:
        ValueError: lists every argument that is not accepted.

    Source: vLLM 0.26.0, v1/attention/backends/flash_attn.py; Dao 2023 for the merge.
    """
    _check(q_Tqd, k_Lgd, v_Lgd, k_scale, v_scale, cu_seqlens_q_S1, cu_seqlens_k_S1, split_tokens)
    start_S = cu_seqlens_k_S1.long()
    return split_attention.attend(
        q_Tqd, quantize_kv(k_Lgd, k_scale), quantize_kv(v_Lgd, v_scale),
        cu_seqlens_q_S1.diff().tolist(), cu_seqlens_k_S1.diff().tolist(),
        lambda sequence_b1, position_bL: start_S[sequence_b1] + position_bL,
        k_scale.item(), v_scale.item(), softmax_scale, split_tokens,
    )  # fmt: skip


attention.register_kernel("cuda")(fa3.attention)


@attention.register_fake
def _(q_Tqd, k_Lgd, v_Lgd, k_scale, v_scale, cu_seqlens_q_S1, cu_seqlens_k_S1, softmax_scale, split_tokens):
    return torch.empty_like(q_Tqd)


def _check(q_Tqd, k_Lgd, v_Lgd, k_scale, v_scale, cu_seqlens_q_S1, cu_seqlens_k_S1, split_tokens):
    problems = packed.cu_seqlens_problems("cu_seqlens_q", cu_seqlens_q_S1, len(q_Tqd))
    problems += packed.cu_seqlens_problems("cu_seqlens_k", cu_seqlens_k_S1, len(k_Lgd))
    if not problems and len(cu_seqlens_q_S1) == len(cu_seqlens_k_S1):
        problems += key_count_problems(cu_seqlens_q_S1.diff().tolist(), cu_seqlens_k_S1.diff().tolist())
    problems += head_problems(q_Tqd, k_Lgd.shape[-2:-1]) + split_problems(split_tokens)
    bf16, fp32, int32 = torch.bfloat16, torch.float32, torch.int32
    check(
        "attention", *problems,
        q_Tqd=(q_Tqd, bf16, "T q d"), k_Lgd=(k_Lgd, bf16, "L g d"), v_Lgd=(v_Lgd, bf16, "L g d"),
        k_scale=(k_scale, fp32, ""), v_scale=(v_scale, fp32, ""),
        cu_seqlens_q_S1=(cu_seqlens_q_S1, int32, "S+1"), cu_seqlens_k_S1=(cu_seqlens_k_S1, int32, "S+1"),
    )  # fmt: skip


def key_count_problems(query_counts: list[int], key_counts: list[int]) -> list[str]:
    """List the sequences with fewer keys than queries."""
    return [
        f"sequence {number} has {queries} queries and {keys} keys; at least as many keys are accepted, as the queries "
        "are the last rows of the keys: pass the keys of the whole prefix"
        for number, (queries, keys) in enumerate(zip(query_counts, key_counts, strict=True))
        if queries > keys
    ]


def head_problems(q_Tqd: Tensor, kv_heads: torch.Size) -> list[str]:
    """Complain if the query heads are no multiple of the KV heads."""
    if q_Tqd.dim() != 3 or len(kv_heads) != 1 or (kv_heads[0] and q_Tqd.shape[1] % kv_heads[0] == 0):
        return []
    return [
        f"{q_Tqd.shape[1]} query heads with {kv_heads[0]} KV heads; a multiple is accepted, every KV head serves as "
        "many query heads: change either"
    ]


def split_problems(split_tokens: int) -> list[str]:
    """Complain if a split is empty or too long to be summed exactly."""
    if 1 <= split_tokens <= split_attention.LARGEST_SPLIT:
        return []
    return [
        f"split_tokens is {split_tokens}; 1 to {split_attention.LARGEST_SPLIT} is accepted, as a longer split is not "
        "summed exactly: change attention_split_tokens"
    ]


def _setup(ctx, inputs, output):
    q_Tqd, k_Lgd, v_Lgd, k_scale, v_scale, cu_seqlens_q_S1, cu_seqlens_k_S1, softmax_scale, _ = inputs
    ctx.save_for_backward(q_Tqd, k_Lgd, v_Lgd, k_scale, v_scale, cu_seqlens_q_S1, cu_seqlens_k_S1)
    ctx.softmax_scale = softmax_scale


def _backward(ctx, grad_Tqd):
    gradients = attention_backward(grad_Tqd, *ctx.saved_tensors, ctx.softmax_scale)
    pairs = zip(gradients, ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    return *(gradient.to(value.dtype) if needed else None for gradient, value, needed in pairs), *[None] * 6


@torch.library.custom_op("vllm_forward_bridge::attention_backward", mutates_args=())
def attention_backward(
    grad_Tqd: Tensor, q_Tqd: Tensor, k_Lgd: Tensor, v_Lgd: Tensor, k_scale: Tensor, v_scale: Tensor,
    cu_seqlens_q_S1: Tensor, cu_seqlens_k_S1: Tensor, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients in fp32 on the dequantised K and V, straight through the quantisation.

    An op of its own, because tracing cannot follow lengths that are data.
    """
    k, v = (quantize_kv(x, scale).float() * scale for x, scale in ((k_Lgd, k_scale), (v_Lgd, v_scale)))
    counts = (cu_seqlens_q_S1.diff().tolist(), cu_seqlens_k_S1.diff().tolist())
    return attention_gradients(q_Tqd.float(), k, v, grad_Tqd.float(), *counts, softmax_scale)


@attention_backward.register_fake
def _(grad_Tqd, q_Tqd, k_Lgd, v_Lgd, k_scale, v_scale, cu_seqlens_q_S1, cu_seqlens_k_S1, softmax_scale):
    return tuple(torch.empty_like(value, dtype=torch.float32) for value in (q_Tqd, k_Lgd, v_Lgd))


def attention_gradients(
    q_Tqd: Tensor, k_Lgd: Tensor, v_Lgd: Tensor, grad_Tqd: Tensor, query_counts: list[int], key_counts: list[int],
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v of softmax(softmax_scale q k^T) v, in the dtype of q (fp32 or fp64).

    With P the weights and o = P v: dv = P^T g;  dS = P (g v^T - <g, o>) softmax_scale;  dq = dS k;  dk = dS^T q.
    """
    grad_q_Tqd, grad_k_Lgd, grad_v_Lgd = (torch.zeros_like(x) for x in (q_Tqd, k_Lgd, v_Lgd))
    device = q_Tqd.device
    start_S = torch.tensor([0, *key_counts], device=device).cumsum(0)
    num_kv_heads = k_Lgd.shape[1]
    for group in split_attention.groups(query_counts, key_counts, q_Tqd.shape[1], k_Lgd[0].numel(), device):
        position_L = torch.arange(group.num_keys, device=device)
        index_bL = (start_S[group.sequence_b, None] + position_L).clamp(max=len(k_Lgd) - 1)
        rows = group.row_bR.shape[1]
        q, g = (split_attention.by_kv_head(x[group.row_bR], num_kv_heads) for x in (q_Tqd, grad_Tqd))
        live = group.live_bR.repeat(1, q.shape[2] // rows)[:, None, :, None]
        visible = group.visible_bR.repeat(1, q.shape[2] // rows)[:, None, :, None]
        k, v = (x[index_bL].transpose(1, 2) for x in (k_Lgd, v_Lgd))
        g = g.masked_fill(~live, 0.0)
        scores = (q @ k.transpose(2, 3) * softmax_scale).masked_fill_(position_L >= visible, -torch.inf)
        weights = torch.softmax(scores, -1)
        grad_weights = g @ v.transpose(2, 3)
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * softmax_scale
        grad_q_Tqd[group.row_bR[group.live_bR]] = split_attention.by_row(grad_scores @ k, rows)[group.live_bR]
        grad_k_Lgd.index_add_(0, index_bL.flatten(), (grad_scores.transpose(2, 3) @ q).transpose(1, 2).flatten(0, 1))
        grad_v_Lgd.index_add_(0, index_bL.flatten(), (weights.transpose(2, 3) @ g).transpose(1, 2).flatten(0, 1))
    return grad_q_Tqd, grad_k_Lgd, grad_v_Lgd


attention.register_autograd(_backward, setup_context=_setup)
