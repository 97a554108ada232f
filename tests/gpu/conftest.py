# SPDX-License-Identifier: Apache-2.0
"""GPU tests: skipped without the hardware; outcomes and measurements go to one JSON-lines file as they come."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import SCALES, deployment, make_folder

from vllm_forward_bridge import settings
from vllm_forward_bridge.config import BridgeConfig, ModelSection, RolloutSection
from vllm_forward_bridge.model_config import load_model_config
from vllm_forward_bridge.quantization import bytes_digest
from vllm_forward_bridge.rollout.open import open_engine

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
    parser.addoption("--model", default="tiny", help="model of the engine proofs: tiny, wide (7 layers) or full (52)")
    parser.addoption("--own-process", action="store_true", help="the engine lives in a process of its own")
    parser.addoption("--rollout-devices", default="", help="CUDA_VISIBLE_DEVICES of that process")


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if MISSING:
            item.add_marker(pytest.mark.skip(reason="needs a GPU with vLLM: " + ", ".join(MISSING)))


def pytest_configure(config):
    # Before the first CUDA call: the tests make tensors long before an engine or a trainer would apply them.
    if not MISSING:
        settings.apply()
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


@pytest.fixture(scope="module")
def measure_module(request) -> Callable[..., None]:
    """Record named numbers of a fixture."""
    outcomes = request.config.pluginmanager.getplugin("outcomes")
    return lambda **numbers: outcomes.write(test=request.node.nodeid, measured=numbers)


@pytest.fixture(scope="session")
def scale(request):
    """Return how large the engine proofs are."""
    return SCALES[request.config.getoption("--model")]


@pytest.fixture(scope="session")
def folder(scale, tmp_path_factory):
    """Return the folder of the model: its configuration, and for the tiny one its weights."""
    return make_folder(scale, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="session")
def tensors(scale, folder):
    """Return the deployment tensors of the model."""
    return deployment(scale, folder)


@pytest.fixture(scope="session")
def bridge(request, scale, folder):
    """Return the run's configuration."""
    limits = RolloutSection(
        engine="vllm",
        max_num_seqs=scale.num_seqs,
        token_budget=2048,
        own_process=request.config.getoption("--own-process"),
        visible_devices=request.config.getoption("--rollout-devices"),
    )
    return BridgeConfig(model=ModelSection(repository=str(folder)), rollout=limits)


@pytest.fixture(scope="session")
def engine_with(folder, tensors):
    """Return a function that opens an engine and gives it weights through memory."""

    def open_with(bridge, **arguments):
        config = load_model_config(folder)
        engine = open_engine(bridge, config, torch.device("cuda", 0), max_model_len=4096, **arguments)
        engine.update_weights(tensors.items(), version=1, digest=bytes_digest(tensors.items()))
        return engine

    return open_with


@pytest.fixture(scope="session")
def rollout(scale, bridge, engine_with):
    """Return the engine of the proofs."""
    return engine_with(bridge, kv_cache_gib=scale.kv_gib)
