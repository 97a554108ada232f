# SPDX-License-Identifier: Apache-2.0
"""How far a step's episodes are: a line on standard output every few seconds, since a step can take minutes."""

import time
from collections.abc import Awaitable, Callable

from vllm_forward_bridge.rollout.protocol import Completion, Request

EVERY_SECONDS = 20.0


class Progress:
    """Counts turns, tokens and ended episodes of one step on one rank.

    Args:
        step: its number.
        sample: the engine's.
    """

    def __init__(self, step: int, sample: Callable[[Request], Awaitable[Completion]]) -> None:
        self.step = step
        self._sample = sample
        self.turns = self.tokens = self.ended = 0
        self._start = self._told = time.monotonic()

    async def sample(self, request: Request) -> Completion:
        """Sample and count."""
        completion = await self._sample(request)
        self.turns += 1
        self.tokens += len(completion.token_ids)
        self._tell()
        return completion

    def end(self) -> None:
        """Count one ended episode."""
        self.ended += 1
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told < EVERY_SECONDS:
            return
        self._told = now
        seconds = now - self._start
        print(
            f"step {self.step}, {seconds:.0f} s: {self.ended} episodes ended, {self.turns} turns, "
            f"{self.tokens:,} tokens sampled ({self.tokens / seconds:.0f}/s)",
            flush=True,
        )
