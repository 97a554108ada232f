# SPDX-License-Identifier: Apache-2.0
"""The task of the tiny example: its rewards by hand, and the tiny checkpoint's own tokenizer."""

import json
import runpy
from pathlib import Path

import pytest

from vllm_forward_bridge.checkpoint import make_tiny_checkpoint

TASK = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "grpo_tiny" / "task.py"))
encode, decode, SayLetter = TASK["encode"], TASK["decode"], TASK["SayLetter"]


@pytest.mark.parametrize(("answer", "reward"), [
    ("bbbb", 1.0),
    ("aaaa", 0.25),
    ("bz!B", (1.0 + 0.25 + 0.025 + 0.025) / 4),
    ("", 0.0),
])  # fmt: skip
def test_reward_counts_the_asked_letter_most(answer, reward):
    tokens = encode(answer)[1:] or (0, 2, 1279, 259)  # pad, end, and two ids beyond the bytes
    assert SayLetter().reward(encode("say b"), tokens) == pytest.approx(reward, abs=1e-12)


def test_prompts_go_round_the_letters_and_repeat_by_place():
    task = SayLetter(letters="xyz")
    asked = [decode(task.prompt(4, group))[-1] for group in range(6)]
    assert asked == ["y", "z", "x", "y", "z", "x"]
    assert task.prompt(4, 1) == task.prompt(5, 0)


def test_encoding_is_that_of_the_tiny_checkpoint(tmp_path):
    make_tiny_checkpoint(tmp_path / "tiny")
    vocab = json.loads((tmp_path / "tiny" / "tokenizer.json").read_text())["model"]["vocab"]
    assert encode("say") == (vocab["<s>"], vocab["s"], vocab["a"], vocab["y"])
