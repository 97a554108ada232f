# SPDX-License-Identifier: Apache-2.0
"""Engines, requests and comparisons that the tests of the embedded rollout share."""

import dataclasses
import functools
import random
import tempfile
from pathlib import Path

import torch

from vllm_forward_bridge.checkpoint import open_repository
from vllm_forward_bridge.checkpoint.tiny import make_tiny_checkpoint
from vllm_forward_bridge.config import BridgeConfig, ForwardSection, GateSection, ModelSection, RolloutSection
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import Nvfp4Bytes, fp8_dequantize, nvfp4_dequantize
from vllm_forward_bridge.rollout.embedded.engine import EmbeddedRollout
from vllm_forward_bridge.rollout.protocol import Completion, Request, SamplingParams

CHUNK = 16
SPLIT_TOKENS = 24
"""Keys a split of the attention; small, so that the prompts here cross several splits."""
PLAIN = SamplingParams(max_new_tokens=6)


@functools.cache
def tiny_repository(seed=0):
    """Return (config, tensors) of a tiny checkpoint; treat the tensors as read-only."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        make_tiny_checkpoint(path, seed=seed, chunk_size=CHUNK)
        repository = open_repository(path)
        return repository.config, {name: repository.read(name).clone() for name in repository.names()}


def engine(*, router_replay=False, seed=0, **limits):
    """Build an engine on the tiny checkpoint; limits are fields of RolloutSection."""
    config, tensors = tiny_repository(seed)
    forward = ForwardSection(mode="baseline" if router_replay else "bridged", attention_split_tokens=SPLIT_TOKENS)
    bridge = BridgeConfig(
        model=ModelSection(repository="unused"),
        forward=forward,
        rollout=RolloutSection(**limits),
        gate=GateSection(router_replay=router_replay),
    )
    return EmbeddedRollout(config, tensors, bridge)


def prompt(length, seed=0):
    """Return `length` token ids of the tiny vocabulary."""
    chosen = random.Random(f"{length} {seed}")
    return tuple(chosen.randrange(1280) for _ in range(length))


def request(name, length, sampling=PLAIN, **changes):
    """Return a request whose prompt and seed follow from its name and length."""
    seed = random.Random(name).randrange(2**63)
    values = {"seed": seed, **changes}
    return Request(request_id=name, prompt_ids=prompt(length, name), sampling=dataclasses.replace(sampling, **values))


def serve(rollout, requests, *, join_at=None):
    """Run requests; those in `join_at` (name -> step) join late. Return completions by id."""
    join_at = join_at or {}
    done, step, waiting = {}, 0, list(requests)
    while waiting or rollout.has_unfinished():
        for one in [one for one in waiting if join_at.get(one.request_id, 0) <= step]:
            rollout.add(one)
            waiting.remove(one)
        done |= {completion.request_id: completion for completion in rollout.step()}
        step += 1
        assert step < 2000
    return done


def assert_same_completion(got: Completion, want: Completion, what: str):
    """Compare tokens, logprob bits and the reason of the end; phases may differ."""
    assert got.token_ids == want.token_ids, f"{what}: tokens of {got.request_id}"
    logprobs = (torch.tensor(one.logprobs, dtype=torch.float64) for one in (got, want))
    assert_same_bits(*logprobs, f"{what}: logprobs of {got.request_id}")
    assert (got.finish_reason, got.weight_version) == (want.finish_reason, want.weight_version)


def assert_same_completions(got, want, what):
    """Compare two mappings of completions by id."""
    assert got.keys() == want.keys()
    for name in want:
        assert_same_completion(got[name], want[name], what)


def scored(rollout, completion, sampling):
    """Return float32 logprobs of a completion's sampled tokens, computed by prefill."""
    (values,) = rollout.score([completion.prompt_ids + completion.token_ids], sampling)
    return values[len(completion.prompt_ids) - 1 :]


def library_product(linear, x_TK):
    """Do what the baseline does in place of an engine's linear: the library's product with dequantised weights."""
    if linear.weight_format == "FP8":
        weight_NK = fp8_dequantize(linear.tensors[0], linear.tensors[1], torch.float32)
    elif linear.weight_format == "W4A16_NVFP4":
        weight_NK = nvfp4_dequantize(Nvfp4Bytes(*linear.tensors), torch.float32)
    else:
        weight_NK = linear.tensors[0].float()
    return (x_TK.float() @ weight_NK.t()).bfloat16()


def poison(rollout):
    """Fill every cache with NaN: what a sequence has not written itself must never reach it."""
    for cache in rollout.model.caches:
        if cache is None:
            continue
        for value in vars(cache).values():
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                    tensor.copy_(torch.full_like(tensor, float("nan"), dtype=torch.float32))
