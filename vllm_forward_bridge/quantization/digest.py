# SPDX-License-Identifier: Apache-2.0
"""One digest of a set of named tensors: equal digests, equal bytes."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def bytes_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hex digest over names, dtypes, shapes and bytes; the order of the tensors does not matter.

    Args:
        named_tensors: each name once; any dtype and device, one tensor in memory at a time.

    Raises:
        ValueError: a name comes twice.
    """
    parts: dict[str, bytes] = {}
    for name, tensor in named_tensors:
        if name in parts:
            raise ValueError(f"{name} comes twice in the tensors to digest; each name must come once, drop one of them")
        part = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # view(uint8) needs at least one dim.
        part.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
        parts[name] = part.digest()
    return hashlib.sha256(b"".join(parts[name] for name in sorted(parts))).hexdigest()
