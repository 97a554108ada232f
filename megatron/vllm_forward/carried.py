# SPDX-License-Identifier: Apache-2.0
"""Tensors of the source that training does not use: kept as bytes on the last stage, so that nothing is lost."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from torch import Tensor, nn

from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.deployed import View, named_tensors

CARRIED_PREFIX = "mtp."


class CarriedTensors(nn.Module):
    """The multi-token-prediction block, untouched; zeros in a model built from scratch.

    Not buffers: they stay in host memory, and no cast or device move may reach them.
    """

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self.specs = {name: spec for name, spec in bridge.tensors.items() if name.startswith(CARRIED_PREFIX)}
        self.contents = {
            name: torch.zeros(math.prod(spec.shape) * spec.dtype.itemsize, dtype=torch.uint8, device="cpu")
            for name, spec in self.specs.items()
        }

    def views(self) -> Iterator[View]:
        """Yield an alias of each tensor under its whole deployment name."""
        for name, spec in self.specs.items():
            yield View(name, self.contents[name].view(spec.dtype).view(spec.shape), spec.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Name the bytes of each tensor `carried.<deployment name>`."""
        return named_tensors(self.contents, {}, prefix, sharded_offsets, metadata)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination.update({f"{prefix}{name}": bytes_ for name, bytes_ in self.contents.items()})

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list, unexpected_keys: list, error_msgs: list,
    ) -> None:  # fmt: skip
        for name, content in self.contents.items():
            given = state_dict.get(f"{prefix}{name}")
            if given is None:
                missing_keys.append(f"{prefix}{name}")
            else:
                content.copy_(given)
