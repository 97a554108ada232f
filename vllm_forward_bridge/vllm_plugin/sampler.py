# SPDX-License-Identifier: Apache-2.0
"""Sampling and logprobs inside vLLM by the contract's ops, and what they need to know of each request.

A token is a function of logits, sampling parameters, seed and position; vLLM's generators, penalties and filters are
not used. The logprob is that of the processed distribution, the same op that the trainer calls.
"""

# T = rows of logits, V = vocabulary

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_forward_bridge import ops
from vllm_forward_bridge.ops import triton_logprob
from vllm_forward_bridge.ops.survivors import uncut
from vllm_forward_bridge.rollout.uniform import token_uniform
from vllm_forward_bridge.vllm_plugin.switch import SEED

_NEUTRAL = {
    "n": (1,),
    "seed": (None,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
}


@dataclass(frozen=True)
class _Row:
    """One request in the running batch."""

    params: SamplingParams
    prompt_length: int
    output_ids: list[int]
    """vLLM's own list, which grows."""

    @property
    def position(self) -> int:
        """Index in its sequence of the token that is sampled next."""
        return self.prompt_length + len(self.output_ids)


class RequestState(LogitsProcessor):
    """Follows the batch; changes no logits. It is vLLM's hook for request parameters and their validation."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, _Row] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose distribution the trainer's op does not compute.

        Raises:
            ValueError: lists every parameter.
        """
        problems = [
            f"{name} is {getattr(sampling_params, name)!r}; only {accepted[0]!r} is accepted"
            for name, accepted in _NEUTRAL.items()
            if getattr(sampling_params, name) not in accepted
        ]
        seed = _seed(sampling_params)
        if not isinstance(seed, int):
            problems.append(
                f"extra_args[{SEED!r}] is {seed!r}; an integer is needed, it and the position draw the token"
            )
        if problems:
            raise ValueError(
                "the bridged sampler draws from temperature, top-k and top-p alone:\n  - " + "\n  - ".join(problems)
            )

    def is_argmax_invariant(self) -> bool:
        """Tell vLLM that greedy rows need not be processed."""
        return True

    def apply(self, logits: Tensor) -> Tensor:
        """Leave the logits alone."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow removals, additions and moves, in the order that vLLM prescribes."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            self.rows[index] = _Row(params, len(prompt_ids or ()), output_ids)
        for source, target, direction in batch_update.moved:
            moved, displaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if direction == MoveDirectionality.SWAP and displaced is not None:
                self.rows[source] = displaced

    def columns(self, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (temperature fp32, top_p fp32, top_k int32, uniform f64), one entry a row of logits."""
        rows = [self.rows.get(index) for index in range(num_rows)]
        # Rows without a request exist only while vLLM measures memory.
        given = [
            (row.params.temperature, row.params.top_p, max(row.params.top_k, 0), _seed(row.params), row.position)
            if row
            else (1.0, 1.0, 0, 0, 0)
            for row in rows
        ]
        temperature, top_p, top_k, seed, position = zip(*given, strict=True)
        uniform_T = token_uniform(torch.tensor(seed), torch.tensor(position))
        columns = (torch.tensor(temperature), torch.tensor(top_p), torch.tensor(top_k, dtype=torch.int32), uniform_T)
        return tuple(column.to(device, non_blocking=True) for column in columns)


def _seed(params: SamplingParams) -> Any:
    return (params.extra_args or {}).get(SEED)


class BridgeSampler(Sampler):
    """vLLM's sampler with the contract's arithmetic."""

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:  # fmt: skip
        """Draw one token a row, and score it if logprobs were asked for."""
        columns = _request_state(sampling_metadata).columns(len(logits), logits.device)
        *settings, uniform_T = columns
        token_T = ops.sample(logits, *settings, uniform_T)
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprob_T = ops.logprob(logits, token_T, *settings)
            # vLLM also wants a rank; the bridge computes none, and 0 says so.
            logprobs = LogprobsTensors(token_T.int()[:, None], logprob_T[:, None], torch.zeros_like(token_T))
        return SamplerOutput(sampled_token_ids=token_T.int()[:, None], logprobs_tensors=logprobs)

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        """Return fp32 [T, V] logprobs at temperature 1 for vLLM's prompt logprobs: (z - max) - ln sum."""
        first_T = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        one_T = torch.ones(len(logits), device=logits.device)
        _, largest_T, log_sum_T = triton_logprob.normalised(logits, first_T, one_T, uncut(logits))
        # bits: the two subtractions of the logprob op, in its order.
        return (logits.float() - largest_T[:, None]) - log_sum_T[:, None]

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Pick the logprob of each row's token; more alternatives are refused by `max_logprobs`."""
        chosen_T1 = logprobs.gather(-1, token_ids[:, None])
        return LogprobsTensors(token_ids.int()[:, None], chosen_T1, torch.zeros_like(token_ids))


def _request_state(metadata: SamplingMetadata) -> RequestState:
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, RequestState):
            return processor
    # vLLM's memory profile samples from rows that belong to no request.
    return RequestState(None, torch.device("cpu"), False)
