# SPDX-License-Identifier: Apache-2.0
"""GRPO over coding-agent episodes, as a Megatron script: flags are Megatron's, the model comes from --vllm-forward.

Example: python -m megatron.vllm_forward examples/swe_bench_pro/train_agent.py --vllm-forward bridged.toml
         --pretrained-checkpoint runs/quickstart/megatron --rl-journal runs/swe/journal.jsonl
         --swe-config examples/swe_bench_pro/configs/cpu.toml --swe-folder runs/swe
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.training import print_rank_0
from megatron.training.arguments import parse_and_validate_args

from examples.swe_bench_pro.config import load_agent_config
from examples.swe_bench_pro.sandbox.protocol import SandboxHost
from examples.swe_bench_pro.train.assemble import assemble_collector
from examples.swe_bench_pro.train.collect import AgentCollector, KnownWeights
from examples.swe_bench_pro.train.numbers import LINE, agent_loop
from megatron.vllm_forward import weights
from megatron.vllm_forward.rl.assemble import assemble_loop, reference_engine
from megatron.vllm_forward.rl.engines import open_rollout
from megatron.vllm_forward.rl.script import build_trained, run_to_end
from megatron.vllm_forward.rl.settings import add_grpo_arguments, settings_from_args
from vllm_forward_bridge.config import load
from vllm_forward_bridge.model_config import load_model_config
from vllm_forward_bridge.rollout.protocol import Rollout

Wrap = Callable[[Rollout], Rollout]
Adjust = Callable[[AgentCollector], None]


def main(
    wrap: Wrap = lambda engine: engine, *, host: SandboxHost | None = None, adjust: Adjust = lambda collector: None
) -> None:
    """Build and run.

    Args:
        wrap: what stands before the engine; a test puts a script there.
        host: replaces the configured sandboxes.
        adjust: may replace parts of the collector before the first step.
    """
    args = parse_and_validate_args(extra_args_provider=add_agent_arguments)
    bridge, settings, config = load(args.vllm_forward), settings_from_args(args), load_agent_config(args.swe_config)
    model_config = load_model_config(bridge.model.repository)
    trained = build_trained(args)
    device = next(trained.model[0].parameters()).device
    engine = open_rollout(
        trained.model,
        bridge,
        model_config,
        device,
        max_model_len=config.agent.context_tokens,
        kv_cache_gib=args.swe_kv_cache_gib,
    )
    rollout = KnownWeights(wrap(engine), weights.deployment_digest(trained.model))
    collector = assemble_collector(
        config,
        settings,
        rollout,
        folder=Path(args.swe_folder),
        repository=Path(bridge.model.repository),
        vocab_size=model_config.vocab_size,
        rank=torch.distributed.get_rank(),
        prepare_thread=lambda: torch.cuda.set_device(device) if device.type == "cuda" else None,
        host=host,
    )
    adjust(collector)
    print_rank_0(f"sandboxes: {collector.host.describe()}; {len(collector.tasks)} tasks")
    reference = reference_engine(bridge, device) if settings.kl_beta else None
    loop = assemble_loop(trained, bridge, settings, None, rollout, device=device, reference=reference)
    run_to_end(agent_loop(loop, collector), trained, bridge, model_config, lambda record: LINE.format(**record))


def add_agent_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the loop's flags and those of this example; the defaults are the published setting's shape."""
    parser = add_grpo_arguments(parser)
    group = parser.add_argument_group("coding agents")
    group.add_argument("--swe-config", required=True, help="TOML file of tasks, sandboxes, limits and rewards.")
    group.add_argument("--swe-folder", required=True, help="Folder of the run: episodes, repositories, sandboxes.")
    group.add_argument("--swe-kv-cache-gib", type=float, default=40.0, help="GPU memory of vLLM's caches.")
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


# The guard matters: Megatron's checkpoint writer starts a process that imports this file again.
if __name__ == "__main__":
    main()
