# SPDX-License-Identifier: Apache-2.0
"""The MoE layer: router, experts, shared expert, and expert parallelism that never sums in transit."""

# Legend: T tokens, H hidden, E experts, k slots a token, F expert width, R rows received here.

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.collectives import all_to_all_rows
from megatron.vllm_forward.deployed import Deployed, Matrix, View, empty_parameter
from megatron.vllm_forward.formats import Nvfp4
from megatron.vllm_forward.linear import Linear
from megatron.vllm_forward.packing import PackedTokens
from vllm_forward_bridge.quantization import RequantizeReport, requantize_f32


class Router(Deployed):
    """Sigmoid scores, fp32 bias for the choice alone, renormalised weights of the chosen."""

    def __init__(self, *, config: TransformerConfig, bridge: Bridge, layer_number: int) -> None:
        super().__init__()
        model = bridge.model
        self.kernels = bridge.kernels
        self.is_f32 = bridge.router_is_f32(layer_number)
        self.top_k = model.num_experts_per_tok
        self.weight = empty_parameter(model.n_routed_experts, model.hidden_size, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            # Every tensor-parallel rank has the whole router, and must start from the same one.
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                config.init_method(self.weight)
        device = self.weight.device
        if self.is_f32:
            # The forward reads the bf16 rounding of the F32 gate, which is the master; the F32 bytes are for export.
            self.register_bytes("weight_f32", self.weight.detach().float())
        zeros = torch.zeros(model.n_routed_experts, dtype=torch.float32, device=device)
        self.register_bytes("expert_bias", zeros)
        self.register_bytes("local_tokens_per_expert", zeros.clone(), persistent=False)

    def forward(self, x_TH: Tensor, expert_ids_Tk: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (weights_Tk fp32, expert_ids_Tk); given ids replace the choice, not the scores."""
        self.check_current()
        if expert_ids_Tk is None:
            weights_Tk, expert_ids_Tk = self.kernels.router(x_TH, self.weight, self.expert_bias, self.top_k)
        else:
            weights_Tk = self.kernels.replayed_router(x_TH, self.weight, expert_ids_Tk)
        if torch.is_grad_enabled():
            self.local_tokens_per_expert += torch.bincount(expert_ids_Tk.flatten(), minlength=len(self.expert_bias))
        return weights_Tk, expert_ids_Tk

    def deployment_views(self) -> Iterator[View]:
        """Yield gate weight and selection bias."""
        gate = self.weight_f32 if self.is_f32 else self.weight.data
        yield View("gate.weight", gate, tuple(gate.shape))
        yield View("gate.e_score_correction_bias", self.expert_bias, tuple(self.expert_bias.shape))

    def quantize_masters(self) -> None:
        """Take f32(master)."""
        if self.is_f32:
            self.weight_f32.copy_(self.weight.detach())

    def requantize_masters(self) -> RequantizeReport:
        """Keep the F32 value of every element that still rounds to its master."""
        if self.is_f32:
            self.weight_f32.copy_(requantize_f32(self.weight.detach(), self.weight_f32))
        return RequantizeReport(0, 0)

    def restore_masters(self) -> None:
        """Set the master to bf16(F32 value)."""
        if self.is_f32:
            self.weight.data.copy_(self.weight_f32)


class ExpertWeight(Matrix):
    """One projection of all experts of this rank, stacked; other ranks of the expert-parallel group hold the rest."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        config: TransformerConfig,
        bridge: Bridge,
        init_method: Any,
        name: str,
        pgs: Any,
    ) -> None:
        super().__init__()
        self.name = name
        self.ep_group, self.expert_dp_group = pgs.ep, pgs.expt_dp
        num_experts, *matrix = shape
        self.weight = empty_parameter(num_experts // self.ep_group.size(), *matrix, dtype=config.params_dtype)
        # Megatron reduces the gradients of such parameters over the ranks that hold the same experts.
        self.weight.allreduce = self.ep_group.size() == 1 and pgs.tp.size() == 1
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for expert in self.weight.data:
                    init_method(expert)
        self.format = Nvfp4(bridge.four_over_six)
        self.format.register(self)

    @property
    def first_expert(self) -> int:
        """Global id of the first expert here."""
        return self.ep_group.rank() * self.weight.shape[0]

    def operands(self, kernels: ModuleType) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, block scales and global scales of the experts here, as the kernels read them."""
        self.check_current()
        return self.format.operands(kernels, self)

    def deployment_views(self) -> Iterator[View]:
        """Yield each expert's tensors under its global id."""
        for view in self.format.views(self, "experts.{}." + self.name):
            _, local, rest = view.name.split(".", 2)
            yield replace(view, name=f"experts.{int(local) + self.first_expert}.{rest}")

    def quantize_masters(self) -> None:
        """Derive bytes from the masters alone."""
        self.format.quantize(self)

    def requantize_masters(self) -> RequantizeReport:
        """Bring the bytes up to date with the masters."""
        return self.format.requantize(self)

    def restore_masters(self) -> None:
        """Set the masters to the values of the bytes."""
        self.format.restore(self)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Stack over global expert ids in dim 0, as Megatron's grouped and sequential experts do."""
        shard = (len(sharded_offsets), self.ep_group.rank(), self.ep_group.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}", tensor, *sharded_offsets, shard,
                replica_id=(0, 0, self.expert_dp_group.rank()), prepend_axis_num=len(sharded_offsets),
            )
            for name, tensor in self.state_dict(prefix="", keep_vars=True).items()
        }  # fmt: skip


