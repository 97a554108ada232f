# SPDX-License-Identifier: Apache-2.0
"""One episode as one flat list of token ids, and what is known about each of them.

Nothing is ever re-encoded or re-rendered: a turn's prompt is exactly what was there before it, which is checked against
what the engine says it saw.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.vllm_forward.rl.trajectory import Trajectory
from vllm_forward_bridge.rollout.protocol import Completion

_PHASES = ("", "prefill", "decode")
_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "phases": "<i1", "versions": "<i4", "turns": "<i4"}
NOT_SAMPLED = -1


@dataclass
class TokenStream:
    """Parallel lists, one entry a token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Exact float32 values of the rollout; NaN where not sampled."""
    phases: list[str] = field(default_factory=list)
    """What computed the logits that a token was drawn from; empty where not sampled."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled the token; `NOT_SAMPLED` elsewhere."""
    turns: list[int] = field(default_factory=list)
    """0 for the first prompt, then the number of the turn that sampled the token or that it answers."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> list[bool]:
        """Tell which tokens the policy drew: only these count in gate and loss."""
        return [version != NOT_SAMPLED for version in self.versions]

    @property
    def num_sampled(self) -> int:
        """Count the tokens that the policy drew."""
        return sum(self.sampled)

    def append_context(self, token_ids: Sequence[int], *, turn: int) -> None:
        """Append tokens that the policy reads but did not draw."""
        self.token_ids += token_ids
        self.logprobs += [math.nan] * len(token_ids)
        self.phases += [""] * len(token_ids)
        self.versions += [NOT_SAMPLED] * len(token_ids)
        self.turns += [turn] * len(token_ids)
        self._check()

    def append_completion(self, completion: Completion, *, turn: int) -> None:
        """Append what the policy drew.

        Raises:
            RuntimeError: the engine continued another text than this one, or returned unequal lists.
        """
        if list(completion.prompt_ids) != self.token_ids:
            raise RuntimeError(
                f"turn {turn} of {completion.request_id} continues {len(completion.prompt_ids)} tokens that are not "
                f"the episode's {len(self)}; the ids must be the same, or the trainer scores another text"
            )
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.phases += completion.phases
        self.versions += [completion.weight_version] * len(completion.token_ids)
        self.turns += [turn] * len(completion.token_ids)
        self._check()

    def _check(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in _ARRAYS}
        if len(set(lengths.values())) != 1:
            raise RuntimeError(f"lists of one episode have lengths {lengths}; one entry a token is needed")

    def trajectory(self, *, group: int, member: int, reward: float, valid: bool, weight_version: int) -> Trajectory:
        """Return the episode as the trainer takes it.

        Args:
            group: place in the step.
            member: place in the group.
            reward: of the whole episode.
            valid: False if the episode says nothing about the policy.
            weight_version: the trainer's number of the weights that sampled.
        """
        # What stands behind the last sampled token is never scored; two tokens are the least that a row can hold.
        end = max(2, len(self) - self.sampled[::-1].index(True) if any(self.sampled) else 2)
        return Trajectory(
            group=group,
            member=member,
            token_ids=tuple(self.token_ids[:end]),
            sampled=tuple(self.sampled[:end]),
            logprobs=tuple(self.logprobs[:end]),
            phases=tuple(self.phases[:end]),
            reward=reward,
            valid=valid,
            weight_version=weight_version,
        )

    def to_record(self) -> dict[str, str]:
        """Return arrays as base64 text, every bit kept."""
        values = {name: getattr(self, name) for name in _ARRAYS} | {"phases": [_PHASES.index(p) for p in self.phases]}
        return {
            name: base64.b64encode(np.array(values[name], dtype).tobytes()).decode() for name, dtype in _ARRAYS.items()
        }

    @classmethod
    def from_record(cls, record: dict[str, str]) -> "TokenStream":
        """Read what `to_record` wrote."""
        values = {
            name: np.frombuffer(base64.b64decode(record[name]), dtype).tolist() for name, dtype in _ARRAYS.items()
        }
        values["phases"] = [_PHASES[code] for code in values["phases"]]
        stream = cls(**values)
        stream._check()
        return stream
