# SPDX-License-Identifier: Apache-2.0
"""What a step's episodes were like, summed over ranks, for the journal, TensorBoard and the plot."""

from collections import Counter
from dataclasses import fields
from typing import Any

from examples.swe_bench_pro.outcomes import OUTCOMES, count
from examples.swe_bench_pro.train.collect import AgentCollector, Collected
from megatron.vllm_forward.rl.layout import Layout
from megatron.vllm_forward.rl.loop import GrpoLoop


class AgentLoop(GrpoLoop):
    """The GRPO loop whose records also say how the agents fared."""

    def step(self, step: int) -> dict[str, Any]:
        """Make one step; see `GrpoLoop.step`."""
        return super().step(step) | agent_numbers(self.collect.last, self.layout)


def agent_loop(loop: GrpoLoop, collector: AgentCollector) -> AgentLoop:
    """Return the loop with another way to collect."""
    parts = {entry.name: getattr(loop, entry.name) for entry in fields(loop) if entry.init}
    return AgentLoop(**parts | {"collect": collector})


def agent_numbers(collected: Collected, layout: Layout) -> dict[str, Any]:
    """Return counts of outcomes and means over episodes; equal on every rank."""
    episodes = collected.episodes
    phases = Counter(phase for episode in episodes for phase in episode.stream.phases if phase)
    sums = {
        "episodes": len(episodes),
        "episodes_reused": collected.reused,
        "groups_tried": collected.groups,
        "groups_with_variance": collected.kept_groups,
        "turns": sum(episode.turns for episode in episodes),
        "commands": sum(episode.commands for episode in episodes),
        "episode_tokens": sum(len(episode.stream) for episode in episodes),
        "sampled_by_prefill": phases["prefill"],
        "sampled_by_decode": phases["decode"],
        "sandbox_seconds": sum(episode.sandbox_seconds for episode in episodes),
        "episode_seconds": sum(episode.seconds for episode in episodes),
        **{f"outcome_{name}": number for name, number in count([episode.outcome for episode in episodes]).items()},
    }
    # A replaced or reused episode counts here and in no logprob: these numbers describe the work, not the batch.
    totals = dict(zip(sums, layout.total(list(map(float, sums.values()))), strict=True))
    longest = layout.largest([max((len(episode.stream) for episode in episodes), default=0)])[0]
    number = max(1.0, totals["episodes"])
    means = ("turns", "commands", "episode_tokens", "sandbox_seconds", "episode_seconds")
    return {
        **{name: int(value) for name, value in totals.items() if name not in means},
        **{f"{name}_mean": totals[name] / number for name in means},
        "episode_tokens_max": int(longest),
        "keep_rate": totals["groups_with_variance"] / max(1.0, totals["groups_tried"]),
        "resolve_rate": totals["outcome_resolved"] / number,
    }


OUTCOME_KEYS = tuple(f"outcome_{name}" for name in OUTCOMES)

LINE = (
    "step {step}: resolved {resolve_rate:.3f} of {episodes} episodes, {turns_mean:.1f} turns, "
    "{mismatches} of {compared} sampled tokens differ, {groups_with_variance} of {groups_tried} groups kept, "
    "{tokens_per_s:.0f} tokens/s"
)
