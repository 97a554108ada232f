# SPDX-License-Identifier: Apache-2.0
"""Deployment weights of a trained model: in, through optimizer steps and Megatron checkpoints, and out again."""

import pytest
import torch
from megatron.training.checkpointing import save_checkpoint
from megatron_process import built, one_process, packed, random_tokens, tiny_source

from megatron.vllm_forward import optimizer_hook, versions, weights
from vllm_forward_bridge.checkpoint.repository import open_repository
from vllm_forward_bridge.checkpoint.to_hf import convert_to_hf
from vllm_forward_bridge.checkpoint.to_megatron import convert_to_megatron
from vllm_forward_bridge.parity.bits import assert_same_bits


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_source(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def process():
    with one_process():
        yield


def exported(trainer):
    return {name: tensor.clone() for name, tensor in weights.deployment_tensors(trainer.model)}


def assert_same_tensors(got, want, what):
    assert list(got) == list(want)
    for name in want:
        assert_same_bits(got[name], want[name], f"{what}: {name}")


def train_step(trainer, learning_rate, seed=0):
    chunk, tokens = trainer.model[0], random_tokens((1, 40), seed)
    chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    loss = chunk(tokens, None, None, labels=tokens.roll(-1, 1), packed_seq_params=packed([23, 17]))
    loss.sum().backward()
    chunk.finish_grad_sync()
    for group in trainer.optimizer.param_groups:
        group["lr"] = learning_rate
    assert trainer.optimizer.step()[0]
    return loss.detach()


def test_export_is_byte_equal_to_the_source_until_a_step_moves_weights(source):
    want = {name: source.read(name) for name in source.names()}
    with built(source.path) as trainer:
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        assert_same_tensors(exported(trainer), want, "after the load")
        addresses = [b.data_ptr() for _, b in versions.unwrapped(trainer.model[0]).named_buffers()]
        version = versions.deployment_version(trainer.model)
        train_step(trainer, 0.0)
        assert_same_tensors(exported(trainer), want, "after a step of size 0")
        assert optimizer_hook.last_report(trainer.optimizer).changed_blocks == 0
        train_step(trainer, 1e-3)
        moved = {name for name, tensor in exported(trainer).items() if not torch.equal(_raw(tensor), _raw(want[name]))}
        assert versions.deployment_version(trainer.model) == version + 2
        assert optimizer_hook.last_report(trainer.optimizer).changed_blocks > 1000
        assert [b.data_ptr() for _, b in versions.unwrapped(trainer.model[0]).named_buffers()] == addresses
    assert {"lm_head.weight", "backbone.layers.0.mixer.in_proj.weight", "backbone.layers.1.mixer.gate.weight"} <= moved
    assert not [name for name in moved if name.startswith("mtp.") or "scale_2" in name or "input_scale" in name]


def _raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_a_step_requantises_only_what_moved_and_the_forward_reads_it(source):
    with built(source.path) as trainer:
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        first = train_step(trainer, 1e-3)
        second = train_step(trainer, 0.0)
        assert float(second.sum()) < float(first.sum())
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        model = versions.unwrapped(trainer.model[0])
        for parameter in model.parameters():
            assert parameter.dtype == torch.bfloat16
        linear = model.decoder.layers[0].mixer.in_proj
        before = linear.fp8_codes.clone()
        linear.weight.data[3, 5] += 0.5
        report = optimizer_hook.refresh(trainer.model)
        assert report.changed_blocks == 1
        assert (linear.fp8_codes != before).nonzero().tolist() == [[3, 5]]


def test_a_moved_router_bias_opens_a_version_even_if_the_step_is_skipped(source):
    with built(source.path) as trainer:
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        train_step(trainer, 0.0)
        version = versions.deployment_version(trainer.model)
        hook = trainer.optimizer.deployment_hook
        hook.inner_step = lambda: (False, None, None)
        assert trainer.optimizer.step()[0] is False
        assert versions.deployment_version(trainer.model) == version
        versions.unwrapped(trainer.model[0]).decoder.layers[1].mlp.router.expert_bias[2] += 0.125
        trainer.optimizer.step()
        assert versions.deployment_version(trainer.model) == version + 1


def test_megatron_checkpoint_keeps_masters_bytes_and_carried_tensors(source, tmp_path):
    place = str(tmp_path / "saved")
    with built(source.path, "--save", place, "--save-interval", "1") as trainer:
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        train_step(trainer, 1e-3)
        want = exported(trainer)
        save_checkpoint(1, trainer.model, trainer.optimizer, trainer.scheduler, 0)
        following = train_step(trainer, 1e-3, seed=1)
        later = exported(trainer)
    with built(source.path, "--load", place) as trainer:
        assert versions.deployment_version(trainer.model) == 1
        assert_same_tensors(exported(trainer), want, "after save and load")
        assert_same_bits(train_step(trainer, 1e-3, seed=1), following, "loss of the next step")
        assert_same_tensors(exported(trainer), later, "after one more step, with the loaded optimizer state")
        router = versions.unwrapped(trainer.model[0]).decoder.layers[1].mlp.router
        assert router.expert_bias.dtype == router.weight_f32.dtype == torch.float32


def test_a_converted_checkpoint_loads_trains_and_converts_back(source, tmp_path):
    convert_to_megatron(source.path, tmp_path / "converted")
    flags = ("--load", str(tmp_path / "converted"), "--save", str(tmp_path / "saved"), "--save-interval", "1")
    with built(tmp_path / "converted/hf", *flags) as trainer:
        assert_same_tensors(exported(trainer), {name: source.read(name) for name in source.names()}, "after conversion")
        train_step(trainer, 1e-3)
        want = exported(trainer)
        save_checkpoint(1, trainer.model, trainer.optimizer, trainer.scheduler, 0)
    convert_to_hf(tmp_path / "saved", tmp_path / "exported", base=tmp_path / "converted")
    back = open_repository(tmp_path / "exported")
    assert_same_tensors({name: back.read(name) for name in want}, want, "the trained model as a repository")


def test_training_from_scratch_derives_bytes_once(source):
    with built(source.path) as trainer:
        losses = [float(train_step(trainer, 3e-3).sum()) for _ in range(3)]
        tensors = exported(trainer)
    assert losses[2] < losses[0]
    assert float(tensors["backbone.layers.0.mixer.in_proj.input_scale"]) == 1.0
    assert float(tensors["backbone.layers.3.mixer.k_proj.k_scale"]) == 1.0
    assert not tensors["mtp.layers.0.eh_proj.weight"].any()


def test_load_lists_every_tensor_that_does_not_fit(source):
    tensors = {name: source.read(name) for name in source.names()}
    del tensors["lm_head.weight_scale"]
    tensors["backbone.norm_f.weight"] = tensors["backbone.norm_f.weight"].float()
    tensors["backbone.layers.1.mixer.experts.3.up_proj.weight"] = torch.zeros(2, 2, dtype=torch.uint8)
    with built(source.path) as trainer:
        version = versions.deployment_version(trainer.model)
        with pytest.raises(ValueError, match="do not fit") as raised:
            weights.load_deployment(trainer.model, tensors)
        assert versions.deployment_version(trainer.model) == version
    for part in (
        "lm_head.weight_scale: missing",
        "norm_f.weight: torch.float32",
        "experts.3.up_proj.weight: torch.uint8 [2, 2]",
    ):
        assert part in str(raised.value)


def test_a_plain_optimizer_requantises_too(source):
    with built(source.path, optimizer=()) as trainer:
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        before = exported(trainer)
        train_step(trainer, 0.0)
        assert_same_tensors(exported(trainer), before, "after a step of size 0")
        train_step(trainer, 1e-3)
        assert optimizer_hook.last_report(trainer.optimizer).changed_blocks > 1000


def test_hook_is_installed_once(source):
    with built(source.path) as trainer, pytest.raises(RuntimeError, match="called twice"):
        optimizer_hook.install(trainer.optimizer, trainer.model)


def test_a_build_outside_the_contract_lists_flags_and_repository(source):
    flags = ("--hidden-dropout", "0.1", "--norm-epsilon", "1e-6")
    with pytest.raises(ValueError, match="outside the contract") as raised, built(source.path, *flags):
        pass
    for part in ("hidden_dropout is 0.1", "layernorm_epsilon is 1e-06; the repository has 1e-05"):
        assert part in str(raised.value)
