# SPDX-License-Identifier: Apache-2.0
"""Router in Triton: a GEMM of one tile for every batch, then sigmoid, biased top-k and renormalisation.

Stock vLLM switches GEMMs at 16 tokens and cuBLAS switches by shape, so neither keeps a row's bits.
"""

# T = packed tokens, H = hidden, E = experts, k = top-k slots

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_forward_bridge.ops.launch import NO_FUSION, kernel_form, next_power_of_2, require_dtype

_BLOCK_T, _BLOCK_E, _BLOCK_H = 16, 64, 128


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    x_ptr, weight_ptr, logits_ptr, T, H: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    columns = tl.arange(0, BLOCK_H)
    live_T, live_E = tokens < T, experts < E
    total = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    # bits: one program owns the whole sum over H, in blocks of one size.
    for start in range(0, H, BLOCK_H):
        live_H = start + columns < H
        x = tl.load(
            x_ptr + tokens[:, None] * H + start + columns[None, :], mask=live_T[:, None] & live_H[None, :], other=0.0
        )
        weight = tl.load(
            weight_ptr + experts[None, :] * H + start + columns[:, None],
            mask=live_E[None, :] & live_H[:, None],
            other=0.0,
        )
        total = tl.dot(x, weight, total)
    tl.store(logits_ptr + tokens[:, None] * E + experts[None, :], total, mask=live_T[:, None] & live_E[None, :])


@triton.jit
def _choose_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, scores_ptr, E: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    slots = tl.arange(0, BLOCK_K)
    live = experts < E
    logits = tl.load(logits_ptr + row * E + experts, mask=live, other=0.0)
    score = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    rank = tl.where(live, score + tl.load(bias_ptr + experts, mask=live, other=0.0), float("-inf"))
    chosen_score = tl.zeros((BLOCK_K,), dtype=tl.float32)
    chosen_id = tl.zeros((BLOCK_K,), dtype=tl.int32)
    total = 0.0
    for slot in tl.static_range(TOP_K):
        best = tl.max(rank, axis=0)
        # bits: of equal ranks the smallest id wins.
        expert = tl.min(tl.where((rank == best) & live, experts, BLOCK_E), axis=0)
        value = tl.sum(tl.where(experts == expert, score, 0.0), axis=0)
        # bits: scores are added in slot order.
        total = total + value
        chosen_score = tl.where(slots == slot, value, chosen_score)
        chosen_id = tl.where(slots == slot, expert, chosen_id)
        rank = tl.where(experts == expert, float("-inf"), rank)
    out = row * TOP_K + slots
    tl.store(weights_ptr + out, tl.div_rn(chosen_score, total), mask=slots < TOP_K)
    tl.store(ids_ptr + out, chosen_id.to(tl.int64), mask=slots < TOP_K)
    tl.store(scores_ptr + out, chosen_score, mask=slots < TOP_K)


def router_logits(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """Return f32 logits x @ weight^T, one tile for every T."""
    require_dtype(x_TH, torch.bfloat16, "x", "router")
    require_dtype(weight_EH, torch.bfloat16, "weight", "router")
    x_TH, weight_EH = kernel_form(x_TH), kernel_form(weight_EH)
    T, H = x_TH.shape
    E = weight_EH.shape[0]
    logits_TE = torch.empty(T, E, dtype=torch.float32, device=x_TH.device)
    if T:
        _logits_kernel[(triton.cdiv(T, _BLOCK_T), triton.cdiv(E, _BLOCK_E))](
            x_TH, weight_EH, logits_TE, T, H=H, E=E,
            BLOCK_T=_BLOCK_T, BLOCK_E=_BLOCK_E, BLOCK_H=_BLOCK_H, num_warps=4, num_stages=3,
        )  # fmt: skip
    return logits_TE


def router(x_TH: Tensor, weight_EH: Tensor, expert_bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, expert ids and the chosen scores; see `ops.router` for the formula."""
    require_dtype(expert_bias_E, torch.float32, "expert_bias", "router")
    logits_TE = router_logits(x_TH, weight_EH)
    T, E = logits_TE.shape
    weights_Tk = torch.empty(T, top_k, dtype=torch.float32, device=x_TH.device)
    ids_Tk = torch.empty(T, top_k, dtype=torch.int64, device=x_TH.device)
    scores_Tk = torch.empty_like(weights_Tk)
    if T:
        _choose_kernel[(T,)](
            logits_TE, kernel_form(expert_bias_E), weights_Tk, ids_Tk, scores_Tk, E=E, TOP_K=top_k,
            BLOCK_E=next_power_of_2(E), BLOCK_K=next_power_of_2(top_k), num_warps=1, **NO_FUSION,
        )  # fmt: skip
    return weights_Tk, ids_Tk, scores_Tk
