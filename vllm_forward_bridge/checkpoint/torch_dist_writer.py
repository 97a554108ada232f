# SPDX-License-Identifier: Apache-2.0
"""Write Megatron's `torch_dist` checkpoint files unit by unit, without torch.distributed and without Megatron.

The files are those of torch.distributed.checkpoint: `__U_0.distcp` holds blocks as `torch.save` writes them, one after
the other; `.metadata` says which block of which tensor lies where. A unit a file makes a conversion resumable.
"""

import io
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vllm_forward_bridge.checkpoint.megatron_keys import Chunk

METADATA_FILE = ".metadata"
# Megatron's ShardedObject of everything that is not a tensor: one shard of one.
_COMMON_STATE = "common_state/shard_0_1"
_COMMON_FILE = "__common_0.distcp"


@dataclass(frozen=True)
class StoredBlock:
    """Where one block of a tensor lies."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


def write_unit(folder: Path, unit: int, chunks: Iterable[Chunk], make: Callable[[Chunk], Tensor]) -> list[StoredBlock]:
    """Write one file of blocks; it has its final name only when it is complete and on disk.

    Args:
        folder: of the checkpoint.
        unit: number in the file's name.
        chunks: the blocks in order.
        make: returns the tensor of a block when its turn comes.
    """
    name, blocks = f"__{unit}_0.distcp", []
    partial = folder / f"{name}.partial"
    with partial.open("wb") as file:
        for chunk in chunks:
            tensor = make(chunk)
            assert (tensor.dtype, tuple(tensor.shape)) == (chunk.dtype, chunk.shape), chunk
            start = file.tell()
            torch.save(tensor, file)
            blocks.append(StoredBlock(chunk.key, chunk.offset, chunk.shape, name, start, file.tell() - start))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / name)
    return blocks


def write_metadata(
    folder: Path,
    table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    blocks: Iterable[StoredBlock],
    common_state: dict,
) -> None:
    """Write what makes the files a Megatron checkpoint: the common state, `.metadata` and `metadata.json`.

    Args:
        folder: of the checkpoint.
        table: dtype and global shape of each key.
        blocks: every block of every file.
        common_state: Megatron's state that is not a tensor.
    """
    tensors = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        for key, (dtype, shape) in table.items()
    }
    storage = {}
    # pickle writes an equal string once only if it is the same object; a resumed conversion must give the same bytes.
    same = {text: text for text in table}
    for block in blocks:
        key, file = same[block.key], same.setdefault(block.file, block.file)
        chunks = tensors[key].chunks
        index = MetadataIndex(key, block.offset, len(chunks))
        chunks.append(ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.shape)))
        storage[index] = _StorageInfo(file, block.start, block.length)
    serialized = io.BytesIO()
    torch.save([common_state], serialized)
    (folder / _COMMON_FILE).write_bytes(serialized.getvalue())
    storage[MetadataIndex(_COMMON_STATE)] = _StorageInfo(_COMMON_FILE, 0, len(serialized.getvalue()))
    metadata = Metadata({**tensors, _COMMON_STATE: BytesStorageMetadata()}, None, storage)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
