# SPDX-License-Identifier: Apache-2.0
"""GRPO on a small text task, as a Megatron script: flags are Megatron's, the model comes from --vllm-forward.

Example: python -m megatron.vllm_forward examples/grpo_tiny/train_grpo.py --vllm-forward examples/grpo_tiny/bridged.toml
         --pretrained-checkpoint runs/quickstart/megatron --rl-journal runs/tiny/journal.jsonl --train-iters 50
"""

import argparse

from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import print_rank_0
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import get_tensorboard_writer
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer
from task import SayLetter

from megatron.vllm_forward.rl.assemble import (
    Trained,
    assemble_loop,
    embedded_rollout,
    identity_of,
    reference_engine,
    require_certificate,
)
from megatron.vllm_forward.rl.run import certify, run_grpo, tensorboard_observer
from megatron.vllm_forward.rl.settings import add_grpo_arguments, settings_from_args
from vllm_forward_bridge.config import load
from vllm_forward_bridge.model_config import load_model_config


def main() -> None:
    """Build, run, certify."""
    args = parse_and_validate_args(extra_args_provider=_arguments)
    bridge, settings = load(args.vllm_forward), settings_from_args(args)
    model_config = load_model_config(bridge.model.repository)
    trained = _trained(args)
    device = next(trained.model[0].parameters()).device
    loop = assemble_loop(
        trained,
        bridge,
        settings,
        SayLetter(),
        embedded_rollout(trained, bridge, model_config, device),
        device=device,
        reference=reference_engine(bridge, device) if settings.kl_beta else None,
    )
    identity = identity_of(loop, trained, bridge, model_config)
    require_certificate(bridge, identity)
    run_grpo(
        loop,
        first_step=args.iteration + 1,
        last_step=args.train_iters,
        journal_path=args.rl_journal,
        save=lambda step: save_checkpoint(step, trained.model, trained.optimizer, trained.scheduler, 0),
        save_interval=args.save_interval if args.save else None,
        observers=(_print, *tensorboard_observer(get_tensorboard_writer())),
    )
    if args.rl_certificate and certify(loop, args.rl_certificate, identity):
        print_rank_0(f"certificate: {args.rl_certificate}")


def _arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the loop's flags, with defaults that suit the tiny model; every one of them can be given."""
    parser = add_grpo_arguments(parser)
    parser.set_defaults(
        grpo_prompts_per_step=8,
        grpo_group_size=8,
        rl_max_new_tokens=12,
        seq_length=2048,
        max_position_embeddings=2048,
        lr=1e-3,
        lr_decay_style="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        clip_grad=1.0,
        train_iters=50,
        save_interval=25,
        eval_iters=0,
        seed=1,
        tokenizer_type="NullTokenizer",
        vocab_size=1279,
    )
    return parser


def _trained(args: argparse.Namespace) -> Trained:
    """Build the model through megatron.training; the launcher has put the bridge's model and optimizer hook there."""
    initialize_megatron()
    container = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    model, optimizer, scheduler = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=container,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return Trained(model=model, optimizer=optimizer, scheduler=scheduler, args=args)


def _print(record: dict) -> None:
    print_rank_0(
        "step {step}: reward {reward:.3f}, entropy {entropy:.3f}, {mismatches} of {compared} tokens differ, "
        "{tokens_per_s:.0f} tokens/s".format(**record)
    )


# The guard matters: Megatron's checkpoint writer starts a process that imports this file again.
if __name__ == "__main__":
    main()
