# SPDX-License-Identifier: Apache-2.0
"""Attention in a bridged engine: FlashAttention 3 on bf16 pages that hold e4m3 code values, one call for all phases."""

# T = new tokens of a step, S = sequences, q = query heads, g = KV heads, d = head dim; Z pages of W tokens.

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from vllm_forward_bridge import ops
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.ops import fa3
from vllm_forward_bridge.rollout.embedded.weights import AttentionWeights


@dataclass(frozen=True)
class PagedMetadata:
    """What the kernel needs of one step."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Passes vLLM's own maps on; there is no schedule that could follow the batch."""

    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Return the step's maps."""
        common = common_attn_metadata
        return PagedMetadata(
            common.num_actual_tokens, common.max_query_len, common.max_seq_len, common.query_start_loc, common.seq_lens,
            common.block_table_tensor, common.slot_mapping,
        )  # fmt: skip

    def update_block_table(self, metadata: PagedMetadata, blk_table: Tensor, slot_mapping: Tensor) -> PagedMetadata:
        """Point the same step at another group's pages."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never: its merge depends on which requests share a prefix."""
        return False


class PagedImpl(AttentionImpl):
    """The kernel call of one layer; scales come from the layer."""

    supports_quant_query_input = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
        sliding_window: Any, kv_cache_dtype: str, logits_soft_cap: Any = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: Any = None,
    ) -> None:  # fmt: skip
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: PagedMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write the step's keys and values, then attend."""
        if attn_metadata is None:
            # Memory profile: there are no pages yet.
            return output.zero_()
        live = attn_metadata.num_actual_tokens
        scales: KvScales = layer.bridge_scales
        key_pages, value_pages = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        slots = attn_metadata.slot_mapping[:live].long()
        place = slots // key_pages.shape[1], slots % key_pages.shape[1]
        for pages, rows, scale in ((key_pages, key, scales.k_scale), (value_pages, value, scales.v_scale)):
            # bits: pages hold f32(code), which bf16 represents exactly.
            pages[place] = ops.quantize_kv(rows[:live].contiguous(), scale).to(torch.bfloat16)
        output[:live] = fa3.paged_attention(
            query[:live], key_pages, value_pages, attn_metadata.block_table, attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            max_query_len=attn_metadata.max_query_len, max_kv_len=attn_metadata.max_seq_len,
            softmax_scale=self.scale * scales.host_k_scale, v_scale=scales.v_scale,
        )  # fmt: skip
        return output


class PagedBackend(FlashAttentionBackend):
    """Page layout of vLLM's FlashAttention backend; kernel, metadata and page size of the contract."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Return the registry's name for a backend from outside."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """Return the kernel call."""
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        """Return the builder."""
        return PagedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Return whole key tiles: a page never ends inside a tile."""
        return [MultipleOf(fa3.PAGE_TOKENS)]


@dataclass(frozen=True)
class KvScales:
    """A layer's scales, the key's also on the host: it is part of the kernel's softmax scale."""

    k_scale: Tensor
    v_scale: Tensor
    host_k_scale: float


class BridgeAttention(nn.Module):
    """An attention mixer.

    Args:
        vllm_config: the engine's configuration.
        config: geometry.
        name: unique name, under which vLLM binds the pages.
    """

    def __init__(self, vllm_config: VllmConfig, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.config = config
        self.weights: AttentionWeights | None = None
        self.attn = Attention(
            config.num_attention_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=config.num_key_value_heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{name}.attn",
            attn_backend=PagedBackend,
        )

    def install(self, weights: AttentionWeights) -> None:
        """Take weights and give the kernel its scales."""
        self.weights = weights
        self.attn.bridge_scales = KvScales(weights.k_scale, weights.v_scale, weights.k_scale.item())

    def forward(self, y_TH: Tensor) -> Tensor:
        """Return the mixer's rows."""
        config, weights = self.config, self.weights
        groups, head_dim = config.num_key_value_heads, config.head_dim
        qkv_Tgrd = weights.qkv_proj(y_TH).view(len(y_TH), groups, -1, head_dim)
        q, k, v = qkv_Tgrd[:, :, :-2], qkv_Tgrd[:, :, -2], qkv_Tgrd[:, :, -1]
        out = self.attn(*(part.reshape(len(y_TH), -1) for part in (q, k, v)))
        return weights.o_proj(out)
