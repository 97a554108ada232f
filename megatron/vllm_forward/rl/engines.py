# SPDX-License-Identifier: Apache-2.0
"""Start the rollout engine that the configuration names, on the weights that the trainer has."""

from typing import Any

import torch

from megatron.vllm_forward import versions, weights
from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.rollout.open import open_engine
from vllm_forward_bridge.rollout.protocol import Rollout


def open_rollout(
    model: list[torch.nn.Module], bridge: BridgeConfig, model_config: ModelConfig, device: torch.device, **limits: Any
) -> Rollout:
    """Return an engine with the deployment bytes of `model`; collective over the ranks.

    Args:
        model: chunks of this rank.
        bridge: `rollout` chooses the engine and its process.
        model_config: geometry.
        device: where the model is.
        limits: the further arguments of `open_engine`.
    """
    engine = open_engine(bridge, model_config, device, **limits)
    version, digest = versions.deployment_version(model), weights.deployment_digest(model)
    engine.update_weights(weights.deployment_tensors(model), version=version, digest=digest)
    return engine
