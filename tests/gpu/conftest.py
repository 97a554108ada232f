# SPDX-License-Identifier: Apache-2.0
"""GPU tests: skipped without the hardware; outcomes and measurements go to one JSON-lines file as they come."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

MISSING = [
    reason
    for absent, reason in (
        (not torch.cuda.is_available(), "no NVIDIA GPU"),
        (importlib.util.find_spec("vllm") is None, "vLLM is not installed"),
    )
    if absent
]


def pytest_addoption(parser):
    parser.addoption(
        "--results", default=None, help="append outcomes and measurements to this file, one JSON object a line"
    )


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if MISSING:
            item.add_marker(pytest.mark.skip(reason="needs a GPU with vLLM: " + ", ".join(MISSING)))


def pytest_configure(config):
    # What pytest reports is flushed test by test, so a run that is cut short still says what it proved.
    config.pluginmanager.register(_Outcomes(config.getoption("--results")), "outcomes")


class _Outcomes:
    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None

    def write(self, **entry) -> None:
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            text = str(report.longrepr)[-1500:] if report.failed else ""
            self.write(
                test=report.nodeid,
                outcome=report.outcome,
                when=report.when,
                seconds=round(report.duration, 2),
                error=text,
            )


@pytest.fixture
def measure(request) -> Callable[..., None]:
    """Record named numbers of a test."""
    outcomes = request.config.pluginmanager.getplugin("outcomes")
    return lambda **numbers: outcomes.write(test=request.node.nodeid, measured=numbers)
