# SPDX-License-Identifier: Apache-2.0
"""Tensor, expert, pipeline, context and data parallelism on two processes: the bits and bytes of one process."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vllm_forward_bridge.checkpoint.tiny import make_tiny_checkpoint
from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits

pytestmark = pytest.mark.dist
LAYOUTS = ("dp", "overlap", "tp", "ep", "tp and ep", "pp", "cp")
NUM_LAYERS = 5
SECONDS = 900
# Rows of the tiny mixer that tensor parallelism shares out section by section.
SECTIONS = {"in_proj.weight": [512, 512, 128, 128, 16], "conv1d": [512, 128, 128]}


def run_two_ranks(folder, backend, chunk_size):
    """Run the worker on two processes; return what each rank saw, by layout."""
    make_tiny_checkpoint(folder / "repository", chunk_size=chunk_size)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if backend == "gloo":
        place["CUDA_VISIBLE_DEVICES"] = ""
    worker = str(Path(__file__).with_name("layouts_worker.py"))
    started = []
    for rank in ("0", "1"):
        log = (folder / f"log{rank}").open("w")
        environment = {**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, worker, folder / "repository", folder, backend]
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = wait_for_all(started)
    tails = [(folder / f"log{rank}").read_text()[-3000:] for rank in (0, 1)]
    assert codes == [0, 0], tails
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


def wait_for_all(processes):
    """Return the exit codes; when one fails, end the others, which would wait for it, and after SECONDS end all."""
    deadline = time.monotonic() + SECONDS
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.2)
    return [process.wait() for process in processes]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what two processes on CPUs saw."""
    return run_two_ranks(tmp_path_factory.mktemp("layouts"), "gloo", 16)


def losses(seen):
    """Return the loss of each place that a rank scored."""
    found = {}
    for places, loss_BS in seen["records"]:
        found.update(zip(places.tolist(), loss_BS[0], strict=True))
    return torch.stack([found[place] for place in sorted(found)])


def test_expert_parallelism_keeps_the_bits(ranks):
    for rank in (0, 1):
        assert_same_bits(losses(ranks[rank]["ep"]), losses(ranks[rank]["dp"]), f"EP 2, rank {rank}")
    assert not same_bits(losses(ranks[0]["dp"]), losses(ranks[1]["dp"]))


def test_pipeline_parallelism_keeps_the_bits(ranks):
    assert ranks[0]["pp"]["records"] == []
    assert_same_bits(losses(ranks[1]["pp"]), losses(ranks[0]["dp"]), "PP 2")


def test_context_parallelism_keeps_the_bits(ranks):
    both = {"records": ranks[0]["cp"]["records"] + ranks[1]["cp"]["records"]}
    assert len(losses(ranks[0]["cp"])) * 2 == len(losses(ranks[0]["dp"]))
    assert_same_bits(losses(both), losses(ranks[0]["dp"]), "CP 2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_export_the_same_bytes_and_an_idle_step_changes_none(ranks, layout):
    first, second = (rank[layout] for rank in ranks)
    assert first["loaded"] == second["loaded"] == ranks[0]["dp"]["loaded"]
    assert first["idle_step"] == second["idle_step"] == first["loaded"]
    assert first["stepped"] == second["stepped"] != first["loaded"]
    assert first["versions"] == second["versions"] == 2
    assert first["changed_blocks"] > 1000


@pytest.mark.parametrize("layout", ["tp", "tp and ep"])
def test_tensor_parallelism_keeps_the_bits(ranks, layout):
    for rank in (0, 1):
        assert_same_bits(losses(ranks[rank][layout]), losses(ranks[0]["dp"]), f"{layout} 2, rank {rank}")


def test_an_overlapped_parameter_gather_gives_the_same_bytes(ranks):
    assert ranks[0]["overlap"]["stepped"] == ranks[0]["dp"]["stepped"]
    assert_same_bits(losses(ranks[1]["overlap"]), losses(ranks[1]["dp"]), "overlapped gathers")


@pytest.mark.parametrize("layout", ["reload", "reload in place"])
def test_a_checkpoint_moves_between_layouts(ranks, layout):
    assert [rank[layout]["loaded"] for rank in ranks] == [ranks[0]["tp"]["stepped"]] * 2


def share(whole, shape, name, rank):
    """Return the part of a gradient that a rank's parameter has: half of its experts, or Megatron's shard."""
    differs = [dim for dim, size in enumerate(shape) if size != whole.shape[dim]]
    sections = next((sizes for part, sizes in SECTIONS.items() if part in name), None)
    if not differs:
        return whole
    if sections is None:
        return whole.chunk(2, dim=differs[0])[rank]
    return torch.cat([section.chunk(2)[rank] for section in whole.split(sections)])


@pytest.mark.parametrize("layout", ["tp", "ep", "tp and ep", "pp", "cp"])
def test_gradients_are_close_to_one_process(ranks, layout):
    # Expert parallelism trains on both batches, like data parallelism; the others on the first one alone.
    want = ranks[0]["dp"]["gradients" if layout == "ep" else "alone"]
    compared = set()
    for rank, seen in enumerate(ranks):
        for name, grad in seen[layout]["gradients"].items():
            reference = share(want[name], grad.shape, name, rank)
            # Rows arrive in other sums, before and after each mixer: two bf16 roundings (2^-8) for every layer passed.
            assert float((grad - reference).norm()) <= NUM_LAYERS * 2 * 2**-8 * float(reference.norm()), name
            assert float(reference.norm()) > 0, name
            compared.add(name)
    assert compared == set(want)
