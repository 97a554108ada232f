# SPDX-License-Identifier: Apache-2.0
"""The embedded rollout engine: continuous batching over the contract's ops, on any machine, without vLLM."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.parity.recorder import OpRecorder
from vllm_forward_bridge.quantization import bytes_digest
from vllm_forward_bridge.rollout.broken import Broken
from vllm_forward_bridge.rollout.embedded.kernel_record import kernel_record
from vllm_forward_bridge.rollout.embedded.model import EmbeddedModel
from vllm_forward_bridge.rollout.embedded.sampler import LogitsRow, sample_rows
from vllm_forward_bridge.rollout.embedded.scheduler import Chunk, Scheduler, Sequence
from vllm_forward_bridge.rollout.embedded.weights import build_weights, model_problems
from vllm_forward_bridge.rollout.protocol import Completion, FinishReason, Phase, Request, SamplingParams


class _Progress:
    """What a request has produced so far."""

    def __init__(self, request: Request, sequence: Sequence) -> None:
        self.request = request
        self.sequence = sequence
        self.logprobs: list[float] = []
        self.phases: list[Phase] = []
        self.expert_ids: list[Tensor] = []
        """Rows [positions, MoE layers, k], each position once, in order."""
        self.finish_reason: FinishReason | None = None

    def completion(self, version: int) -> Completion:
        sequence = self.sequence
        return Completion(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(sequence.tokens[sequence.prompt_length :]),
            logprobs=tuple(self.logprobs),
            phases=tuple(self.phases),
            finish_reason=self.finish_reason,
            weight_version=version,
            expert_ids=torch.cat(self.expert_ids) if self.expert_ids else None,
        )


class EmbeddedRollout:
    """A `protocol.Rollout` in this process.

    Args:
        config: geometry and quantisation map.
        tensors: the whole model in deployment bytes, by Hugging Face name; copied.
        bridge: limits of the batch and the cache, split of the attention; `gate.router_replay` turns the recording of
            expert ids on.
        device: where it runs.
        version: version of `tensors`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        bridge: BridgeConfig,
        device: str | torch.device = "cpu",
        *,
        version: int = 0,
    ) -> None:
        self.config = config
        self.limits = bridge.rollout
        self.records_experts = bridge.gate.router_replay
        self.device = torch.device(device)
        self._split_tokens = bridge.forward.attention_split_tokens
        self._version = version
        self._progress: dict[str, _Progress] = {}
        self._aborted: list[_Progress] = []
        self._broken = Broken()
        self._recorder: tuple[OpRecorder, Mapping[str, int]] | None = None
        self._install(tensors)

    @property
    def version(self) -> int:
        """Return the version of the weights that it samples with."""
        return self._version

    def add(self, request: Request) -> None:
        """Queue a request; see `protocol.Rollout.add`."""
        problems = self._token_problems(request.prompt_ids)
        in_use = [*self._progress, *(progress.request.request_id for progress in self._aborted)]
        if request.request_id in in_use:
            problems.append("its id belongs to an unfinished request; completions are matched by id: give it another")
        sequence = Sequence(request.request_id, list(request.prompt_ids), len(request.prompt_ids), request.sampling)
        problems += self._size_problems(sequence)
        if problems:
            raise ValueError(f"request {request.request_id!r} cannot be served:\n  - " + "\n  - ".join(problems))
        self._progress[request.request_id] = _Progress(request, sequence)
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request and free its cache; see `protocol.Rollout.abort`."""
        if request_id not in self._progress:
            raise KeyError(
                f"no unfinished request is called {request_id!r}; one that was added and has not ended can be aborted: "
                "look at the completions of the last steps"
            )
        progress = self._progress.pop(request_id)
        self.scheduler.remove(progress.sequence)
        progress.finish_reason = "aborted"
        self._aborted.append(progress)

    def has_unfinished(self) -> bool:
        """Tell whether a step would do or deliver anything."""
        return bool(self._progress or self._aborted)

    def step(self) -> list[Completion]:
        """Run one forward over a mixed batch and return what finished."""
        finished, self._aborted = self._aborted, []
        with self._broken.step():
            finished += self._advance()
        return [progress.completion(self._version) for progress in finished]

    def _advance(self) -> list[_Progress]:
        finished: list[_Progress] = []
        chunks = self.scheduler.schedule()
        if not chunks:
            return finished
        sampled = [chunk for chunk in chunks if chunk.samples]
        tokens, logprob_R = self._forward(chunks, [(chunk, chunk.end) for chunk in sampled])
        for chunk, token, logprob in zip(sampled, tokens, logprob_R.tolist(), strict=True):
            progress = self._progress[chunk.sequence.request_id]
            self._append(progress, token, logprob, "decode" if chunk.is_decode else "prefill")
            if progress.finish_reason:
                self.scheduler.remove(progress.sequence)
                finished.append(self._progress.pop(progress.request.request_id))
        return finished

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their end; completions come in the order of `requests`."""
        requests = list(requests)
        self._require_idle("generate")
        try:
            for request in requests:
                self.add(request)
        except ValueError:
            self._forget_all()
            raise
        done = {}
        while self.has_unfinished():
            done |= {completion.request_id: completion for completion in self.step()}
        return [done[request.request_id] for request in requests]

    def score(self, sequences: Iterable[tuple[int, ...]], sampling: SamplingParams) -> list[Tensor]:
        """Compute the logprobs of given tokens by prefill; see `protocol.Rollout.score`."""
        sequences = list(sequences)
        self._require_idle("score")
        queue = [Sequence(str(n), list(ids), len(ids), sampling, scored=True) for n, ids in enumerate(sequences)]
        problems = []
        for sequence in queue:
            found = self._token_problems(sequence.tokens) + self._size_problems(sequence)
            problems += [f"sequence {sequence.request_id}: {problem}" for problem in found]
        if problems:
            raise ValueError("these sequences cannot be scored:\n  - " + "\n  - ".join(problems))
        scores = {sequence: torch.empty(max(len(sequence.tokens) - 1, 0)) for sequence in queue}
        for sequence in queue:
            if sequence.num_wanted > 0:
                self.scheduler.add(sequence)
        while not self.scheduler.is_idle:
            with self._broken.step():
                chunks = self.scheduler.schedule()
                rows = [(chunk, position + 1) for chunk in chunks for position in range(chunk.start, chunk.end)]
                _, logprob_R = self._forward(chunks, rows)
            for chunk, logprobs in zip(chunks, logprob_R.cpu().split([chunk.count for chunk in chunks]), strict=True):
                scores[chunk.sequence][chunk.start : chunk.end] = logprobs
                if not chunk.sequence.num_wanted:
                    self.scheduler.remove(chunk.sequence)
        return [scores[sequence] for sequence in queue]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int, digest: str) -> None:
        """Replace all weights or none; see `protocol.Rollout.update_weights`."""
        self._require_idle("update_weights")
        problems, tensors = [], {}
        for name, tensor in named_tensors:
            if name in tensors:
                problems.append(f"{name} comes twice; each tensor must come once: drop one of them")
            # A copy, because the sender may hand out a buffer that it fills again for the next tensor.
            tensors[name] = tensor.detach().clone()
        if version <= self._version:
            problems.append(f"version {version} is not greater than the present {self._version}; send newer weights")
        found = bytes_digest(tensors.items())
        if found != digest:
            problems.append(f"the tensors have digest {found}, but {digest} was announced; send what was digested")
        problems += model_problems(self.config, tensors)
        if problems:
            raise ValueError(f"weights of version {version} are refused:\n  - " + "\n  - ".join(problems))
        self._install(tensors)
        self._version = version

    def record(self) -> dict[str, str]:
        """Name the kernel that serves each op in this process."""
        return kernel_record(self.device)

    def record_ops(self, recorder: OpRecorder, samples: Mapping[str, int]) -> None:
        """Record the ops of every later forward.

        Args:
            recorder: where they go; save it when the requests have ended.
            samples: sample number of each request to record; "0", "1", ... name the sequences of `score`.
        """
        self._recorder = recorder, samples

    def _install(self, tensors: Mapping[str, Tensor]) -> None:
        """Build weights, caches and scheduler anew; nothing is assigned before all of it has succeeded."""
        limits = self.limits
        weights = build_weights(self.config, tensors, self.device)
        self.model = EmbeddedModel(
            self.config, weights, limits, split_tokens=self._split_tokens, records_experts=self.records_experts
        )
        self.scheduler = Scheduler(
            max_num_seqs=limits.max_num_seqs,
            token_budget=limits.token_budget,
            num_pages=limits.num_kv_pages,
            page_tokens=limits.kv_page_tokens,
        )

    @torch.inference_mode()
    def _forward(self, chunks: list[Chunk], wanted: list[tuple[Chunk, int]]) -> tuple[list[int], Tensor]:
        """Run the chunks; give tokens and logprobs at the wanted (chunk, position of the token) rows."""
        first_row, total = {}, 0
        for chunk in chunks:
            first_row[chunk.sequence], total = total - chunk.start, total + chunk.count
        rows = [first_row[chunk.sequence] + position - 1 for chunk, position in wanted]
        row_R = torch.tensor(rows, device=self.device)
        with self._recorded(chunks) as narrow:
            hidden_TH, expert_ids_TLk = self.model.forward(chunks)
            for chunk in chunks:
                chunk.sequence.num_computed = chunk.end
            if expert_ids_TLk is not None:
                self._keep_experts(chunks, expert_ids_TLk)
            if not wanted:
                return [], hidden_TH.new_empty(0, dtype=torch.float32)
            narrow(row_R)
            logits_RV = self.model.logits(hidden_TH[row_R])
            return sample_rows(logits_RV, [self._logits_row(chunk.sequence, position) for chunk, position in wanted])

    @contextlib.contextmanager
    def _recorded(self, chunks: list[Chunk]) -> Iterator[Callable[[Tensor], None]]:
        """Record this forward if asked to; give the function that says which rows go on to the output layer."""
        if self._recorder is None:
            yield lambda row_R: None
            return
        recorder, samples = self._recorder
        sample_T = [samples.get(chunk.sequence.request_id, -1) for chunk in chunks for _ in range(chunk.count)]
        position_T = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        with recorder.rows(torch.tensor(sample_T), torch.tensor(position_T)):
            yield recorder.narrow

    def _logits_row(self, sequence: Sequence, position: int) -> LogitsRow:
        token = sequence.tokens[position] if sequence.scored else None
        return LogitsRow(sequence.sampling, position, token)

    def _keep_experts(self, chunks: list[Chunk], expert_ids_TLk: Tensor) -> None:
        for chunk, ids in zip(chunks, expert_ids_TLk.cpu().split([chunk.count for chunk in chunks]), strict=True):
            progress = self._progress.get(chunk.sequence.request_id)
            if progress is not None and not chunk.sequence.scored:
                # A preempted sequence computes positions again; each is kept once, and the ids are the same anyway.
                known = sum(len(part) for part in progress.expert_ids)
                progress.expert_ids.append(ids[max(known - chunk.start, 0) :])

    def _append(self, progress: _Progress, token: int, logprob: float, phase: Phase) -> None:
        sequence, sampling = progress.sequence, progress.request.sampling
        sequence.tokens.append(token)
        progress.logprobs.append(logprob)
        progress.phases.append(phase)
        if token in sampling.stop_token_ids:
            progress.finish_reason = "stop"
        elif len(progress.logprobs) == sampling.max_new_tokens:
            progress.finish_reason = "length"

    def _token_problems(self, tokens: Iterable[int]) -> list[str]:
        outside = [token for token in tokens if not 0 <= token < self.config.vocab_size]
        if not outside:
            return []
        return [f"token {outside[0]} is outside the vocabulary; ids below {self.config.vocab_size} are accepted"]

    def _size_problems(self, sequence: Sequence) -> list[str]:
        needed, there = self.scheduler.pages_for(sequence.length_limit), self.scheduler.num_pages
        if needed <= there:
            return []
        return [
            f"its {sequence.length_limit} positions need {needed} KV pages; the cache has {there}, and a request must "
            "fit alone to be sure to end: raise [rollout] num_kv_pages or shorten the request"
        ]

    def _require_idle(self, call: str) -> None:
        if self.has_unfinished():
            raise RuntimeError(
                f"{call} was called with {len(self._progress) + len(self._aborted)} unfinished requests; an idle "
                "engine is needed, because they would see other weights or lose their completions: step until "
                "has_unfinished() is False"
            )

    def _forget_all(self) -> None:
        for progress in self._progress.values():
            self.scheduler.remove(progress.sequence)
        self._progress.clear()
