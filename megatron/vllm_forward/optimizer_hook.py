# SPDX-License-Identifier: Apache-2.0
"""After each optimizer step the deployment bytes follow their masters, in place, on every replica alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron.vllm_forward import adam_states
from megatron.vllm_forward.deployed import sum_reports
from megatron.vllm_forward.moe import Router
from megatron.vllm_forward.versions import deployed_modules, mark_bytes_current, mark_masters_changed
from vllm_forward_bridge.quantization import RequantizeReport


def install(optimizer: MegatronOptimizer, model_chunks: Sequence[nn.Module]) -> None:
    """Wrap `optimizer.step` so that a step that changed weights ends with new bytes and a new version.

    Every replica derives the same bytes, because it derives them from the same gathered bf16 parameters. Megatron has
    no hook after a step; wrapping the outermost optimizer (chained or not) sees the whole step once.

    Args:
        optimizer: plain, distributed or chained.
        model_chunks: all chunks of this rank, as Megatron's builders return them.

    Raises:
        RuntimeError: it is installed already.
    """
    if "deployment_hook" in vars(optimizer):
        raise RuntimeError(
            "optimizer_hook.install was called twice for one optimizer; bytes would be derived twice: call it once"
        )
    adam_states.start(optimizer)
    hook = _Hook(optimizer, list(model_chunks))
    optimizer.deployment_hook = hook
    optimizer.step = hook.step
    optimizer.load_state_dict = hook.load_state_dict


def last_report(optimizer: MegatronOptimizer) -> RequantizeReport:
    """Return what the last step changed: blocks with new bytes, blocks that overflowed a fixed scale, on this rank."""
    return optimizer.deployment_hook.report


def refresh(model_chunks: Sequence[nn.Module]) -> RequantizeReport:
    """Open a new version and derive its bytes from the masters as they are now."""
    mark_masters_changed(model_chunks)
    with torch.no_grad():
        report = sum_reports(module.requantize_masters() for module in deployed_modules(model_chunks))
    mark_bytes_current(model_chunks)
    return report


class _Hook:
    def __init__(self, optimizer: MegatronOptimizer, model_chunks: list[nn.Module]) -> None:
        self.optimizer = optimizer
        self.inner_step = optimizer.step
        self.inner_load = optimizer.load_state_dict
        self.model_chunks = model_chunks
        self.report = RequantizeReport(0, 0)
        self.biases = self._biases()

    def step(self) -> tuple[bool, Any, Any]:
        """Step, and if anything changed bring the bytes up to date."""
        result = self.inner_step()
        self.report = RequantizeReport(0, 0)
        # Megatron moves the router's bias before the step; it stays moved when the step itself is skipped.
        if result[0] or self._biases_moved():
            _finish_parameter_gathers(self.model_chunks)
            self.report = refresh(self.model_chunks)
            self.biases = self._biases()
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the optimizer, with the step counts that Megatron loses."""
        self.inner_load(state_dict)
        adam_states.restore_counts(self.optimizer)

    def _biases(self) -> list[Tensor]:
        routers = (m for m in deployed_modules(self.model_chunks) if isinstance(m, Router))
        return [router.expert_bias.clone() for router in routers]

    def _biases_moved(self) -> bool:
        return any(not torch.equal(old, new) for old, new in zip(self.biases, self._biases(), strict=True))


def _finish_parameter_gathers(model_chunks: Sequence[nn.Module]) -> None:
    """Wait until every rank has the parameters of this step: an overlapped gather would still be on its way."""
    for chunk in model_chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
