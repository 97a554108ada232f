# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 in a bridged engine: exact replay of the partial chunk from the fp32 boundary state, one path for all phases.

The paged Mamba state holds, for each sequence, the convolution's tail, the state at the last chunk boundary, and x, raw
dt and B of the rows since then. A step feeds those rows again in front of the new ones, so prefill, a chunk, a decode
row and a recompute after preemption are the same scan on the same chunk grid.
"""

# T = new tokens of a step, S = sequences, C = conv channels, h heads, P head dim, G groups, n state size, Q chunk size;
# N rows with those fed again; Z pages.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2  # noqa: F401  (registers the op that `forward` calls)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend, Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from vllm_forward_bridge import ops
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.ops import conv_cuda, ssd_cuda
from vllm_forward_bridge.rollout.embedded.weights import MambaWeights
from vllm_forward_bridge.state.mamba_state import ReplayPlan, replay_plan


def state_shapes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one sequence's state: conv tail, boundary state, and x, dt, B of a partial chunk."""
    channels, rows = sum(config.conv_sections.values()), config.chunk_size
    return (
        (config.conv_kernel - 1, channels),
        (config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size),
        (rows, config.mamba_num_heads, config.mamba_head_dim),
        (rows, config.mamba_num_heads),
        (rows, config.n_groups, config.ssm_state_size),
    )


STATE_DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16)
"""In the order of `state_shapes`. bits: a boundary state in bf16 would change what comes behind it."""


@dataclass(frozen=True)
class ReplayMetadata:
    """Index maps of one step, on the device; only `page_S` differs between the groups of Mamba layers."""

    page_S: Tensor
    """int32: the page that holds each sequence's state; 0 is vLLM's null page."""
    num_tokens: int
    plan: ReplayPlan
    """Its slots are numbers of sequences, to be looked up in `page_S`."""
    has_boundary_S: Tensor
    """bool: a chunk was completed before; otherwise the page's state is another sequence's."""
    has_tail_S: Tensor
    refed: tuple[Tensor, Tensor]
    """(sequence, row of its buffers) of each row that is fed again."""
    kept: tuple[Tensor, Tensor]
    """(sequence, row of its buffers) of each row to keep."""
    chunks: ssd_cuda.ChunkPlan
    nums_dict: dict[int, dict[str, Any]]
    batch_ptr: Tensor
    token_chunk_offset_ptr: Tensor


