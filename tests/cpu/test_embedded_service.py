# SPDX-License-Identifier: Apache-2.0
"""What the embedded engine refuses, how it ends requests, and how it takes new weights."""

import dataclasses
import re

import pytest
import torch
from embedded_engines import (
    CHUNK,
    PLAIN,
    assert_same_completion,
    assert_same_completions,
    engine,
    prompt,
    request,
    serve,
    tiny_repository,
)

from vllm_forward_bridge.config import BridgeConfig, ModelSection, RolloutSection
from vllm_forward_bridge.parity.recorder import OpRecorder, compare_recordings
from vllm_forward_bridge.quantization import bytes_digest
from vllm_forward_bridge.rollout.embedded.engine import EmbeddedRollout
from vllm_forward_bridge.rollout.protocol import Request


def update(rollout, tensors, *, version, digest=None):
    rollout.update_weights(tensors.items(), version=version, digest=digest or bytes_digest(tensors.items()))


def changed(**tensors):
    """Return the tiny checkpoint's tensors with some replaced; None removes one."""
    merged = dict(tiny_repository()[1]) | tensors
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


def test_abort_frees_pages_and_leaves_the_others_alone():
    requests = [request(str(number), 10 + number) for number in range(6)]
    want = serve(engine(num_kv_pages=32), requests)
    rollout = engine(num_kv_pages=32, max_num_seqs=4, token_budget=32)
    for one in requests:
        rollout.add(one)
    rollout.step()
    assert rollout.scheduler.num_free_pages < 32
    running, waiting = rollout.scheduler.running[1].request_id, rollout.scheduler.waiting[-1].request_id
    rollout.abort(running)
    rollout.abort(waiting)
    got = serve(rollout, [])
    assert {got.pop(name).finish_reason for name in (running, waiting)} == {"aborted"}
    assert_same_completions(got, {name: want[name] for name in got}, "neighbours of aborted requests")
    assert len(got) == 4
    assert rollout.scheduler.num_free_pages == 32
    with pytest.raises(KeyError, match=f"no unfinished request is called '{running}'"):
        rollout.abort(running)


def test_aborted_request_keeps_its_tokens():
    whole = engine(num_kv_pages=8).generate([request("one", 10)])[0]
    rollout = engine(num_kv_pages=8)
    rollout.add(request("one", 10))
    for _ in range(3):
        rollout.step()
    rollout.abort("one")
    (aborted,) = rollout.step()
    assert aborted.finish_reason == "aborted"
    assert (aborted.token_ids, aborted.logprobs) == (whole.token_ids[:3], whole.logprobs[:3])
    assert not rollout.has_unfinished()


def test_requests_are_refused_with_all_reasons():
    rollout = engine(num_kv_pages=2, kv_page_tokens=4)
    rollout.add(request("twice", 2, max_new_tokens=2))
    with pytest.raises(ValueError) as error:
        rollout.add(Request(request_id="twice", prompt_ids=(5, 1280, *prompt(8)), sampling=PLAIN))
    parts = ("its id belongs to an unfinished request", "token 1280 is outside", "need 4 KV pages; the cache has 2")
    assert [part for part in parts if part not in str(error.value)] == []
    with pytest.raises(RuntimeError, match="generate was called with 1 unfinished"):
        rollout.generate([request("other", 2)])
    with pytest.raises(RuntimeError, match="score was called with 1 unfinished"):
        rollout.score([prompt(3)], PLAIN)


def test_generate_takes_all_requests_or_none():
    rollout = engine(num_kv_pages=2, kv_page_tokens=4)
    with pytest.raises(ValueError, match="request 'long' cannot be served"):
        rollout.generate([request("short", 2, max_new_tokens=2), request("long", 20)])
    assert not rollout.has_unfinished()
    assert rollout.scheduler.is_idle


def test_score_edges():
    rollout = engine(num_kv_pages=16)
    empty, pair = rollout.score([prompt(1), prompt(2)], PLAIN)
    assert (empty.shape, pair.shape) == ((0,), (1,))
    with pytest.raises(ValueError, match="sequence 1: token 1280 is outside"):
        rollout.score([prompt(2), (1, 1280)], PLAIN)


