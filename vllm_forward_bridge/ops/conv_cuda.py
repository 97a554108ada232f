# SPDX-License-Identifier: Apache-2.0
"""vLLM's causal convolution for prefill, chunk and step alike: `causal_conv1d_fn` on a cache of tails."""

# T = packed tokens, S = sequences, C = channels, W = window width

import torch
from torch import Tensor

from vllm_forward_bridge.ops.launch import kernel_form
from vllm_forward_bridge.vllm_symbols import symbol


def conv(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor, cu_seqlens_S1: Tensor, tails: Tensor, slots_S: Tensor,
    has_tail_S: Tensor, metadata=None,
) -> Tensor:  # fmt: skip
    """Convolve packed sequences and move their tails forward in place.

    Args:
        x_TC: bf16, contiguous.
        weight_CW: bf16.
        bias_C: bf16.
        cu_seqlens_S1: int32.
        tails: bf16 [slots, W-1, C], the last inputs of each sequence, oldest first; slot 0 is never read or written.
        slots_S: int32, where each sequence's tail lies.
        has_tail_S: bool, False for a sequence at its first token.
        metadata: vLLM's host-side launch plan (`nums_dict`, ...); None makes the kernel's wrapper read lengths back.

    Returns:
        y_TC; rows past the last sequence are not written.
    """
    y_CT = symbol("causal_conv1d_fn")(
        kernel_form(x_TC).t(), weight_CW, bias_C, tails.transpose(1, 2),
        query_start_loc=cu_seqlens_S1, cache_indices=slots_S, has_initial_state=has_tail_S, activation="silu",
        metadata=metadata,
    )  # fmt: skip
    return y_CT.t()


def causal_conv1d(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor, cu_seqlens_S1: Tensor, tail_SWC: Tensor | None
) -> Tensor:
    """Run `ops.causal_conv1d` with a throw-away cache; rows past the last sequence are zero."""
    num_sequences, width, channels = len(cu_seqlens_S1) - 1, weight_CW.shape[1], x_TC.shape[1]
    if not len(x_TC):
        return torch.empty_like(x_TC)
    tails = x_TC.new_zeros(num_sequences + 1, width - 1, channels)
    if tail_SWC is not None:
        tails[1:] = tail_SWC
    slots_S = torch.arange(1, num_sequences + 1, dtype=torch.int32, device=x_TC.device)
    has_tail_S = torch.full((num_sequences,), tail_SWC is not None, device=x_TC.device)
    y_TC = conv(x_TC, kernel_form(weight_CW), kernel_form(bias_C), cu_seqlens_S1, tails, slots_S, has_tail_S)
    live_T1 = (torch.arange(len(x_TC), device=x_TC.device) < cu_seqlens_S1[-1])[:, None]
    return torch.where(live_T1, y_TC, 0.0)
