# SPDX-License-Identifier: Apache-2.0
"""Ordinary kernels under the names of the contract's ops: what a trainer runs that does not care about the rollout.

Same signatures as `bridged`. Weights are bf16(dequantised deployment bytes), straight-through to the masters; products
are BLAS, attention is SDPA, the scan is torch's, experts are summed as usual. Close to the bridged forward, never
the same bits.
"""

# Legend: T tokens, S sequences, H hidden, K in features, N out features, E experts, k slots, F expert width, C conv
# channels, W conv width, h mamba heads, P mamba head dim, G groups, n state size, q query heads, g kv heads, d head
# dim.

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_forward_bridge.quantization import Nvfp4Bytes, fp8_dequantize, nvfp4_dequantize


class _StraightThrough(torch.autograd.Function):
    """Value of the deployment bytes, gradient of the master."""

    @staticmethod
    def forward(ctx, value: Tensor, master: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def rms_norm(x_TH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    """Return torch's rms_norm."""
    return F.rms_norm(x_TH, gain_H.shape, gain_H, eps)


def gated_rms_norm(y_TD: Tensor, gate_TD: Tensor, gain_D: Tensor, group_size: int, eps: float) -> Tensor:
    """Gate, normalise within groups, weigh: one cast at the end."""
    gated = (y_TD.float() * F.silu(gate_TD.float())).unflatten(1, (-1, group_size))
    return (F.rms_norm(gated, (group_size,), None, eps).flatten(1) * gain_D.float()).to(y_TD.dtype)


def bf16_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Multiply by BLAS."""
    if x_TK.is_cuda:
        return F.linear(x_TK, weight_NK)
    # Most CPUs multiply bf16 several times slower than fp32.
    return F.linear(x_TK.float(), weight_NK.float()).to(x_TK.dtype)


def fp8_linear(x_TK: Tensor, codes_NK: Tensor, weight_scale: Tensor, input_scale: Tensor, weight_NK: Tensor) -> Tensor:
    """Multiply by the dequantised weight; activations stay bf16."""
    return bf16_linear(x_TK, _StraightThrough.apply(fp8_dequantize(codes_NK, weight_scale), weight_NK))


def nvfp4_operands(codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arguments: nothing is packed here."""
    return codes, block_scale


def nvfp4_linear(
    x_TK: Tensor, codes: Tensor, block_scale: Tensor, global_scale: Tensor, weight_NK: Tensor, num_features: int
) -> Tensor:
    """Multiply by the dequantised weight."""
    value = nvfp4_dequantize(Nvfp4Bytes(codes, block_scale, global_scale))
    return bf16_linear(x_TK, _StraightThrough.apply(value, weight_NK))


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2."""
    return F.relu(x).square()


def router(x_TH: Tensor, weight_EH: Tensor, expert_bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose by torch.topk."""
    scores_TE = torch.sigmoid(F.linear(x_TH.float(), weight_EH.float()))
    expert_ids_Tk = torch.topk(scores_TE.detach() + expert_bias_E, top_k, dim=1).indices
    return _renormalised(scores_TE, expert_ids_Tk), expert_ids_Tk


def replayed_router(x_TH: Tensor, weight_EH: Tensor, expert_ids_Tk: Tensor) -> Tensor:
    """Return the weights of experts that the rollout chose (R3)."""
    return _renormalised(torch.sigmoid(F.linear(x_TH.float(), weight_EH.float())), expert_ids_Tk)


def _renormalised(scores_TE: Tensor, expert_ids_Tk: Tensor) -> Tensor:
    chosen = scores_TE.gather(1, expert_ids_Tk)
    return chosen / chosen.sum(dim=1, keepdim=True)


def moe_experts(
    x_TH: Tensor, expert_ids_Tk: Tensor,
    fc1_codes: Tensor, fc1_block_scale: Tensor, fc1_global_scale: Tensor,
    fc2_codes: Tensor, fc2_block_scale: Tensor, fc2_global_scale: Tensor,
    fc1_weight_EFH: Tensor, fc2_weight_EHF: Tensor,
) -> Tensor:  # fmt: skip
    """Run each expert on the rows that chose it."""
    fc1 = nvfp4_dequantize(Nvfp4Bytes(fc1_codes, fc1_block_scale, fc1_global_scale))
    fc2 = nvfp4_dequantize(Nvfp4Bytes(fc2_codes, fc2_block_scale, fc2_global_scale))
    fc1, fc2 = _StraightThrough.apply(fc1, fc1_weight_EFH), _StraightThrough.apply(fc2, fc2_weight_EHF)
    slots, chosen = expert_ids_Tk.shape[1], expert_ids_Tk.flatten()
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen[chosen >= 0], minlength=len(fc1)).tolist()
    # Rows that no expert here serves come first in the order, and stay zero.
    skipped = len(chosen) - sum(counts)
    parts = [x_TH.new_zeros(skipped, x_TH.shape[1])]
    for expert, places in enumerate(order[skipped:].split(counts)):
        rows = bf16_linear(x_TH[places // slots], fc1[expert])
        parts.append(bf16_linear(relu_squared(rows), fc2[expert]))
    return torch.cat(parts)[torch.argsort(order)].view(-1, slots, x_TH.shape[1])


def moe_combine(rows_TkH: Tensor, weights_Tk: Tensor, routed_scaling_factor: float, shared_TH: Tensor | None) -> Tensor:
    """Sum weighted rows in fp32, scale, add the shared expert, cast once."""
    total = (rows_TkH.float() * (weights_Tk * routed_scaling_factor).unsqueeze(2)).sum(dim=1)
    return (total if shared_TH is None else total + shared_TH.float()).to(rows_TkH.dtype)


def causal_conv1d(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor, cu_seqlens_S1: Tensor, tail_SWC: Tensor | None
) -> Tensor:
    """Convolve by torch.conv1d, all sequences side by side, then SiLU; each starts from zeros."""
    side_by_side_SLC = _padded(x_TC, cu_seqlens_S1)
    padded_SCL = F.pad(side_by_side_SLC.transpose(1, 2), (weight_CW.shape[1] - 1, 0))
    y_SLC = F.conv1d(padded_SCL, weight_CW.unsqueeze(1), bias_C, groups=len(weight_CW)).transpose(1, 2)
    return F.silu(_whole([_unpadded(y_SLC, cu_seqlens_S1)], x_TC))


def ssd_decay(A_log_h: Tensor) -> Tensor:
    """Return -exp(A_log)."""
    return -A_log_h.float().exp()


def ssd_scan(
    x_ThP: Tensor, dt_Th: Tensor, A_h: Tensor, B_TGn: Tensor, C_TGn: Tensor, D_h: Tensor, dt_bias_h: Tensor,
    cu_seqlens_S1: Tensor, chunk_size: int, boundary_state_ShPn: Tensor | None,
) -> tuple[Tensor, None]:  # fmt: skip
    """Scan chunk by chunk in fp32, all sequences side by side; no state is handed on."""
    repeats = x_ThP.shape[1] // B_TGn.shape[1]
    dt_Th = F.softplus(dt_Th.float() + dt_bias_h.float())
    padded = [
        _padded(rows, cu_seqlens_S1).transpose(1, 2)
        for rows in (
            (dt_Th * A_h).unsqueeze(2), x_ThP.float() * dt_Th.unsqueeze(2),
            B_TGn.float().repeat_interleave(repeats, dim=1), C_TGn.float().repeat_interleave(repeats, dim=1),
        )
    ]  # fmt: skip
    state_ShPn, parts = None, []
    for decay_ShQ1, x_ShQP, B_ShQn, C_ShQn in zip(*(rows.split(chunk_size, dim=2) for rows in padded), strict=True):
        total_ShQ1 = decay_ShQ1.cumsum(dim=2)
        between_ShQQ = (total_ShQ1 - total_ShQ1.mT).tril().exp().tril()
        y_ShQP = (C_ShQn @ B_ShQn.mT * between_ShQQ) @ x_ShQP
        if state_ShPn is not None:
            y_ShQP = y_ShQP + C_ShQn @ state_ShPn.mT * total_ShQ1.exp()
        parts.append(y_ShQP)
        left_ShQ1 = (total_ShQ1[:, :, -1:] - total_ShQ1).exp()
        added_ShPn = (x_ShQP * left_ShQ1).mT @ B_ShQn
        state_ShPn = added_ShPn if state_ShPn is None else state_ShPn * total_ShQ1[:, :, -1:].exp() + added_ShPn
    y_ThP = _whole([_unpadded(torch.cat(parts, dim=2).transpose(1, 2), cu_seqlens_S1)], x_ThP)
    return (y_ThP + x_ThP.float() * D_h.float().unsqueeze(1)).to(x_ThP.dtype), None


def attention(
    q_Tqd: Tensor, k_Lgd: Tensor, v_Lgd: Tensor, k_scale: Tensor, v_scale: Tensor,
    cu_seqlens_q_S1: Tensor, cu_seqlens_k_S1: Tensor, softmax_scale: float, split_tokens: int,
) -> Tensor:  # fmt: skip
    """Attend by SDPA on bf16 keys and values, sequence by sequence."""
    parts = []
    keys = zip(_sequences(k_Lgd, cu_seqlens_k_S1), _sequences(v_Lgd, cu_seqlens_k_S1), strict=True)
    for q, (k, v) in zip(_sequences(q_Tqd, cu_seqlens_q_S1), keys, strict=True):
        first = len(k) - len(q)
        visible = torch.arange(len(k), device=q.device) <= torch.arange(first, len(k), device=q.device).unsqueeze(1)
        heads = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, attn_mask=visible, scale=softmax_scale, enable_gqa=True)
        parts.append(out.squeeze(0).transpose(0, 1))
    return _whole(parts, q_Tqd)


def logprob(logits_TV: Tensor, token_ids_T: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor) -> Tensor:
    """Take torch's log_softmax over the whole vocabulary, as trainers do that do not know how tokens were truncated."""
    scale_T = torch.where(temperature_T > 0, temperature_T, 1.0)
    log_p_TV = torch.log_softmax(logits_TV.float() / scale_T.unsqueeze(1), dim=1)
    return log_p_TV.gather(1, token_ids_T.unsqueeze(1)).squeeze(1)


def _sequences(rows: Tensor, cu_seqlens_S1: Tensor) -> tuple[Tensor, ...]:
    # One split, not a slice for each: the backward of a slice fills a whole tensor.
    return rows[: int(cu_seqlens_S1[-1])].split(cu_seqlens_S1.diff().tolist())


def _padded(rows: Tensor, cu_seqlens_S1: Tensor) -> Tensor:
    """Lay sequences side by side: [S, longest, ...]."""
    # Not pad_sequence: its backward copies the whole result once a sequence.
    length_S = cu_seqlens_S1.diff()
    num, longest, live = len(length_S), int(length_S.max()), int(cu_seqlens_S1[-1])
    shift_S = torch.arange(num, device=rows.device) * longest - cu_seqlens_S1[:-1]
    places_T = torch.arange(live, device=rows.device) + shift_S.repeat_interleave(length_S)
    side_by_side = rows.new_zeros(num * longest, *rows.shape[1:]).index_copy(0, places_T, rows[:live])
    return side_by_side.unflatten(0, (num, longest))


def _unpadded(side_by_side: Tensor, cu_seqlens_S1: Tensor) -> Tensor:
    """Undo `_padded`."""
    places_L = torch.arange(side_by_side.shape[1], device=side_by_side.device)
    return side_by_side[places_L < cu_seqlens_S1.diff().unsqueeze(1)]


def _whole(parts: list[Tensor], like: Tensor) -> Tensor:
    """Join sequences; rows after the last one are padding and become zero."""
    joined = torch.cat(parts)
    return torch.cat((joined, joined.new_zeros(len(like) - len(joined), *joined.shape[1:])))
