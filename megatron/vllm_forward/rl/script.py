# SPDX-License-Identifier: Apache-2.0
"""The first and the last lines of a GRPO script: build through megatron.training, run to the last step, certify."""

import argparse
from collections.abc import Callable
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import print_rank_0
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import get_tensorboard_writer
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer

from megatron.vllm_forward.rl.assemble import Trained, identity_of, require_certificate
from megatron.vllm_forward.rl.loop import GrpoLoop
from megatron.vllm_forward.rl.run import certify, run_grpo, tensorboard_observer
from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.model_config import ModelConfig


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


def run_to_end(
    loop: GrpoLoop,
    trained: Trained,
    bridge: BridgeConfig,
    model_config: ModelConfig,
    describe: Callable[[dict[str, Any]], str],
) -> None:
    """Run from the loaded checkpoint to `--train-iters`, with journal, checkpoints, TensorBoard and certificate.

    Args:
        loop: the assembled parts.
        trained: what `build_trained` returned.
        bridge: the run's configuration.
        model_config: geometry and quantisation map.
        describe: makes the line that the log gets for a record.
    """
    args = trained.args
    identity = identity_of(loop, trained, bridge, model_config)
    require_certificate(bridge, identity)
    run_grpo(
        loop,
        first_step=args.iteration + 1,
        last_step=args.train_iters,
        journal_path=args.rl_journal,
        save=lambda step: save_checkpoint(step, trained.model, trained.optimizer, trained.scheduler, 0),
        save_interval=args.save_interval if args.save else None,
        observers=(lambda record: print_rank_0(describe(record)), *tensorboard_observer(get_tensorboard_writer())),
    )
    if args.rl_certificate and certify(loop, args.rl_certificate, identity):
        print_rank_0(f"certificate: {args.rl_certificate}")
