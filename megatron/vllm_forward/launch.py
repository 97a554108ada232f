# SPDX-License-Identifier: Apache-2.0
"""Put the bridge into Megatron for the time of one program: its parser, its hybrid model, its optimizer."""

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core
import torch

from megatron.vllm_forward import optimizer_hook, spec
from megatron.vllm_forward.arguments import add_arguments, given_file, model_arguments
from megatron.vllm_forward.bridge import Bridge, make_bridge
from megatron.vllm_forward.cpu_device import on_cpu_if_needed
from megatron.vllm_forward.model import BridgedModel
from megatron.vllm_forward.patches import Patch, applied
from vllm_forward_bridge import settings
from vllm_forward_bridge.config import load

# The wheel, and the tag of a Megatron-LM checkout whose hooked functions are the same.
MEGATRON_VERSIONS = ("0.19.2", "0.19.0")
_SPEC_PLACE = ("megatron.vllm_forward.spec", "SPEC")


@contextmanager
def session() -> Iterator[None]:
    """Make Megatron build bridged models until exit; without a GPU also make it allocate on the host.

    Raises:
        RuntimeError: another megatron-core is installed, or one of the hooked functions has another signature.
    """
    check_version()
    if torch.cuda.is_available():
        settings.apply()
    with applied(_PATCHES), on_cpu_if_needed():
        yield


def check_version() -> None:
    """Raise unless megatron-core is the version whose functions are hooked."""
    found = megatron.core.__version__.partition("+")[0]
    if found not in MEGATRON_VERSIONS:
        raise RuntimeError(
            f"megatron-core {found} was imported from {megatron.core.__file__}; accepted are "
            f"{' and '.join(MEGATRON_VERSIONS)}, because functions are hooked one by one: "
            f"pip install megatron-core=={MEGATRON_VERSIONS[0]}, or, if a Megatron-LM folder on PYTHONPATH comes "
            f"first, check out its tag core_v{MEGATRON_VERSIONS[1]}"
        )


@contextmanager
def arguments_for(bridge: Bridge, argv: list[str]) -> Iterator[None]:
    """Let Megatron's parser see the flags of a bridge's geometry before `argv`, and its layer spec after it."""
    with applied(
        [Patch("sys", "argv", lambda found: [found[0], *model_arguments(bridge.model), *argv, "--spec", *_SPEC_PLACE])]
    ):
        spec.publish(bridge)
        yield


def _with_flag(found: Callable[..., Any]) -> Callable[..., Any]:
    def add_megatron_arguments(parser: Any) -> Any:
        return add_arguments(found(parser))

    return add_megatron_arguments


def _with_geometry(found: Callable[..., Namespace]) -> Callable[..., Namespace]:
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Namespace:
        path = given_file(sys.argv[1:])
        if path is None:
            return found(extra_args_provider, ignore_unknown_args)
        with arguments_for(make_bridge(load(path)), sys.argv[1:]):
            return found(extra_args_provider, ignore_unknown_args)

    return parse_args


def _with_hook(found: Callable[..., Any]) -> Callable[..., Any]:
    def get_megatron_optimizer(config: Any, model_chunks: Any, *args: Any, **keywords: Any) -> Any:
        optimizer = found(config, model_chunks, *args, **keywords)
        optimizer_hook.install(optimizer, model_chunks)
        return optimizer

    return get_megatron_optimizer


def _already_compiled(found: Callable[[], None]) -> Callable[[], None]:
    # The wheel has the compiled helper but not the Makefile that Megatron runs before it looks.
    return (lambda: None) if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") else found


_PATCHES = (
    Patch("megatron.core.datasets.utils", "compile_helpers", _already_compiled, ()),
    Patch("megatron.training.arguments", "add_megatron_arguments", _with_flag, ("parser",)),
    Patch("megatron.training.arguments", "parse_args", _with_geometry, ("extra_args_provider", "ignore_unknown_args")),
    Patch(
        "megatron.core.models.hybrid.hybrid_model",
        "HybridModel",
        lambda found: BridgedModel,
        ("config", "hybrid_stack_spec"),
    ),
    Patch(
        "megatron.training.models.hybrid", "HybridModel", lambda found: BridgedModel, ("config", "hybrid_stack_spec")
    ),
    Patch("megatron.training.training", "get_megatron_optimizer", _with_hook, ("config", "model_chunks")),
)
