# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine on the bridged model. Importing this file registers it as strategy `megatron_bridged`.

Every worker imports it through VERL_USE_EXTERNAL_MODULES. Taken over from verl: micro-batches, schedules, loss,
offloading. Replaced: how the model and its optimizer are built, which tensors go to the rollout, and the logprob of
tokens, which is the rollout's op. The rollout's side is vLLM's plugin and `rollout.py`, both named in the job's
configuration.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from examples.swe_bench_pro.verl_recipe.announcement import announced
from megatron.vllm_forward import build, launch, weights
from vllm_forward_bridge.checkpoint import open_repository
from vllm_forward_bridge.config import load
from vllm_forward_bridge.ops.logprob import logprob

STRATEGY = "megatron_bridged"
CONFIG_VARIABLE = "VLLM_FORWARD_TOML"
"""verl's configuration has no place for a file of ours that reaches every worker; its environment does."""


@EngineRegistry.register(model_type="language_model", backend=STRATEGY)
class BridgedMegatronEngine(MegatronEngineWithLMHead):
    """The actor on the rollout's forward."""

    def _build_megatron_module(self) -> list[torch.nn.Module]:
        path = os.environ.get(CONFIG_VARIABLE)
        if not path:
            raise ValueError(
                f"{CONFIG_VARIABLE} is not set; name the bridge's TOML file in the job's runtime environment"
            )
        config = load(path)
        # The session stays open for the life of the worker: recompute and the optimizer come back to what it replaces.
        self._session = contextlib.ExitStack()
        self._session.enter_context(launch.session())
        self._trainer = build.build(config, megatron_flags(self.engine_config, self.optimizer_config))
        weights.load_deployment(self._trainer.model, open_repository(config.model.repository), self._trainer.optimizer)
        return self._trainer.model

    def _build_optimizer(self) -> Any:
        return self._trainer.optimizer

    def _build_lr_scheduler(self) -> Any:
        return self._trainer.scheduler

    def get_per_tensor_param(self, base_sync_done: bool = False, **_: Any) -> tuple[Iterable[tuple[str, Tensor]], None]:
        """Return the whole model in deployment bytes, then their digest; there are no adapters."""
        return announced(weights.deployment_tensors(self._trainer.model)), None

    def _lm_head_logits_processor(
        self,
        logits: Tensor,
        label: Tensor,
        temperature: Tensor,
        *,
        calculate_sum_pi_squared: bool,
        calculate_entropy: bool,
        distillation_use_topk: bool,
        distillation_only: bool,
        logits_processor_func: Callable,
        batch: Any,
        data_format: str,
    ) -> dict[str, Tensor]:
        if calculate_sum_pi_squared or distillation_use_topk or distillation_only:
            raise ValueError("sum_pi_squared and distillation are not part of the bridged logprob; switch them off")
        return token_numbers(logits, label, temperature, with_entropy=calculate_entropy)


def token_numbers(logits: Tensor, label: Tensor, temperature: Tensor, *, with_entropy: bool) -> dict[str, Tensor]:
    """Return `log_probs` by the rollout's op, and `entropy` of the same distribution in plain torch.

    Args:
        logits: bf16 [..., V].
        label: int64 [...]; verl pads with ids of the vocabulary.
        temperature: fp32 [...]; verl gives padding 0, which stands for no division here too.
        with_entropy: whether the entropy is wanted.
    """
    rows_TV, temperature_T = logits.reshape(-1, logits.shape[-1]), temperature.reshape(-1).float()
    ones_T = torch.ones_like(temperature_T)
    off_T = torch.zeros(len(rows_TV), dtype=torch.int32, device=logits.device)
    found = {"log_probs": logprob(rows_TV, label.reshape(-1), temperature_T, ones_T, off_T).reshape(label.shape)}
    if with_entropy:
        divided = rows_TV.float() / torch.where(temperature_T > 0, temperature_T, 1.0)[:, None]
        log_p = divided.log_softmax(-1)
        found["entropy"] = -(log_p.exp() * log_p).sum(-1).reshape(label.shape)
    return found


def megatron_flags(engine: Any, optimizer: Any) -> list[str]:
    """Translate verl's engine and optimizer configuration into the Megatron flags that the build reads."""
    values = {
        "tensor-model-parallel-size": engine.tensor_model_parallel_size,
        "pipeline-model-parallel-size": engine.pipeline_model_parallel_size,
        "expert-model-parallel-size": engine.expert_model_parallel_size,
        # Megatron's default is the tensor-parallel size, and the bridge splits no expert.
        "expert-tensor-parallel-size": 1,
        "context-parallel-size": engine.context_parallel_size,
        "lr": optimizer.lr,
        "weight-decay": optimizer.weight_decay,
        "clip-grad": optimizer.clip_grad,
        "lr-decay-style": "constant",
        "micro-batch-size": 1,
        "seq-length": engine.override_transformer_config.get("seq_length", 131072),
        "train-iters": 1,
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
    }
    values["max-position-embeddings"] = values["seq-length"]
    switches = ["use-distributed-optimizer"] if engine.use_distributed_optimizer else []
    if engine.tensor_model_parallel_size > 1:
        switches.append("sequence-parallel")
    return [part for name, value in values.items() for part in (f"--{name}", str(value))] + [f"--{s}" for s in switches]
