# SPDX-License-Identifier: Apache-2.0
"""Trainer logprob == rollout logprob, token by token, bit by bit; an ordinary trainer on the same bytes differs."""

import random
import time

import pytest
import torch
from sampling import GREEDY, PLAIN, TOP_K, TRUNCATED, differing, logprobs, request, serve
from trainer import ADAM, SCORE_ONLY, SIGNED_SGD, built, forward, ordinary_kernels, packs, scores

from megatron.vllm_forward import optimizer_hook, versions, weights
from vllm_forward_bridge.parity.bits import assert_same_bits, integer_view

STEPS = 10


@pytest.fixture(scope="module")
def trainer(scale, bridge, tensors, rollout):
    """Build after the engine, whose update needs room for a second copy."""
    flags = SCORE_ONLY if not scale.trains else SIGNED_SGD if scale.layers else ADAM
    with built(bridge, tensors, flags) as made:
        if not scale.trains:
            # 52 layers twice, with bf16 masters, fill the card: the copy that both sides were loaded from must go.
            tensors.clear()
            torch.cuda.empty_cache()
        yield made


@pytest.fixture(scope="module")
def model(trainer):
    return trainer.model[0]


@pytest.fixture(scope="module")
def long_run(scale, rollout, measure_module):
    """Sample a lot: half at temperature 1, half at 0.7 with top-p 0.95."""
    requests = [
        request(f"long {n}", 20 + 13 * n % 400, scale.vocabulary, scale.new_tokens, PLAIN if n % 2 else TRUNCATED)
        for n in range(scale.num_seqs)
    ]
    start = time.monotonic()
    done = serve(rollout, requests, a_step=scale.num_seqs)
    seconds = time.monotonic() - start
    completions = [done[one.request_id] for one in requests]
    tokens = sum(len(completion.token_ids) for completion in completions)
    measure_module(what="rollout", sampled_tokens=tokens, tokens_per_second=round(tokens / seconds, 1))
    return requests, completions


def test_deployment_comes_back_byte_for_byte(trainer, tensors):
    for name, tensor in weights.deployment_tensors(trainer.model):
        assert_same_bits(integer_view(tensor).cpu(), integer_view(tensors[name]).cpu(), name)


def test_same_logprobs(scale, model, long_run, measure):
    requests, completions = long_run
    start = time.monotonic()
    different, compared, largest = differing(scores(model, completions, requests), completions)
    seconds = time.monotonic() - start
    measure(what="trainer", compared=compared, differing=different, largest=largest, seconds=round(seconds, 1))
    assert compared == scale.num_seqs * scale.new_tokens
    assert different == 0, f"{different} of {compared} tokens differ, by up to {largest}"


def test_same_logprobs_for_every_kind_of_sampling(scale, rollout, model):
    settings = (PLAIN, TRUNCATED, TOP_K, GREEDY)
    requests = [request(f"kind {n}", 100 + n, scale.vocabulary, 30, settings[n % 4]) for n in range(24)]
    done = serve(rollout, requests)
    completions = [done[one.request_id] for one in requests]
    for most in (1, 700, 8192):  # one sequence a row, some, all
        assert differing(scores(model, completions, requests, most), completions)[0] == 0, f"rows of {most}"


def test_gradient_changes_no_bit(scale, model, long_run):
    if not scale.trains:
        pytest.skip("this model is too large to train on one GPU")
    requests, completions = long_run
    pack = next(packs(completions))[:4]
    found = forward(model, pack, {one.request_id: one.sampling for one in requests})
    assert found[0].requires_grad
    assert differing([value.detach().cpu() for value in found], pack)[0] == 0


def test_ordinary_trainer_differs(model, long_run, measure):
    requests, completions = long_run
    few = completions[:8]
    with ordinary_kernels(model):
        found = scores(model, few, requests)
    different, compared, largest = differing(found, few)
    gaps = torch.cat([a - logprobs(c) for a, c in zip(found, few, strict=True)]).abs()
    mean = gaps[gaps.isfinite()].mean().item()
    measure(what="ordinary trainer", compared=compared, differing=different, largest=largest, mean=mean)
    assert different > compared // 2


def train_once(scale, trainer, requests, completions, seed: int) -> None:
    """Make one policy-gradient step with random advantages."""
    model = trainer.model[0]
    model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    sampling = {one.request_id: one.sampling for one in requests}
    weigh = random.Random(seed)
    for pack in packs(completions):
        loss = sum((value * weigh.choice((-1.0, 1.0))).sum() for value in forward(model, pack, sampling))
        loss.backward()
    model.finish_grad_sync()
    if scale.layers:
        for parameter in model.parameters():
            parameter.main_grad.sign_()
    success, _, _ = trainer.optimizer.step()
    assert success


def test_ten_steps_and_updates(scale, trainer, model, rollout, measure):
    if not scale.trains:
        pytest.skip("this model is too large to train on one GPU")
    before = None
    for step in range(STEPS):
        start = time.monotonic()
        requests = [request(f"train {n}", 60 + n, scale.vocabulary, 24, (PLAIN, TRUNCATED)[n % 2]) for n in range(32)]
        done = serve(rollout, requests, a_step=32)
        completions = [done[one.request_id] for one in requests]
        different, compared, largest = differing(scores(model, completions, requests), completions)
        assert different == 0, f"step {step}: {different} of {compared} tokens differ, by up to {largest}"
        assert [c.logprobs for c in completions] != before, "the update changed no logprob of any request"
        before = [c.logprobs for c in completions]
        train_once(scale, trainer, requests, completions, step)
        changed = optimizer_hook.last_report(trainer.optimizer).changed_blocks
        assert changed, "the step changed no byte: nothing would be proved by what follows"
        # Tests before this one may have raised the engine's version beyond the trainer's.
        version = max(versions.deployment_version(trainer.model), rollout.version + 1)
        digest = weights.deployment_digest(trainer.model)
        rollout.update_weights(weights.deployment_tensors(trainer.model), version=version, digest=digest)
        assert rollout.version == version
        seconds = round(time.monotonic() - start, 1)
        measure(what="step", step=step, compared=compared, differing=different, changed_blocks=changed, seconds=seconds)
