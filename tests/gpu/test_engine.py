# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with the bridged forward: a token and its logprob do not depend on how the engine came to it."""

import random

import pytest
import shapes
from sampling import GREEDY, PLAIN, TOP_K, TRUNCATED, assert_same_completions, logprobs, preempting, request, serve

from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import bytes_digest
from vllm_forward_bridge.rollout.protocol import SamplingParams

LENGTHS = (1, 5, shapes.CHUNK - 1, shapes.CHUNK, shapes.CHUNK + 1, 2 * shapes.CHUNK - 1, 2 * shapes.CHUNK + 1, 700)
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def requests(scale):
    settings = (PLAIN, TRUNCATED, PLAIN, TOP_K, PLAIN, GREEDY, PLAIN, PLAIN)
    return [
        request(f"{length}.{copy}", length, scale.vocabulary, NEW_TOKENS, settings[(place + copy) % len(settings)])
        for copy in range(8)
        for place, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def together(rollout, requests):
    """Serve all requests in one batch, which also cuts prompts into chunks."""
    return serve(rollout, requests, a_step=len(requests))


def test_every_op_runs_its_cuda_kernel(rollout, measure):
    record = rollout.record()
    measure(record=record)
    ops = [name for name, kernel in record.items() if "vllm_forward_bridge.ops" in kernel]
    assert len(ops) > 10
    assert all("[cuda]" in record[name] for name in ops), record


def test_tokens_are_drawn_and_scored(together, requests):
    for one in requests:
        completion = together[one.request_id]
        assert len(completion.token_ids) == NEW_TOKENS
        assert completion.finish_reason == "length"
        assert completion.phases[0] == "prefill"
        assert set(completion.phases[1:]) == {"decode"}
        assert all(value <= 0 for value in completion.logprobs)
        if one.sampling.temperature == 1.0 and not one.sampling.top_k:
            assert min(completion.logprobs) < -1.0
    assert len({completion.token_ids for completion in together.values()}) == len(together)


def test_decode_is_prefill(rollout, requests, together):
    plain = [one for one in requests if one.sampling.temperature == 1.0 and not one.sampling.top_k]
    completions = [together[one.request_id] for one in plain]
    scores = rollout.score([c.prompt_ids + c.token_ids for c in completions], SamplingParams())
    for completion, score in zip(completions, scores, strict=True):
        want = score[len(completion.prompt_ids) - 1 :]
        assert_same_bits(logprobs(completion), want, f"{completion.request_id}: decoded and prefilled")


def test_alone_is_together(rollout, requests, together):
    for one in requests[:16]:
        assert_same_completions(serve(rollout, [one]), {one.request_id: together[one.request_id]}, "alone and together")


@pytest.mark.parametrize("a_step", [1, 3])
def test_late_and_shuffled_arrival(rollout, requests, together, a_step):
    shuffled = random.Random(a_step).sample(requests, len(requests))
    assert_same_completions(serve(rollout, shuffled, a_step=a_step), together, f"{a_step} joining a step")


def test_after_preemption(rollout, requests, together):
    again = serve(rollout, requests, a_step=len(requests), disturb=preempting(rollout, (4, 9, 25)))
    assert any("prefill" in completion.phases[1:] for completion in again.values()), "nothing was preempted"
    assert_same_completions(again, together, "preempted three times and undisturbed")


def test_after_aborts(rollout, requests, together):
    given_up = [request(f"given up {number}", 300, 1000, 500) for number in range(16)]

    def abort(step):
        if step == 6:
            for one in given_up:
                rollout.abort(one.request_id)

    done = serve(rollout, [*given_up, *requests], a_step=len(requests) + 16, disturb=abort)
    aborted = {name: done.pop(name) for name in [one.request_id for one in given_up]}
    assert all(completion.finish_reason == "aborted" for completion in aborted.values())
    assert_same_completions(done, together, "beside aborted requests")


def test_wrong_digest_changes_nothing(rollout, tensors, requests, together):
    version = rollout.version
    with pytest.raises(ValueError, match="digest"):
        rollout.update_weights(tensors.items(), version=version + 1, digest="0" * 64)
    with pytest.raises(ValueError, match="without version and digest"):
        rollout._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
    assert rollout.version == version
    one = requests[0]
    assert_same_completions(serve(rollout, [one]), {one.request_id: together[one.request_id]}, "after a refused update")


def test_same_weights_again_are_the_same_bits(rollout, tensors, requests, together):
    rollout.update_weights(tensors.items(), version=rollout.version + 1, digest=bytes_digest(tensors.items()))
    again = serve(rollout, requests[:8], a_step=8)
    assert_same_completions(again, {name: together[name] for name in again}, "after an update with the same bytes")
