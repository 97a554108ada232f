# SPDX-License-Identifier: Apache-2.0
"""A verifiable text task that a random model can learn in some dozen steps: say the letter that was asked for."""

from dataclasses import dataclass

BOS = 1
FIRST_BYTE = 3
"""Byte b is token 3 + b in the tiny checkpoint's tokenizer; 0, 1 and 2 are pad, begin and end."""
LETTERS = "ab"


def encode(text: str) -> tuple[int, ...]:
    """Return the token ids of a text, after the beginning mark."""
    return (BOS, *(FIRST_BYTE + byte for byte in text.encode()))


def decode(token_ids: tuple[int, ...]) -> str:
    """Return the text of token ids; ids that are no byte show as a question mark."""
    text = bytes(token - FIRST_BYTE if 0 <= token - FIRST_BYTE < 256 else ord("?") for token in token_ids)
    return text.decode("latin-1")


@dataclass(frozen=True)
class SayLetter:
    """`say e` asks for the letter e, as often as the answer has room.

    reward = mean over the answer's tokens of: 1 for the letter, `small` for another lower-case letter, `byte` for any
    other byte. The last two are a slope where the first is flat: a random model rarely says the right letter. With two
    letters, a model that says one of them whatever was asked gets (1 + small) / 2; more than that is listening.
    """

    letters: str = LETTERS
    small: float = 0.25
    byte: float = 0.025

    def prompt(self, step: int, group: int) -> tuple[int, ...]:
        """Return the prompt of a group; neighbouring groups ask for different letters."""
        return encode(f"say {self.letters[(step + group) % len(self.letters)]}")

    def reward(self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> float:
        """Grade an answer from 0 to 1."""
        asked = prompt_ids[-1]
        return sum(self._value(token, asked) for token in token_ids) / len(token_ids)

    def _value(self, token: int, asked: int) -> float:
        if token == asked:
            return 1.0
        byte = token - FIRST_BYTE
        if ord("a") <= byte <= ord("z"):
            return self.small
        return self.byte if 0 <= byte < 256 else 0.0
