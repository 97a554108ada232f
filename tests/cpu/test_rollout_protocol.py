# SPDX-License-Identifier: Apache-2.0
"""Requests, completions and sampling parameters refuse what the contract does not cover, all at once."""

import pytest

from vllm_forward_bridge.rollout.protocol import Completion, Request, SamplingParams


def test_sampling_params_list_every_violation_at_once():
    with pytest.raises(ValueError) as error:
        SamplingParams(temperature=-1.0, top_p=0.0, top_k=-2, seed=-1, max_new_tokens=0, stop_token_ids=(-5,))
    message = str(error.value)
    parts = ("temperature is -1.0", "top_p is 0.0", "top_k is -2", "seed is -1", "max_new_tokens is 0", "contains -5")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 0.001}, "0 or at least 0.01"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": 0.0, "top_p": 0.9}, "greedy reports the unfiltered logprob"),
        ({"temperature": 0.0, "top_k": 5}, "greedy reports the unfiltered logprob"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": 2**63}, "seed is"),
        ({"stop_token_ids": [1]}, "stop_token_ids is a list"),
    ],
)
def test_sampling_params_reject(values, part):
    with pytest.raises(ValueError, match=part):
        SamplingParams(**values)


def test_sampling_params_accept_the_edges():
    SamplingParams(temperature=0.0)
    SamplingParams(temperature=0.01, top_p=1e-6, top_k=1, seed=2**63 - 1)


@pytest.mark.parametrize(
    ("prompt", "part"),
    [((), "is empty"), ([1, 2], "prompt_ids is a list"), ((1, -1), "contains -1"), ((1, 2.0), "contains 2.0")],
)
def test_request_rejects(prompt, part):
    with pytest.raises(ValueError, match=part):
        Request(request_id="a", prompt_ids=prompt)


def test_request_needs_an_id():
    with pytest.raises(ValueError, match="request_id is ''"):
        Request(request_id="", prompt_ids=(1,))


def test_completion_needs_one_logprob_and_phase_a_token():
    values = dict(request_id="a", prompt_ids=(1,), token_ids=(2, 3), finish_reason="length", weight_version=1)
    Completion(logprobs=(-1.0, -2.0), phases=("prefill", "decode"), **values)
    with pytest.raises(ValueError, match="2 token_ids, 1 logprobs, 3 phases"):
        Completion(logprobs=(-1.0,), phases=("prefill", "decode", "decode"), **values)
    with pytest.raises(ValueError, match="phases has replay"):
        Completion(logprobs=(-1.0, -2.0), phases=("prefill", "replay"), **values)
