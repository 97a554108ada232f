# SPDX-License-Identifier: Apache-2.0
"""Sample every problem with a model as it is, without training: what the filter needs, or a plain evaluation.

Example: python -m examples.swe_bench_pro.sample_tasks --swe-config examples/swe_bench_pro/configs/cpu.toml
         --vllm-forward bridged.toml --folder runs/base --samples 4
"""

import argparse
import dataclasses
import importlib
import sys
from collections import Counter
from pathlib import Path

import torch

from examples.swe_bench_pro.config import load_agent_config
from examples.swe_bench_pro.outcomes import count
from examples.swe_bench_pro.sandbox.protocol import IsolationUnavailable
from examples.swe_bench_pro.train.assemble import assemble_collector
from examples.swe_bench_pro.train.collect import AgentCollector, KnownWeights
from examples.swe_bench_pro.train.journal import EpisodeJournal
from megatron.vllm_forward.rl.assemble import reference_engine
from megatron.vllm_forward.rl.settings import GrpoSettings
from vllm_forward_bridge.checkpoint import open_repository
from vllm_forward_bridge.config import BridgeConfig, load
from vllm_forward_bridge.model_config import load_model_config
from vllm_forward_bridge.quantization import bytes_digest
from vllm_forward_bridge.rollout.protocol import Rollout, SamplingParams

MISUSE = 2
PROBLEMS_AT_ONCE = 32


def main(arguments: list[str] | None = None) -> int:
    """Sample, and print how many episodes ended how; a second start goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swe-config", type=Path, required=True, help="TOML file of tasks, sandboxes and limits")
    parser.add_argument("--vllm-forward", type=Path, required=True, help="TOML file of the bridge; names the model")
    parser.add_argument("--folder", type=Path, required=True, help="episodes and sandboxes of this run")
    parser.add_argument("--samples", type=int, default=4, help="episodes of each problem")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-cache-gib", type=float, default=40.0, help="GPU memory of vLLM's caches")
    args = parser.parse_args(arguments)
    try:
        config, bridge = load_agent_config(args.swe_config), load(args.vllm_forward)
        config = dataclasses.replace(config, collect=dataclasses.replace(config.collect, attempts=1))
        engine = _engine(bridge, config.agent.context_tokens, args.kv_cache_gib)
        settings = GrpoSettings(
            prompts_per_step=PROBLEMS_AT_ONCE,
            group_size=args.samples,
            row_tokens=config.agent.context_tokens,
            sampling=SamplingParams(seed=args.seed),
        )
        collector = assemble_collector(
            config,
            settings,
            KnownWeights(engine, _digest(bridge)),
            folder=args.folder,
            repository=Path(bridge.model.repository),
            vocab_size=load_model_config(bridge.model.repository).vocab_size,
        )
    except (ValueError, OSError, IsolationUnavailable) as error:
        print(error, file=sys.stderr)
        return MISUSE
    sample_all(collector)
    outcomes = [episode.outcome for _, _, episode in EpisodeJournal(args.folder / "episodes").every()]
    print({name: number for name, number in count(outcomes).items() if number})
    solved = Counter(e.instance_id for _, _, e in collector.journal.every() if e.outcome == "resolved")
    print(f"{len(solved)} of {len(collector.tasks)} problems solved at least once")
    return 0


def sample_all(collector: AgentCollector) -> None:
    """Run every problem of the collector once with all its members."""
    at_once = collector.settings.prompts_per_step
    for first in range(0, len(collector.tasks), at_once):
        collector(first // at_once + 1, range(min(at_once, len(collector.tasks) - first)))


def _engine(bridge: BridgeConfig, context_tokens: int, kv_cache_gib: float) -> Rollout:
    if bridge.rollout.engine == "embedded":
        return reference_engine(bridge, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    # Imported by name: vLLM is an optional package.
    engine = importlib.import_module("vllm_forward_bridge.rollout.vllm").VllmRollout
    return engine(bridge, max_model_len=context_tokens, kv_cache_bytes=int(kv_cache_gib * (1 << 30)))


def _digest(bridge: BridgeConfig) -> str:
    repository = open_repository(bridge.model.repository)
    return bytes_digest((name, repository.read(name)) for name in repository.names())


if __name__ == "__main__":
    sys.exit(main())
