# SPDX-License-Identifier: Apache-2.0
"""The coding agent as an agent of Megatron-LM's own RL script; needs a Megatron-LM checkout on the path.

An environment file names it: `agent_type: BridgedCodingAgent` where the checkout has a registry of agents, otherwise
`examples.swe_bench_pro.upstream_agent.CodingAgent`; `agent_args` are the fields below.
"""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from megatron.rl.agent.api import GroupedRolloutGenerator, RolloutGenerator, TokenRollout
from pydantic import PrivateAttr

from examples.swe_bench_pro.agent.episode import Episode, Workshop, run_episode
from examples.swe_bench_pro.agent.prompts import Prompts
from examples.swe_bench_pro.agent.stream import TokenStream
from examples.swe_bench_pro.config import load_agent_config
from examples.swe_bench_pro.grade.patch import PatchTaker
from examples.swe_bench_pro.sandbox.choose import open_host
from examples.swe_bench_pro.train.assemble import make_renderer, run_name
from megatron.vllm_forward.rl.single_turn import request_seed
from vllm_forward_bridge.rollout.protocol import SamplingParams


class CodingAgent(RolloutGenerator, GroupedRolloutGenerator):
    """Groups of coding episodes as token rollouts, one row an episode, sampled tokens masked in."""

    swe_config: str
    swe_folder: str
    repository: str
    vocab_size: int
    env_id: str = "swe_bench_pro"
    seed: int = 1
    _shop: Any = PrivateAttr(None)
    _numbers: Any = PrivateAttr(default_factory=itertools.count)

    async def rollout(self, request: Any) -> TokenRollout:
        """Run one episode of the next problem."""
        return (await self._group(request, 1))[0]

    async def group_rollout(self, request: Any) -> list[TokenRollout]:
        """Run a group of episodes of the next problem."""
        return await self._group(request, request.rollouts_per_group)

    async def _group(self, request: Any, members: int) -> list[TokenRollout]:
        config, tasks, shop = await self._opened()
        number = next(self._numbers)
        task = tasks[number % len(tasks)]
        served = request.inference_interface.served
        episodes = await asyncio.gather(
            *(self._episode(served, config, shop, task, number, member) for member in range(members))
        )
        return [self._as_rollout(config, served.epoch, episode) for episode in episodes]

    async def _episode(self, served: Any, config: Any, shop: Workshop, task: Any, number: int, member: int) -> Episode:
        def sampling(turn: int, max_new_tokens: int) -> SamplingParams:
            seed = request_seed(self.seed, number, member, turn)
            stops = shop.renderer.stop_token_ids
            return SamplingParams(
                temperature=served.sampling.temperature, seed=seed, max_new_tokens=max_new_tokens, stop_token_ids=stops
            )

        return await run_episode(shop, task, f"u{number}-m{member}", served.shared.sample, sampling)

    async def _opened(self) -> tuple:
        if self._shop is None:
            config, folder = load_agent_config(self.swe_config), Path(self.swe_folder)
            tasks = config.load_tasks(folder / "repositories")
            host = open_host(
                config.sandbox.kind, folder / "sandboxes", run_name=run_name(folder, 0), limits=config.sandbox.limits
            )
            await host.sweep()
            shop = Workshop(
                host=host,
                renderer=make_renderer(config, tasks, Path(self.repository), self.vocab_size),
                patches=PatchTaker(folder / "bases"),
                limits=config.agent,
                prompts=Prompts(),
                graders=asyncio.Semaphore(config.collect.gradings),
            )
            self._shop = (config, tasks, shop)
        return self._shop

    def _as_rollout(self, config: Any, epoch: int, episode: Episode) -> TokenRollout:
        stream, rule = episode.stream, config.rule()
        known = TokenRollout.model_fields
        # Upstream has no member outside the statistics at core_v0.19.0: an infrastructure failure counts 0 there.
        failed = {"rollout_status": "failed", "failure_reason": episode.outcome}
        values = {
            "trajectory": [stream.token_ids],
            "reward": rule.reward(episode.outcome, len(stream)),
            "generation_mask": [stream.sampled],
            "logprobs": [_from_first_sampled(stream)],
            "env_id": self.env_id,
            "problem_id": episode.instance_id,
            "policy_epoch": [[(0, epoch)]],
            "kv_cache_epoch": [[(0, epoch)]],
            "num_evictions": [0],
            **({} if rule.is_valid(episode.outcome) else failed),
        }
        return TokenRollout(**{name: value for name, value in values.items() if name in known})


def _from_first_sampled(stream: TokenStream) -> list[float]:
    """Return one number a token from the first sampled one on: upstream lays them out without gaps.

    Tokens in between that were not sampled get 0, which upstream's mask leaves out.
    """
    first = stream.sampled.index(True) if any(stream.sampled) else len(stream)
    pairs = zip(stream.logprobs[first:], stream.sampled[first:], strict=True)
    return [value if own else 0.0 for value, own in pairs]
