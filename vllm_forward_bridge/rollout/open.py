# SPDX-License-Identifier: Apache-2.0
"""The engine that a configuration names, allocated without weights: `update_weights` must come first."""

import importlib
from functools import partial
from typing import Any

import torch

from vllm_forward_bridge.checkpoint.tensor_table import ZeroTensors
from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.rollout.embedded.engine import EmbeddedRollout
from vllm_forward_bridge.rollout.process import ProcessRollout
from vllm_forward_bridge.rollout.protocol import NO_WEIGHTS, Rollout

GIB = 1 << 30


def open_engine(
    bridge: BridgeConfig,
    model_config: ModelConfig,
    device: torch.device,
    *,
    max_model_len: int,
    kv_cache_gib: float,
    **vllm_arguments: Any,
) -> Rollout:
    """Return an engine of version `NO_WEIGHTS`, in this process or in its own as the configuration says.

    Args:
        bridge: `rollout` chooses engine and process.
        model_config: geometry.
        device: where the embedded engine computes; vLLM takes the first visible GPU.
        max_model_len: longest sequence; the embedded engine is bounded by its pages alone.
        kv_cache_gib: memory of vLLM's caches.
        vllm_arguments: more of vLLM's engine arguments.

    Raises:
        ValueError: the trainer is on another GPU than the one that vLLM would take.
    """
    if bridge.rollout.engine == "vllm" and device.index and not bridge.rollout.visible_devices:
        raise ValueError(
            f"the trainer is on {device} and vLLM takes the first visible GPU, which another rank may have; start each "
            "rank with a CUDA_VISIBLE_DEVICES of its own, or name the engine's in [rollout] visible_devices"
        )
    if bridge.rollout.engine == "embedded":
        make = partial(_embedded, bridge, model_config, device)
    else:
        make = partial(_vllm, bridge, max_model_len=max_model_len, kv_cache_gib=kv_cache_gib, **vllm_arguments)
    if not bridge.rollout.own_process:
        return make()
    return ProcessRollout(make, visible_devices=bridge.rollout.visible_devices)


def _embedded(bridge: BridgeConfig, model_config: ModelConfig, device: torch.device) -> Rollout:
    return EmbeddedRollout(model_config, ZeroTensors(model_config), bridge, device, version=NO_WEIGHTS)


def _vllm(bridge: BridgeConfig, *, kv_cache_gib: float, **arguments: Any) -> Rollout:
    # Imported by name: vLLM is an optional package, and importing it costs half a minute.
    engine = importlib.import_module("vllm_forward_bridge.rollout.vllm").VllmRollout
    return engine(bridge, kv_cache_bytes=int(kv_cache_gib * GIB), empty=True, **arguments)
