# SPDX-License-Identifier: Apache-2.0
"""nemotron_h over the contract's ops, incremental: any mix of whole prompts, chunks and decode rows in one forward."""

# Legend: T new rows, H hidden, R rows whose logits are wanted, V vocabulary, L MoE layers, k top-k slots; Mamba: D
# inner width, C conv channels, N one of their sections, h heads, P head dim, G groups, n state size; attention: q query
# heads, g KV heads, r query heads a KV head, d head dim.

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge import ops
from vllm_forward_bridge.config import RolloutSection
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.rollout.embedded.scheduler import Chunk
from vllm_forward_bridge.rollout.embedded.weights import (
    AttentionWeights,
    ExpertWeights,
    MambaWeights,
    ModelWeights,
)
from vllm_forward_bridge.state.kv_cache import KVCache, PagePlan, page_plan
from vllm_forward_bridge.state.mamba_state import MambaState, ReplayPlan, replay_plan


@dataclass(frozen=True)
class Plans:
    """The index maps of one forward."""

    replay: ReplayPlan
    pages: PagePlan


class EmbeddedModel:
    """Weights and the caches of all slots and pages.

    Args:
        config: geometry.
        weights: deployment bytes, on the device on which the model then runs.
        limits: number of slots, and size and number of pages.
        split_tokens: keys a split of the attention.
        records_experts: return the router's choice.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        limits: RolloutSection,
        *,
        split_tokens: int,
        records_experts: bool,
    ) -> None:
        self.config = config
        self.weights = weights
        self.limits = limits
        self.split_tokens = split_tokens
        self.records_experts = records_experts
        self.device = weights.embedding_VH.device
        self.caches = [self._cache(layer.mixer) for layer in weights.layers]

    def forward(self, chunks: Rows[Chunk]) -> tuple[Tensor, Tensor | None]:
        """Compute the chunks' rows, packed in their order.

        s0 = embedding; y = rms_norm(s0); then for each layer x = mixer(y), (y, s) = fused_add_rms_norm(x, s), the last
        one with the final norm's gain.

        Returns:
            (hidden_TH after the final norm, expert ids [T, L, k] if they are recorded).
        """
        tokens = [token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]]
        plans = self._plans(chunks)
        residual_TH = self.weights.embedding_VH[torch.tensor(tokens, device=self.device)]
        layers, eps = self.weights.layers, self.config.norm_eps
        next_gains = [*(layer.norm_gain_H for layer in layers[1:]), self.weights.final_gain_H]
        y_TH = ops.rms_norm(residual_TH, layers[0].norm_gain_H, eps)
        chosen: list[Tensor] = []
        for layer, cache, gain_H in zip(layers, self.caches, next_gains, strict=True):
            mixer = layer.mixer
            if isinstance(mixer, MambaWeights):
                x_TH = self._mamba(mixer, cache, plans.replay, y_TH)
            elif isinstance(mixer, AttentionWeights):
                x_TH = self._attention(mixer, cache, plans.pages, y_TH)
            else:
                x_TH = self._experts(mixer, y_TH, chosen)
            y_TH, residual_TH = ops.fused_add_rms_norm(x_TH, residual_TH, gain_H, eps)
        return y_TH, torch.stack(chosen, dim=1) if self.records_experts and chosen else None

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return bf16 logits_RV."""
        return self.weights.lm_head(hidden_RH)

    def _cache(self, mixer: MambaWeights | AttentionWeights | ExpertWeights) -> MambaState | KVCache | None:
        config, limits = self.config, self.limits
        if isinstance(mixer, MambaWeights):
            return MambaState(
                num_slots=limits.max_num_seqs, num_heads=config.mamba_num_heads, head_dim=config.mamba_head_dim,
                num_groups=config.n_groups, state_size=config.ssm_state_size, conv_width=config.conv_kernel,
                chunk_size=config.chunk_size, device=self.device,
            )  # fmt: skip
        if isinstance(mixer, AttentionWeights):
            return KVCache(
                num_pages=limits.num_kv_pages, page_tokens=limits.kv_page_tokens, device=self.device,
                num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
                k_scale=mixer.k_scale, v_scale=mixer.v_scale,
            )  # fmt: skip
        return None

    def _plans(self, chunks: Rows[Chunk]) -> Plans:
        starts, counts = [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
        slots, pages = [chunk.sequence.slot for chunk in chunks], [chunk.sequence.pages for chunk in chunks]
        config = self.config
        return Plans(
            replay_plan(
                slots, starts, counts, chunk_size=config.chunk_size, conv_width=config.conv_kernel, device=self.device
            ),
            page_plan(pages, starts, counts, page_tokens=self.limits.kv_page_tokens, device=self.device),
        )

    def _mamba(self, mixer: MambaWeights, state: MambaState, plan: ReplayPlan, y_TH: Tensor) -> Tensor:
        config = self.config
        inner, groups = config.mamba_inner_size, config.n_groups
        projected = mixer.in_proj(y_TH)
        gate_TD, xBC_TC, dt_Th = projected.split([inner, sum(config.conv_sections.values()), config.mamba_num_heads], 1)
        xBC_TC = state.convolve(plan, xBC_TC.contiguous(), mixer.conv_weight_CW, mixer.conv_bias_C)
        x_TD, B_TN, C_TN = xBC_TC.split(list(config.conv_sections.values()), 1)
        y_ThP = state.scan(
            plan,
            x_TD.contiguous().view(-1, config.mamba_num_heads, config.mamba_head_dim),
            dt_Th.contiguous(),
            mixer.A_h,
            B_TN.contiguous().view(-1, groups, config.ssm_state_size),
            C_TN.contiguous().view(-1, groups, config.ssm_state_size),
            mixer.D_h,
            mixer.dt_bias_h,
        )
        gated_TD = ops.gated_rms_norm(
            y_ThP.flatten(1), gate_TD.contiguous(), mixer.norm_gain_D, inner // groups, config.norm_eps
        )
        return mixer.out_proj(gated_TD)

    def _attention(self, mixer: AttentionWeights, cache: KVCache, plan: PagePlan, y_TH: Tensor) -> Tensor:
        config = self.config
        groups = config.num_key_value_heads
        heads_a_group = config.num_attention_heads // groups
        qkv_Tgrd = mixer.qkv_proj(y_TH).view(len(y_TH), groups, heads_a_group + 2, config.head_dim)
        q_Tgrd, k_Tgd, v_Tgd = qkv_Tgrd[:, :, :-2], qkv_Tgrd[:, :, -2], qkv_Tgrd[:, :, -1]
        cache.write(plan, k_Tgd.contiguous(), v_Tgd.contiguous())
        q_Tqd = q_Tgrd.reshape(len(y_TH), config.num_attention_heads, config.head_dim)
        out_Tqd = cache.attend(plan, q_Tqd, config.head_dim**-0.5, self.split_tokens)
        return mixer.o_proj(out_Tqd.flatten(1))

    def _experts(self, mixer: ExpertWeights, y_TH: Tensor, chosen: list[Tensor]) -> Tensor:
        config = self.config
        weights_Tk, ids_Tk = ops.router(y_TH, mixer.router_weight_EH, mixer.expert_bias_E, config.num_experts_per_tok)
        chosen.append(ids_Tk)
        rows_TkH = ops.moe_experts(y_TH, ids_Tk, *mixer.experts)
        shared_TH = mixer.shared_down(ops.relu_squared(mixer.shared_up(y_TH)))
        return ops.moe_combine(rows_TkH, weights_Tk, config.routed_scaling_factor, shared_TH)
