# SPDX-License-Identifier: Apache-2.0
"""Collect single-turn trajectories: a prompt, one completion a member, one reward each."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron.vllm_forward.rl.settings import GrpoSettings
from megatron.vllm_forward.rl.trajectory import Trajectory, from_completion
from vllm_forward_bridge.rollout.protocol import Request, Rollout


class Task(Protocol):
    """A verifiable text task."""

    def prompt(self, step: int, group: int) -> tuple[int, ...]:
        """Return the problem's token ids; the same for the same arguments."""
        ...

    def reward(self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> float:
        """Grade a completion."""
        ...


@dataclass(frozen=True)
class SingleTurn:
    """The loop's `collect` for tasks that one completion answers."""

    task: Task
    rollout: Rollout
    settings: GrpoSettings

    def __call__(self, step: int, groups: Sequence[int]) -> list[Trajectory]:
        """Sample and grade all members of `groups`."""
        members = [(group, member) for group in groups for member in range(self.settings.group_size)]
        completions = self.rollout.generate([self._request(step, *key) for key in members])
        return [
            from_completion(
                completion,
                group=group,
                member=member,
                reward=self.task.reward(completion.prompt_ids, completion.token_ids),
            )
            for (group, member), completion in zip(members, completions, strict=True)
        ]

    def _request(self, step: int, group: int, member: int) -> Request:
        seed = request_seed(self.settings.sampling.seed, step, group, member)
        return Request(
            request_id=f"{step}/{group}/{member}",
            prompt_ids=self.task.prompt(step, group),
            sampling=replace(self.settings.sampling, seed=seed),
        )


def request_seed(seed: int, *place: int) -> int:
    """Derive a request's seed from the run's and its place, so that it depends on no layout and no order."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