def test_weight_update_changes_outputs_and_equals_a_fresh_engine():
    one = request("one", CHUNK + 1)
    rollout = engine(num_kv_pages=8)
    before = rollout.generate([one])[0]
    update(rollout, tiny_repository(seed=1)[1], version=7)
    after = rollout.generate([one])[0]
    assert (before.weight_version, after.weight_version, rollout.version) == (0, 7, 7)
    assert after.token_ids != before.token_ids
    config, tensors = tiny_repository(seed=1)
    fresh = EmbeddedRollout(config, tensors, bridge_of(rollout), version=7)
    assert_same_completion(fresh.generate([one])[0], after, "engine built on the new weights")


def bridge_of(rollout):
    return BridgeConfig(model=ModelSection(repository="unused"), rollout=rollout.limits)


def test_small_updates_reach_the_outputs():
    """One byte of a quantised expert and one element of the expert bias are enough."""
    one = request("one", 2 * CHUNK)
    rollout = engine(num_kv_pages=8)
    scores = [rollout.score([one.prompt_ids], one.sampling)[0]]
    tensors = dict(tiny_repository()[1])
    names = ("backbone.layers.1.mixer.gate.e_score_correction_bias", "lm_head.weight_scale_2")
    for version, name in enumerate(names, 1):
        tensors[name] = tensors[name] * 1.5 + 0.25
        update(rollout, tensors, version=version)
        scores.append(rollout.score([one.prompt_ids], one.sampling)[0])
    assert not torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[1], scores[2])


def test_engine_owns_its_bytes():
    one = request("one", CHUNK)
    config, tensors = tiny_repository()
    mine = {name: tensor.clone() for name, tensor in tensors.items()}
    rollout = EmbeddedRollout(config, mine, BridgeConfig(model=ModelSection(repository="unused")))
    before = rollout.generate([one])[0]
    for tensor in mine.values():
        tensor.view(torch.uint8 if tensor.dim() else tensor.dtype).zero_()
    assert_same_completion(rollout.generate([one])[0], before, "after the sender reused its buffers")


@pytest.mark.parametrize(
    ("tensors", "version", "digest", "part"),
    [
        (changed(), 3, None, "version 3 is not greater than the present 3"),
        (changed(), 4, "0" * 64, "digest"),
        (changed(**{"lm_head.weight_scale": None}), 4, None, "lm_head.weight_scale: missing"),
        (changed(**{"backbone.layers.0.mixer.in_proj.input_scale": None}), 4, None, "in_proj.input_scale: missing"),
        (changed(**{"backbone.norm_f.weight": torch.ones(191).bfloat16()}), 4, None, "backbone.norm_f.weight is"),
        (changed(**{"backbone.norm_f.weight": torch.ones(192)}), 4, None, "backbone.norm_f.weight is"),
        (changed(**{"extra.weight": torch.ones(1)}), 4, None, "extra.weight"),
        (changed(**{"backbone.layers.3.mixer.k_proj.k_scale": None}), 4, None, "k_scale: missing while other"),
    ],
)
def test_faulty_updates_change_nothing(tensors, version, digest, part):
    one = request("one", 5)
    rollout = engine(num_kv_pages=8)
    update(rollout, tiny_repository()[1], version=3)
    before = rollout.generate([one])[0]
    with pytest.raises(ValueError, match=re.escape(part)):
        update(rollout, tensors, version=version, digest=digest)
    assert rollout.version == 3
    assert_same_completion(rollout.generate([one])[0], before, "after a refused update")


def test_a_refused_update_lists_everything():
    tensors = changed(**{"lm_head.weight": None, "backbone.embeddings.weight": torch.ones(2)})
    with pytest.raises(ValueError) as error:
        update(engine(num_kv_pages=1), tensors, version=0, digest="0")
    parts = ("version 0", "digest", "lm_head.weight: missing", "backbone.embeddings.weight is")
    assert [part for part in parts if part not in str(error.value)] == []


