# SPDX-License-Identifier: Apache-2.0
"""Put a GRPO loop together: engine, policy, gate and collector around a built Megatron model."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.vllm_forward.rl.loop import GrpoLoop
from megatron.vllm_forward.rl.policy import MegatronPolicy, megatron_layout
from megatron.vllm_forward.rl.settings import GrpoSettings
from megatron.vllm_forward.rl.single_turn import SingleTurn, Task
from megatron.vllm_forward.rl.trajectory import Row
from vllm_forward_bridge.checkpoint import open_repository
from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.parity.certificate import RunIdentity, check_certificate, run_identity
from vllm_forward_bridge.parity.gate import Gate
from vllm_forward_bridge.rollout.embedded.engine import EmbeddedRollout
from vllm_forward_bridge.rollout.protocol import Rollout, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What `setup_model_and_optimizer` returns, and the arguments it was built from."""

    model: list[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    args: argparse.Namespace


def reference_engine(bridge: BridgeConfig, device: torch.device) -> EmbeddedRollout:
    """Start an engine on the repository's own weights, which a resumed run has not moved; for the KL term."""
    repository = open_repository(bridge.model.repository)
    tensors = {name: repository.read(name) for name in repository.names()}
    return EmbeddedRollout(repository.config, tensors, bridge, device)


def assemble_loop(
    trained: Trained,
    bridge: BridgeConfig,
    settings: GrpoSettings,
    task: Task,
    rollout: Rollout,
    *,
    device: torch.device,
    reference: Rollout | None = None,
) -> GrpoLoop:
    """Build the loop of a single-turn task; collective over the ranks.

    Args:
        trained: the model, with the hook that requantises on its optimizer.
        bridge: the run's configuration.
        settings: the GRPO choices.
        task: prompts and rewards.
        rollout: this rank's engine.
        device: where the model runs.
        reference: an engine that keeps the weights the run started from; needed for a KL term.
    """
    layout = megatron_layout(device)
    policy = MegatronPolicy(
        **vars(trained), sampling=settings.sampling, device=device, router_replay=bridge.gate.router_replay
    )
    return GrpoLoop(
        settings=settings,
        section=bridge.gate,
        policy=policy,
        rollout=rollout,
        collect=SingleTurn(task, rollout, settings),
        layout=layout,
        gate=Gate(on_difference=bridge.gate.on_difference, group=torch.distributed.group.WORLD, device=device),
        reference=reference_logprobs(reference, settings.sampling) if reference else None,
    )


def reference_logprobs(engine: Rollout, sampling: SamplingParams) -> Callable[[Row], Tensor]:
    """Return the function that scores a row with an engine whose weights never change."""

    def score(row: Row) -> Tensor:
        logprob_T = torch.zeros(len(row.tokens_T))
        scores = engine.score([trajectory.token_ids for trajectory in row.trajectories], sampling)
        for where, values in zip(row.slices(), scores, strict=True):
            logprob_T[where] = values.cpu()
        return logprob_T

    return score


def identity_of(
    loop: GrpoLoop, trained: Trained, bridge: BridgeConfig, model_config: ModelConfig
) -> RunIdentity:
    """Describe the run for a certificate."""
    args = trained.args
    degrees = {
        "data": loop.layout.data_size,
        "pipeline": args.pipeline_model_parallel_size,
        "expert": args.expert_model_parallel_size,
        "tensor": args.tensor_model_parallel_size,
    }
    return run_identity(
        bridge,
        model_config,
        kernels=loop.rollout.record(),
        layout=degrees,
        sampling=loop.settings.sampling,
        device=loop.layout.device,
    )


def require_certificate(bridge: BridgeConfig, identity: RunIdentity) -> None:
    """Refuse to reuse the rollout's logprobs unless the configuration is certified."""
    if bridge.gate.old_logprob == "reuse":
        check_certificate(bridge.gate.certificate, identity)
