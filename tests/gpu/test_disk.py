# SPDX-License-Identifier: Apache-2.0
"""A repository on disk, converted, trained and exported, is loaded by vLLM and gives the trainer's logprob bits."""

import dataclasses
from functools import partial

import torch
from megatron.training.checkpointing import save_checkpoint
from sampling import PLAIN, TRUNCATED, logprobs, request, serve
from trainer import ADAM, built, forward, scores

from megatron.vllm_forward import optimizer_hook
from vllm_forward_bridge.checkpoint import convert_to_hf, convert_to_megatron
from vllm_forward_bridge.config import ModelSection
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.rollout.open import GIB
from vllm_forward_bridge.rollout.process import ProcessRollout


def loaded_by_vllm(bridge, folder):
    """Return an engine, in a process of its own, that read its weights from a folder."""
    # Imported here: vLLM may be absent where this file is collected.
    from vllm_forward_bridge.rollout.vllm import VllmRollout

    bridge = dataclasses.replace(bridge, model=ModelSection(repository=str(folder)))
    return ProcessRollout(partial(VllmRollout, bridge, max_model_len=1024, kv_cache_bytes=GIB // 2))


def assert_trainer_agrees(model, engine, requests, what):
    """Compare logprob bits of every sampled token."""
    done = serve(engine, requests, a_step=len(requests))
    completions = [done[one.request_id] for one in requests]
    for found, completion in zip(scores(model, completions, requests), completions, strict=True):
        assert_same_bits(found.float(), logprobs(completion), f"{what}: {completion.request_id}")
    return completions


def test_an_exported_model_loads_in_vllm_with_the_trainers_bits(scale, folder, bridge, tensors, tmp_path):
    convert_to_megatron(folder, tmp_path / "converted")
    requests = [request(f"disk {n}", 100 + n, scale.vocabulary, 24, (PLAIN, TRUNCATED)[n % 2]) for n in range(16)]
    flags = (*ADAM, "--save", str(tmp_path / "saved"), "--save-interval", "1")
    with built(bridge, tensors, flags) as trainer:
        model = trainer.model[0]
        engine = loaded_by_vllm(bridge, folder)
        before = assert_trainer_agrees(model, engine, requests, "the source")
        engine.close()
        model.zero_grad_buffer()
        loss = forward(model, before, {one.request_id: one.sampling for one in requests})
        torch.cat(loss).sum().backward()
        model.finish_grad_sync()
        assert trainer.optimizer.step()[0]
        assert optimizer_hook.last_report(trainer.optimizer).changed_blocks
        save_checkpoint(1, trainer.model, trainer.optimizer, trainer.scheduler, 0)
        convert_to_hf(tmp_path / "saved", tmp_path / "exported", base=tmp_path / "converted")
        engine = loaded_by_vllm(bridge, tmp_path / "exported")
        after = assert_trainer_agrees(model, engine, requests, "the export")
        engine.close()
    assert [one.logprobs for one in after] != [one.logprobs for one in before]
