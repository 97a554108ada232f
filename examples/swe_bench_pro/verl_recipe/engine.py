# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine on the bridged model. Importing this file puts it in the place of verl's own.

Every worker imports it through VERL_USE_EXTERNAL_MODULES. Taken over from verl: micro-batches, schedules, loss,
checkpoints in Megatron's format. Replaced: how the model and its optimizer are built, which tensors go to the rollout,
and the logprob of tokens, which is the rollout's op behind verl's switch for fused kernels. The rollout's side is
vLLM's plugin and `rollout.py`, both named in the job's configuration.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor
from verl.utils.megatron_utils import register_megatron_training_hooks
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from examples.swe_bench_pro.verl_recipe.announcement import announced
from examples.swe_bench_pro.verl_recipe.limits import check
from megatron.vllm_forward import build, launch, weights
from megatron.vllm_forward.output import Sampling
from megatron.vllm_forward.versions import unwrapped
from vllm_forward_bridge.checkpoint import open_repository
from vllm_forward_bridge.config import load

MODEL_TYPE, BACKEND = "language_model", "megatron"
CONFIG_VARIABLE = "VLLM_FORWARD_TOML"
"""verl's configuration has no place for a file of ours that reaches every worker; its environment does."""


class BridgedMegatronEngine(MegatronEngineWithLMHead):
    """The actor on the rollout's forward."""

    def _build_tf_config(self) -> None:
        """Refuse what the bridged forward lacks; the model brings its own configuration, so no bridge package runs."""
        check(self.engine_config, self.optimizer_config, self.model_config)
        self.is_value_model = self.vanilla_bridge = self.share_embeddings_and_output_weights = False
        self.bridge = self.provider = self.peft_cls = self.tf_config = None
        self.param_dtype = self.dtype = torch.bfloat16

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
        self.tf_config = get_model_config(self._trainer.model[0])
        # verl's micro-batches differ in length, so pipeline stages must tell each other the shapes.
        self.tf_config.variable_seq_lengths = True
        return self._trainer.model

    def _maybe_enable_fused_kernels(self) -> None:
        # verl's own patch takes GPT models only, and computes the logprob by another kernel.
        for chunk in self.module:
            model = unwrapped(chunk)
            model.forward = scored(model.forward)

    def _build_optimizer(self) -> Any:
        # Megatron's own loop would set these; without them no gradient is summed over ranks.
        register_megatron_training_hooks(self.module, self._trainer.optimizer)
        return self._trainer.optimizer

    def _build_lr_scheduler(self) -> Any:
        return self._trainer.scheduler

    def get_per_tensor_param(self, base_sync_done: bool = False, **_: Any) -> tuple[Iterable[tuple[str, Tensor]], None]:
        """Return the whole model in deployment bytes, then their digest; there are no adapters."""
        return announced(weights.deployment_tensors(self._trainer.model)), None


def scored(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bridged model's forward in the form of verl's fused kernels.

    It takes one temperature for all tokens beside the labels, and its result on the last stage has `log_probs`, fp32
    [b, s], and `entropy` without a gradient.
    """

    def score(*, labels: Tensor, temperature: float, **keywords: Any) -> Any:
        ones = torch.ones(labels.shape, dtype=torch.float32, device=labels.device)
        sampling = Sampling(ones * temperature, ones, torch.zeros_like(labels, dtype=torch.int32))
        found = forward(labels=labels, sampling=sampling, with_entropy=True, **keywords)
        if isinstance(found, Tensor):  # hidden states of a stage before the last
            return found
        loss, entropy = found
        return SimpleNamespace(log_probs=-loss, entropy=entropy)

    return score


def replace_verls_engine() -> None:
    """Register the bridged engine in the place of verl's; verl asserts that a Megatron strategy has this very name.

    Raises:
        RuntimeError: verl would still choose another class.
    """
    verls = EngineRegistry._engines.get(MODEL_TYPE, {}).get(BACKEND, {})
    if verls.pop("cuda", None) is not MegatronEngineWithLMHead:
        raise RuntimeError(
            f"verl's registry has {verls} for ({MODEL_TYPE}, {BACKEND}) and no MegatronEngineWithLMHead for cuda to "
            "replace; the recipe is for verl 0.9.1: install that version, and import no other engine"
        )
    EngineRegistry.register(model_type=MODEL_TYPE, backend=BACKEND)(BridgedMegatronEngine)
    chosen = EngineRegistry.get_engine_cls(MODEL_TYPE, BACKEND)
    if chosen is not BridgedMegatronEngine:
        raise RuntimeError(
            f"verl chooses {chosen} for ({MODEL_TYPE}, {BACKEND}), not the bridged engine: a device or vendor of its "
            "own is registered, or VERL_ENGINE_DEVICE names one; only cuda is accepted: unset it"
        )


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
        "adam-beta1": optimizer.betas[0],
        "adam-beta2": optimizer.betas[1],
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


replace_verls_engine()
