# SPDX-License-Identifier: Apache-2.0
"""Which weights a model holds, as an explicit integer: a tensor's own counter does not see an optimizer step."""

from collections.abc import Iterator, Sequence

from torch import nn

from megatron.vllm_forward.deployed import Deployed


def unwrapped(chunk: nn.Module) -> nn.Module:
    """Return the HybridModel inside Megatron's DDP and Float16 wrappers."""
    while not hasattr(chunk, "deployment_version"):
        if not hasattr(chunk, "module"):
            raise ValueError(
                f"{type(chunk).__name__} is not a bridged model; build it with the spec of megatron.vllm_forward"
            )
        chunk = chunk.module
    return chunk


def deployed_modules(model_chunks: Sequence[nn.Module]) -> Iterator[Deployed]:
    """Yield every module that holds deployment bytes or deployed parameters."""
    for chunk in model_chunks:
        for module in unwrapped(chunk).modules():
            if isinstance(module, Deployed):
                yield module


def deployment_version(model_chunks: Sequence[nn.Module]) -> int:
    """Return the version of the weights; it grows with each optimizer step that changed them and with each load.

    Raises:
        RuntimeError: the chunks disagree; one was changed without the others.
    """
    found = [unwrapped(chunk).deployment_version for chunk in model_chunks]
    if len(set(found)) != 1:
        raise RuntimeError(
            f"the chunks of one model have versions {found}; they must change together: reload the model"
        )
    return found[0]


def mark_masters_changed(model_chunks: Sequence[nn.Module]) -> int:
    """Open a new version: from here to `mark_bytes_current` every forward raises."""
    version = max(unwrapped(chunk).deployment_version for chunk in model_chunks) + 1
    for chunk in model_chunks:
        unwrapped(chunk).deployment_version = version
    for module in deployed_modules(model_chunks):
        module.master_version = version
    return version


def mark_bytes_current(model_chunks: Sequence[nn.Module]) -> None:
    """Close a version: the bytes now belong to the masters."""
    for module in deployed_modules(model_chunks):
        module.bytes_version = module.master_version
