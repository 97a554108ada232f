# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: which rows of which sequences the next forward computes, and where their caches lie.

No decision here may change a bit: a sequence may be cut anywhere, moved to another slot, or thrown out and computed
again. The rules therefore only aim at progress: first come, first served; the oldest running sequence always gets its
rows and its pages, so every request ends.
"""

from collections import deque
from dataclasses import dataclass, field

from vllm_forward_bridge.rollout.protocol import SamplingParams


@dataclass(eq=False)
class Sequence:
    """A request's tokens and how far they are computed."""

    request_id: str
    tokens: list[int]
    """Prompt, then sampled tokens."""
    prompt_length: int
    sampling: SamplingParams
    scored: bool = False
    """True when all tokens are given and every row's logprob is wanted; nothing is sampled then."""
    num_computed: int = 0
    slot: int | None = None
    """Place of the Mamba state while running."""
    pages: list[int] = field(default_factory=list)

    @property
    def length_limit(self) -> int:
        """Most rows this sequence will ever compute; the last sampled token is never fed."""
        return len(self.tokens) - 1 if self.scored else self.prompt_length + self.sampling.max_new_tokens - 1

    @property
    def num_wanted(self) -> int:
        """Rows that could be computed now."""
        return len(self.tokens) - self.scored - self.num_computed


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one sequence in one forward."""

    sequence: Sequence
    start: int
    """Rows computed before: position of the first row."""
    count: int

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.count

    @property
    def is_decode(self) -> bool:
        """Tell whether the one row is a sampled token whose whole prefix is in the caches."""
        return self.count == 1 and self.start >= self.sequence.prompt_length

    @property
    def samples(self) -> bool:
        """Tell whether the last row's logits give the sequence's next token."""
        return not self.sequence.scored and self.end == len(self.sequence.tokens)


class Scheduler:
    """Waiting and running sequences, free slots and free pages.

    Args:
        max_num_seqs: sequences in one forward at most; each holds a slot.
        token_budget: new rows in one forward at most; replayed rows of a partial Mamba chunk are not counted.
        num_pages: KV pages.
        page_tokens: positions in a page.
    """

    def __init__(self, *, max_num_seqs: int, token_budget: int, num_pages: int, page_tokens: int) -> None:
        self.token_budget = token_budget
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._free_pages = list(reversed(range(num_pages)))

    @property
    def num_free_pages(self) -> int:
        """Return how many KV pages no sequence holds."""
        return len(self._free_pages)

    @property
    def is_idle(self) -> bool:
        """Tell whether no sequence waits or runs."""
        return not self.waiting and not self.running

    def pages_for(self, length: int) -> int:
        """Return how many pages `length` positions need."""
        return -(-length // self.page_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Chunk]:
        """Choose the next forward's rows, oldest running sequence first, then waiting ones; claim slots and pages."""
        budget, chunks, preemptions = self.token_budget, [], self.num_preemptions
        # A copy, because a preemption shortens the list; whoever is preempted comes later in it.
        for sequence in list(self.running):
            count = min(sequence.num_wanted, budget)
            if count and sequence.slot is not None and self._claim_pages(sequence, count, preempt=True):
                chunks.append(Chunk(sequence, sequence.num_computed, count))
                budget -= count
        # Nobody is let in on pages that were just taken from somebody.
        while self.waiting and self._free_slots and budget and preemptions == self.num_preemptions:
            sequence = self.waiting[0]
            count = min(sequence.num_wanted, budget)
            if not self._claim_pages(sequence, count, preempt=False):
                break
            self.running.append(self.waiting.popleft())
            sequence.slot = self._free_slots.pop()
            chunks.append(Chunk(sequence, sequence.num_computed, count))
            budget -= count
        return chunks

    def _claim_pages(self, sequence: Sequence, count: int, *, preempt: bool) -> bool:
        lacking = self.pages_for(sequence.num_computed + count) - len(sequence.pages)
        while lacking > len(self._free_pages):
            if not preempt:
                return False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.pages += [self._free_pages.pop() for _ in range(lacking)]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Throw a running sequence back to the head of the queue; it is computed again from its first token."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        self._free_pages += reversed(sequence.pages)
        sequence.slot, sequence.pages = None, []
