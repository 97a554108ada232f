# SPDX-License-Identifier: Apache-2.0
"""The GRPO loop's `collect`: groups of episodes, replaced while they teach nothing, whatever finishes first.

A group whose valid rewards are all alike has no gradient. Its place (slot) in the step is then given to the slot's next
problem, a bounded number of times. Which problem that is follows from step, slot and attempt alone, so a resumed run
and a run on other ranks take the same ones.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from examples.swe_bench_pro.agent.episode import Episode, EpisodeLimits, Workshop, is_infrastructure, run_episode
from examples.swe_bench_pro.agent.prompts import Prompts
from examples.swe_bench_pro.agent.renderer import Renderer
from examples.swe_bench_pro.grade.patch import PatchTaker
from examples.swe_bench_pro.outcomes import RewardRule
from examples.swe_bench_pro.sandbox.protocol import SandboxHost
from examples.swe_bench_pro.tasks.columns import Task
from examples.swe_bench_pro.train.journal import EpisodeJournal, Place
from examples.swe_bench_pro.train.progress import Progress
from megatron.vllm_forward.rl.settings import GrpoSettings
from megatron.vllm_forward.rl.shared_engine import SharedEngine
from megatron.vllm_forward.rl.single_turn import request_seed
from megatron.vllm_forward.rl.trajectory import Trajectory
from vllm_forward_bridge.rollout.protocol import Rollout, SamplingParams


class KnownWeights:
    """An engine that remembers the digest of the weights it has; everything else is the engine's own."""

    def __init__(self, engine: Rollout, digest: str) -> None:
        self._engine = engine
        self.digest = digest

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def update_weights(self, named_tensors, *, version: int, digest: str) -> None:
        """Pass the weights on; their digest is kept only if the engine took them."""
        self._engine.update_weights(named_tensors, version=version, digest=digest)
        self.digest = digest


@dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """How groups are filled."""

    attempts: int = 3
    """Problems that one slot of a step may try."""
    retries: int = 1
    """Further tries of an episode that ended for a reason that is not the policy's."""
    episodes: int = 256
    """Episodes at one time, on this rank."""
    gradings: int = 64
    """Gradings at one time, on this rank."""


@dataclass
class Collected:
    """What one step of this rank saw, replaced groups included."""

    episodes: list[Episode] = field(default_factory=list)
    groups: int = 0
    kept_groups: int = 0
    reused: int = 0
    """Episodes that came from the journal of a killed run."""


@dataclass(kw_only=True)
class AgentCollector:
    """See the module. One a rank.

    Args:
        tasks: the problems, in the run's order.
        settings: the GRPO choices.
        collect: how groups are filled.
        rule: what an outcome is worth.
        engine: this rank's.
        journal: of the run.
        host, renderer, patches, limits, prompts: the episodes' parts.
        prepare_thread: see `SharedEngine`.
    """

    tasks: Sequence[Task]
    settings: GrpoSettings
    collect: CollectSettings
    rule: RewardRule
    engine: KnownWeights
    journal: EpisodeJournal
    host: SandboxHost
    renderer: Renderer
    patches: PatchTaker
    limits: EpisodeLimits
    prompts: Prompts = field(default_factory=Prompts)
    prepare_thread: Callable[[], None] = lambda: None
    last: Collected = field(default_factory=Collected)

    def __call__(self, step: int, groups: Sequence[int]) -> list[Trajectory]:
        """Sample and grade all members of `groups` with the present weights."""
        return asyncio.run(self._collect(step, groups))

    async def _collect(self, step: int, slots: Sequence[int]) -> list[Trajectory]:
        self.last = Collected()
        done = self.journal.read(step, self.engine.digest)
        self.last.reused = len(done)
        limit = asyncio.Semaphore(self.collect.episodes)
        workshop = Workshop(
            host=self.host,
            renderer=self.renderer,
            patches=self.patches,
            limits=self.limits,
            prompts=self.prompts,
            graders=asyncio.Semaphore(self.collect.gradings),
        )
        async with SharedEngine(self.engine, self.prepare_thread) as engine, asyncio.TaskGroup() as work:
            progress = Progress(step, engine.sample)
            parts = [work.create_task(self._slot(step, slot, done, workshop, progress, limit)) for slot in slots]
        return [trajectory for part in parts for trajectory in part.result()]

    async def _slot(self, step, slot, done, workshop, progress, limit) -> list[Trajectory]:
        for attempt in range(self.collect.attempts):
            task = self.problem(step, slot, attempt)
            members = [Place(slot, attempt, member) for member in range(self.settings.group_size)]
            async with asyncio.TaskGroup() as work:
                parts = [
                    work.create_task(self._member(step, place, done, task, workshop, progress, limit))
                    for place in members
                ]
            episodes = [part.result() for part in parts]
            rewards = {self._reward(episode) for episode in episodes if self.rule.is_valid(episode.outcome)}
            self.last.groups += 1
            self.last.episodes += episodes
            if len(rewards) > 1:
                self.last.kept_groups += 1
                break
        return [self._trajectory(place, episode) for place, episode in zip(members, episodes, strict=True)]

    async def _member(self, step, place, done, task, workshop, progress, limit) -> Episode:
        if place in done:
            return done[place]
        async with limit:
            for attempt in range(self.collect.retries + 1):
                name = f"s{step}-g{place.slot}-a{place.attempt}-m{place.member}-t{attempt}"
                episode = await run_episode(workshop, task, name, progress.sample, self._sampling(step, place))
                if not is_infrastructure(episode):
                    break
        await asyncio.to_thread(self.journal.append, step, place, self.engine.digest, episode)
        progress.end()
        return episode

    def problem(self, step: int, slot: int, attempt: int) -> Task:
        """Return the problem of a slot's attempt: slots walk the list side by side, an attempt jumps a step ahead."""
        jump = self.settings.prompts_per_step
        if jump % len(self.tasks) == 0:
            jump = 1  # a whole round would come back to the same problem
        return self.tasks[((step - 1) * self.settings.prompts_per_step + slot + attempt * jump) % len(self.tasks)]

    def _sampling(self, step: int, place: Place) -> Callable[[int, int], SamplingParams]:
        def sampling(turn: int, max_new_tokens: int) -> SamplingParams:
            seed = request_seed(self.settings.sampling.seed, step, *place, turn)
            stops = self.renderer.stop_token_ids
            return replace(self.settings.sampling, seed=seed, max_new_tokens=max_new_tokens, stop_token_ids=stops)

        return sampling

    def _reward(self, episode: Episode) -> float:
        return self.rule.reward(episode.outcome, len(episode.stream))

    def _trajectory(self, place: Place, episode: Episode) -> Trajectory:
        # An episode of a killed run was sampled by these very weights under another number: the digest says so.
        return episode.stream.trajectory(
            group=place.slot,
            member=place.member,
            reward=self._reward(episode),
            valid=self.rule.is_valid(episode.outcome),
            weight_version=self.engine.version,
        )
