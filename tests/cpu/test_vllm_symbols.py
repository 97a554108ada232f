# SPDX-License-Identifier: Apache-2.0
import ast
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from vllm_forward_bridge.vllm_symbols import PINNED_VERSION, SYMBOLS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def source_of(module: str) -> ast.Module:
    """Parse an installed module without importing it: most of vLLM cannot be imported without a GPU."""
    parent, _, _ = module.partition(".")
    root = Path(importlib.util.find_spec(parent).submodule_search_locations[0]).parent
    path = root.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def test_the_installed_vllm_is_the_pinned_one():
    assert importlib.metadata.version("vllm") == PINNED_VERSION


@pytest.mark.parametrize("name", SYMBOLS)
def test_symbol_has_the_parameters_that_are_passed(name):
    symbol = SYMBOLS[name]
    functions = [
        node
        for node in ast.walk(source_of(symbol.module))
        if isinstance(node, ast.FunctionDef) and node.name == symbol.name
    ]
    assert functions, f"{symbol.module} defines no {symbol.name}"
    given = {
        argument.arg
        for function in functions
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    }
    assert set(symbol.parameters) <= given, sorted(set(symbol.parameters) - given)
