# SPDX-License-Identifier: Apache-2.0
"""Build model, optimizer and scheduler through megatron.training, for a loop that is not `pretrain`."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer
from torch import nn

from megatron.vllm_forward.bridge import make_bridge
from megatron.vllm_forward.launch import arguments_for
from vllm_forward_bridge.config import BridgeConfig


@dataclass(frozen=True)
class Trainer:
    """What `setup_model_and_optimizer` returns, and the arguments it used."""

    model: list[nn.Module]
    """Chunks of this rank, wrapped by Float16Module and DDP."""
    optimizer: MegatronOptimizer
    scheduler: Any
    args: Namespace


def build(config: BridgeConfig, flags: Sequence[str]) -> Trainer:
    """Initialise Megatron and build a bridged model; call it once a process, inside `launch.session()`.

    Args:
        config: names the repository, from which the geometry's flags are derived.
        flags: the other Megatron flags: batch sizes, learning rate, layout, checkpoints.

    Raises:
        ValueError: lists everything that is outside the contract.
    """
    bridge = make_bridge(config)
    with arguments_for(bridge, [*_own_loop(bridge.model.vocab_size), *flags]):
        args = parse_and_validate_args()
    initialize_megatron()
    container = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    model, optimizer, scheduler = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=container,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return Trainer(model, optimizer, scheduler, args)


def _own_loop(vocab_size: int) -> list[str]:
    """Return flags that spare a loop Megatron's rerun machinery, which only `pretrain` drives, and a tokenizer."""
    return ["--rerun-mode", "disabled", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size - 1)]
