# SPDX-License-Identifier: Apache-2.0
"""Megatron's self attention with our linears and core: keys and values are read back from their e4m3 codes."""

# Legend: T queries here, A tokens of all context-parallel ranks, L keys, q query heads, g key/value heads, d head dim.

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.collectives import gather_rows
from megatron.vllm_forward.deployed import Deployed, View
from megatron.vllm_forward.linear import Linear, QkvLinear
from megatron.vllm_forward.packing import PackedTokens


class CoreAttention(Deployed):
    """Causal attention over packed sequences with fixed key splits."""

    def __init__(self, *, config: TransformerConfig, bridge: Bridge, pg_collection: Any, **unused: Any) -> None:
        super().__init__()
        self.kernels = bridge.kernels
        self.tp_group = pg_collection.tp
        self.softmax_scale = bridge.model.head_dim**-0.5
        self.split_tokens = bridge.config.forward.attention_split_tokens
        device = torch.cuda.current_device()
        # 1 in a model built from scratch; a checkpoint's are calibrated.
        for name in ("k_scale", "v_scale"):
            self.register_bytes(name, torch.ones(1, dtype=torch.float32, device=device))

    def forward(
        self,
        query_Tqd: Tensor,
        key_Tgd: Tensor,
        value_Tgd: Tensor,
        attention_mask: None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedTokens,
    ) -> Tensor:
        """Return [T, 1, q d]; every sequence of `packed_seq_params` attends to itself, causally."""
        tokens = packed_seq_params
        if tokens.context_group is None:
            queries = keys = tokens.cu_seqlens_S1
        else:
            queries, keys, index_L = tokens.queries
            order_L = tokens.order_A.index_select(0, index_L)
            both = gather_rows(torch.cat((key_Tgd, value_Tgd), dim=1), tokens.context_group).index_select(0, order_L)
            key_Tgd, value_Tgd = both.chunk(2, dim=1)
        out_Tqd = self.kernels.attention(
            query_Tqd.contiguous(), key_Tgd.contiguous(), value_Tgd.contiguous(), self.k_scale, self.v_scale,
            queries, keys, self.softmax_scale, self.split_tokens,
        )  # fmt: skip
        return out_Tqd.flatten(1).unsqueeze(1)

    def deployment_views(self) -> Iterator[View]:
        """Yield the scales of the KV cache."""
        yield View("k_proj.k_scale", self.k_scale, (1,))
        yield View("v_proj.v_scale", self.v_scale, (1,))


class Attention(SelfAttention):
    """Megatron's SelfAttention, built from the contract's parts."""

    def __init__(
        self, config: TransformerConfig, *, layer_number: int, bridge: Bridge, submodules: None = None, **keywords: Any
    ) -> None:
        model = bridge.model
        qkv = partial(QkvLinear, bridge=bridge, num_groups=model.num_key_value_heads, head_dim=model.head_dim)
        proj = partial(
            _named_linear, bridge=bridge, named="o_proj", split=-1, format=bridge.format_of(layer_number, "o_proj")
        )
        parts = SelfAttentionSubmodules(
            linear_qkv=_without_name(qkv), core_attention=partial(CoreAttention, bridge=bridge), linear_proj=proj
        )
        super().__init__(config, parts, layer_number, **keywords)


def _named_linear(*sizes: int, named: str, name: str | None = None, **keywords: Any) -> Linear:
    # Megatron passes its own module path as `name`; ours is the deployment name.
    return Linear(*sizes, name=named, **keywords)


def _without_name(build: Any) -> Any:
    return lambda *sizes, name=None, **keywords: build(*sizes, **keywords)
