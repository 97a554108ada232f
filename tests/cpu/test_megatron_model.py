# SPDX-License-Identifier: Apache-2.0
"""The bridged HybridModel on one rank: same bits however it is called, and nothing outside the contract is built."""

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron_process import built, one_process, packed, random_tokens, take_gradients, tiny_source

from megatron.vllm_forward import coverage, versions, weights
from megatron.vllm_forward.output import Sampling
from megatron.vllm_forward.stack import residual_add
from vllm_forward_bridge.ops.fused_add_rms_norm import fused_add_rms_norm
from vllm_forward_bridge.ops.logprob import logprob
from vllm_forward_bridge.ops.rms_norm import rms_norm
from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    source = tiny_source(tmp_path_factory)
    with one_process(), built(source.path) as trainer:
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        yield trainer


@pytest.fixture
def model(trainer):
    return versions.unwrapped(trainer.model[0])


def loss_and_gradients(trainer, tokens, **keywords):
    loss = trainer.model[0](tokens, None, None, labels=tokens.roll(-1, 1), **keywords)
    loss.sum().backward()
    return loss.detach(), take_gradients(trainer.model[0])


def test_same_bits_packed_and_batched_with_and_without_grad_in_train_and_eval(model):
    tokens = random_tokens((3, 40))
    model.train()
    batched = model(tokens, None, None, labels=tokens.roll(-1, 1)).detach()
    for training, grad in ((True, False), (False, True), (False, False)):
        model.train(training)
        with torch.set_grad_enabled(grad):
            again = model(tokens, None, None, labels=tokens.roll(-1, 1))
            together = model(
                tokens.view(1, -1),
                None,
                None,
                labels=tokens.roll(-1, 1).view(1, -1),
                packed_seq_params=packed([40] * 3),
            )
        assert_same_bits(again, batched, f"training {training}, grad {grad}")
        assert_same_bits(together.view(3, 40), batched, f"packed, training {training}, grad {grad}")
    model.train()


def test_a_sequence_keeps_its_bits_beside_others_and_before_padding(model):
    tokens = random_tokens((1, 75), seed=1)
    labels = tokens.roll(-1, 1)
    with torch.no_grad():
        several = model(tokens, None, None, labels=labels, packed_seq_params=packed([17, 1, 33]))
        alone = model(tokens[:, 18:51], None, None, labels=labels[:, 18:51])
    assert_same_bits(several[:, 18:51], alone, "a sequence among others, with padded rows behind")
    assert not same_bits(several[:, :17], model(tokens[:, 1:18], None, None, labels=labels[:, 1:18]).detach())


@pytest.mark.parametrize("part", ["full", "core_attn", "moe"])
def test_recompute_keeps_the_bits_of_loss_and_gradients(trainer, model, monkeypatch, part):
    tokens = random_tokens((1, 48), seed=2)
    loss, grads = loss_and_gradients(trainer, tokens, packed_seq_params=packed([31, 17]))
    layers = model.decoder.layers
    if part == "full":
        for name, value in (("granularity", "full"), ("method", "uniform"), ("num_layers", 2)):
            monkeypatch.setattr(model.config, f"recompute_{name}", value)
    elif part == "core_attn":
        monkeypatch.setattr(layers[3].self_attention, "checkpoint_core_attention", True)
    else:
        monkeypatch.setattr(layers[1].mlp, "recompute", True)
    again, again_grads = loss_and_gradients(trainer, tokens, packed_seq_params=packed([31, 17]))
    assert_same_bits(again, loss, "loss under recompute")
    for name, grad in grads.items():
        assert_same_bits(again_grads[name], grad, f"gradient of {name} under recompute")


def test_logprob_is_that_of_all_logits_and_ignores_the_chunk(trainer, model, monkeypatch):
    tokens = random_tokens((2, 30), seed=3)
    labels = tokens.roll(-1, 1)
    ones = torch.ones(2, 30)
    sampling = Sampling(ones * 0.7, ones * 0.9, (ones * 50).int())
    with torch.no_grad():
        logits = model(tokens, None, None)
        whole, entropy = model(tokens, None, None, labels=labels, sampling=sampling, with_entropy=True)
    direct = logprob(logits.view(60, -1), labels.flatten(), *sampling.rows())
    assert_same_bits(-whole.flatten(), direct, "logprob from chunks against logprob of all logits")
    assert 0 < float(entropy.min())
    assert float(entropy.max()) < float(torch.tensor(1280.0).log())
    _, grads = loss_and_gradients(trainer, tokens)
    monkeypatch.setattr(model.output_layer, "chunk_tokens", 7)
    with torch.no_grad():
        chunked = model(tokens, None, None, labels=labels, sampling=sampling)
    assert_same_bits(chunked, whole, "chunks of 7 tokens against one chunk")
    _, chunked_grads = loss_and_gradients(trainer, tokens)
    # Chunks only change the order of an fp32 sum before one cast: at most one bf16 step, and one more below it.
    name = "module.module.output_layer.weight"
    assert float((chunked_grads[name].float() - grads[name].float()).abs().max()) <= 2**-7 * float(
        grads[name].abs().max()
    )
    assert float(grads[name].abs().max()) > 0


def test_residual_add_and_norm_are_the_fused_ones():
    generator = torch.Generator().manual_seed(4)
    x, residual, gain = (torch.randn(s, generator=generator).bfloat16() for s in ((33, 192), (33, 192), (192,)))
    y, s = fused_add_rms_norm(x, residual, gain, 1e-5)
    for training in (True, False):
        added = residual_add(training, False)((x.clone(), None), residual, 0.0)
        assert_same_bits(added, s, f"Megatron's residual add, training {training}")
        assert_same_bits(rms_norm(added, gain, 1e-5), y, "norm after it")


def test_coverage_names_every_module_that_is_not_bridged(model, monkeypatch):
    coverage.check_coverage([model])
    monkeypatch.setitem(model.decoder.layers[0]._modules, "norm", torch.nn.RMSNorm(192))
    monkeypatch.setitem(model.decoder.layers[1].mlp._modules, "router", torch.nn.Linear(192, 8))
    monkeypatch.setitem(model.decoder.layers[3]._modules, "self_attention", IdentityOp())
    monkeypatch.setattr(model.decoder.layers[2], "mamba_bda", lambda *_: None)
    with pytest.raises(RuntimeError) as raised:
        coverage.check_coverage([model])
    for part in ("layers.0.norm: torch", "mlp.router: torch", "layer 4 (*).self_attention: IdentityOp", "mamba_bda"):
        assert part in str(raised.value)


def test_stale_bytes_stop_the_forward(model):
    tokens = random_tokens((1, 8))
    version = versions.mark_masters_changed([model])
    with pytest.raises(RuntimeError, match=f"version {version}; requantise first"):
        model(tokens, None, None)
    versions.mark_bytes_current([model])
    assert versions.deployment_version([model]) == version
    model(tokens, None, None)


def test_expert_ids_are_refused_by_the_bridged_forward(model):
    tokens = random_tokens((1, 8))
    with pytest.raises(ValueError, match="only mode 'baseline' takes them"):
        model(tokens, None, None, expert_ids=torch.zeros(1, 8, 2, 3, dtype=torch.int64))
