# SPDX-License-Identifier: Apache-2.0
import ast
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from vllm_forward_bridge.vllm_symbols import PINNED_VERSION, SYMBOLS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def functions_of(module: str, name: str) -> list[ast.FunctionDef]:
    """Find functions in an installed module without importing it: most of vLLM needs a GPU for that.

    A package may take them from its files.
    """
    parent, _, _ = module.partition(".")
    root = Path(importlib.util.find_spec(parent).submodule_search_locations[0]).parent
    path = root.joinpath(*module.split("."))
    files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]


def test_the_installed_vllm_is_the_pinned_one():
    assert importlib.metadata.version("vllm") == PINNED_VERSION


@pytest.mark.parametrize("name", SYMBOLS)
def test_symbol_has_the_parameters_that_are_passed(name):
    symbol = SYMBOLS[name]
    functions = functions_of(symbol.module, symbol.name)
    assert functions, f"{symbol.module} defines no {symbol.name}"
    given = {
        argument.arg
        for function in functions
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    }
    assert set(symbol.parameters) <= given, sorted(set(symbol.parameters) - given)
