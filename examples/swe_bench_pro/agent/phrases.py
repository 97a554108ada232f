# SPDX-License-Identifier: Apache-2.0
"""A vocabulary for models of about a thousand tokens: what the frame, the prompts and the tasks say most often."""

import re
from collections import Counter
from collections.abc import Iterable

from examples.swe_bench_pro.agent.prompts import Prompts
from examples.swe_bench_pro.agent.renderer import BASH, own_pieces
from examples.swe_bench_pro.agent.tokens import SPECIALS, PhraseTokenizer
from examples.swe_bench_pro.tasks.columns import Task

_SPECIAL = re.compile("|".join(map(re.escape, SPECIALS)))


def phrase_tokenizer(tasks: Iterable[Task], prompts: Prompts, *, vocab_size: int) -> PhraseTokenizer:
    """Return a tokenizer whose ids all lie below `vocab_size`.

    The fixed texts come first, whole; then the pieces of words of the tasks that save the most bytes.
    """
    frame = [piece for text in own_pieces((BASH,), thinking=True) for piece in _SPECIAL.split(text)]
    fixed = [*frame, prompts.system, *re.split(r"\{\w+\}", prompts.task + prompts.no_call)]
    counts = Counter(
        piece
        for task in tasks
        for text in (task.statement(), task.patch)
        for piece in re.findall(r" ?\w+|[^\w\s]+|\s+", text)
    )
    worth = sorted(counts, key=lambda piece: (-counts[piece] * (len(piece.encode()) - 1), piece))
    room = vocab_size - 256 - len(SPECIALS)
    return PhraseTokenizer(list(dict.fromkeys(text for text in [*fixed, *worth] if len(text.encode()) > 1))[:room])
