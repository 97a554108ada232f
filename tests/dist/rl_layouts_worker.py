# SPDX-License-Identifier: Apache-2.0
"""A process of a world of one or two: two GRPO steps of the tiny script in each layout, a journal each."""

import sys
from pathlib import Path

import torch

from megatron.vllm_forward.__main__ import main

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo_tiny" / "train_grpo.py"
FLAGS = (
    "--distributed-backend", "gloo", "--grpo-prompts-per-step", "4", "--grpo-group-size", "4",
    "--rl-max-new-tokens", "6", "--train-iters", "2", "--seq-length", "80", "--use-distributed-optimizer",
)  # fmt: skip
LAYOUTS = {
    1: {"alone": ()},
    2: {
        "dp": (),
        "ep": ("--expert-model-parallel-size", "2"),
        "pp": ("--pipeline-model-parallel-size", "2", "--hybrid-layer-pattern", "ME|M*E"),
    },
}


def run(folder, name, flags):
    """Run the script and leave Megatron as it was; torch.distributed stays, the next layout uses it."""
    from megatron.training.training import destroy_global_state

    main([
        str(SCRIPT), "--vllm-forward", str(folder / "bridged.toml"),
        "--pretrained-checkpoint", str(folder / "megatron"),
        "--rl-journal", str(folder / f"{name}.jsonl"), *FLAGS, *flags,
    ])  # fmt: skip
    destroy_global_state()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each, given in LAYOUTS[int(sys.argv[2])].items():
        run(Path(sys.argv[1]), each, given)
    torch.distributed.destroy_process_group()
