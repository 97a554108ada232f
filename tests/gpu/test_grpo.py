# SPDX-License-Identifier: Apache-2.0
"""GRPO as a Megatron script on one GPU, vLLM rolling out in the same process: the gate stays silent for a whole run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shapes import CHUNK

from megatron.vllm_forward.rl.journal import read_journal
from vllm_forward_bridge.checkpoint import convert_to_megatron, make_tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
TOML = """
[model]
repository = "{repository}"

[forward]
mode = "{mode}"

[rollout]
engine = "vllm"
max_num_seqs = 128
token_budget = 2048

[gate]
on_difference = "{on_difference}"
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    make_tiny_checkpoint(folder / "tiny", chunk_size=CHUNK)
    convert_to_megatron(folder / "tiny", folder / "megatron")
    return folder


def run(folder: Path, mode: str, on_difference: str, steps: int, *flags: str) -> list[dict]:
    toml, journal = folder / f"{mode}.toml", folder / f"{mode}.jsonl"
    toml.write_text(TOML.format(repository=folder / "tiny", mode=mode, on_difference=on_difference))
    command = [
        sys.executable, "-m", "megatron.vllm_forward", "examples/grpo_tiny/train_grpo.py", "--vllm-forward", str(toml),
        "--pretrained-checkpoint", str(folder / "megatron"), "--rl-journal", str(journal), "--train-iters", str(steps),
        "--log-interval", "1", *flags,
    ]  # fmt: skip
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | place, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return read_journal(journal)


def summary(records: list[dict]) -> dict:
    """Return the numbers that a report needs."""
    first, last = records[:10], records[-10:]
    mean = lambda part, name: round(sum(record[name] for record in part) / len(part), 4)  # noqa: E731
    return {
        "steps": len(records),
        "compared": sum(record["compared"] for record in records),
        "mismatches": sum(record["mismatches"] for record in records),
        "reward_first": mean(first, "reward"),
        "reward_last": mean(last, "reward"),
        "tokens_per_s": mean(last, "tokens_per_s"),
        "seconds_step": mean(last, "seconds_step"),
    }


def test_bridged_run_never_differs(checkpoints, measure):
    found = summary(run(checkpoints, "bridged", "stop", 200))
    measure(what="GRPO, bridged", **found)
    assert found["steps"] == 200
    assert found["compared"] > 100_000
    assert found["mismatches"] == 0
    assert found["reward_last"] > found["reward_first"]


def test_baseline_run_differs(checkpoints, measure):
    found = summary(run(checkpoints, "baseline", "correct", 20))
    measure(what="GRPO, baseline", **found)
    assert found["mismatches"] > found["compared"] // 2
