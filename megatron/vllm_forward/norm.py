# SPDX-License-Identifier: Apache-2.0
"""RMS norms with Megatron's constructors: the one before a mixer, and the gated one inside the Mamba mixer."""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.deployed import Parameters, empty_parameter
from megatron.vllm_forward.sharding import Shard


class RmsNorm(Parameters):
    """y = rms_norm(x): statistics over the hidden dim in fp32, one cast."""

    def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float, bridge: Bridge) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = bridge.kernels
        self.weight = empty_parameter(hidden_size, dtype=config.params_dtype)
        torch.nn.init.ones_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of x; other dims are rows."""
        return self.kernels.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


class GatedRmsNorm(Parameters):
    """The Mamba mixer's norm: gate first, statistics within a group, cast, then the weight.

    A tensor-parallel rank has whole groups.
    """

    def __init__(
        self, *, config: TransformerConfig, size: int, group_size: int, eps: float, bridge: Bridge, tp_group: Any
    ) -> None:
        super().__init__()
        self.shard = Shard(tp_group, 0) if tp_group.size() > 1 else None
        self.eps = eps
        self.group_size = group_size
        self.kernels = bridge.kernels
        self.weight = empty_parameter(size // tp_group.size(), dtype=config.params_dtype)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        torch.nn.init.ones_(self.weight)

    def forward(self, y_TD: Tensor, gate_TD: Tensor) -> Tensor:
        """Return bf16(bf16(normalised y * silu(gate)) * weight)."""
        return self.kernels.gated_rms_norm(y_TD, gate_TD, self.weight, self.group_size, self.eps)
