# SPDX-License-Identifier: Apache-2.0
"""A process that trains on agent episodes: member 0 follows a script, the others are sampled by the embedded engine."""

import json
import os
import sys
from pathlib import Path

import torch
from swe_workbench import SUBMIT, applying, own_tasks, place_of

from examples.swe_bench_pro import train_agent
from examples.swe_bench_pro.agent.phrases import phrase_tokenizer
from examples.swe_bench_pro.agent.prompts import Prompts
from examples.swe_bench_pro.agent.tokens import encode_frame
from megatron.vllm_forward.launch import session
from megatron.vllm_forward.orphans import end_with_parent
from vllm_forward_bridge.checkpoint import convert_to_megatron, make_tiny_checkpoint
from vllm_forward_bridge.rollout.protocol import Completion

VOCABULARY = 1280
CONFIG = """
[tasks]
keep = "{keep}"
[tokenizer]
kind = "phrases"
[sandbox]
memory_mib = 192
processes = 48
disk_mib = 64
[agent]
context_tokens = 1200
turn_tokens = 600
turns = 4
format_errors = 2
command_seconds = 20
grade_seconds = 60
[collect]
attempts = 1
episodes = 4
gradings = 1
[reward]
overlong_tokens = 1100
"""
BRIDGE = '[model]\nrepository = "tiny"\n[rollout]\ntoken_budget = 512\nnum_kv_pages = 512\n'


class Guided:
    """The engine, but one member's tokens come from a script and only their logprobs from the engine."""

    def __init__(self, engine, tokenizer, turns):
        self._engine, self._tokenizer, self._turns = engine, tokenizer, turns
        self._queue = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def add(self, request):
        if place_of(request.request_id)[2] == 0:
            self._queue.append(request)
        else:
            # A random model has no reason to stop; 16 tokens a turn are enough to compare.
            short = type(request.sampling)(**{**vars(request.sampling), "max_new_tokens": 16})
            self._engine.add(type(request)(**{**vars(request), "sampling": short}))

    def has_unfinished(self):
        return bool(self._queue) or self._engine.has_unfinished()

    def step(self):
        if self._engine.has_unfinished():
            return self._engine.step()
        queue, self._queue = self._queue, []
        return [self._completion(request) for request in queue]

    def _completion(self, request):
        said = self._turns[place_of(request.request_id)[3] - 1] + "<|im_end|>"
        ids = tuple(encode_frame(self._tokenizer, said))
        scores = self._engine.score([request.prompt_ids + ids], request.sampling)[0]
        return Completion(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            token_ids=ids,
            logprobs=tuple(scores[len(request.prompt_ids) - 1 :].tolist()),
            phases=("prefill",) * len(ids),
            finish_reason="stop",
            weight_version=self._engine.version,
        )


def main(folder, port, steps):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    task = own_tasks()["ledger"]
    if not (folder / "megatron").exists():
        make_tiny_checkpoint(folder / "tiny")
        (folder / "keep.json").write_text(json.dumps({"ids": [task.instance_id]}))
        (folder / "agent.toml").write_text(CONFIG.format(keep=folder / "keep.json"))
        (folder / "bridge.toml").write_text(BRIDGE)
        convert_to_megatron(folder / "tiny", folder / "megatron")
    tokenizer = phrase_tokenizer([task], Prompts(), vocab_size=VOCABULARY)
    turns = ["look</think>" + applying(task.patch).removeprefix("</think>"), SUBMIT]
    sys.argv = [
        "train_agent.py", "--vllm-forward", str(folder / "bridge.toml"), "--train-iters", steps,
        "--pretrained-checkpoint", str(folder / "megatron"), "--swe-config", str(folder / "agent.toml"),
        "--grpo-prompts-per-step", "1", "--grpo-group-size", "3", "--seq-length", "2048",
        "--max-position-embeddings", "2048", "--swe-folder", str(folder / "run"),
        "--rl-journal", str(folder / "journal.jsonl"), "--save", str(folder / "checkpoints"),
        "--load", str(folder / "checkpoints"), "--lr", "1e-4", "--distributed-backend", "gloo",
        "--vocab-size", str(VOCABULARY - 1),
    ]  # fmt: skip
    with session():
        train_agent.main(lambda engine: Guided(engine, tokenizer, turns))


end_with_parent(__name__)

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
