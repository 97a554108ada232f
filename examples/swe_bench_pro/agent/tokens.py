# SPDX-License-Identifier: Apache-2.0
"""Tokenizers as the renderer needs them: text to ordinary ids, and the ids of special tokens. No template here."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from examples.swe_bench_pro.optional import require

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
"""The tokens of the Nemotron-3 chat frame. One that a vocabulary lacks is spelled in ordinary tokens."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def specials(self) -> dict[str, int]:
        """Return every token that is matched in text as a whole: its text and id."""
        ...

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of text that contains no special token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        ...


def encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text of an outsider: it keeps every character, and no id of it is a special token.

    A special token's text inside is cut behind its first character and both parts are encoded apart, so the model reads
    the same characters in ordinary tokens.

    Raises:
        ValueError: a special token of one character, which cannot be cut.
    """
    specials = tokenizer.specials
    pattern = _any_of(specials)
    ids: list[int] = []
    for piece in _pieces(text, pattern) if pattern else [text]:
        ids += tokenizer.encode_ordinary(piece)
    forged = set(ids) & set(specials.values())
    if forged:
        raise ValueError(f"text of an outsider got special ids {sorted(forged)}; this tokenizer cannot be used safely")
    return ids


def encode_frame(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text of our own template: special tokens in it become special ids."""
    pattern = _any_of(tokenizer.specials)
    ids: list[int] = []
    for piece in re.split(f"({pattern.pattern})", text) if pattern else [text]:
        special = tokenizer.specials.get(piece)
        ids += [special] if special is not None else tokenizer.encode_ordinary(piece) if piece else []
    return ids


def _any_of(specials: Iterable[str]) -> re.Pattern[str] | None:
    texts = sorted(specials, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _pieces(text: str, pattern: re.Pattern[str]) -> list[str]:
    pieces, start = [], 0
    while (found := pattern.search(text, start)) is not None:
        pieces.append(text[start : found.start() + 1])
        start = found.start() + 1
    return [piece for piece in [*pieces, text[start:]] if piece]


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read with the package `tokenizers`.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        tokenizers = require("tokenizers", 'read tokenizer.json; small models may set [tokenizer] kind = "phrases"')
        self._inner = tokenizers.Tokenizer.from_file(str(path))

    @cached_property
    def specials(self) -> dict[str, int]:
        """Return every added token: `tokenizers` matches those in any text."""
        return {token.content: id_ for id_, token in self._inner.get_added_tokens_decoder().items()}

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of text without special tokens; none are added around it."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._inner.decode(list(ids), skip_special_tokens=False)


class PhraseTokenizer:
    """Bytes, special tokens and whole phrases, longest match first: a small vocabulary for small models.

    Phrases make ids depend on their neighbours, as merges do in a real tokenizer: encoding two texts apart is not
    encoding them together. An id beyond the phrases decodes to nothing.

    Args:
        phrases: each becomes one token.
    """

    def __init__(self, phrases: Sequence[str]) -> None:
        first = 256 + len(SPECIALS)
        self.specials = {text: 256 + at for at, text in enumerate(SPECIALS)}
        known = list(dict.fromkeys(phrase for phrase in phrases if len(phrase.encode()) > 1))
        self._ids = {phrase.encode(): first + at for at, phrase in enumerate(known)}
        self._bytes = {id_: phrase for phrase, id_ in self._ids.items()}
        self._bytes |= {id_: text.encode() for text, id_ in self.specials.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._piece = re.compile(b"|".join([*map(re.escape, longest_first), b"."]), re.DOTALL)
        self.vocab_size = first + len(known)

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of text, the longest phrase first."""
        return [self._ids.get(piece, piece[0]) for piece in self._piece.findall(text.encode())]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 are replaced."""
        content = b"".join(self._bytes.get(id_, b"") if id_ > 255 else bytes([id_]) for id_ in ids)
        return content.decode("utf-8", errors="replace")
