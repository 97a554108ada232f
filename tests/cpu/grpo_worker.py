# SPDX-License-Identifier: Apache-2.0
"""A process that runs the tiny GRPO script in several modes, one after the other: imports are paid once."""

import sys
from pathlib import Path

import torch

from megatron.vllm_forward.__main__ import main
from vllm_forward_bridge.checkpoint import convert_to_megatron, make_tiny_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_tiny"
SMALL = ("--grpo-prompts-per-step", "3", "--grpo-group-size", "4", "--rl-max-new-tokens", "20")
# name, [forward], [gate], steps of the run, flags
RUNS = (
    ("bridged", 'mode = "bridged"', "", 2, ("--grpo-kl-beta", "0.01", "--save-interval", "1")),
    ("resumed", 'mode = "bridged"', "", 3, ("--grpo-kl-beta", "0.01", "--save-interval", "1")),
    ("straight", 'mode = "bridged"', "", 3, ("--grpo-kl-beta", "0.01")),
    ("reused", 'mode = "bridged"', 'old_logprob = "reuse"\ncertificate = "bridged.certificate"', 1, ()),
    ("baseline", 'mode = "baseline"', 'on_difference = "correct"', 1, ()),
    ("replayed", 'mode = "baseline"', 'on_difference = "correct"\ncorrection = "tis"\nrouter_replay = true', 1, ()),
)


def run(folder, name, forward, gate, steps, flags):
    """Run the script as the launcher would."""
    from megatron.training.training import destroy_global_state

    toml = folder / f"{name}.toml"
    toml.write_text(f'[model]\nrepository = "tiny"\n[forward]\n{forward}\n[gate]\n{gate}\n')
    home = folder / ("bridged" if name == "resumed" else name)
    main([
        str(EXAMPLE / "train_grpo.py"), "--vllm-forward", str(toml), "--train-iters", str(steps),
        "--pretrained-checkpoint", str(folder / "megatron"),
        "--load", str(home / "checkpoints"), "--save", str(home / "checkpoints"),
        "--rl-journal", str(home / "journal.jsonl"), "--rl-certificate", str(folder / f"{name}.certificate"),
        "--distributed-backend", "gloo", *SMALL, *flags,
    ])  # fmt: skip
    destroy_global_state()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    make_tiny_checkpoint(place / "tiny")
    convert_to_megatron(place / "tiny", place / "megatron")
    for each in RUNS:
        run(place, *each)
