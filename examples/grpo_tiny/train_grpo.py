# SPDX-License-Identifier: Apache-2.0
"""GRPO on a small text task, as a Megatron script: flags are Megatron's, the model comes from --vllm-forward.

Example: python -m megatron.vllm_forward examples/grpo_tiny/train_grpo.py --vllm-forward examples/grpo_tiny/bridged.toml
         --pretrained-checkpoint runs/quickstart/megatron --rl-journal runs/tiny/journal.jsonl --train-iters 60
         --distributed-backend gloo
"""

import argparse

from megatron.training.arguments import parse_and_validate_args
from task import LETTERS, SayLetter

from megatron.vllm_forward.rl.assemble import assemble_loop, reference_engine
from megatron.vllm_forward.rl.engines import open_rollout
from megatron.vllm_forward.rl.script import build_trained, run_to_end
from megatron.vllm_forward.rl.settings import add_grpo_arguments, settings_from_args
from vllm_forward_bridge.config import load
from vllm_forward_bridge.model_config import load_model_config

LINE = (
    "step {step}: reward {reward:.3f}, entropy {entropy:.3f}, {mismatches} of {compared} tokens differ, "
    "{tokens_per_s:.0f} tokens/s"
)


def main() -> None:
    """Build and run."""
    args = parse_and_validate_args(extra_args_provider=_arguments)
    bridge, settings = load(args.vllm_forward), settings_from_args(args)
    model_config = load_model_config(bridge.model.repository)
    trained = build_trained(args)
    device = next(trained.model[0].parameters()).device
    rollout = open_rollout(
        trained.model, bridge, model_config, device, max_model_len=args.seq_length, kv_cache_gib=args.rl_kv_cache_gib
    )
    task = SayLetter(letters=args.task_letters)
    reference = reference_engine(bridge, device) if settings.kl_beta else None
    loop = assemble_loop(trained, bridge, settings, task, rollout, device=device, reference=reference)
    run_to_end(loop, trained, bridge, model_config, lambda record: LINE.format(**record))


def _arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the loop's flags, with defaults that suit the tiny model; every one of them can be given."""
    parser = add_grpo_arguments(parser)
    parser.add_argument("--rl-kv-cache-gib", type=float, default=1.0, help="GPU memory of vLLM's caches.")
    parser.add_argument("--task-letters", default=LETTERS, help="Letters that prompts ask for; more are harder.")
    parser.set_defaults(
        grpo_prompts_per_step=8,
        grpo_group_size=16,
        rl_max_new_tokens=8,
        seq_length=2048,
        max_position_embeddings=2048,
        lr=1.5e-3,
        lr_decay_style="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        clip_grad=1.0,
        train_iters=60,
        save_interval=20,
        override_opt_param_scheduler=True,
        eval_iters=0,
        seed=1,
        tokenizer_type="NullTokenizer",
        vocab_size=1279,
    )
    return parser


# The guard matters: Megatron's checkpoint writer starts a process that imports this file again.
if __name__ == "__main__":
    main()
