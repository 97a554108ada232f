# SPDX-License-Identifier: Apache-2.0
"""Our flag, and the Megatron flags that a repository's geometry fixes."""

import argparse

from vllm_forward_bridge.model_config import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our group to a parser; usable as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group("vllm forward", "train on the rollout's forward")
    group.add_argument(
        "--vllm-forward",
        metavar="FILE.toml",
        help="run the forward on the kernels and the quantised bytes of the rollout, as this file says",
    )
    return parser


def given_file(argv: list[str]) -> str | None:
    """Return the file of `--vllm-forward` among command-line arguments, whatever else is there."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return parser.parse_known_args(argv)[0].vllm_forward


def model_arguments(model: ModelConfig) -> list[str]:
    """Return the Megatron flags of a geometry and of the contract; a flag given after them wins, and is checked."""
    values = {
        "hybrid-layer-pattern": model.layer_types,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.moe_intermediate_size,
        "num-attention-heads": model.num_attention_heads,
        "num-query-groups": model.num_key_value_heads,
        "kv-channels": model.head_dim,
        "mamba-num-heads": model.mamba_num_heads,
        "mamba-head-dim": model.mamba_head_dim,
        "mamba-num-groups": model.n_groups,
        "mamba-state-dim": model.ssm_state_size,
        "num-experts": model.n_routed_experts,
        "moe-router-topk": model.num_experts_per_tok,
        "moe-ffn-hidden-size": model.moe_intermediate_size,
        "moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size,
        "moe-router-score-function": "sigmoid",
        "moe-router-topk-scaling-factor": model.routed_scaling_factor,
        "moe-router-load-balancing-type": "none",
        "moe-aux-loss-coeff": 0.0,
        "moe-token-dispatcher-type": "alltoall",
        "normalization": "RMSNorm",
        "norm-epsilon": model.norm_eps,
        "position-embedding-type": "none",
        "padded-vocab-size": model.vocab_size,
        "hidden-dropout": 0.0,
        "attention-dropout": 0.0,
        "transformer-impl": "local",
    }
    switches = (
        "bf16", "group-query-attention", "squared-relu", "disable-bias-linear", "untie-embeddings-and-output-weights",
        "no-gradient-accumulation-fusion", "no-bias-dropout-fusion", "no-masked-softmax-fusion",
        "no-persist-layer-norm",
    )  # fmt: skip
    flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return flags + [f"--{name}" for name in switches]
