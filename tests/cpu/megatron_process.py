# SPDX-License-Identifier: Apache-2.0
"""Megatron in the test process: one gloo rank, the CPU shim, and a tiny model built through megatron.training."""

import socket
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training.training import destroy_global_state

from megatron.vllm_forward import build, launch
from vllm_forward_bridge.checkpoint.repository import open_repository
from vllm_forward_bridge.checkpoint.tiny import make_tiny_checkpoint
from vllm_forward_bridge.config import BridgeConfig, ForwardSection, ModelSection

FLAGS = (
    "--distributed-backend", "gloo", "--seq-length", "80", "--max-position-embeddings", "80", "--micro-batch-size", "1",
    "--global-batch-size", "1", "--train-iters", "4", "--lr", "1e-3", "--lr-decay-style", "constant", "--weight-decay",
    "0.0", "--clip-grad", "1.0", "--calculate-per-token-loss",
)  # fmt: skip


@contextmanager
def one_rank():
    """Put a world of one process with a free port into the environment; leave no process group behind."""
    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("127.0.0.1", 0))
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": str(probe.getsockname()[1])}.items():
            patch.setenv(name, value)
        probe.close()
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def one_process():
    """Enter a session in a world of one process; leave no global state behind."""
    with launch.session(), one_rank():
        yield


@contextmanager
def built(repository, *flags, mode="bridged", optimizer=("--use-distributed-optimizer",)):
    """Build a trainer inside `one_process`; another may follow after it."""
    config = BridgeConfig(model=ModelSection(repository=str(repository)), forward=ForwardSection(mode=mode))
    try:
        yield build.build(config, [*FLAGS, *optimizer, *flags])
    finally:
        destroy_global_state()


def tiny_source(tmp_path_factory):
    """Return an opened tiny repository in a fresh folder."""
    path = tmp_path_factory.mktemp("tiny") / "repository"
    make_tiny_checkpoint(path)
    return open_repository(path)


def packed(lengths):
    """Return packed parameters for sequences of these lengths."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


def random_tokens(shape, seed=0):
    """Return token ids of the tiny vocabulary."""
    return torch.randint(0, 1280, shape, generator=torch.Generator().manual_seed(seed))


def take_gradients(chunk):
    """Return the fp32 gradients that Megatron's DDP wrapper collected, by name, and clear them."""
    found = {name: parameter.main_grad.clone() for name, parameter in chunk.named_parameters()}
    chunk.zero_grad_buffer()
    return found
