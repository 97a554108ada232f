# SPDX-License-Identifier: Apache-2.0
"""Let megatron-core allocate on the CPU: its CUDA calls answer for the host. Used only where there is no GPU."""

import contextlib
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.vllm_forward.patches import Patch, applied

_CPU = torch.device("cpu")
# Megatron compares these names as strings to tell an fp32 master from a bf16 parameter.
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class _OnCpu(TorchFunctionMode):
    """Read every `cuda` device that a torch function receives as `cpu`."""

    def __torch_function__(self, func, classes, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if any(_is_cuda(argument) for argument in args[1:]):
            args = (args[0], *(_CPU if _is_cuda(argument) else argument for argument in args[1:]))
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class _Stream:
    """A stream that is always done: the host runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 0.0


def _answer(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda found: lambda *args, **kwargs: value


def _properties(*args: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=1 << 34)


_STREAM = _Stream()

_CUDA = (
    ("is_available", _answer(True)),
    ("device_count", _answer(1)),
    ("current_device", _answer(_CPU)),
    ("set_device", _answer(None)),
    ("synchronize", _answer(None)),
    ("empty_cache", _answer(None)),
    ("ipc_collect", _answer(None)),
    ("Stream", lambda found: _Stream),
    ("Event", lambda found: _Event),
    ("current_stream", _answer(_STREAM)),
    ("default_stream", _answer(_STREAM)),
    ("set_stream", _answer(None)),
    ("stream", lambda found: lambda stream: contextlib.nullcontext()),
    ("manual_seed", lambda found: torch.manual_seed),
    ("get_rng_state", lambda found: lambda device=None: torch.get_rng_state()),
    ("set_rng_state", lambda found: lambda state, device=None: torch.set_rng_state(state)),
    ("get_device_capability", _answer((0, 0))),
    ("get_device_properties", lambda found: _properties),
    ("get_device_name", _answer("cpu")),
    ("mem_get_info", _answer((1 << 34, 1 << 34))),
    ("memory_stats", _answer({})),
    ("memory_allocated", _answer(0)),
    ("max_memory_allocated", _answer(0)),
    ("memory_reserved", _answer(0)),
    ("max_memory_reserved", _answer(0)),
    ("reset_peak_memory_stats", _answer(None)),
    ("is_current_stream_capturing", _answer(False)),
)

_PATCHES = (
    *(Patch("torch.cuda", name, make) for name, make in _CUDA),
    Patch("torch.nn.Module", "cuda", lambda found: lambda module, device=None: module, ("self", "device")),
    Patch(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        lambda found: lambda device=None, clone=False, graph_safe=False: torch.get_rng_state(),
        ("device", "clone", "graph_safe"),
    ),
    Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        lambda found: lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        ("new_state", "device", "graph_safe"),
    ),
    # Compiles and warms up CUDA kernels; on a host there is nothing to warm up.
    Patch("megatron.training.training", "set_jit_fusion_options", _answer(None), ("tp_size",)),
)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run Megatron without a GPU: allocation, streams, seeds and device questions are answered by the host.

    Raises:
        RuntimeError: a GPU is there; the real calls must be used then.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "on_cpu was entered, but this machine has a GPU; run without it, Megatron allocates there itself"
        )
    tracker = logging.getLogger("megatron.core.tensor_parallel.random")
    tracker.addFilter(_is_not_about_shared_state)
    try:
        with applied(_PATCHES), _OnCpu():
            yield
    finally:
        tracker.removeFilter(_is_not_about_shared_state)


def _is_not_about_shared_state(record: logging.LogRecord) -> bool:
    """Drop Megatron's warning that host random numbers were drawn where a device's were expected: here they are one."""
    return "CPU RNG state changed" not in record.getMessage()


@contextmanager
def on_cpu_if_needed() -> Iterator[None]:
    """Enter `on_cpu` if and only if there is no GPU."""
    with contextlib.nullcontext() if torch.cuda.is_available() else on_cpu():
        yield
