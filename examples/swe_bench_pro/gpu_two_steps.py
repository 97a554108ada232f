# SPDX-License-Identifier: Apache-2.0
"""Two GRPO steps on long multi-turn episodes on one GPU: vLLM samples in the trainer's process, the gate is at zero.

Example: python -m examples.swe_bench_pro.gpu_two_steps --out runs/gpu/two_steps
The model has true Lightning widths, seven layers and random weights, so its turns are noise: every turn is read as a
call of `seq`, answered by a sandbox where this machine can isolate, otherwise by a script that executes nothing. What
is measured is the path of the tokens, not a skill.
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import torch

from examples.swe_bench_pro import train_agent
from examples.swe_bench_pro.recorded import CountingRenderer, RecordedHost
from examples.swe_bench_pro.sandbox.bubblewrap import BubblewrapHost
from examples.swe_bench_pro.sandbox.protocol import IsolationUnavailable, Limits, SandboxHost
from examples.swe_bench_pro.train.collect import AgentCollector
from megatron.vllm_forward.launch import session
from megatron.vllm_forward.orphans import end_with_parent
from megatron.vllm_forward.rl.journal import read_journal
from vllm_forward_bridge.checkpoint.tensor_table import tensor_table
from vllm_forward_bridge.checkpoint.tiny_config import FAMILIES, model_json, quantization_config_json, quantization_json
from vllm_forward_bridge.model_config import parse_model_config

LAYERS = "MEM*EME"
CHUNK = 128
WIDTHS = {
    "hidden_size": 2688, "vocab_size": 131072, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "max_position_embeddings": 32768,
}  # fmt: skip
"""Of Nemotron-3.5-Lightning-30B-A3B."""

AGENT = """
[tokenizer]
kind = "phrases"
[sandbox]
memory_mib = 512
processes = 64
disk_mib = 64
[agent]
context_tokens = {context}
turn_tokens = {turn_tokens}
turns = {turns}
command_seconds = 20
[collect]
attempts = 1
episodes = 256
[reward]
overlong_tokens = {overlong}
"""
BRIDGE = """
[model]
repository = "model"
[rollout]
engine = "{engine}"
max_num_seqs = {sequences}
token_budget = {budget}
num_kv_pages = {pages}
"""


def main(arguments: list[str] | None = None) -> int:
    """Make the configuration of the model, run two steps, write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/two_steps"), help="folder; emptied first")
    parser.add_argument("--scale", choices=("wide", "tiny"), default="wide", help="tiny: any machine, embedded engine")
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384, help="most tokens of an episode")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=96, help="most sampled tokens of a turn")
    parser.add_argument(
        "--answer-numbers", type=int, default=3000, help="numbers in the longest answer; 3 to 5 tokens each"
    )
    parser.add_argument("--row-tokens", type=int, default=32768, help="tokens of a packed row of the trainer")
    parser.add_argument("--kv-cache-gib", type=float, default=12.0)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args(arguments)
    # Stopped by a clock, it still reports the steps that ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = args.out.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    host = open_host(folder)
    write_files(folder, args)
    sys.argv = ["train_agent.py", *flags(folder, args)]
    begin = time.monotonic()
    try:
        with session():
            train_agent.main(host=host, adjust=lambda collector: adjust(collector, args))
    finally:
        report = summary(folder, args, host, time.monotonic() - begin)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1))
    return 0 if report["zero"] else 1


def open_host(folder: Path) -> SandboxHost:
    """Return sandboxes where this machine can isolate, otherwise the scripted tool that executes nothing."""
    limits = Limits(memory_bytes=512 << 20, processes=64, disk_bytes=64 << 20)
    try:
        return BubblewrapHost(folder / "sandboxes", run_name="two-steps", limits=limits)
    except IsolationUnavailable as missing:
        print(f"{missing}\nno command is executed: answers are scripted", file=sys.stderr)
        return RecordedHost()


def adjust(collector: AgentCollector, args: argparse.Namespace) -> None:
    """Read every turn as a call."""
    renderer = CountingRenderer(collector.renderer.tokenizer)
    renderer.longest = args.answer_numbers
    collector.renderer = renderer


def write_files(folder: Path, args: argparse.Namespace) -> None:
    """Write the model's configuration and the two TOML files of the run."""
    family = dataclasses.replace(FAMILIES["lightning"], mtp=False)
    config = model_json(family, CHUNK if args.scale == "wide" else 16, LAYERS)
    config |= WIDTHS if args.scale == "wide" else {}
    modules = [
        e.name.removesuffix(".weight")
        for e in tensor_table(parse_model_config(config, None))
        if e.name.endswith(".weight")
    ]
    quantization = quantization_json(family, modules)
    config["quantization_config"] = quantization_config_json(quantization)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "hf_quant_config.json").write_text(json.dumps(quantization))
    values = {
        "context": args.context,
        "turn_tokens": args.turn_tokens,
        "turns": args.turns,
        "overlong": args.context - 1,
    }
    (folder / "agent.toml").write_text(AGENT.format(**values))
    sizes = (
        {"sequences": 128, "budget": 8192, "pages": 4096}
        if args.scale == "wide"
        else {"sequences": 16, "budget": 256, "pages": 1024}
    )
    (folder / "bridge.toml").write_text(BRIDGE.format(engine="vllm" if args.scale == "wide" else "embedded", **sizes))


def flags(folder: Path, args: argparse.Namespace) -> list[str]:
    """Return Megatron's flags of the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "RANK": "0", "LOCAL_RANK": "0"}
    os.environ.update({**place, "WORLD_SIZE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    values = {
        "vllm-forward": folder / "bridge.toml", "swe-config": folder / "agent.toml", "swe-folder": folder / "run",
        "rl-journal": folder / "journal.jsonl", "train-iters": args.steps, "grpo-prompts-per-step": args.problems,
        "grpo-group-size": args.members, "seq-length": args.row_tokens, "max-position-embeddings": args.row_tokens,
        "lr": 1e-6, "swe-kv-cache-gib": args.kv_cache_gib, "recompute-granularity": "full",
        "recompute-method": "uniform", "recompute-num-layers": 1, "vocab-size": vocabulary(args) - 1,
        "distributed-backend": "nccl" if torch.cuda.is_available() else "gloo",
    }  # fmt: skip
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def vocabulary(args: argparse.Namespace) -> int:
    """Return the number of the model's tokens."""
    return WIDTHS["vocab_size"] if args.scale == "wide" else 1280


def summary(folder: Path, args: argparse.Namespace, host: SandboxHost, seconds: float) -> dict:
    """Return what was run, on what, and what came out; `zero` only if every step compared tokens and none differed."""
    records = read_journal(folder / "journal.jsonl")
    cuda = torch.cuda.is_available()
    return {
        "zero": len(records) == args.steps and all(r["compared"] > 0 and r["mismatches"] == 0 for r in records),
        "sandbox": host.describe(),
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "layers": LAYERS,
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "seconds": round(seconds, 1),
        "gpu_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "steps": records,
    }


end_with_parent(__name__)

if __name__ == "__main__":
    sys.exit(main())
