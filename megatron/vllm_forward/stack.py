# SPDX-License-Identifier: Apache-2.0
"""Megatron's HybridStack over sequence-contiguous rows, with our final norm."""

# Legend: b batch, s sequence of this rank, T = b s tokens, H hidden, L MoE layers, k slots a token.

from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.norm import RmsNorm
from megatron.vllm_forward.packing import from_packed, packed_tokens, to_packed


def residual_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return Megatron's bias-dropout-add without compiled fusion: bf16(x + residual) at dropout 0 without bias."""
    return bias_dropout_add_unfused(training)


class BridgedStack(HybridStack):
    """Layers are Megatron's or ours; every one of them sees packed rows `[T, 1, H]`."""

    def __init__(self, config: TransformerConfig, submodules: Any, *, bridge: Bridge, **keywords: Any) -> None:
        # Megatron's stack builds a Transformer Engine norm unless told that there is none.
        super().__init__(config, submodules, **{**keywords, "post_layer_norm": False})
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = RmsNorm(
                config=config, hidden_size=config.hidden_size, eps=bridge.model.norm_eps, bridge=bridge
            )

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        expert_ids_TLk: Tensor | None = None,
    ) -> Tensor:
        """Run the layers of this stage on `[s, b, h]` activations and return `[s, b, h]`."""
        # attention_mask is a dataset's causal mask; cu_seqlens say the same.
        received = hidden_states if self.pre_process else self.input_tensor
        tokens = packed_tokens(received, packed_seq_params, self.pg_collection, expert_ids_TLk)
        rows_T1H = to_packed(received)
        if not self.pre_process:
            self.set_input_tensor(rows_T1H)
        out_T1H = super().forward(rows_T1H, None, packed_seq_params=tokens)
        out = from_packed(out_T1H, received.shape[1])
        return make_viewless_tensor(inp=out, requires_grad=out.requires_grad, keep_graph=True)
