# SPDX-License-Identifier: Apache-2.0
"""The trainer's logprobs are the rollout's, bit for bit; the baseline's are not, and learn all the same."""

import pytest
import torch
from megatron_process import built, one_process, packed, take_gradients, tiny_source

from megatron.vllm_forward import versions, weights
from megatron.vllm_forward.output import Sampling
from vllm_forward_bridge.config import BridgeConfig, ModelSection
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.rollout.embedded.engine import EmbeddedRollout
from vllm_forward_bridge.rollout.protocol import Request, SamplingParams

LENGTHS = (3, 16, 33, 40)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_source(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def process():
    with one_process():
        yield


def rollout(source, tensors):
    config = BridgeConfig(model=ModelSection(repository=str(source.path)))
    return EmbeddedRollout(source.config, tensors, config)


def sample(engine, **sampling):
    generator = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(0, 1280, (length,), generator=generator).tolist()) for length in LENGTHS]
    requests = [
        Request(
            request_id=str(seed), prompt_ids=prompt, sampling=SamplingParams(seed=seed, max_new_tokens=21, **sampling)
        )
        for seed, prompt in enumerate(prompts)
    ]
    return engine.generate(requests)


def score(trainer, completions, temperature=1.0, top_p=1.0, top_k=0):
    """Return the trainer's logprobs and the rollout's, of all sampled tokens in one packed batch."""
    rows = [c.prompt_ids + c.token_ids for c in completions]
    tokens = torch.tensor([[token for row in rows for token in row]])
    ones = torch.ones(tokens.shape)
    sampling = Sampling(ones * temperature, ones * top_p, (ones * top_k).int())
    loss = trainer.model[0](
        tokens, None, None, labels=tokens.roll(-1, 1), packed_seq_params=packed([len(row) for row in rows]),
        sampling=sampling,
    )  # fmt: skip
    ends = torch.tensor([len(row) for row in rows]).cumsum(0).tolist()
    sampled = [torch.arange(end - len(c.token_ids) - 1, end - 1) for c, end in zip(completions, ends, strict=True)]
    return -loss[0, torch.cat(sampled)], torch.tensor([value for c in completions for value in c.logprobs])


def test_trainer_and_rollout_agree_before_and_after_an_update(source):
    engine = rollout(source, {name: source.read(name) for name in source.names()})
    with built(source.path) as trainer:
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        for version in (1, 2):
            completions = sample(engine, temperature=0.8, top_p=0.9, top_k=60)
            mine, theirs = score(trainer, completions, 0.8, 0.9, 60)
            assert_same_bits(mine.detach(), theirs, f"logprobs of {len(theirs)} sampled tokens, round {version}")
            mine.sum().backward()
            trainer.model[0].finish_grad_sync()
            assert trainer.optimizer.step()[0]
            stale, _ = score(trainer, completions, 0.8, 0.9, 60)
            assert not torch.equal(stale, theirs)
            digest = weights.deployment_digest(trainer.model)
            engine.update_weights(weights.deployment_tensors(trainer.model), version=version, digest=digest)


def test_baseline_differs_and_trains(source):
    completions = sample(rollout(source, {name: source.read(name) for name in source.names()}))
    with built(source.path, mode="baseline") as trainer:
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        mine, theirs = score(trainer, completions)
        differs = (mine != theirs).sum()
        mine.sum().backward()
        grads = take_gradients(trainer.model[0])
        loaded = {name: tensor.clone() for name, tensor in weights.deployment_tensors(trainer.model)}
    # Ordinary bf16 kernels through five layers: different bits nearly everywhere, yet the same model. Each of about
    # 40 roundings moves a logit of size 4 by at most one bf16 step.
    assert int(differs) > len(theirs) // 2
    assert float((mine - theirs).abs().max()) < 40 * 2**-8 * 4
    assert [name for name, grad in grads.items() if not grad.abs().sum() > 0] == []
    for name in source.names():
        assert_same_bits(loaded[name], source.read(name), f"the baseline's bytes: {name}")


def test_router_replay_takes_the_given_experts(source):
    with built(source.path, mode="baseline") as trainer, torch.no_grad():
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        model = versions.unwrapped(trainer.model[0])
        tokens = torch.arange(12).view(1, 12)
        seen = {}
        for place in (1, 4):
            router = model.decoder.layers[place].mlp.router
            router.register_forward_hook(lambda module, inputs, output, place=place: seen.update({place: output[1]}))
        free = model(tokens, None, None, labels=tokens)
        chosen = torch.stack((seen[1], seen[4]), dim=1)[None]
        assert_same_bits(model(tokens, None, None, labels=tokens, expert_ids=chosen), free, "its own choice replayed")
        other = (chosen + 1) % 8
        assert not torch.equal(model(tokens, None, None, labels=tokens, expert_ids=other), free)
        assert torch.equal(torch.stack((seen[1], seen[4]), dim=1)[None], other)
