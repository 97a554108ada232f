# SPDX-License-Identifier: Apache-2.0
"""Import a package that only some runs need."""

import importlib
from types import ModuleType


def require(module: str, why: str) -> ModuleType:
    """Return a module of an optional package.

    Args:
        module: dotted name.
        why: ends the message: what it is needed for, and what else would do.

    Raises:
        ModuleNotFoundError: the package is not installed; a broken install raises its own error.
    """
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name != package:
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed (pip install {package}); it is needed to {why}"
        ) from missing