def build_metadata(
    page_S: Tensor, starts: Sequence[int], counts: Sequence[int], config: tuple[int, int], device: torch.device
) -> ReplayMetadata:
    """Plan a step from host integers alone; nothing is read back from the device.

    Args:
        page_S: int32 on the device.
        starts: rows of each sequence computed before.
        counts: new rows of each sequence.
        config: (chunk size, conv width).
        device: where the layers run.
    """
    chunk_size, conv_width = config
    plan = replay_plan(range(len(starts)), starts, counts, chunk_size=chunk_size, conv_width=conv_width, device=device)
    totals = [start % chunk_size + count for start, count in zip(starts, counts, strict=True)]
    flags = torch.tensor([[start >= chunk_size for start in starts], [start > 0 for start in starts]]).to(device)
    new_starts = torch.tensor([0, *counts]).cumsum(0).int()
    nums_dict, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(new_starts, device=device)
    return ReplayMetadata(
        page_S=page_S,
        num_tokens=sum(counts),
        plan=plan,
        has_boundary_S=flags[0],
        has_tail_S=flags[1],
        refed=(plan.refed_from_U // chunk_size, plan.refed_from_U % chunk_size),
        kept=(plan.kept_at_K // chunk_size, plan.kept_at_K % chunk_size),
        chunks=ssd_cuda.plan_chunks(totals, chunk_size, device),
        nums_dict=nums_dict,
        batch_ptr=batch_ptr,
        token_chunk_offset_ptr=offset_ptr,
    )


class ReplayBuilder(Mamba2AttentionMetadataBuilder):
    """Builds `ReplayMetadata` from the scheduler's host-side counts."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> ReplayMetadata:
        """Plan the step; sequences without new rows are padding and left out."""
        common = common_attn_metadata
        counts = common.query_start_loc_cpu.diff().tolist()
        lengths = common.seq_lens_cpu_upper_bound.tolist()
        live = sum(count > 0 for count in counts)
        counts, lengths = counts[:live], lengths[:live]
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        shapes = self.kv_cache_spec.shapes
        return build_metadata(
            common.block_table_tensor[:live, 0], starts, counts, (self.chunk_size, shapes[0][0] + 1), self.device
        )

    def update_block_table(self, metadata: ReplayMetadata, blk_table: Tensor, slot_mapping: Tensor) -> ReplayMetadata:
        """Point the same plan at another group's pages."""
        return replace(metadata, page_S=blk_table[: len(metadata.page_S), 0])


class ReplayBackend(Mamba2AttentionBackend):
    """vLLM's Mamba-2 backend with the replaying builder."""

    @staticmethod
    def get_builder_cls() -> type[ReplayBuilder]:
        """Return the builder."""
        return ReplayBuilder


def replay_step(
    state: Sequence[Tensor],
    metadata: ReplayMetadata,
    xBC_TC: Tensor,
    dt_Th: Tensor,
    weights: MambaWeights,
    config: ModelConfig,
) -> Tensor:
    """Run convolution and scan of one layer over a step's new rows and move the paged state on.

    Args:
        state: paged tensors in the order of `state_shapes`, each [pages, ...].
        metadata: the step's plan.
        xBC_TC: bf16, contiguous; what the input projection gives for x, B and C.
        dt_Th: bf16, contiguous, raw.
        weights: the mixer's tensors.
        config: geometry.

    Returns:
        y_ThP of the new rows.
    """
    tails, boundaries, *buffers = state
    plan, page_S = metadata.plan, metadata.page_S
    xBC_TC = conv_cuda.conv(
        xBC_TC,
        weights.conv_weight_CW,
        weights.conv_bias_C,
        plan.cu_seqlens_S1,
        tails,
        page_S,
        metadata.has_tail_S,
        metadata,
    )
    x_TD, B_TN, C_TN = xBC_TC.split(list(config.conv_sections.values()), 1)
    heads, groups = (config.mamba_num_heads, config.mamba_head_dim), (config.n_groups, config.ssm_state_size)
    new = (x_TD.reshape(-1, *heads), dt_Th, B_TN.reshape(-1, *groups))
    page_S = page_S.long()
    refed_pages, kept_pages = page_S[metadata.refed[0]], page_S[metadata.kept[0]]
    replayed = []
    for buffer, rows in zip(buffers, new, strict=True):
        both = rows.new_empty(plan.num_replayed, *rows.shape[1:])
        both[plan.refed_at_U] = buffer[refed_pages, metadata.refed[1]]
        both[plan.new_at_T] = rows
        replayed.append(both)
    C_NGn = replayed[2].new_zeros(plan.num_replayed, *groups)
    C_NGn[plan.new_at_T] = C_TN.reshape(-1, *groups)
    boundary_ShPn = boundaries[page_S].masked_fill_(~metadata.has_boundary_S[:, None, None, None], 0.0)
    x_NhP, dt_Nh, B_NGn = replayed
    y_NhP, boundary_ShPn = ssd_cuda.scan(
        x_NhP,
        dt_Nh,
        weights.A_h,
        B_NGn,
        C_NGn,
        weights.D_h,
        weights.dt_bias_h,
        metadata.chunks,
        config.chunk_size,
        boundary_ShPn,
    )
    boundaries[page_S] = boundary_ShPn
    for buffer, rows in zip(buffers, replayed, strict=True):
        buffer[kept_pages, metadata.kept[1]] = rows[plan.kept_from_K]
    return y_NhP[plan.new_at_T]


class BridgeMamba(nn.Module, MambaBase):
    """A Mamba-2 mixer.

    Args:
        vllm_config: the engine's configuration.
        config: geometry.
        name: unique name, under which vLLM binds the paged state.
    """

    def __init__(self, vllm_config: VllmConfig, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.config = config
        self.weights: MambaWeights | None = None
        self.layer_name = name
        self.encoded_name = _encode_layer_name(name)
        self.kv_cache = (torch.tensor([]),) * len(STATE_DTYPES)
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one sequence's state."""
        return state_shapes(self.config)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return their dtypes."""
        return STATE_DTYPES

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Tell vLLM which family of states this is."""
        return MambaAttentionBackendEnum.MAMBA2

    def get_attn_backend(self) -> type[ReplayBackend]:
        """Return the backend whose builder plans the replay."""
        return ReplayBackend

    def forward(self, y_TH: Tensor) -> Tensor:
        """Return the mixer's rows."""
        config, weights = self.config, self.weights
        inner = config.mamba_inner_size
        projected = weights.in_proj(y_TH)
        scanned = projected.new_empty(len(projected), inner)
        # vLLM's own op, by its own name: it is one of those that split piecewise graphs.
        torch.ops.vllm.mamba_mixer2(projected, scanned, self.encoded_name)
        gate_TD = projected[:, :inner].contiguous()
        gated_TD = ops.gated_rms_norm(scanned, gate_TD, weights.norm_gain_D, inner // config.n_groups, config.norm_eps)
        return weights.out_proj(gated_TD)

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        """Fill `output` from [z | x | B | C | dt] rows; called by vLLM's op with this layer's metadata."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # Memory profile: there is no state yet.
            output.zero_()
            return
        metadata = metadata[self.layer_name]
        config, live = self.config, metadata.num_tokens
        sections = [config.mamba_inner_size, sum(config.conv_sections.values()), config.mamba_num_heads]
        _, xBC_TC, dt_Th = projected_states[:live].split(sections, 1)
        y_ThP = replay_step(self.kv_cache, metadata, xBC_TC.contiguous(), dt_Th.contiguous(), self.weights, config)
        output[:live] = y_ThP.flatten(1)
        output[live:] = 0.0