def test_update_needs_an_idle_engine_and_each_name_once():
    rollout = engine(num_kv_pages=8)
    rollout.add(request("one", 5))
    with pytest.raises(RuntimeError, match="update_weights was called with 1 unfinished"):
        update(rollout, tiny_repository()[1], version=1)
    serve(rollout, [])
    name, tensor = next(iter(tiny_repository()[1].items()))
    with pytest.raises(ValueError, match=f"{name} comes twice"):
        rollout.update_weights([(name, tensor), (name, tensor)], version=1, digest="")


def test_mtp_tensors_may_be_left_out():
    without = {name: tensor for name, tensor in tiny_repository()[1].items() if not name.startswith("mtp.")}
    assert len(without) < len(tiny_repository()[1])
    one = request("one", 5)
    rollout = engine(num_kv_pages=8)
    before = rollout.generate([one])[0]
    update(rollout, without, version=1)
    assert rollout.generate([one])[0].logprobs == before.logprobs


def test_expert_ids_are_recorded_once_a_position_whatever_the_batch():
    requests = [request(str(length), length) for length in (3, CHUNK, CHUNK + 1)]
    want = engine(router_replay=True, num_kv_pages=32).generate(requests)
    rollout = engine(router_replay=True, num_kv_pages=9, kv_page_tokens=4, token_budget=5)
    got = serve(rollout, requests)
    assert rollout.scheduler.num_preemptions > 0
    for completion in want:
        positions = len(completion.prompt_ids) + len(completion.token_ids) - 1
        assert completion.expert_ids.shape == (positions, 2, 3)
        assert torch.equal(got[completion.request_id].expert_ids, completion.expert_ids)
    assert len(want[0].expert_ids.unique()) > 3
    assert engine(num_kv_pages=8).generate([request("one", 3)])[0].expert_ids is None


def test_recordings_of_decode_and_of_prefill_have_the_same_bits_op_by_op(tmp_path):
    one, other = request("one", CHUNK - 2), request("other", 4)
    decoding, scoring = engine(num_kv_pages=8, token_budget=8), engine(num_kv_pages=8)
    recorders = OpRecorder(), OpRecorder()
    decoding.record_ops(recorders[0], {"one": 5})
    completion = decoding.generate([other, one])[1]
    scoring.record_ops(recorders[1], {"0": 5})
    scoring.score([completion.prompt_ids + completion.token_ids], one.sampling)
    for number, recorder in enumerate(recorders):
        recorder.save(tmp_path / str(number))
    points, lonely = compare_recordings(tmp_path / "0", tmp_path / "1")
    assert [point.name for point in points if point.differing_rows] == []
    by_op = {point.name.split(".")[1]: point.common_rows for point in points}
    every_position = len(one.prompt_ids) + len(completion.token_ids) - 1
    assert by_op["attention"] == by_op["moe_experts"] == by_op["causal_conv1d"] == every_position
    assert by_op["logprob"] == len(completion.token_ids)
    # The scan runs over replayed rows too, so its own rows are not those of the forward; what follows it is compared.
    assert {name.split(".")[1] for name in lonely} <= {"ssd_scan"}


def test_record_names_the_kernels_that_run():
    record = engine(num_kv_pages=1).record()
    assert record["ssd_scan"] == "vllm_forward_bridge.ops.ssd_scan.ssd_scan [cpu]"
    assert len(record) == 16
    assert all(kernel.startswith("vllm_forward_bridge.ops.") for kernel in record.values())


def test_models_outside_the_contract_are_refused_with_all_reasons():
    config, tensors = tiny_repository()
    formats = dict(config.quantization.formats) | {
        "backbone.layers.1.mixer.experts.0.up_proj": "NVFP4",
        "backbone.layers.3.mixer.q_proj": "FP8",
    }
    quantization = type(config.quantization)(formats, None)

    outside = dataclasses.replace(config, quantization=quantization, moe_latent_size=64)
    with pytest.raises(ValueError) as error:
        EmbeddedRollout(outside, tensors, BridgeConfig(model=ModelSection(repository="x"), rollout=RolloutSection()))
    parts = ("moe_latent_size is 64", "kv_cache_quant_algo is None", "experts.0.up_proj is NVFP4", "q_proj is FP8")
    assert [part for part in parts if part not in str(error.value)] == []
