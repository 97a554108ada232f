# SPDX-License-Identifier: Apache-2.0
"""Which function serves each op of the engine, read back from PyTorch's table of registered kernels."""

import inspect

import torch
from torch._library.custom_ops import OPDEFS

USED_OPS = (
    "rms_norm", "fused_add_rms_norm", "gated_rms_norm", "bf16_linear", "fp8_linear", "nvfp4_linear", "causal_conv1d",
    "ssd_decay", "ssd_scan", "cached_attention", "router", "relu_squared", "moe_experts", "moe_combine", "logprob",
    "sample",
)  # fmt: skip
"""Every op that the engine calls."""


def kernel_record(device: torch.device) -> dict[str, str]:
    """Return for each op the qualified name of the kernel that runs on `device`.

    Raises:
        RuntimeError: lists the ops that have no kernel for this device.
    """
    found = {name: _kernel_name(OPDEFS[f"vllm_forward_bridge::{name}"], device.type) for name in USED_OPS}
    missing = [name for name, kernel in found.items() if not kernel]
    if missing:
        raise RuntimeError(
            f"no kernel for {device.type} is registered for {', '.join(missing)}; every op of the engine needs one, "
            "there is no fallback: run on another device"
        )
    return found


def _kernel_name(op: torch.library.CustomOpDef, device_type: str) -> str:
    # torch keeps a registered kernel in the closure of a wrapper; there is no public way to read it back.
    wrapper = op._backend_fns.get(device_type)
    if wrapper is None:
        return ""
    kernel = inspect.getclosurevars(inspect.unwrap(wrapper)).nonlocals["fn"]
    return f"{kernel.__module__}.{kernel.__qualname__} [{device_type}]"
