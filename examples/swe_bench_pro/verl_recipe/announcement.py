# SPDX-License-Identifier: Apache-2.0
"""A checksum at the end of a stream of weights: verl's transport has no place for one beside the tensors."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm_forward_bridge.quantization import BytesDigest

NAME = "vllm_forward_bridge.digest"


def announced(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor, then uint8 [32] named `NAME`: the digest of what was yielded."""
    digest, device = BytesDigest(), None
    for name, tensor in named_tensors:
        digest.add(name, tensor)
        device = tensor.device
        yield name, tensor
    yield NAME, torch.tensor(list(bytes.fromhex(digest.hex())), dtype=torch.uint8, device=device)


def take(received: dict[str, Tensor]) -> str:
    """Remove the announcement from what arrived, and return the digest.

    Raises:
        ValueError: there is none; the stream was cut off, or its sender is not the bridged engine.
    """
    if NAME not in received:
        raise ValueError(
            f"{len(received)} tensors arrived without {NAME}, which comes last; the stream was cut off, or its sender "
            "is not the bridged actor: name examples.swe_bench_pro.verl_recipe.engine in VERL_USE_EXTERNAL_MODULES"
        )
    return bytes(received.pop(NAME).tolist()).hex()
