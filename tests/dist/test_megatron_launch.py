# SPDX-License-Identifier: Apache-2.0
"""The launcher runs a plain Megatron script, also beside a Megatron-LM checkout."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_forward_bridge.checkpoint.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/pretrain_hybrid.py"
FLAGS = (
    "--distributed-backend gloo --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 3 --lr 1e-3 --lr-decay-style constant --mock-data --vocab-size 1279 "
    "--tokenizer-type NullTokenizer --split 90,10,0 --num-workers 0 --eval-iters 0 --eval-interval 9 --log-interval 1 "
    "--use-distributed-optimizer --clip-grad 1.0 --moe-router-enable-expert-bias"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    make_tiny_checkpoint(folder / "repository")
    (folder / "run.toml").write_text('[model]\nrepository = "repository"\n')
    # What a Megatron-LM checkout adds to the namespace, and a script's neighbour.
    (folder / "checkout/megatron/rl").mkdir(parents=True)
    (folder / "checkout/megatron/rl/__init__.py").write_text("WHERE = __file__\n")
    return folder


def start(folder, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder / "checkout")}
    command = [sys.executable, "-m", "megatron.vllm_forward", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)


def test_a_stock_pretraining_script_trains_on_the_bridged_forward(folder):
    done = start(folder, SCRIPT, *FLAGS, "--vllm-forward", "run.toml")
    assert done.returncode == 0, done.stderr[-3000:]
    found = [float(value) for value in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(found) == 3
    assert found[2] < found[0] < 7.5


def test_core_training_and_a_checkout_share_the_namespace(folder):
    (folder / "imports.py").write_text(
        "import megatron.core, megatron.training, megatron.rl, megatron.vllm_forward as ours\n"
        "from megatron.core.models.hybrid.hybrid_model import HybridModel\n"
        "import neighbour\n"
        "print('found', megatron.rl.WHERE, ours.__file__, HybridModel.__name__, neighbour.VALUE)\n"
    )
    (folder / "neighbour.py").write_text("VALUE = 17\n")
    done = start(folder, folder / "imports.py", "--vllm-forward", "run.toml")
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    assert str(folder / "checkout/megatron/rl") in line
    assert str(ROOT / "megatron/vllm_forward") in line
    assert line.endswith("BridgedModel 17")
