# SPDX-License-Identifier: Apache-2.0
"""Process settings that change bits or their repeatability, as a table: `apply` them early, `check` them for drift.

The forward's kernels are pinned and read none of these; the backward's library GEMMs and collectives do.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True)
class Setting:
    """One setting, how it is read back and how it is made."""

    name: str
    value: Any
    reason: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    before_cuda: bool
    """Libraries read it when the GPU is first used; later it has no effect."""


def _environment(name: str, value: str, reason: str) -> Setting:
    return Setting(name, value, reason, partial(os.environ.get, name), partial(os.environ.__setitem__, name), True)


def _attribute(owner: Any, path: str, attribute: str, value: Any, reason: str) -> Setting:
    read, write = partial(getattr, owner, attribute), partial(setattr, owner, attribute)
    return Setting(f"{path}.{attribute}", value, reason, read, write, False)


_MATMUL = torch.backends.cuda.matmul
SETTINGS = (
    _environment(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8", "one workspace a stream, so that library GEMMs repeat their bits"
    ),
    _environment("NCCL_ALGO", "Ring", "one order in which ranks add gradients, in every run on one layout"),
    _attribute(_MATMUL, "torch.backends.cuda.matmul", "allow_tf32", False, "fp32 products keep their 24 bits"),
    _attribute(torch.backends.cudnn, "torch.backends.cudnn", "allow_tf32", False, "fp32 products keep their 24 bits"),
    _attribute(
        _MATMUL,
        "torch.backends.cuda.matmul",
        "allow_bf16_reduced_precision_reduction",
        False,
        "partial sums of split products are added in fp32",
    ),
)


def apply() -> None:
    """Make every setting of the table.

    Raises:
        RuntimeError: the GPU is already in use and a setting that must come before differs; lists all of them.
    """
    late = torch.cuda.is_initialized()
    problems = [_problem(setting) for setting in SETTINGS if late and setting.before_cuda and _problem(setting)]
    if problems:
        raise RuntimeError(
            "the GPU is already in use, so these settings can no longer take effect:\n  - "
            + "\n  - ".join(problems)
            + "\n"
            "Call settings.apply() before the first CUDA call, or export the variables before the program starts"
        )
    for setting in SETTINGS:
        setting.write(setting.value)


def check() -> None:
    """Read every setting back.

    Raises:
        RuntimeError: lists every setting that drifted since `apply`.
    """
    problems = [problem for problem in map(_problem, SETTINGS) if problem]
    if problems:
        raise RuntimeError(
            "process settings are not what settings.apply() makes:\n  - " + "\n  - ".join(problems) + "\n"
            "Call settings.apply() first, and find what changed them since"
        )


def _problem(setting: Setting) -> str:
    found = setting.read()
    return (
        "" if found == setting.value else f"{setting.name} is {found!r}; {setting.value!r} is needed: {setting.reason}"
    )
