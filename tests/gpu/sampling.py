# SPDX-License-Identifier: Apache-2.0
"""Requests for the engine proofs, and ways of serving them that must change no bit."""

import random

import torch

from vllm_forward_bridge.parity.bits import assert_same_bits, integer_view
from vllm_forward_bridge.rollout.protocol import Completion, Request, SamplingParams

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
TRUNCATED = {"temperature": 0.7, "top_p": 0.95, "top_k": 0}
TOP_K = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


def request(name: str, length: int, vocabulary: int, new_tokens: int, settings: dict = PLAIN) -> Request:
    """Return a request whose prompt and seed follow from its name."""
    chosen = random.Random(name)
    prompt = tuple(chosen.randrange(vocabulary) for _ in range(length))
    sampling = SamplingParams(max_new_tokens=new_tokens, seed=chosen.randrange(2**63), **settings)
    return Request(request_id=name, prompt_ids=prompt, sampling=sampling)


def serve(rollout, requests, *, a_step=1, disturb=None) -> dict[str, Completion]:
    """Run requests that join `a_step` at a time; `disturb(step)` is called before each step."""
    waiting, done, step = list(requests), {}, 0
    while waiting or rollout.has_unfinished():
        for one in waiting[:a_step]:
            rollout.add(one)
        del waiting[:a_step]
        if disturb:
            disturb(step)
        done |= {completion.request_id: completion for completion in rollout.step()}
        step += 1
    return done


def preempting(rollout, steps):
    """Return a `disturb` that sends every running request back to the queue at these steps."""
    scheduler = rollout._engine.engine_core.engine_core.scheduler

    def preempt(step):
        if step in steps:
            scheduler.reset_prefix_cache(reset_running_requests=True)

    return preempt


def differing(found, completions) -> tuple[int, int, float]:
    """Return how many tokens differ, of how many, and the largest difference."""
    pairs = [(a.float(), logprobs(c)) for a, c in zip(found, completions, strict=True)]
    different = sum(int((integer_view(a) != integer_view(b)).sum()) for a, b in pairs)
    largest = max(((a - b).abs().nan_to_num(posinf=0.0).max().item() for a, b in pairs), default=0.0)
    return different, sum(len(a) for a, _ in pairs), largest


def logprobs(completion: Completion) -> torch.Tensor:
    """Return a completion's logprobs as fp32, which they are exactly."""
    return torch.tensor(completion.logprobs, dtype=torch.float32)


def assert_same_completions(got, want, what: str) -> None:
    """Compare tokens and logprob bits by request id; phases may differ."""
    assert got.keys() == want.keys()
    for name, completion in got.items():
        assert completion.token_ids == want[name].token_ids, f"{what}: tokens of {name}"
        assert_same_bits(logprobs(completion), logprobs(want[name]), f"{what}: logprobs of {name}")
