# SPDX-License-Identifier: Apache-2.0
"""How an episode can end, which ends say something about the policy, and what each is worth."""

from collections.abc import Collection
from dataclasses import dataclass

POLICY_OUTCOMES = (
    "resolved",
    "unresolved",
    "no_patch",
    "patch_rejected",
    "forged",
    "format",
    "agent_timeout",
    "steps",
    "context",
)
"""What the policy did: `forged` passed its tests by a patch that looks made to fool them; `format` stopped calling the
tool; the last three ran into a limit."""

INFRASTRUCTURE_OUTCOMES = ("sandbox_error", "grade_timeout", "grade_error", "oom")
"""What happened to the policy: the sample leaves group statistics and loss."""

OUTCOMES = POLICY_OUTCOMES + INFRASTRUCTURE_OUTCOMES

MASKS = {
    "infrastructure": frozenset(INFRASTRUCTURE_OUTCOMES),
    "infrastructure-and-limits": frozenset(INFRASTRUCTURE_OUTCOMES) | {"agent_timeout", "steps", "context"},
}
"""Outcomes that leave the group. The second list also masks every limit, as NeMo Gym's coding agents do."""


@dataclass(frozen=True, kw_only=True)
class RewardRule:
    """reward = [outcome is resolved] - overlong_penalty * overlong, overlong in [0, 1].

    overlong grows linearly from 0 to 1 over the last `overlong_tokens` before the context is full (Yu et al. 2025,
    DAPO, soft overlong punishment).
    """

    context_tokens: int
    overlong_tokens: int = 0
    """0: no penalty."""
    overlong_penalty: float = 1.0
    masked: frozenset[str] = MASKS["infrastructure"]

    def __post_init__(self) -> None:
        problems = [
            f"masked outcome {name!r} is unknown; known are {', '.join(OUTCOMES)}"
            for name in sorted(self.masked - set(OUTCOMES))
        ]
        problems += [
            f"{name!r} must be masked: it says nothing about the policy"
            for name in sorted(set(INFRASTRUCTURE_OUTCOMES) - self.masked)
        ]
        if "resolved" in self.masked:
            problems.append("resolved is masked; then nothing could be learned")
        if not 0 <= self.overlong_tokens < self.context_tokens:
            problems.append(f"overlong_tokens is {self.overlong_tokens}; 0 to {self.context_tokens - 1} is needed")
        if problems:
            raise ValueError("this reward rule is not usable:\n  - " + "\n  - ".join(problems))

    def reward(self, outcome: str, num_tokens: int) -> float:
        """Return what an episode of `num_tokens` tokens, prompt included, is worth."""
        over = num_tokens - (self.context_tokens - self.overlong_tokens)
        share = min(1.0, over / self.overlong_tokens) if self.overlong_tokens and over > 0 else 0.0
        return float(outcome == "resolved") - self.overlong_penalty * share

    def is_valid(self, outcome: str) -> bool:
        """Tell whether the sample stays in its group."""
        return outcome not in self.masked


def count(outcomes: Collection[str]) -> dict[str, int]:
    """Count every known outcome, the absent ones as 0, so that all steps have the same columns."""
    return {name: sum(outcome == name for outcome in outcomes) for name in OUTCOMES}
