# SPDX-License-Identifier: Apache-2.0
"""Assign into other packages: the only file that does, always with a signature check and a way back."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One name of another package that gets another value for a while."""

    owner: str
    """Dotted path of the module or class that holds the name."""
    name: str
    make: Callable[[Any], Any]
    """Receives the value found there, returns the value to put there."""
    parameters: tuple[str, ...] | None = None
    """Leading parameter names the found callable must have; None where the value is not called by us."""


@contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[None]:
    """Put all patches in place, and every old value back on exit.

    Raises:
        RuntimeError: lists every missing name and every unexpected signature; nothing is changed then.
    """
    problems: list[str] = []
    found = [_resolve(patch, problems) for patch in patches]
    if problems:
        raise RuntimeError(
            "the installed packages do not offer what this version hooks into (install the pinned versions):\n  - "
            + "\n  - ".join(problems)
        )
    previous = []
    try:
        for patch, (owner, _) in zip(patches, found, strict=True):
            # An earlier patch of the same list may have replaced the value meanwhile: wrap what is there now.
            current = getattr(owner, patch.name)
            own = vars(owner).get(patch.name, MISSING)
            setattr(owner, patch.name, patch.make(current))
            previous.append((owner, patch.name, own))
        yield
    finally:
        for owner, name, own in reversed(previous):
            if own is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _resolve(patch: Patch, problems: list[str]) -> tuple[Any, Any]:
    where = f"{patch.owner}.{patch.name}"
    owner = _import_owner(patch.owner)
    value = getattr(owner, patch.name, MISSING) if owner is not None else MISSING
    if value is MISSING:
        problems.append(f"{where} does not exist")
    elif patch.parameters is not None:
        have = tuple(inspect.signature(value).parameters)[: len(patch.parameters)]
        if have != patch.parameters:
            problems.append(
                f"{where} takes ({', '.join(have)}, ...); ({', '.join(patch.parameters)}, ...) was expected"
            )
    return owner, value


def _import_owner(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        # A class inside a module: only the last component may be missing, a broken import must not be hidden.
        parent, _, name = path.rpartition(".")
        if error.name != path or not parent:
            return None
        return getattr(importlib.import_module(parent), name, None)
