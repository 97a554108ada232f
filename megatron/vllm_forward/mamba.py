# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 mixer with Megatron's parameter names, sections and checkpoint keys, over the contract's ops."""

# Legend: T tokens here, A tokens of all context-parallel ranks, C conv channels, W conv width, h heads, P head dim,
# G groups, n state size, D inner width (h P).

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.collectives import all_to_all_rows
from megatron.vllm_forward.deployed import Deployed, View, empty_parameter
from megatron.vllm_forward.linear import Linear
from megatron.vllm_forward.norm import GatedRmsNorm
from megatron.vllm_forward.packing import PackedTokens
from megatron.vllm_forward.sharding import Shard

_CHECKPOINT_KEYS = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}
_SPLIT_BYTES = ("fp8_codes", "nvfp4_codes", "nvfp4_block_scale")


class MambaMixer(Deployed):
    """in_proj, causal convolution, chunked scan, gated norm, out_proj: same names and shapes as Megatron's mixer."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        d_model: int,
        layer_number: int,
        pg_collection: Any,
        bridge: Bridge,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__()
        model = bridge.model
        self.config = config
        self.kernels = bridge.kernels
        self.tp_group = pg_collection.tp
        self.layer_number = layer_number
        self.model = model
        self.context_size = pg_collection.cp.size()
        # A tensor-parallel rank has its share of heads and groups.
        ranks = pg_collection.tp.size()
        self.sections = {name: size // ranks for name, size in model.mamba_sections.items()}
        self.conv_sections = {name: size // ranks for name, size in model.conv_sections.items()}
        linear = {"config": config, "bridge": bridge, "tp_group": pg_collection.tp}
        sections = tuple(model.mamba_sections.values())
        self.in_proj = Linear(
            d_model, sum(sections), init_method=config.init_method, name="in_proj", split=0, sections=sections,
            format=bridge.format_of(layer_number, "in_proj"), **linear,
        )  # fmt: skip
        self._make_parameters()
        self.norm = GatedRmsNorm(
            config=config, size=model.mamba_inner_size, group_size=model.mamba_inner_size // model.n_groups,
            eps=model.norm_eps, bridge=bridge, tp_group=pg_collection.tp,
        )  # fmt: skip
        self.out_proj = Linear(
            model.mamba_inner_size, d_model, init_method=config.output_layer_init_method, name="out_proj", split=-1,
            format=bridge.format_of(layer_number, "out_proj"), **linear,
        )  # fmt: skip

    def _make_parameters(self) -> None:
        model, dtype = self.model, self.config.params_dtype
        channels, heads = sum(self.conv_sections.values()), self.sections["dt"]
        self.conv1d_weight = empty_parameter(channels, 1, model.conv_kernel, dtype=dtype)
        self.conv1d_bias = empty_parameter(channels, dtype=dtype)
        self.dt_bias = empty_parameter(heads, dtype=dtype)
        self.A_log = empty_parameter(heads, dtype=dtype)
        self.D = empty_parameter(heads, dtype=dtype)
        for parameter in self.parameters(recurse=False):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork(), torch.no_grad():
                bound = 1 / math.sqrt(model.conv_kernel)
                self.conv1d_weight.uniform_(-bound, bound)
                self.conv1d_bias.uniform_(-bound, bound)
                # softplus(dt_bias) is then log-uniform in [0.001, 0.1], as Mamba-2 starts.
                dt = torch.empty_like(self.dt_bias, dtype=torch.float32).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
                self.A_log.copy_(torch.empty_like(self.A_log, dtype=torch.float32).uniform_(1, 16).log())
                self.D.fill_(1)
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True

    def forward(
        self,
        hidden_T1H: Tensor,
        inference_context: None = None,
        *,
        inference_params: None = None,
        packed_seq_params: PackedTokens,
    ) -> tuple[Tensor, None]:
        """Mix packed tokens; the second value is the bias that Megatron expects."""
        projected, _ = self.in_proj(hidden_T1H)
        sizes = (self.sections["z"], sum(self.conv_sections.values()), self.sections["dt"])
        z, xBC, dt = projected.squeeze(1).split(sizes, dim=1)
        mix = self._mix_whole_sequences if self.context_size == 1 else self._mix_by_heads
        y_TD = mix(xBC.contiguous(), dt.contiguous(), packed_seq_params)
        out, _ = self.out_proj(self.norm(y_TD, z.contiguous()).unsqueeze(1))
        return out, None

    def _mix_whole_sequences(self, xBC_TC: Tensor, dt_Th: Tensor, tokens: PackedTokens) -> Tensor:
        weights = (self.conv1d_weight.squeeze(1), self.conv1d_bias, self.A_log, self.D, self.dt_bias)
        return self._convolve_and_scan(xBC_TC, dt_Th, tokens.cu_seqlens_S1, *weights)

    def _mix_by_heads(self, xBC_TC: Tensor, dt_Th: Tensor, tokens: PackedTokens) -> Tensor:
        """Trade: every rank gets whole sequences of its share of heads and groups, and gives the outputs back."""
        group, num_tokens = tokens.context_group, xBC_TC.shape[0]
        counts = [num_tokens] * group.size()
        channels = self._channels_by_rank(group.size())
        sent = torch.cat([torch.cat((xBC_TC[:, c], dt_Th[:, h]), dim=1) for c, h in channels])
        gathered = all_to_all_rows(sent, counts, counts, group).index_select(0, tokens.order_A)
        mine, heads = channels[group.rank()]
        xBC_AC, dt_Ah = gathered.split((len(mine), len(heads)), dim=1)
        weights = (self.conv1d_weight.squeeze(1)[mine], self.conv1d_bias[mine])
        weights += tuple(parameter[heads] for parameter in (self.A_log, self.D, self.dt_bias))
        y_AD = self._convolve_and_scan(xBC_AC.contiguous(), dt_Ah.contiguous(), tokens.cu_seqlens_S1, *weights)
        back = y_AD.index_select(0, torch.argsort(tokens.order_A))
        parts = all_to_all_rows(back, counts, counts, group).split(num_tokens)
        return torch.cat(parts, dim=1)

    def _channels_by_rank(self, ranks: int) -> list[tuple[Tensor, Tensor]]:
        """Return, for each rank, the conv channels and the heads of its share."""
        device = self.A_log.device
        sections = [
            section.chunk(ranks)
            for section in torch.arange(self.conv1d_bias.shape[0], device=device).split(
                list(self.conv_sections.values())
            )
        ]
        heads = torch.arange(self.sections["dt"], device=device).chunk(ranks)
        return [(torch.cat([section[rank] for section in sections]), heads[rank]) for rank in range(ranks)]

    def _convolve_and_scan(
        self, xBC_TC: Tensor, dt_Th: Tensor, cu_seqlens_S1: Tensor,
        conv_weight_CW: Tensor, conv_bias_C: Tensor, A_log_h: Tensor, D_h: Tensor, dt_bias_h: Tensor,
    ) -> Tensor:  # fmt: skip
        kernels, heads = self.kernels, dt_Th.shape[1]
        inner, state_size = heads * self.model.mamba_head_dim, self.model.ssm_state_size
        xBC_TC = kernels.causal_conv1d(xBC_TC, conv_weight_CW.contiguous(), conv_bias_C, cu_seqlens_S1, None)
        states = (xBC_TC.shape[1] - inner) // 2
        x, B, C = (part.contiguous() for part in xBC_TC.split((inner, states, states), dim=1))
        y_ThP, _ = kernels.ssd_scan(
            x.view(-1, heads, self.model.mamba_head_dim), dt_Th, kernels.ssd_decay(A_log_h),
            B.view(len(B), -1, state_size), C.view(len(C), -1, state_size), D_h, dt_bias_h,
            cu_seqlens_S1, self.model.chunk_size, None,
        )  # fmt: skip
        return y_ThP.flatten(1)

    def deployment_views(self) -> Iterator[View]:
        """Yield the parameters that are not a linear's or a norm's."""
        for name in ("A_log", "D", "dt_bias"):
            parameter = getattr(self, name)
            yield View(name, parameter.data, tuple(parameter.shape), self._shard(()))
        for name, deployed in _CHECKPOINT_KEYS.items():
            parameter = getattr(self, name)
            shard = self._shard(tuple(self.model.conv_sections.values()))
            yield View(deployed, parameter.data, tuple(parameter.shape), shard)

    def _shard(self, sections: tuple[int, ...]) -> Shard | None:
        return Shard(self.tp_group, 0, sections) if self.tp_group.size() > 1 else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Name tensors as Megatron's mixer does: packed rows are split into z, x, B, C and dt."""
        axes = {name: 0 for name, _ in self.named_parameters(recurse=False)}
        own = self.named_shards(axes, prefix, sharded_offsets, metadata)
        for name, module in self.named_children():
            own.update(module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata))
        for name, key in _CHECKPOINT_KEYS.items():
            own[f"{prefix}{name}"].key = f"{prefix}{key}"
        split = {f"{prefix}{name}": self.conv_sections for name in _CHECKPOINT_KEYS}
        split |= {f"{prefix}in_proj.{name}": self.model.mamba_sections for name in _SPLIT_BYTES}
        split[f"{prefix}in_proj.weight"] = self.sections
        for name, sections in split.items():
            if name in own:
                own[name] = _split_tensor_factory(own[name], list(sections.values()), list(sections), 0)
        return own

    def mamba_state_shapes_per_request(self) -> None:
        """Refuse: Megatron's own inference engine would run other kernels than the rollout."""
        raise NotImplementedError(
            "Megatron's inference engine asked a bridged mixer for its state; generate with the rollout instead"
        )
