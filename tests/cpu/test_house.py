# SPDX-License-Identifier: Apache-2.0
"""The tree keeps its own rules: who may import whom, how long a file may be, which claims name a test."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("vllm_forward_bridge", "megatron/vllm_forward")
LINE_LIMIT = 450
MAY_IMPORT_VLLM = tuple(f"vllm_forward_bridge/{part}" for part in ("vllm_symbols.py", "vllm_plugin/", "rollout/vllm"))
MAY_ASSIGN = "megatron/vllm_forward/patches.py"


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def imports_of(name):
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_files_stay_within_the_line_limit():
    long = {name: len((ROOT / name).read_text().splitlines()) for name in tracked("*.py")}
    assert {name: lines for name, lines in long.items() if lines > LINE_LIMIT} == {}


def test_files_start_with_the_licence():
    sources = tracked("*.py", "*.sh")
    assert len(sources) > 20
    lacking = [name for name in sources if "SPDX-License-Identifier: Apache-2.0" not in (ROOT / name).read_text()[:200]]
    assert lacking == []


def test_bridge_never_imports_megatron_or_what_stands_above_it():
    above = ("megatron", "examples", "tools", "tests")
    wrong = [
        (name, module)
        for name in tracked("vllm_forward_bridge/*.py", "vllm_forward_bridge/**/*.py")
        for module in imports_of(name)
        if module.split(".")[0] in above
    ]
    assert wrong == []


def test_only_three_places_import_vllm():
    wrong = [
        name
        for name in tracked("vllm_forward_bridge/*.py", "megatron/*.py", "tools/*.py", "examples/*.py")
        for module in imports_of(name)
        if module.split(".")[0] == "vllm" and not name.startswith(MAY_IMPORT_VLLM)
    ]
    assert wrong == []


def test_reference_imports_torch_only():
    allowed = {"torch", "math", "vllm_forward_bridge.reference"}
    wrong = [
        (name, module)
        for name in tracked("vllm_forward_bridge/reference/*.py")
        for module in imports_of(name)
        if not any(module == good or module.startswith(good + ".") for good in allowed)
    ]
    assert wrong == []


def test_engine_and_trainer_share_no_wiring():
    engine = tracked("vllm_forward_bridge/rollout/embedded/*.py")
    assert engine
    wrong = [(name, module) for name in engine for module in imports_of(name) if module.startswith("megatron")]
    assert wrong == []
    trainer = tracked("megatron/vllm_forward/*.py")
    wiring = "vllm_forward_bridge.rollout.embedded.model"
    wrong = [(name, module) for name in trainer for module in imports_of(name) if module.startswith(wiring)]
    assert wrong == []


def test_ops_reference_and_tests_share_one_word_list():
    not_ops = {"__init__", "exact"}
    ops = {Path(n).stem for n in tracked("vllm_forward_bridge/ops/*.py")} - not_ops
    references = {Path(n).stem for n in tracked("vllm_forward_bridge/reference/*.py")} - not_ops
    registered = {n for n in ops if "custom_op" in (ROOT / f"vllm_forward_bridge/ops/{n}.py").read_text()}
    tests = {Path(n).stem.removeprefix("test_") for n in tracked("tests/cpu/test_*.py")}
    assert references - ops == set()
    assert registered - references == set()
    assert registered - tests == set()


def test_megatron_stays_a_namespace():
    assert not (ROOT / "megatron/__init__.py").exists()
    import megatron.core
    import megatron.training

    import megatron.vllm_forward

    assert not Path(megatron.core.__file__).is_relative_to(ROOT / "megatron")
    assert Path(megatron.vllm_forward.__file__).is_relative_to(ROOT)


def test_environment_variables_are_not_configuration():
    allowed = ("settings.py", "tools/", "tests/", "cpu_device.py", "examples/")
    wrong = [
        name
        for name in tracked("vllm_forward_bridge/*.py", "megatron/*.py")
        if re.search(r"os\.environ\.get|os\.getenv", (ROOT / name).read_text()) and not any(a in name for a in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", ["docs/parity.md"])
def test_every_claim_names_a_test_that_exists(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text))
    assert len(named) >= 20
    missing = [f"{file}::{test}" for file, test in sorted(named)
               if not (ROOT / file).exists() or f"def {test}(" not in (ROOT / file).read_text()]
    assert missing == []
