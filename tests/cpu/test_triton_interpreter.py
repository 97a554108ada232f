# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels under Triton's interpreter: kernels are built when imported, so a process of its own is needed."""

import ast
from pathlib import Path

import child_tests
import pytest

HERE = Path(__file__).parent
KERNELS = HERE / "interpreted_kernels.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return child_tests.run(KERNELS, tmp_path_factory.mktemp("interpreter"), {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("name", child_tests.names(KERNELS))
def test_interpreted(report, name):
    child_tests.check(report[name])


def test_every_launcher_is_interpreted():
    called = {node.attr for node in ast.walk(ast.parse(KERNELS.read_text())) if isinstance(node, ast.Attribute)}
    sources = sorted((HERE.parents[1] / "vllm_forward_bridge" / "ops").glob("triton_*.py"))
    launchers = {
        node.name
        for source in sources
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    assert len(launchers) >= 8
    assert launchers - called == set()
