# SPDX-License-Identifier: Apache-2.0
"""Negative control: stock vLLM on one checkpoint. Its decode and prefill differ, and so do it and the trainer."""

import itertools

import pytest
import torch
from models import SCALES, deployment, make_folder
from sampling import logprobs, request
from trainer import SCORE_ONLY, built, scores

from vllm_forward_bridge.checkpoint.repository import write_repository
from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec
from vllm_forward_bridge.config import BridgeConfig, ModelSection
from vllm_forward_bridge.rollout.protocol import Completion

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Write a three-layer model of Lightning's width to disk, as stock vLLM reads it."""
    scale, home = SCALES["short"], tmp_path_factory.mktemp("stock")
    plain = make_folder(scale, home / "configuration")
    tensors = deployment(scale, plain)
    shards = {name: f"model-{place // 400:05d}.safetensors" for place, name in enumerate(tensors)}
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape), shards[name]) for name, tensor in tensors.items()]
    files = {path.name: path.read_text() for path in plain.iterdir()}
    write_repository(home / "model", files, specs, lambda name: tensors[name].cpu())
    return home / "model", tensors


@pytest.fixture(scope="module")
def stock(stored):
    """Return (completions by stock vLLM, logprobs of the same tokens by its own prefill)."""
    pytest.MonkeyPatch().setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    folder, _ = stored
    engine = LLM(
        str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=4096, max_num_seqs=64,
        kv_cache_memory_bytes=4 << 30, gpu_memory_utilization=0.01, enable_prefix_caching=False,
        logprobs_mode="processed_logprobs", generation_config="vllm", disable_log_stats=True,
    )  # fmt: skip
    requests = [request(f"stock {n}", 60 + 7 * n, SCALES["short"].vocabulary, NEW_TOKENS) for n in range(48)]
    sampled = engine.generate(
        [{"prompt_token_ids": list(one.prompt_ids)} for one in requests],
        [
            SamplingParams(max_tokens=NEW_TOKENS, seed=n, logprobs=0, ignore_eos=True, detokenize=False)
            for n in range(len(requests))
        ],
        use_tqdm=False,
    )
    completions = []
    for one, output in zip(requests, sampled, strict=True):
        tokens = tuple(output.outputs[0].token_ids)
        values = tuple(entry[t].logprob for entry, t in zip(output.outputs[0].logprobs, tokens, strict=True))
        phases = ("prefill", *itertools.repeat("decode", len(tokens) - 1))
        completions.append(
            Completion(
                request_id=one.request_id, prompt_ids=one.prompt_ids, token_ids=tokens, logprobs=values,
                phases=phases, finish_reason="length", weight_version=1,
            )
        )  # fmt: skip
    again = engine.generate(
        [{"prompt_token_ids": list(c.prompt_ids + c.token_ids)} for c in completions],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    prefilled = []
    for completion, output in zip(completions, again, strict=True):
        entries = output.prompt_logprobs[len(completion.prompt_ids) :]
        values = [entry[t].logprob for entry, t in zip(entries, completion.token_ids, strict=True)]
        prefilled.append(torch.tensor(values))
    return requests, completions, prefilled


def report(found, completions) -> dict:
    """Return how many logprobs differ from the completions' own, and by how much."""
    gaps = torch.cat([(a - logprobs(c)).abs() for a, c in zip(found, completions, strict=True)])
    share = round((gaps > 0).float().mean().item(), 4)
    return {"compared": len(gaps), "share": share, "mean": gaps.mean().item(), "largest": gaps.max().item()}


def test_stock_decode_is_not_stock_prefill(stock, measure):
    _, completions, prefilled = stock
    found = report(prefilled, completions)
    measure(what="stock vLLM, decode and prefill", **found)
    assert found["share"] > 0.1


def test_stock_rollout_is_not_our_trainer(stock, stored, measure):
    requests, completions, _ = stock
    folder, tensors = stored
    with built(BridgeConfig(model=ModelSection(repository=str(folder))), tensors, SCORE_ONLY) as trainer:
        found = report(scores(trainer.model[0], completions, requests), completions)
    measure(what="stock vLLM and the bridged trainer", **found)
    assert found["share"] > 0.1
