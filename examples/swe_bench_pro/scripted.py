# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: it says what a script says. For tests of everything around the policy, and dry runs."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from examples.swe_bench_pro.agent.renderer import END
from examples.swe_bench_pro.agent.tokens import Tokenizer, encode_frame
from vllm_forward_bridge.rollout.protocol import Completion, Request, SamplingParams

Script = Callable[[Request], str]
"""script(request): the whole turn as text, without the token that ends it."""


def call(command: str, thought: str = "") -> str:
    """Return a turn that calls bash, in the model's format."""
    parameter = f"<parameter=command>\n{command}\n</parameter>"
    return f"{thought}</think><tool_call>\n<function=bash>\n{parameter}\n</function>\n</tool_call>"


class ScriptedEngine:
    """A `protocol.Rollout` whose tokens come from a script; its logprobs are made up from the ids.

    Args:
        tokenizer: encodes what the script says.
        script: gives the turn for a request.
        steps_a_turn: engine steps before a turn is finished, so that turns of many episodes interleave.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script, *, steps_a_turn: int = 2) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._steps_a_turn = steps_a_turn
        self._waiting: dict[str, tuple[Request, int]] = {}
        self._aborted: list[Request] = []
        self.version = 1
        self.most_at_once = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.request_id in self._waiting:
            raise ValueError(f"{request.request_id} is in use; give each request an id of its own")
        self._waiting[request.request_id] = (request, self._steps_a_turn)

    def step(self) -> list[Completion]:
        """Finish the turns whose time has come."""
        self.most_at_once = max(self.most_at_once, len(self._waiting))
        finished = [self._completion(request, "aborted") for request in self._aborted]
        self._aborted = []
        for request_id, (request, left) in list(self._waiting.items()):
            if left > 1:
                self._waiting[request_id] = (request, left - 1)
            else:
                del self._waiting[request_id]
                finished.append(self._completion(request, "stop"))
        return finished

    def abort(self, request_id: str) -> None:
        """End a request."""
        self._aborted.append(self._waiting.pop(request_id)[0])

    def has_unfinished(self) -> bool:
        """Tell whether a step would do anything."""
        return bool(self._waiting or self._aborted)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all at once."""
        return [self._completion(request, "stop") for request in requests]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int, digest: str) -> None:
        """Take the version; there are no weights."""
        self.version = version

    def record(self) -> dict[str, str]:
        """Say that nothing was computed."""
        return {"all": "script"}

    def score(self, sequences: Sequence[tuple[int, ...]], sampling: SamplingParams) -> list[Tensor]:
        """Return the logprobs that `step` would report."""
        return [torch.tensor([_logprob(id_) for id_ in ids[1:]]) for ids in sequences]

    def _completion(self, request: Request, reason: str) -> Completion:
        ids = [] if reason == "aborted" else encode_frame(self._tokenizer, self._script(request) + END)
        if len(ids) > request.sampling.max_new_tokens:
            ids, reason = ids[: request.sampling.max_new_tokens], "length"
        return Completion(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(ids),
            logprobs=tuple(map(_logprob, ids)),
            phases=tuple("prefill" if at == 0 else "decode" for at in range(len(ids))),
            finish_reason=reason,
            weight_version=self.version,
        )


def _logprob(token_id: int) -> float:
    return -(token_id % 64) / 64
