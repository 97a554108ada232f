# SPDX-License-Identifier: Apache-2.0
"""The GRPO script on Megatron, the tiny checkpoint and the embedded engine: zero with the bridge, not without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.vllm_forward.rl.journal import read_journal

WORKER = Path(__file__).with_name("grpo_worker.py")
TOKENS = 3 * 4 * 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run every mode in one process and return the records by name."""
    folder = tmp_path_factory.mktemp("grpo")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return {path.parent.name: read_journal(path) for path in folder.glob("*/journal.jsonl")}, folder


def test_bridged_grpo_has_no_difference_over_updates_and_a_resume(runs):
    records = runs[0]["bridged"]
    assert [record["step"] for record in records] == [1, 2, 3]  # two steps, then a third from the checkpoint
    for record in records:
        assert (record["mismatches"], record["max"], record["mean"], record["std"], record["k3_kl"]) == (0, 0, 0, 0, 0)
        assert record["compared"] == record["tokens"] == TOKENS
        assert record["ratio_deviation"] == record["weights_off_one"] == 0
        assert record["grad_norm"] > 0
        assert record["requantised_blocks"] > 0
    assert records[0]["kl"] == 0  # the reference is the engine on the repository's own weights: the same bits
    assert records[1]["kl"] > 0


def test_resumed_step_equals_the_uninterrupted_one(runs):
    resumed, straight = (runs[0][name][2] for name in ("bridged", "straight"))
    alike = [name for name in straight if not name.startswith(("seconds", "tokens_per_s", "version"))]
    assert "reward" in alike
    assert "grad_norm" in alike
    assert {name: resumed[name] for name in alike} == {name: straight[name] for name in alike}


def test_bridged_grpo_writes_a_certificate_that_reuse_accepts(runs):
    content = json.loads((runs[1] / "bridged.certificate").read_text())
    assert (content["steps"], content["tokens"]) == (2, 2 * TOKENS)
    (record,) = runs[0]["reused"]
    assert record["mismatches"] == 0
    assert record["compared"] == record["trained_tokens"] > 0
    assert "seconds_gate" not in record


def test_baseline_grpo_differs(runs):
    (record,) = runs[0]["baseline"]
    assert record["compared"] == TOKENS
    assert record["mismatches"] > TOKENS // 2
    assert record["max"] > 0
    assert record["k3_kl"] > 0
    assert not (runs[1] / "baseline.certificate").exists()


def test_router_replay_and_a_correction_do_not_make_it_zero(runs):
    (record,) = runs[0]["replayed"]
    assert record["mismatches"] > TOKENS // 2
    assert record["weights_off_one"] > 0.5
