# SPDX-License-Identifier: Apache-2.0
"""The rollout by vLLM's own engine with the bridged forward, in this process, weights handed over in memory."""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from vllm import SamplingParams as VllmSamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_forward_bridge import settings
from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.rollout.broken import Broken
from vllm_forward_bridge.rollout.protocol import Completion, Phase, Request, SamplingParams
from vllm_forward_bridge.vllm_plugin.switch import KEY, SEED, complete, package_digest, switch_value

_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
"""vLLM reads these when it builds an engine: the engine lives in this process, with the model runner that is proven."""
_MEMORY_IS_GIVEN = {"gpu_memory_utilization": 0.01}
"""vLLM refuses to start where less than this share of the GPU is free, although `kv_cache_bytes` alone is used."""


@dataclass
class _Progress:
    """What a request has produced so far."""

    request: Request
    internal_id: str
    """vLLM's own name of the request."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    phases: list[Phase] = field(default_factory=list)


class VllmRollout:
    """A `protocol.Rollout` on a GPU.

    Args:
        bridge: `model.repository` is the checkpoint; `rollout` gives the limits.
        max_model_len: longest sequence.
        kv_cache_bytes: memory for KV pages and Mamba states together.
        empty: allocate weights without reading them; `update_weights` must come first.
        engine_arguments: more of vLLM's engine arguments; those of the contract cannot be changed.
    """

    def __init__(
        self,
        bridge: BridgeConfig,
        *,
        max_model_len: int,
        kv_cache_bytes: int,
        empty: bool = False,
        **engine_arguments: Any,
    ) -> None:
        os.environ.update(_IN_PROCESS)
        settings.apply()
        arguments = EngineArgs(
            model=bridge.model.repository,
            skip_tokenizer_init=True,
            load_format="dummy" if empty else "safetensors",
            max_model_len=max_model_len,
            max_num_seqs=bridge.rollout.max_num_seqs,
            max_num_batched_tokens=bridge.rollout.token_budget,
            kv_cache_memory_bytes=kv_cache_bytes,
            disable_log_stats=True,
            additional_config={KEY: switch_value()},
            **_MEMORY_IS_GIVEN | engine_arguments,
        )
        complete(arguments)
        with _kept_random_states():
            self._engine = LLMEngine.from_engine_args(arguments)
        self._progress: dict[str, _Progress] = {}
        self._aborted: list[Completion] = []
        self._broken = Broken()
        self._check_record()

    @property
    def version(self) -> int:
        """Return the version of the weights that every worker samples with."""
        versions = set(self._engine.collective_rpc("bridge_version"))
        if len(versions) != 1:
            raise RuntimeError(
                f"workers have weight versions {sorted(versions)}; one is needed: send a whole version again"
            )
        return versions.pop()

    def add(self, request: Request) -> None:
        """Queue a request; see `protocol.Rollout.add`."""
        if request.request_id in self._progress or any(c.request_id == request.request_id for c in self._aborted):
            raise ValueError(
                f"request {request.request_id!r} is unfinished; completions are matched by id: give it another"
            )
        internal_id = self._engine.add_request(
            request.request_id, {"prompt_token_ids": list(request.prompt_ids)}, _vllm_params(request.sampling)
        )
        self._progress[request.request_id] = _Progress(request, internal_id)

    def abort(self, request_id: str) -> None:
        """End a request and free its cache; see `protocol.Rollout.abort`."""
        progress = self._progress.pop(request_id)
        self._engine.abort_request([request_id])
        self._aborted.append(self._completion(progress, "aborted"))

    def has_unfinished(self) -> bool:
        """Tell whether a step would do or deliver anything."""
        return bool(self._progress or self._aborted)

    def step(self) -> list[Completion]:
        """Run one step of vLLM's engine and return what finished."""
        finished, self._aborted = self._aborted, []
        if not self._progress:
            return finished
        decoding = self._decoding()
        for output in self._outputs():
            progress = self._progress.get(output.request_id)
            if progress is None:
                continue
            sampled = output.outputs[0]
            new = len(sampled.token_ids) - len(progress.token_ids)
            progress.phases += ["decode" if progress.internal_id in decoding else "prefill"] * new
            progress.token_ids = tuple(sampled.token_ids)
            progress.logprobs = tuple(
                entry[token].logprob for entry, token in zip(sampled.logprobs, sampled.token_ids, strict=True)
            )
            if output.finished:
                reason = {"stop": "stop", "length": "length"}.get(sampled.finish_reason, "aborted")
                finished.append(self._completion(self._progress.pop(output.request_id), reason))
        return finished

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their end; completions come in the order of `requests`."""
        requests = list(requests)
        self._require_idle("generate")
        with self._all_or_none([request.request_id for request in requests]):
            for request in requests:
                self.add(request)
        done: dict[str, Completion] = {}
        while self.has_unfinished():
            done.update((completion.request_id, completion) for completion in self.step())
        return [done[request.request_id] for request in requests]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int, digest: str) -> None:
        """Replace all weights in every worker, or none, and drop every cache."""
        self._require_idle("update_weights")
        self._engine.collective_rpc("bridge_update", args=(dict(named_tensors), version, digest))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not drop its prefix cache after the update; old keys could be read: make a new engine"
            )
        if self.version != version:
            raise RuntimeError(f"workers report version {self.version} after an update to {version}: make a new engine")

    def record(self) -> dict[str, str]:
        """Name the kernel that serves each op, as every worker reports it."""
        records = self._engine.collective_rpc("bridge_record")
        if any(record != records[0] for record in records):
            raise RuntimeError(
                f"workers run different kernels: {records}; one set is needed: install one package everywhere"
            )
        return records[0]

    def score(self, sequences: Sequence[tuple[int, ...]], sampling: SamplingParams) -> list[Tensor]:
        """Score given tokens by prefill, through vLLM's prompt logprobs.

        Raises:
            ValueError: a temperature, top-p or top-k; vLLM's prompt logprobs know none.
        """
        if (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, 0):
            raise ValueError(
                f"{sampling} has a temperature, top-p or top-k; vLLM scores prompts at temperature 1 without filters: "
                "score with the trainer"
            )
        self._require_idle("score")
        params = _vllm_params(SamplingParams(max_new_tokens=1), prompt_logprobs=0)
        with self._all_or_none([str(number) for number in range(len(sequences))]):
            for number, sequence in enumerate(sequences):
                self._engine.add_request(str(number), {"prompt_token_ids": list(sequence)}, params)
        scores: dict[int, Tensor] = {}
        while self._engine.has_unfinished_requests():
            for output in self._outputs():
                pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                scores[int(output.request_id)] = torch.tensor([entry[token].logprob for token, entry in pairs])
        return [scores[number] for number in range(len(sequences))]

    def _outputs(self) -> list[Any]:
        with self._broken.step():
            return self._engine.step()

    @contextmanager
    def _all_or_none(self, request_ids: list[str]) -> Iterator[None]:
        """Take every request back when one is refused: their completions belong to a call that has failed."""
        try:
            yield
        except Exception:
            self._engine.abort_request(request_ids)
            self._progress.clear()
            raise

    def _check_record(self) -> None:
        found = self.record()["package"]
        if found != package_digest():
            raise RuntimeError(
                f"workers run package {found}, this process {package_digest()}: install one package everywhere"
            )

    def _decoding(self) -> set[str]:
        """Name the requests whose next logits are computed from one new row behind a computed prefix."""
        running = self._engine.engine_core.engine_core.scheduler.running
        return {
            request.request_id
            for request in running
            if request.num_computed_tokens == request.num_tokens - 1 and request.num_output_tokens > 0
        }

    def _completion(self, progress: _Progress, reason: str) -> Completion:
        return Completion(
            request_id=progress.request.request_id,
            prompt_ids=progress.request.prompt_ids,
            token_ids=progress.token_ids,
            logprobs=progress.logprobs,
            phases=tuple(progress.phases),
            finish_reason=reason,
            weight_version=self.version,
        )

    def _require_idle(self, call: str) -> None:
        if self.has_unfinished():
            raise RuntimeError(f"{call} was called with unfinished requests; finish or abort them first")


@contextmanager
def _kept_random_states() -> Iterator[None]:
    """Give a trainer in this process its random states back: vLLM seeds Python, NumPy and torch."""
    python, array = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        yield
    random.setstate(python)
    numpy.random.set_state(array)


def _vllm_params(sampling: SamplingParams, **more: Any) -> VllmSamplingParams:
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        extra_args={SEED: sampling.seed},
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        **more,
    )
