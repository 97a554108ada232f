# SPDX-License-Identifier: Apache-2.0
"""One episode: sample a turn, run its command, append the result, until the work is submitted or a limit is met."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from examples.swe_bench_pro.agent.prompts import Prompts, is_submission, observation
from examples.swe_bench_pro.agent.renderer import Renderer
from examples.swe_bench_pro.agent.stream import TokenStream
from examples.swe_bench_pro.grade.grader import Grade, grade
from examples.swe_bench_pro.grade.patch import PatchTaker, TreeRefused
from examples.swe_bench_pro.outcomes import INFRASTRUCTURE_OUTCOMES
from examples.swe_bench_pro.sandbox.protocol import Sandbox, SandboxError, SandboxHost, hide_history
from examples.swe_bench_pro.tasks.columns import APP, Task
from vllm_forward_bridge.rollout.protocol import Completion, Request, SamplingParams

Sample = Callable[[Request], Awaitable[Completion]]
SamplingOf = Callable[[int, int], SamplingParams]
"""sampling(turn, max_new_tokens): the seed must be the turn's own."""

_TREE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Where an episode ends."""

    context_tokens: int = 131072
    """Prompt and all turns together."""
    turn_tokens: int = 8192
    """Sampled tokens of one turn."""
    turns: int = 200
    command_seconds: float = 60.0
    episode_seconds: float = 3600.0
    grade_seconds: float = 3600.0
    format_errors: int = 3
    """Turns in a row without a usable call before the episode ends."""


@dataclass(kw_only=True)
class Episode:
    """What came of one attempt at a task."""

    name: str
    instance_id: str
    outcome: str = ""
    stream: TokenStream = field(default_factory=TokenStream)
    turns: int = 0
    commands: int = 0
    patch: str = ""
    suspicions: tuple[str, ...] = ()
    detail: str = ""
    sandbox_seconds: float = 0.0
    """In commands, start and grading; the rest is the policy's."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What all episodes of a run share."""

    host: SandboxHost
    renderer: Renderer
    patches: PatchTaker
    limits: EpisodeLimits
    prompts: Prompts
    graders: asyncio.Semaphore
    """Bounds the gradings at one time: they come in a second wave."""


async def run_episode(workshop: Workshop, task: Task, name: str, sample: Sample, sampling: SamplingOf) -> Episode:
    """Run one episode to a typed end; only errors of the engine or of this program are raised.

    Args:
        workshop: the shared parts.
        task: the problem.
        name: unique among the episodes that run at one time.
        sample: the policy.
        sampling: gives each turn its sampling parameters.
    """
    episode = Episode(name=name, instance_id=task.instance_id)
    begin = time.monotonic()
    episode.stream.append_context(_first_prompt(workshop, task), turn=0)
    sandbox = workshop.host.sandbox(task, f"{name}-agent")
    try:
        try:
            # The first ids are there in any case, so that a sandbox that fails at once leaves a whole sample too.
            tree = await _work(workshop, task, episode, sandbox, sample, sampling)
        finally:
            await sandbox.close()
    except SandboxError as error:
        episode.outcome, episode.detail, tree = "sandbox_error", str(error), None
    if not episode.outcome:
        await _grade(workshop, task, episode, tree)
    episode.seconds = time.monotonic() - begin
    return episode


def _first_prompt(workshop: Workshop, task: Task) -> list[int]:
    prompts = workshop.prompts
    return workshop.renderer.prompt(prompts.system, prompts.task.format(statement=task.statement()))


async def _work(
    workshop: Workshop, task: Task, episode: Episode, sandbox: Sandbox, sample: Sample, sampling: SamplingOf
) -> bytes | None:
    """Return the tree that a submitting agent left; any other end is in the episode's outcome."""
    with _Timed(episode):
        await sandbox.start()
        await hide_history(sandbox, task)
        before = await sandbox.get(APP, max_bytes=_TREE_BYTES)
        if before is None:
            raise SandboxError(f"{task.instance_id}: the project cannot be read out of its sandbox")
        await workshop.patches.remember(task.instance_id, before)
    try:
        async with asyncio.timeout(workshop.limits.episode_seconds):
            episode.outcome = await _turns(workshop, episode, sandbox, sample, sampling)
    except TimeoutError:
        episode.outcome = "agent_timeout"
    if episode.outcome:
        return None
    with _Timed(episode):
        return await sandbox.get(APP, max_bytes=_TREE_BYTES)


async def _turns(workshop: Workshop, episode: Episode, sandbox: Sandbox, sample: Sample, sampling: SamplingOf) -> str:
    """Take turns until the end; return its outcome, empty if the work was submitted."""
    limits, stream, errors = workshop.limits, episode.stream, 0
    for turn in range(1, limits.turns + 1):
        room = min(limits.turn_tokens, limits.context_tokens - len(stream))
        if room < 1:
            return "context"
        request = Request(
            request_id=f"{episode.name}/{turn}", prompt_ids=tuple(stream.token_ids), sampling=sampling(turn, room)
        )
        completion = await sample(request)
        stream.append_completion(completion, turn=turn)
        episode.turns = turn
        said = workshop.renderer.parse(completion.token_ids)
        if said.problem or len(said.calls) != 1:
            errors += 1
            if errors >= limits.format_errors:
                return "format"
            problem = said.problem or f"there are {len(said.calls)} calls, one is needed"
            answer = {"tool_output": None, "user": workshop.prompts.no_call.format(problem=problem)}
        else:
            errors = 0
            with _Timed(episode):
                done = await sandbox.execute(said.calls[0][1]["command"], seconds=limits.command_seconds)
            episode.commands += 1
            if is_submission(done):
                return ""
            answer = {"tool_output": observation(done), "user": None}
        added = workshop.renderer.extension(completion.token_ids, **answer)
        if added is None:
            return "context"
        stream.append_context(added[: max(0, limits.context_tokens - len(stream))], turn=turn)
    return "steps"


async def _grade(workshop: Workshop, task: Task, episode: Episode, tree: bytes | None) -> None:
    if tree is None:
        episode.outcome, episode.detail = "patch_rejected", "the project cannot be read, or is too large"
        return
    try:
        episode.patch = await workshop.patches.take(task.instance_id, tree)
    except TreeRefused as error:
        episode.outcome, episode.detail = "patch_rejected", str(error)
        return
    async with workshop.graders:
        found: Grade = await grade(
            task,
            episode.patch,
            lambda: workshop.host.sandbox(task, f"{episode.name}-grade"),
            seconds=workshop.limits.grade_seconds,
        )
    episode.outcome, episode.detail, episode.suspicions = found.outcome, found.detail, found.suspicions
    episode.sandbox_seconds += found.seconds


def is_infrastructure(episode: Episode) -> bool:
    """Tell whether the episode ended for a reason that is not the policy's."""
    return episode.outcome in INFRASTRUCTURE_OUTCOMES


class _Timed:
    """Add the time of a block to the episode's sandbox time."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._episode.sandbox_seconds += time.monotonic() - self._begin
