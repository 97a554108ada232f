# SPDX-License-Identifier: Apache-2.0
"""GRPO on two gloo processes: data, expert and pipeline parallel train on the batch of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.vllm_forward.rl.journal import read_journal
from vllm_forward_bridge.checkpoint import convert_to_megatron, make_tiny_checkpoint

WORKER = Path(__file__).with_name("rl_layouts_worker.py")
LAYOUTS = ("dp", "ep", "pp")
TOKENS = 4 * 4 * 6

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def journals(tmp_path_factory):
    """Run one process alone and two together, and return their records by layout."""
    folder = tmp_path_factory.mktemp("layouts")
    make_tiny_checkpoint(folder / "tiny")
    convert_to_megatron(folder / "tiny", folder / "megatron")
    (folder / "bridged.toml").write_text('[model]\nrepository = "tiny"\n')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    started = []
    for place in ({}, *({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for place in places)):
        command = [sys.executable, str(WORKER), str(folder), place.get("WORLD_SIZE", "1")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **place}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return {name: read_journal(folder / f"{name}.jsonl") for name in ("alone", *LAYOUTS)}


def test_every_layout_has_no_difference_before_and_after_an_update(journals):
    for records in journals.values():
        assert [(r["step"], r["compared"], r["mismatches"], r["max"]) for r in records] == [
            (1, TOKENS, 0, 0), (2, TOKENS, 0, 0),
        ]  # fmt: skip
        assert records[1]["version"] > records[0]["version"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_on_the_batch_of_one_process(journals, layout):
    got, want = journals[layout][0], journals["alone"][0]
    same = ("tokens", "trajectories", "groups", "dropped_groups", "trained_tokens", "ratio", "ratio_deviation")
    assert {name: got[name] for name in same} == {name: want[name] for name in same}
    assert want["trained_tokens"] > 0
    # The same float64 numbers, added in another order: 96 additions of values below the sum.
    for name in ("reward", "entropy"):
        assert abs(got[name] - want[name]) <= TOKENS * 2.0**-52 * want[name]
