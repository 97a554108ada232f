# SPDX-License-Identifier: Apache-2.0
"""The worker of a bridged engine: strict start, the contract's sampler, a readable record, weight updates."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_forward_bridge.ops import ssd_cuda
from vllm_forward_bridge.vllm_plugin.sampler import BridgeSampler
from vllm_forward_bridge.vllm_plugin.strict import page_problem, refuse_unproven
from vllm_forward_bridge.vllm_plugin.switch import package_digest

logger = init_logger(__name__)


class BridgeWorker(Worker):
    """vLLM's GPU worker; the methods named `bridge_*` are for `collective_rpc`."""

    def init_device(self) -> None:
        """Refuse an unproven engine before anything is built, then put the contract's sampler in."""
        refuse_unproven(self.vllm_config)
        super().init_device()
        self.model_runner.sampler = BridgeSampler(logprobs_mode=self.vllm_config.model_config.logprobs_mode)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the caches; refuse attention pages that the attention kernel would read in another way."""
        problem = page_problem(self.vllm_config.cache_config.block_size)
        if problem:
            raise ValueError(problem)
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Pin kernels and log which one serves each op; vLLM's warm-up would compile kernels that are not used here."""
        # bits: before anything runs a scan, and before the record is read back.
        ssd_cuda.pin_kernels()
        logger.info("bridged forward: %s", "; ".join(f"{op}: {kernel}" for op, kernel in self.bridge_record().items()))
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def bridge_record(self) -> dict[str, str]:
        """Name the kernel that serves each op in this process, read back from it."""
        model = self.model_runner.get_model()
        return {
            "package": package_digest(),
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "sampler": f"{type(self.model_runner.sampler).__module__}.{type(self.model_runner.sampler).__qualname__}",
            **model.kernel_record(),
        }

    def bridge_version(self) -> int:
        """Return the version of the weights, or raise if an update was interrupted."""
        return self.model_runner.get_model().weights_version()

    def bridge_update(self, tensors: Mapping[str, Tensor], version: int, digest: str) -> None:
        """Replace all weights in place, or none, by vLLM's reload; see `BridgedNemotronH.update_weights`."""
        with self.model_runner.get_model().announced(version=version, digest=digest):
            self.reload_weights(weights_iterator=iter(tensors.items()))
