# SPDX-License-Identifier: Apache-2.0
"""The engine alone, over as many tokens as a run samples: decode, chunked prefill and recompute have the same bits."""

import pytest
from sampling import PLAIN, assert_same_completions, differing, preempting, request, serve

from vllm_forward_bridge.rollout.protocol import SamplingParams

PREEMPTED_AT = (40, 300, 650)


@pytest.fixture(scope="module")
def requests(scale):
    return [request(f"alone {n}", 20 + 13 * n % 400, scale.vocabulary, scale.new_tokens) for n in range(scale.num_seqs)]


@pytest.fixture(scope="module")
def decoded(rollout, requests):
    """Serve all in one batch."""
    return serve(rollout, requests, a_step=len(requests))


def test_every_decoded_token_is_the_prefilled_one(scale, rollout, requests, decoded, measure):
    completions = [decoded[one.request_id] for one in requests]
    scores = rollout.score([c.prompt_ids + c.token_ids for c in completions], SamplingParams(**PLAIN))
    behind_prompts = [score[len(c.prompt_ids) - 1 :] for c, score in zip(completions, scores, strict=True)]
    different, compared, _ = differing(behind_prompts, completions)
    measure(what="engine alone, decode against prefill", compared=compared, differing=different)
    assert compared == scale.num_seqs * scale.new_tokens
    assert different == 0


def test_preemption_changes_no_token_of_the_run(rollout, requests, decoded, measure):
    again = serve(rollout, requests, a_step=len(requests), disturb=preempting(rollout, PREEMPTED_AT))
    recomputed = sum(completion.phases[1:].count("prefill") for completion in again.values())
    tokens = sum(len(completion.token_ids) for completion in again.values())
    measure(what="engine alone, preempted and undisturbed", compared=tokens, sampled_by_recompute=recomputed)
    assert recomputed, "nothing was preempted"
    assert_same_completions(again, decoded, "preempted and undisturbed")
