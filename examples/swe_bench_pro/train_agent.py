# SPDX-License-Identifier: Apache-2.0
"""GRPO over coding-agent episodes, as a Megatron script: flags are Megatron's, the model comes from --vllm-forward.

Example: python -m megatron.vllm_forward examples/swe_bench_pro/train_agent.py --vllm-forward bridged.toml
         --pretrained-checkpoint runs/quickstart/megatron
         --swe-config examples/swe_bench_pro/configs/cpu.toml --swe-folder runs/swe --rl-journal runs/swe/journal.jsonl
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import print_rank_0
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import get_tensorboard_writer
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer

from examples.swe_bench_pro.config import load_agent_config
from examples.swe_bench_pro.train.assemble import assemble_collector
from examples.swe_bench_pro.train.collect import KnownWeights
from examples.swe_bench_pro.train.numbers import agent_loop
from megatron.vllm_forward import weights
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
from vllm_forward_bridge.rollout.protocol import Rollout

Wrap = Callable[[Rollout], Rollout]


def main(wrap: Wrap = lambda engine: engine) -> None:
    """Build, run, certify.

    Args:
        wrap: what stands before the engine; a test puts a script there.
    """
    args = parse_and_validate_args(extra_args_provider=add_agent_arguments)
    bridge, settings, config = load(args.vllm_forward), settings_from_args(args), load_agent_config(args.swe_config)
    model_config = load_model_config(bridge.model.repository)
    trained = build_trained(args)
    device = next(trained.model[0].parameters()).device
    engine = wrap(embedded_rollout(trained, bridge, model_config, device))
    rollout = KnownWeights(engine, weights.deployment_digest(trained.model))
    folder = Path(args.swe_folder)
    collector = assemble_collector(
        config,
        settings,
        rollout,
        folder=folder,
        repository=Path(bridge.model.repository),
        vocab_size=model_config.vocab_size,
        rank=torch.distributed.get_rank(),
        prepare_thread=lambda: torch.cuda.set_device(device) if device.type == "cuda" else None,
    )
    reference = reference_engine(bridge, device) if settings.kl_beta else None
    loop = agent_loop(
        assemble_loop(trained, bridge, settings, None, rollout, device=device, reference=reference), collector
    )
    identity = identity_of(loop, trained, bridge, model_config)
    require_certificate(bridge, identity)
    print_rank_0(f"sandboxes: {collector.host.describe()}; {len(collector.tasks)} tasks")
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


def add_agent_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the loop's flags and the two of this example; the defaults are the published setting's shape."""
    parser = add_grpo_arguments(parser)
    group = parser.add_argument_group("coding agents")
    group.add_argument("--swe-config", required=True, help="TOML file of tasks, sandboxes, limits and rewards.")
    group.add_argument("--swe-folder", required=True, help="Folder of the run: episodes, journal, sandboxes.")
    parser.set_defaults(
        grpo_prompts_per_step=32,
        grpo_group_size=8,
        seq_length=131072,
        max_position_embeddings=131072,
        lr=1e-6,
        lr_decay_style="constant",
        weight_decay=0.0,
        clip_grad=1.0,
        save_interval=1,
        eval_iters=0,
        seed=1,
        tokenizer_type="NullTokenizer",
    )
    return parser


def build_trained(args: argparse.Namespace) -> Trained:
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
        "step {step}: resolved {resolve_rate:.3f} of {episodes} episodes, {turns_mean:.1f} turns, "
        "{mismatches} of {compared} sampled tokens differ, {groups_with_variance} of {groups_tried} groups kept, "
        "{tokens_per_s:.0f} tokens/s".format(**record)
    )


# The guard matters: Megatron's checkpoint writer starts a process that imports this file again.
if __name__ == "__main__":
    main()
