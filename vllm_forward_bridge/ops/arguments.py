# SPDX-License-Identifier: Apache-2.0
"""Check the tensors of an op's call against the letters in their names; one error lists everything wrong."""

from functools import cache

import torch
from torch import Tensor

Form = tuple[Tensor | None, torch.dtype, str]
"""A tensor (None: not given), its dtype, and its shape in words: "T K", "N K/2", "E" or "" for a scalar ([] or [1])."""


def check(op: str, *more_problems: str, **forms: Form) -> dict[str, int]:
    """Return the size of each shape letter, or raise.

    Args:
        op: name of the op, first in the message.
        more_problems: complaints found elsewhere about the same call; an empty one is none.
        forms: name of each argument and what it must be. A letter has one size in the whole call; the first tensor that
            shows it decides.

    Raises:
        ValueError: dtype, rank, size, contiguity or device of any tensor is not the accepted one, or there are other
            problems.
    """
    sizes: dict[str, int] = {}
    shown_by: dict[str, str] = {}
    problems = [problem for problem in more_problems if problem]
    for name, (tensor, dtype, letters) in forms.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            problems.append(f"{name} is {tensor.dtype}; {dtype} is accepted, the kernel reads no other: convert it")
        if not tensor.is_contiguous():
            problems.append(f"{name} has strides {tensor.stride()}; the kernel walks it flat: pass {name}.contiguous()")
        problems += _shape_problems(name, tuple(tensor.shape), letters, sizes, shown_by)
    if problems:
        raise ValueError(f"{op} cannot take this call:\n  - " + "\n  - ".join(problems))
    return sizes


def require_master(op: str, *masters: Tensor | None) -> None:
    """Raise if a backward that multiplies by a master weight has none.

    Raises:
        ValueError: a master is None.
    """
    if any(master is None for master in masters):
        raise ValueError(
            f"{op} was called without its bf16 master weight and is now asked for a gradient; the stored bytes "
            "have no gradient, the backward multiplies by the master: pass the master weight to the forward"
        )


def _shape_problems(name: str, shape: tuple[int, ...], letters: str, sizes: dict, shown_by: dict) -> list[str]:
    words = _words(letters)
    if not words and shape in ((), (1,)):
        return []
    if len(shape) != len(words) or not words:
        wanted = f"[{', '.join(letters.split())}]" if words else "[] or [1]"
        return [f"{name} has shape {list(shape)}; {wanted} is accepted: reshape it or pass the tensor that has it"]
    problems = []
    for size, (letter, divisor) in zip(shape, words, strict=True):
        whole = size * divisor
        if sizes.setdefault(letter, whole) != whole:
            problems.append(
                f"{name} has shape {list(shape)}, so {letter} = {whole}, but {letter} = {sizes[letter]} in "
                f"{shown_by[letter]}; [{', '.join(letters.split())}] is accepted: pass tensors of one {letter}"
            )
        shown_by.setdefault(letter, name)
    return problems


@cache
def _words(letters: str) -> tuple[tuple[str, int], ...]:
    """Parse "N K/2" to (("N", 1), ("K", 2))."""
    parts = (word.partition("/") for word in letters.split())
    return tuple((letter, int(divisor or 1)) for letter, _, divisor in parts)
