# SPDX-License-Identifier: Apache-2.0
"""The switch of the plugin: one key of vLLM's `additional_config`, and the engine arguments that belong to it.

`additional_config` is part of VllmConfig's hash and reaches every process, so no compiled graph and no worker can mix
bridged and stock code. The digest in it is that of this package's source: a worker with other code refuses to start.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = "vllm_forward_bridge"
SEED = "vllm_forward_bridge_seed"
"""Key of a request's `extra_args`. vLLM's own `seed` makes a generator that it rewinds as if a draw had moved it."""
_PLUGIN = "vllm_forward_bridge.vllm_plugin"
ARCHITECTURE = "NemotronHForCausalLM"

ARGUMENTS: Mapping[str, Any] = {
    "worker_cls": f"{_PLUGIN}.worker.BridgeWorker",
    "model_class_overrides": {ARCHITECTURE: f"{_PLUGIN}.model:BridgedNemotronH"},
    "logits_processors": [f"{_PLUGIN}.sampler:RequestState"],
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": 0,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "disable_cascade_attn": True,
    "generation_config": "vllm",
}
"""Engine arguments that the bridged forward needs, with the only value that is proven."""


def switch_value() -> dict[str, str]:
    """Return what stands behind `KEY` in `additional_config`."""
    return {"digest": package_digest()}


@functools.cache
def package_digest() -> str:
    """Hash every source file of this package, once a process: two processes with one digest run one code."""
    root = Path(__file__).resolve().parent.parent
    hasher = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        hasher.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


def complete(arguments: Any) -> None:
    """Fill in `ARGUMENTS` where an EngineArgs still has its default.

    Raises:
        ValueError: lists every argument that was set to something else.
    """
    defaults = {field.name: _default(field) for field in dataclasses.fields(arguments)}
    problems = []
    for name, wanted in ARGUMENTS.items():
        given = getattr(arguments, name)
        if given == wanted:
            continue
        if given == defaults[name]:
            setattr(arguments, name, wanted)
        else:
            problems.append(f"{name} is {given!r}; only {wanted!r} is proven to keep the bits: leave it at its default")
    if problems:
        raise ValueError(
            f"additional_config has {KEY!r}, and these engine arguments contradict it:\n  - " + "\n  - ".join(problems)
        )
    arguments.additional_config = {**arguments.additional_config, KEY: switch_value()}


def is_on(additional_config: Any) -> bool:
    """Tell whether an engine's `additional_config` asks for the bridged forward."""
    return isinstance(additional_config, Mapping) and KEY in additional_config


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING
