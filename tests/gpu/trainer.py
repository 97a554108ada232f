# SPDX-License-Identifier: Apache-2.0
"""Megatron's side of the engine proofs: build the bridged model in this process and score what the rollout sampled."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron.vllm_forward import baseline, build, launch, weights
from megatron.vllm_forward.output import Sampling
from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.rollout.protocol import Completion, SamplingParams

_FLAGS = (
    "--seq-length", "8192", "--max-position-embeddings", "8192", "--micro-batch-size", "1", "--global-batch-size", "1",
    "--train-iters", "100", "--lr-decay-style", "constant", "--weight-decay", "0.0", "--calculate-per-token-loss",
)  # fmt: skip
ADAM = ("--lr", "1e-3", "--use-distributed-optimizer", "--clip-grad", "1.0")
SIGNED_SGD = ("--lr", "1e-4", "--optimizer", "sgd", "--sgd-momentum", "0.0", "--clip-grad", "0.0")
"""For models whose Adam moments would not fit; the test gives it the signs of the gradients."""
SCORE_ONLY = ("--lr", "1e-3", "--skip-train")
PACK = 8192


@contextmanager
def built(bridge: BridgeConfig, tensors: dict[str, Tensor], flags: Sequence[str]) -> Iterator[build.Trainer]:
    """Build a trainer on deployment tensors; Megatron's parser, model and optimizer are ours until exit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(place)
    with launch.session():
        trainer = build.build(bridge, [*_FLAGS, *flags])
        weights.load_deployment(trainer.model, tensors, trainer.optimizer)
        yield trainer


@contextmanager
def ordinary_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Run the model on the baseline's kernels for a while: same bytes, ordinary arithmetic."""
    modules = [module for module in model.modules() if hasattr(module, "kernels")]
    kernels = [module.kernels for module in modules]
    for module in modules:
        module.kernels = baseline
    _drop_packed_weights(model)
    yield
    for module, found in zip(modules, kernels, strict=True):
        module.kernels = found
    _drop_packed_weights(model)


def _drop_packed_weights(model: torch.nn.Module) -> None:
    """Let each module make its operands again: ordinary kernels read plain bytes, the contract's read packed ones."""
    for module in model.modules():
        if hasattr(module, "made_operands"):
            module.made_operands = None


def packs(completions: Sequence[Completion], most: int = PACK) -> Iterator[list[Completion]]:
    """Yield runs of completions that fit into one packed row."""
    pack, size = [], 0
    for completion in completions:
        length = len(completion.prompt_ids) + len(completion.token_ids)
        if pack and size + length > most:
            yield pack
            pack, size = [], 0
        pack.append(completion)
        size += length
    if pack:
        yield pack


def forward(model: torch.nn.Module, pack: Sequence[Completion], sampling: dict[str, SamplingParams]) -> list[Tensor]:
    """Return the trainer's logprobs of each completion's sampled tokens, with gradient if it is on."""
    sequences = [completion.prompt_ids + completion.token_ids for completion in pack]
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device="cuda")[None]
    ends = torch.tensor([0, *map(len, sequences)], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(tokens.device)
    settings = [sampling[completion.request_id] for completion in pack]

    def column(name: str, dtype: torch.dtype) -> Tensor:
        values = [getattr(s, name) for s, sequence in zip(settings, sequences, strict=True) for _ in sequence]
        return torch.tensor(values, dtype=dtype, device=tokens.device)[None]

    loss = model(
        tokens,
        torch.arange(tokens.shape[1], device=tokens.device)[None],
        None,
        labels=tokens.roll(-1, dims=1),
        packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends),
        sampling=Sampling(
            column("temperature", torch.float32), column("top_p", torch.float32), column("top_k", torch.int32)
        ),
    )
    found = []
    for completion, end in zip(pack, ends.tolist()[1:], strict=True):
        found.append(-loss[0, end - len(completion.token_ids) - 1 : end - 1])
    return found


def scores(model: torch.nn.Module, completions: Sequence[Completion], requests, most: int = PACK) -> list[Tensor]:
    """Return the trainer's logprobs on the CPU, without gradient."""
    sampling = {one.request_id: one.sampling for one in requests}
    with torch.no_grad():
        return [value.cpu() for pack in packs(completions, most) for value in forward(model, pack, sampling)]
