# SPDX-License-Identifier: Apache-2.0
"""A completion of the embedded engine depends on weights, prompt and sampling alone."""

import random

import pytest
import torch
from embedded_engines import (
    CHUNK,
    PLAIN,
    assert_same_completion,
    assert_same_completions,
    engine,
    library_product,
    poison,
    request,
    scored,
    serve,
)

from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits
from vllm_forward_bridge.rollout.embedded.weights import Linear
from vllm_forward_bridge.rollout.protocol import Rollout, SamplingParams

NUCLEUS = SamplingParams(temperature=0.7, top_p=0.95, top_k=20, max_new_tokens=5)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=5)


def mixed_requests():
    """Prompts on both sides of the chunk boundaries under each sampling; the long one crosses one while decoding."""
    return [
        request("one", 1, NUCLEUS),
        request("chunk - 1", CHUNK - 1, PLAIN),
        request("chunk", CHUNK, GREEDY),
        request("chunk + 1", CHUNK + 1, NUCLEUS),
        request("2 chunk + 1", 2 * CHUNK + 1, PLAIN),
        request("long", 5, PLAIN, max_new_tokens=CHUNK),
    ]


@pytest.fixture(scope="module")
def reference():
    """Completions of the mixed requests, each alone in the engine, prefilled in one shot."""
    rollout = engine(max_num_seqs=1, num_kv_pages=16)
    return {one.request_id: rollout.generate([one])[0] for one in mixed_requests()}


def test_engine_is_a_rollout():
    assert isinstance(engine(num_kv_pages=1), Rollout)


def test_decode_equals_prefill(reference):
    rollout = engine(num_kv_pages=16)
    for one in mixed_requests():
        completion = reference[one.request_id]
        assert completion.phases == ("prefill",) + ("decode",) * (len(completion.token_ids) - 1)
        got = torch.tensor(completion.logprobs)
        assert_same_bits(got, scored(rollout, completion, one.sampling), f"decode and prefill of {one.request_id}")


def test_ordinary_kernels_differ(reference, monkeypatch):
    """The negative control: with the library's products in the linears, decode and prefill do not agree."""
    monkeypatch.setattr(Linear, "__call__", library_product)
    rollout = engine(num_kv_pages=16)
    one = request("control", 2 * CHUNK + 1, max_new_tokens=CHUNK)
    (completion,) = rollout.generate([one])
    assert not same_bits(torch.tensor(completion.logprobs), scored(rollout, completion, one.sampling))


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"token_budget": 1},
        {"token_budget": 7},
        {"token_budget": CHUNK, "max_num_seqs": 3},
        {"kv_page_tokens": 5},
    ],
    ids=str,
)
def test_batch_and_chunked_prefill_change_nothing(reference, limits):
    got = engine(**{"num_kv_pages": 128, **limits}).generate(mixed_requests())
    assert [completion.request_id for completion in got] == [one.request_id for one in mixed_requests()]
    assert_same_completions({one.request_id: one for one in got}, reference, f"limits {limits}")


def test_order_of_arrival_and_late_joiners_change_nothing(reference):
    chosen = random.Random(3)
    requests = mixed_requests()
    chosen.shuffle(requests)
    join_at = {one.request_id: chosen.randrange(12) for one in requests}
    got = serve(engine(token_budget=24, max_num_seqs=4, num_kv_pages=128), requests, join_at=join_at)
    assert_same_completions(got, reference, "late joiners")


def test_preemption_recomputes_the_same_bits(reference):
    rollout = engine(num_kv_pages=11, kv_page_tokens=4, token_budget=64)
    got = serve(rollout, mixed_requests())
    assert rollout.scheduler.num_preemptions >= 2
    recomputed = [name for name, one in got.items() if "prefill" in one.phases[1:]]
    assert recomputed
    assert_same_completions(got, reference, "after preemption")
    assert rollout.scheduler.num_free_pages == 11


def test_garbage_in_free_pages_and_slots_changes_nothing(reference):
    rollout = engine(num_kv_pages=12, kv_page_tokens=8, token_budget=30, max_num_seqs=4)
    poison(rollout)
    got = serve(rollout, mixed_requests())
    assert_same_completions(got, reference, "poisoned caches")
    assert all(torch.tensor(one.logprobs).isfinite().all() for one in got.values())


def test_seed_decides_the_tokens():
    first, again, other = (request("seeded", 9, seed=seed) for seed in (5, 5, 6))
    rollout = engine(num_kv_pages=16)
    (one,), (two,), (three,) = (rollout.generate([each]) for each in (first, again, other))
    assert_same_completion(two, one, "same seed")
    assert one.token_ids != three.token_ids


def test_greedy_takes_the_most_likely_token_and_ignores_the_seed():
    rollout = engine(num_kv_pages=64)
    (one,), (two,) = (rollout.generate([request("greedy", 1, GREEDY, seed=seed)]) for seed in (1, 2))
    assert one.token_ids == two.token_ids
    others = rollout.score([(*one.prompt_ids, token) for token in range(0, 1280, 20)], GREEDY)
    assert torch.cat(others).max() <= one.logprobs[0]


def test_filtered_tokens_have_no_logprob():
    """With top-k 20 at most 20 tokens of any 64 have a logprob; without filters all have one."""
    rollout = engine(num_kv_pages=64)
    (completion,) = rollout.generate([request("filtered", 1, NUCLEUS)])
    sequences = [(*completion.prompt_ids, token) for token in range(completion.token_ids[0] % 20, 1280, 20)]
    filtered, plain = (torch.cat(rollout.score(sequences, sampling)) for sampling in (NUCLEUS, PLAIN))
    assert 1 <= filtered.isfinite().sum() <= 20
    assert filtered[completion.token_ids[0] // 20].item() == completion.logprobs[0]
    assert (filtered[~filtered.isfinite()] == -torch.inf).all()
    assert plain.isfinite().all()


def test_stop_token_ends_a_request_and_belongs_to_it(reference):
    whole = reference["long"]
    stop = whole.token_ids[4]
    at = whole.token_ids.index(stop)
    stopping = request("long", 5, max_new_tokens=CHUNK, stop_token_ids=(stop,))
    (completion,) = engine(num_kv_pages=16).generate([stopping])
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.token_ids[: at + 1]
    assert completion.logprobs == whole.logprobs[: at + 1]
    assert whole.finish_reason == "length"


@pytest.mark.parametrize("call", ["step", "score"])
def test_a_failed_step_is_the_last(monkeypatch, call):
    rollout = engine(num_kv_pages=16)

    def fail(*_):
        raise FloatingPointError("bad kernel")

    monkeypatch.setattr(rollout, "_forward", fail)
    with pytest.raises(FloatingPointError, match="bad kernel"):
        rollout.generate([request("one", 3, PLAIN)]) if call == "step" else rollout.score([(1, 2, 3)], PLAIN)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"a step .* failed \(FloatingPointError: bad kernel\).*new engine"):
        rollout.step()
