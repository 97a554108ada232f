# SPDX-License-Identifier: Apache-2.0
"""The certificate of a run whose every step was zero; `old_logprob = "reuse"` needs one for the same configuration."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_forward_bridge.config import BridgeConfig, GateSection
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.parity.gate import Gate
from vllm_forward_bridge.rollout.protocol import SamplingParams

_PACKAGES = ("vllm-forward-bridge", "torch", "megatron-core", "triton", "vllm")


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What a certificate holds for: everything that may change bits, weights excepted."""

    config: str
    """Digest of the bridge configuration without its gate, which changes no forward."""
    geometry: str
    """Digest of the model's geometry and quantisation map."""
    versions: Mapping[str, str]
    """Package versions, Python and the device that ran them."""
    kernels: Mapping[str, str]
    """Which kernel served each op in the rollout, as read back from it."""
    layout: Mapping[str, int]
    """Parallel degrees of trainer and rollout."""
    sampling: Mapping[str, float]
    """Temperature, top-p and top-k: each takes the logprob through other operations."""


def run_identity(
    bridge: BridgeConfig,
    model: ModelConfig,
    *,
    kernels: Mapping[str, str],
    layout: Mapping[str, int],
    sampling: SamplingParams,
    device: str | torch.device = "cpu",
) -> RunIdentity:
    """Describe this run for a certificate."""
    return RunIdentity(
        config=dataclasses.replace(bridge, gate=GateSection()).digest,
        geometry=geometry_digest(model),
        versions=_versions(torch.device(device)),
        kernels=dict(kernels),
        layout=dict(layout),
        sampling={name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")},
    )


def geometry_digest(model: ModelConfig) -> str:
    """Identify a model's geometry and quantisation map."""
    values = {entry.name: getattr(model, entry.name) for entry in dataclasses.fields(model)}
    quantization = values.pop("quantization")
    values["formats"] = dict(quantization.formats)
    values["unquantized"] = [quantization.kv_cache, quantization.default_format, *quantization.exclude_modules]
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_certificate(path: str | Path, gate: Gate, identity: RunIdentity) -> None:
    """Write what `gate` saw, in one rename.

    Raises:
        RuntimeError: no step was checked or a token differed; such a run certifies nothing.
    """
    total = gate.total
    if not gate.steps or not total.is_zero:
        raise RuntimeError(
            f"this run checked {gate.steps} steps with {total.count} tokens, {total.mismatches} of them different; a "
            "certificate needs at least one step and no difference, because it lets later runs skip the check: find "
            "the first difference and run again"
        )
    content = {"steps": gate.steps, "tokens": total.count, **dataclasses.asdict(identity)}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    partial.replace(path)


def check_certificate(path: str | Path, identity: RunIdentity) -> int:
    """Return how many tokens certified this configuration.

    Raises:
        ValueError: the file is absent or malformed, or lists every value in which this run differs from it.
    """
    advice = "run once with old_logprob = 'recompute' and name the file it wrote"
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"certificate {path} does not exist; old_logprob = 'reuse' needs one: {advice}")
    try:
        content = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"certificate {path} is not a JSON object ({error}); a file from write_certificate is needed: {advice}"
        ) from error
    wanted = dataclasses.asdict(identity)
    problems = _disagreements({name: content.get(name) for name in wanted}, wanted)
    for name in ("steps", "tokens"):
        if type(content.get(name)) is not int or content[name] < 1:
            problems.append(f"{name} is {content.get(name)!r}; at least 1 is needed")
    if problems:
        raise ValueError(
            f"certificate {path} is not for this run:\n  - "
            + "\n  - ".join(problems)
            + f"\nOnly a certified configuration may reuse the rollout's logprob as the old one: {advice}"
        )
    return content["tokens"]


def _disagreements(certified: Mapping, wanted: Mapping, where: str = "") -> list[str]:
    problems = []
    for name in sorted(set(certified) | set(wanted)):
        have, want = certified.get(name), wanted.get(name)
        if isinstance(have, Mapping) and isinstance(want, Mapping):
            problems += _disagreements(have, want, f"{where}{name}.")
        elif have != want:
            problems.append(f"{where}{name}: certified {have!r}, this run {want!r}")
    return problems


def _versions(device: torch.device) -> dict[str, str]:
    found = {name: _installed(name) for name in _PACKAGES}
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        hardware = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return {**found, "python": platform.python_version(), "device": hardware}


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
