# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine takes and gives: requests, completions and the engine protocol. Runs no kernel.

The logprob of a sampled token is that of the *processed* distribution it was drawn from: logits divided by the
temperature, then top-k, then top-p, renormalised over the survivors. Temperature 0 is greedy: the largest logit, ties
to the smaller id, and the logprob of the unscaled distribution. A completion's bits do not depend on the other
requests, on the order of arrival, on chunking, preemption, or the engine's limits; they depend on weights, prompt and
sampling alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args, runtime_checkable

from torch import Tensor

Phase = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length", "aborted"]

SMALLEST_TEMPERATURE = 0.01
LARGEST_SEED = 2**63 - 1
NO_WEIGHTS = -1
"""Version of an engine that was allocated without weights; every version of a trainer is newer."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Part of the numeric contract: the trainer scores with the same values."""

    temperature: float = 1.0
    """0 is greedy; otherwise at least `SMALLEST_TEMPERATURE`."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this mass; 1.0 is off."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 is off."""
    seed: int = 0
    """With the token's position it fixes the random number; two samples of one prompt need two seeds."""
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    """A sampled token of these ends the request and is part of the completion."""

    def __post_init__(self) -> None:
        problems = _sampling_problems(self)
        if problems:
            raise ValueError("these sampling parameters are outside the contract:\n  - " + "\n  - ".join(problems))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue once."""

    request_id: str
    """Unique among unfinished requests."""
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.request_id, str) or not self.request_id:
            problems.append(f"request_id is {self.request_id!r}; a non-empty string is needed to match completions by")
        problems += _token_problems("prompt_ids", self.prompt_ids)
        if not self.prompt_ids:
            problems.append("prompt_ids is empty; at least one token is needed, logits come from the last one")
        if not isinstance(self.sampling, SamplingParams):
            problems.append(f"sampling is {type(self.sampling).__name__}; SamplingParams is needed")
        if problems:
            raise ValueError(f"request {self.request_id!r} cannot be served:\n  - " + "\n  - ".join(problems))


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """One a sampled token; each is an exact float32 value."""
    phases: tuple[Phase, ...]
    """What computed the logits of each sampled token; after a preemption a later token may be `prefill` too."""
    finish_reason: FinishReason
    weight_version: int
    expert_ids: Tensor | None = field(default=None, compare=False)
    """When recorded: int64 [positions, MoE layers, k], positions = len(prompt_ids) + len(token_ids) - 1, since the last
    sampled token is never fed. An aborted request has the positions it computed."""

    def __post_init__(self) -> None:
        problems = []
        if not len(self.token_ids) == len(self.logprobs) == len(self.phases):
            problems.append(
                f"{len(self.token_ids)} token_ids, {len(self.logprobs)} logprobs, {len(self.phases)} phases; "
                "one of each a sampled token is needed, the gate drops none"
            )
        reasons = {self.finish_reason}
        for name, value, accepted in (("phases", set(self.phases), Phase), ("finish_reason", reasons, FinishReason)):
            unknown = sorted(map(str, value - set(get_args(accepted))))
            if unknown:
                problems.append(f"{name} has {', '.join(unknown)}; accepted are {', '.join(get_args(accepted))}")
        if problems:
            raise ValueError(f"completion of {self.request_id!r} is malformed:\n  - " + "\n  - ".join(problems))


@runtime_checkable
class Rollout(Protocol):
    """An engine that samples with the contract's kernels on deployment bytes."""

    @property
    def version(self) -> int:
        """Return the version of the weights that it samples with."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; it joins the running batch at a later step.

        Raises:
            ValueError: the id is in use, a token is outside the vocabulary, or the request could never fit the cache.
        """
        ...

    def step(self) -> list[Completion]:
        """Run one forward over a mixed batch and return what finished, aborted requests included."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request and free its cache; its completion, `aborted`, comes out of the next step.

        Raises:
            KeyError: no unfinished request has this id.
        """
        ...

    def has_unfinished(self) -> bool:
        """Tell whether a step would do or deliver anything."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests to their end and return completions in the order of `requests`.

        Raises:
            RuntimeError: the engine has unfinished requests from `add`; their completions would have no receiver.
        """
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int, digest: str) -> None:
        """Replace all weights, or none if anything is wrong; every cache is dropped.

        Args:
            named_tensors: the whole model by Hugging Face name, in deployment bytes.
            version: greater than the present version.
            digest: `quantization.bytes_digest` of the tensors that were sent.

        Raises:
            RuntimeError: there are unfinished requests.
            ValueError: lists every wrong name, dtype, shape, digest and version.
        """
        ...

    def record(self) -> dict[str, str]:
        """Name the kernel that serves each op in this process, as read back from it."""
        ...

    def score(self, sequences: Sequence[tuple[int, ...]], sampling: SamplingParams) -> list[Tensor]:
        """Compute what `generate` would have reported for given tokens, by prefill; for tests.

        Returns:
            For each sequence, float32 [len - 1]: logprob of each token after the first, given those before it; -inf
            where the token is outside the survivors.
        """
        ...


def _sampling_problems(given: SamplingParams) -> list[str]:
    problems = []
    temperature, top_p, top_k = given.temperature, given.top_p, given.top_k
    if not _is_number(temperature) or not math.isfinite(temperature) or temperature < 0:
        problems.append(f"temperature is {temperature!r}; a finite number >= 0 is needed, 0 means greedy")
    elif 0 < temperature < SMALLEST_TEMPERATURE:
        problems.append(
            f"temperature is {temperature!r}; 0 or at least {SMALLEST_TEMPERATURE} is needed, because vLLM raises "
            "smaller ones and the trainer would score another distribution: use 0 for greedy"
        )
    if not _is_number(top_p) or not 0 < top_p <= 1:
        problems.append(f"top_p is {top_p!r}; a number in (0, 1] is needed, 1.0 means off")
    if not _is_integer(top_k) or top_k < 0:
        problems.append(f"top_k is {top_k!r}; an integer >= 0 is needed, 0 means off")
    if temperature == 0 and (top_p != 1.0 or top_k != 0):
        problems.append(
            f"temperature is 0 with top_p {top_p!r} and top_k {top_k!r}; greedy reports the unfiltered logprob, "
            "so leave both off"
        )
    if not _is_integer(given.seed) or not 0 <= given.seed <= LARGEST_SEED:
        problems.append(f"seed is {given.seed!r}; an integer from 0 to {LARGEST_SEED} is needed")
    if not _is_integer(given.max_new_tokens) or given.max_new_tokens < 1:
        problems.append(f"max_new_tokens is {given.max_new_tokens!r}; an integer >= 1 is needed")
    return problems + _token_problems("stop_token_ids", given.stop_token_ids)


def _token_problems(name: str, ids: tuple[int, ...]) -> list[str]:
    if not isinstance(ids, tuple):
        return [f"{name} is a {type(ids).__name__}; a tuple of token ids is needed, requests are immutable"]
    wrong = [token for token in ids if not _is_integer(token) or token < 0]
    return [f"{name} contains {wrong[0]!r}; token ids are integers >= 0"] if wrong else []


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
