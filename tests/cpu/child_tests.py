# SPDX-License-Identifier: Apache-2.0
"""Run a file of tests in a process of its own, once, and show each of its tests in this process."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest


def names(file: Path) -> list[str]:
    """Return the test functions of a file without importing it."""
    nodes = ast.parse(file.read_text()).body
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def run(file: Path, folder: Path, environment: Mapping[str, str]) -> dict[str, list[ElementTree.Element]]:
    """Run the file under pytest; return what it reports of each test function, one element a case.

    Args:
        file: the tests.
        folder: where the report is written.
        environment: variables to set before anything is imported.
    """
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
    child = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, capture_output=True, text=True, timeout=900
    )
    if not report.exists():
        raise RuntimeError(f"{file.name} wrote no report:\n{child.stdout}\n{child.stderr}")
    cases: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        cases.setdefault(case.attrib["name"].partition("[")[0], []).append(case)
    if not cases.keys() >= set(names(file)):
        raise RuntimeError(f"{file.name} ran {sorted(cases)} only:\n{child.stdout}\n{child.stderr}")
    return cases


def check(cases: list[ElementTree.Element]) -> None:
    """Fail, skip or pass as the child did."""
    failed = [part for case in cases for part in (*case.findall("failure"), *case.findall("error"))]
    if failed:
        pytest.fail("\n".join(part.text for part in failed), pytrace=False)
    skipped = [part for case in cases for part in case.findall("skipped")]
    if skipped:
        pytest.skip("; ".join(part.attrib["message"] for part in skipped))
