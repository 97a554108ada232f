# SPDX-License-Identifier: Apache-2.0
"""Read blocks of tensors from Megatron's `torch_dist` checkpoints of any layout; only the rows asked for."""

import io
import math
import os
import pickle
import zipfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from vllm_forward_bridge.checkpoint.safetensors_file import FileRange, read_bytes
from vllm_forward_bridge.checkpoint.torch_dist_writer import METADATA_FILE

_STORAGE_DTYPES = {
    "BFloat16Storage": torch.bfloat16, "ByteStorage": torch.uint8, "FloatStorage": torch.float32,
    "HalfStorage": torch.float16, "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32,
}  # fmt: skip
# Offset of the two length fields of a local header in a zip archive, and the header's fixed size.
_ZIP_LENGTHS, _ZIP_HEADER = 26, 30


class TorchDistReader:
    """A checkpoint folder; threads may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA_FILE
        if not path.exists():
            raise ValueError(
                f"{folder}: has no {METADATA_FILE}; the folder of a finished torch_dist checkpoint is needed"
            )
        metadata = _read_metadata(path)
        entries = metadata.state_dict_metadata.items()
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)
        }
        self._storage = metadata.storage_data
        problems = self._file_problems()
        if problems:
            raise ValueError(f"{folder}: this checkpoint cannot be read:\n  - " + "\n  - ".join(problems))
        # Neighbouring rows of a block are read one after the other; where its elements start is found once.
        self._locate = lru_cache(maxsize=1 << 16)(_find_elements)

    def _file_problems(self) -> list[str]:
        ends: dict[str, int] = {}
        for info in self._storage.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        problems = []
        for name, end in ends.items():
            path = self.folder / name
            if not path.exists():
                problems.append(f"{name}: listed in {METADATA_FILE} but not there; copy it again")
            elif path.stat().st_size < end:
                problems.append(
                    f"{name}: has {path.stat().st_size} bytes, {METADATA_FILE} lists blocks up to {end}; it is cut "
                    "off: copy it again"
                )
        return problems

    def table(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and global shape of every tensor."""
        return {key: (entry.properties.dtype, tuple(entry.size)) for key, entry in self._tensors.items()}

    def read(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a block of a tensor, assembled from the blocks that the writer's layout made.

        Raises:
            ValueError: the checkpoint does not hold all of it, or a file is cut off.
        """
        entry = self._tensors[key]
        out, filled = torch.empty(shape, dtype=entry.properties.dtype), 0
        for place, chunk in enumerate(entry.chunks):
            low = [max(a, b) for a, b in zip(offset, chunk.offsets, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, chunk.offsets, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                part = self._read_part(MetadataIndex(key, chunk.offsets, place), chunk, low, high, out.dtype)
                out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))] = part
                filled += part.numel()
        if filled != math.prod(shape):
            raise ValueError(
                f"{self.folder}: {key} holds {filled} of the {math.prod(shape)} elements of the block at {offset} of "
                f"shape {shape}; a rank's part is missing: save the checkpoint again"
            )
        return out

    def place(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> FileRange | None:
        """Return where a block lies in one piece, or None if it must be assembled.

        Raises:
            ValueError: what is stored there is no contiguous block of the dtype and shape that the metadata says.
        """
        entry = self._tensors[key]
        for number, chunk in enumerate(entry.chunks):
            inside = all(b <= a for a, b in zip(offset, chunk.offsets, strict=True)) and all(
                a + n <= b + m for a, n, b, m in zip(offset, shape, chunk.offsets, chunk.sizes, strict=True)
            )
            if inside and shape[1:] == tuple(chunk.sizes[1:]):
                path, start = self._elements(MetadataIndex(key, chunk.offsets, number), chunk, entry.properties.dtype)
                row_bytes = math.prod(shape[1:]) * entry.properties.dtype.itemsize
                rows = (offset[0] - chunk.offsets[0], shape[0]) if shape else (0, 1)
                return FileRange(path, start + rows[0] * row_bytes, rows[1] * row_bytes, key)
        return None

    def _elements(self, index: MetadataIndex, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> tuple[Path, int]:
        """Return the file of a stored block and where its elements start."""
        info, sizes = self._storage[index], tuple(chunk.sizes)
        path = self.folder / info.relative_path
        start, found = self._locate(path, info.offset, info.length)
        if found != (dtype, sizes, _contiguous_strides(sizes)):
            raise ValueError(
                f"{path}: the block of {index.fqn} at byte {info.offset} has dtype, shape and strides {found}; "
                f"{dtype} {sizes}, contiguous, is needed: save the checkpoint again"
            )
        return path, start

    def _read_part(
        self, index: MetadataIndex, chunk: ChunkStorageMetadata, low: list[int], high: list[int], dtype: torch.dtype
    ) -> Tensor:
        """Read rows low[0] to high[0] of one stored block, then narrow the other dims."""
        path, start = self._elements(index, chunk, dtype)
        sizes = tuple(chunk.sizes)
        if not sizes:
            return read_bytes(path, start, dtype.itemsize, index.fqn).view(dtype).reshape(())
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        first, count = low[0] - chunk.offsets[0], high[0] - low[0]
        block = read_bytes(path, start + first * row_bytes, count * row_bytes, index.fqn).view(dtype)
        block = block.reshape(count, *sizes[1:])
        for dim in range(1, block.dim()):
            block = block.narrow(dim, low[dim] - chunk.offsets[dim], high[dim] - low[dim])
        return block


def _read_metadata(path: Path) -> Metadata:
    try:
        found = pickle.loads(path.read_bytes())
    except Exception as error:
        # Damaged bytes are instructions too: besides UnpicklingError they raise whatever those lead to.
        raise ValueError(
            f"{path}: {path.stat().st_size} bytes that cannot be unpickled ({type(error).__name__}: {error}); the "
            "whole file of a finished torch_dist checkpoint is needed: copy it again"
        ) from error
    if not isinstance(found, Metadata):
        raise ValueError(
            f"{path}: holds a {type(found).__name__}; the Metadata of a torch_dist checkpoint is needed: copy it again"
        )
    return found


def _contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _find_elements(path: Path, offset: int, length: int) -> tuple[int, tuple]:
    """Return where the elements of a tensor that torch.save wrote start in the file; its dtype, sizes and strides."""
    with path.open("rb") as file:
        # A few hundred bytes here and there: reading ahead would fetch megabytes for each.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        view = _FileView(file, offset, length)
        try:
            start, found = _described(view)
        except Exception as error:
            # As for the metadata: a damaged archive and a damaged pickle in it raise errors of many kinds.
            raise ValueError(
                f"{path}: no tensor at byte {offset} ({type(error).__name__}: {error}); a file as torch.save writes it "
                "is needed: copy it again or save the checkpoint again"
            ) from error
        return offset + start, found


def _described(view: "_FileView") -> tuple[int, tuple]:
    """Return where the elements start in an archive of torch.save; dtype, sizes and strides."""
    archive = zipfile.ZipFile(view)
    records = {name.partition("/")[2]: archive.getinfo(name) for name in archive.namelist()}
    view.seek(_record_start(view, records["data.pkl"]))
    # Not archive.read: it insists on checksums, which torch.save may be told to leave out.
    pickled = view.read(records["data.pkl"].file_size)
    dtype, storage, first, sizes, strides = _Description(io.BytesIO(pickled)).load()
    return _record_start(view, records[f"data/{storage}"]) + first * dtype.itemsize, (dtype, sizes, strides)


def _record_start(view: "_FileView", record: zipfile.ZipInfo) -> int:
    """Return where a record's content starts in the archive: behind its local header, whose length varies."""
    assert record.compress_type == zipfile.ZIP_STORED, "torch.save never compresses"
    view.seek(record.header_offset + _ZIP_LENGTHS)
    return record.header_offset + _ZIP_HEADER + sum(int.from_bytes(view.read(2), "little") for _ in range(2))


class _FileView(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def readable(self) -> bool:
        """Tell zipfile that it may read."""
        return True

    def seekable(self) -> bool:
        """Tell zipfile that it may seek."""
        return True

    def tell(self) -> int:
        """Return the place within the part."""
        return self._place

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place within the part."""
        self._place = place + (0, self._place, self._length)[whence]
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer`, never beyond the part."""
        self._file.seek(self._offset + self._place)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._place)])
        self._place += count
        return count


class _Description(pickle.Unpickler):
    """Reads what torch.save pickled about one tensor, without building it."""

    def find_class(self, module: str, name: str) -> object:
        """Return stand-ins for the few names that a plain tensor needs."""
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, first, sizes, strides, *_: (*storage, first, tuple(sizes), tuple(strides))
        raise ValueError(f"a block is pickled with {module}.{name}; a plain tensor is needed")

    def persistent_load(self, reference: tuple) -> tuple:
        """Return dtype and name of a storage."""
        _, dtype, name, _, _ = reference
        return dtype, name