class Experts(MegatronModule):
    """W2 relu(W1 x)^2 of each (token, slot), not weighted, not summed; those of other ranks travel there and back."""

    def __init__(self, *, config: TransformerConfig, bridge: Bridge, pg_collection: Any) -> None:
        super().__init__(config)
        model = bridge.model
        self.kernels = bridge.kernels
        self.ep_group = pg_collection.ep
        self.num_experts = model.n_routed_experts
        experts, hidden, width = model.n_routed_experts, model.hidden_size, model.moe_intermediate_size
        weight = partial(ExpertWeight, config=config, bridge=bridge, pgs=pg_collection)
        self.linear_fc1 = weight((experts, width, hidden), init_method=config.init_method, name="up_proj")
        self.linear_fc2 = weight(
            (experts, hidden, width), init_method=config.output_layer_init_method, name="down_proj"
        )

    def forward(self, x_TH: Tensor, expert_ids_Tk: Tensor) -> Tensor:
        """Return rows_TkH."""
        if self.ep_group.size() == 1:
            return self._local_rows(x_TH, expert_ids_Tk)
        ids = expert_ids_Tk.flatten()
        per_rank = self.num_experts // self.ep_group.size()
        owners = ids // per_rank
        order = torch.argsort(owners, stable=True)
        send, receive = self._counts(owners)
        slots = expert_ids_Tk.shape[1]
        x_RH = all_to_all_rows(x_TH.index_select(0, order // slots), send, receive, self.ep_group)
        local_ids = all_to_all_rows((ids % per_rank)[order], send, receive, self.ep_group)
        rows_RH = self._local_rows(x_RH, local_ids.unsqueeze(1)).squeeze(1)
        # bits: each (token, slot) row comes back as it was computed; its owner combines in slot order.
        back = all_to_all_rows(rows_RH, receive, send, self.ep_group)
        return back.index_select(0, torch.argsort(order)).view(-1, slots, back.shape[1])

    def _local_rows(self, x_TH: Tensor, expert_ids_Tk: Tensor) -> Tensor:
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        operands = (*fc1.operands(self.kernels), *fc2.operands(self.kernels))
        return self.kernels.moe_experts(x_TH, expert_ids_Tk, *operands, fc1.weight, fc2.weight)

    def _counts(self, owners: Tensor) -> tuple[list[int], list[int]]:
        send = torch.bincount(owners, minlength=self.ep_group.size())
        receive = torch.empty_like(send)
        torch.distributed.all_to_all_single(receive, send, group=self.ep_group)
        return send.tolist(), receive.tolist()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Add the level `experts.` that Megatron's checkpoints have."""
        own = {}
        for name, module in self.named_children():
            for key, tensor in module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata).items():
                tensor.key = f"{prefix}experts.{key.removeprefix(prefix)}"
                own[key] = tensor
        return own


class SharedExpert(MegatronModule):
    """down(relu(up(x))^2), added to every token."""

    def __init__(self, *, config: TransformerConfig, bridge: Bridge, layer_number: int, tp_group: Any) -> None:
        super().__init__(config)
        self.kernels = bridge.kernels
        hidden, width = bridge.model.hidden_size, bridge.model.moe_shared_expert_intermediate_size
        linear = partial(Linear, config=config, bridge=bridge, tp_group=tp_group)
        names = {"linear_fc1": "shared_experts.up_proj", "linear_fc2": "shared_experts.down_proj"}
        formats = {part: bridge.format_of(layer_number, name) for part, name in names.items()}
        self.linear_fc1 = linear(
            hidden,
            width,
            init_method=config.init_method,
            name=names["linear_fc1"],
            split=0,
            format=formats["linear_fc1"],
        )
        self.linear_fc2 = linear(
            width,
            hidden,
            init_method=config.output_layer_init_method,
            name=names["linear_fc2"],
            split=-1,
            format=formats["linear_fc2"],
        )

    def forward(self, x_TH: Tensor) -> Tensor:
        """Return y_TH."""
        return self.linear_fc2.product(self.kernels.relu_squared(self.linear_fc1.product(x_TH)))


class MoeLayer(MegatronModule):
    """router -> experts -> combine in slot order -> scaling factor -> shared expert."""

    def __init__(
        self, *, config: TransformerConfig, pg_collection: Any, bridge: Bridge, layer_number: int, **unused: Any
    ) -> None:
        super().__init__(config)
        self.kernels = bridge.kernels
        self.layer_number = layer_number
        self.factor = bridge.model.routed_scaling_factor
        self.recompute = config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        self.router = Router(config=config, bridge=bridge, layer_number=layer_number)
        self.experts = Experts(config=config, bridge=bridge, pg_collection=pg_collection)
        self.shared_experts = SharedExpert(
            config=config, bridge=bridge, layer_number=layer_number, tp_group=pg_collection.tp
        )

    def forward(
        self, x_T1H: Tensor, /, *, padding_mask: None = None, expert_ids_Tk: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """Mix experts for packed tokens; the second value is the bias that Megatron expects."""
        if self.recompute and self.training:
            return tensor_parallel.checkpoint(partial(self._mix, expert_ids_Tk=expert_ids_Tk), False, x_T1H), None
        return self._mix(x_T1H, expert_ids_Tk), None

    def _mix(self, x_T1H: Tensor, expert_ids_Tk: Tensor | None) -> Tensor:
        x_TH = x_T1H.squeeze(1)
        weights_Tk, expert_ids_Tk = self.router(x_TH, expert_ids_Tk)
        rows_TkH = self.experts(x_TH, expert_ids_Tk)
        shared_TH = self.shared_experts(x_TH)
        return self.kernels.moe_combine(rows_TkH, weights_Tk, self.factor, shared_TH).unsqueeze(1)


class MoeTransformerLayer(TransformerLayer):
    """Megatron's layer around a MoeLayer; gives it its number and, for router replay, its expert ids."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, layer_number: int, *, bridge: Bridge,
        **keywords: Any,
    ) -> None:  # fmt: skip
        built = partial(MoeLayer, bridge=bridge, layer_number=layer_number)
        super().__init__(config, replace(submodules, mlp=built), layer_number, **keywords)
        self.moe_index = bridge.model.layer_types[: layer_number - 1].count("E")

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: None = None,
        padding_mask: None = None,
        packed_seq_params: PackedTokens | None = None,
    ) -> Tensor:
        replayed = packed_seq_params.expert_ids_TLk
        given = None if replayed is None else replayed[:, self.moe_index].contiguous()
        normed = self._forward_pre_mlp_layernorm(hidden_states)
        return self._forward_post_mlp(self.mlp(normed, expert_ids_Tk=given), hidden_states)


def moe_layers(model: nn.Module) -> Iterator[MoeLayer]:
    """Yield the MoE layers of a model, first layer first."""
    return (module for module in model.modules() if isinstance(module, MoeLayer))
