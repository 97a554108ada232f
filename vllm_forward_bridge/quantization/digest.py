# SPDX-License-Identifier: Apache-2.0
"""One digest of a set of named tensors, computed where the tensors are: equal digests, equal bytes."""

import functools
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_WORD_BYTES = 8
_BLOCK_WORDS = 1 << 17
# More at once do not stay in the cache of a CPU core, and one is too little for a GPU.
_BLOCKS_AT_ONCE = 4
_LANES = 2


def bytes_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hex digest over names, dtypes, shapes and bytes; their order and device do not matter.

    Bytes are read as 64-bit words; each block of 2^17 words gives two sums of word * odd coefficient modulo 2^64, and
    SHA-256 takes these sums: a GPU sends 16 bytes a megabyte to the host. A changed word always changes the digest; it
    guards against mistakes, not against an attacker.

    Args:
        named_tensors: each name once; one tensor in memory at a time.

    Raises:
        ValueError: a name comes twice.
    """
    digest = BytesDigest()
    for name, tensor in named_tensors:
        digest.add(name, tensor)
    return digest.hex()


class BytesDigest:
    """`bytes_digest` of tensors that come one by one, for a sender that streams them."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor in.

        Raises:
            ValueError: the name came before.
        """
        if name in self._parts:
            raise ValueError(f"{name} comes twice in the tensors to digest; each name must come once, drop one of them")
        part = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        part.update(_block_sums(tensor.detach()).cpu().numpy().tobytes())
        self._parts[name] = part.digest()

    def hex(self) -> str:
        """Return the digest of what was taken in."""
        return hashlib.sha256(b"".join(self._parts[name] for name in sorted(self._parts))).hexdigest()


def _block_sums(tensor: Tensor) -> Tensor:
    """Return int64 [blocks, 2]; the last block is filled up with zeros, which the digest tells apart by the shape."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    coefficients = _coefficients(tensor.device)
    sums, step = [], _BLOCK_WORDS * _WORD_BYTES * _BLOCKS_AT_ONCE
    for start in range(0, len(raw), step):
        part = raw[start : start + step]
        size = min(_BLOCK_WORDS, -(-len(part) // _WORD_BYTES)) * _WORD_BYTES
        padding = -len(part) % size
        if padding or part.data_ptr() % _WORD_BYTES:
            part = torch.nn.functional.pad(part, (0, padding)).clone()
        words = part.view(torch.int64).view(-1, size // _WORD_BYTES)
        # Integer sums wrap and have no order, so every device and thread count gives the same ones.
        sums.append(torch.stack([(words * lane[: words.shape[1]]).sum(1) for lane in coefficients], dim=1))
    return torch.cat(sums) if sums else torch.empty(0, _LANES, dtype=torch.int64)


@functools.cache
def _coefficients(device: torch.device) -> Tensor:
    """Return odd int64 coefficients [2, 2^17], the same on every device."""
    generator = torch.Generator().manual_seed(0x4E454D4F)
    low, high = -(1 << 63), (1 << 63) - 1
    return (torch.randint(low, high, (_LANES, _BLOCK_WORDS), generator=generator) | 1).to(device)
