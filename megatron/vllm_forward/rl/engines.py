# SPDX-License-Identifier: Apache-2.0
"""Start the rollout engine that the configuration names, on the weights that the trainer has."""

import importlib
from typing import Any

import torch

from megatron.vllm_forward import versions, weights
from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.rollout.embedded.engine import EmbeddedRollout
from vllm_forward_bridge.rollout.protocol import Rollout

GIB = 1 << 30


def open_rollout(
    model: list[torch.nn.Module],
    bridge: BridgeConfig,
    model_config: ModelConfig,
    device: torch.device,
    *,
    max_model_len: int,
    kv_cache_gib: float,
    **vllm_arguments: Any,
) -> Rollout:
    """Return an engine in this process with the deployment bytes of `model`; collective over the ranks.

    Args:
        model: chunks of this rank.
        bridge: `rollout.engine` chooses.
        model_config: geometry.
        device: where the model is.
        max_model_len: longest sequence; the embedded engine is bounded by its pages alone.
        kv_cache_gib: memory of vLLM's caches.
        vllm_arguments: more of vLLM's engine arguments.
    """
    version = versions.deployment_version(model)
    if bridge.rollout.engine == "embedded":
        tensors = {name: tensor.detach().clone() for name, tensor in weights.deployment_tensors(model)}
        return EmbeddedRollout(model_config, tensors, bridge, device, version=version)
    # Imported by name: vLLM is an optional package, and importing it costs half a minute.
    engine = importlib.import_module("vllm_forward_bridge.rollout.vllm").VllmRollout(
        bridge, max_model_len=max_model_len, kv_cache_bytes=int(kv_cache_gib * GIB), empty=True, **vllm_arguments
    )
    if engine.version != version:
        digest = weights.deployment_digest(model)
        engine.update_weights(weights.deployment_tensors(model), version=version, digest=digest)
    return engine
