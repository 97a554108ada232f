# SPDX-License-Identifier: Apache-2.0
"""The safetensors container, tensor by tensor: every fault of a file is named before its bytes are used."""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U8": torch.uint8, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_HEADER_LIMIT = 100 << 20
_COPIED_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype, shape and shard file of one stored tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def text(self) -> str:
        """Dtype and shape as people write them."""
        return f"{DTYPE_NAMES[self.dtype]} {list(self.shape)}"


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file that are a block of a tensor as they lie there."""

    path: Path
    start: int
    nbytes: int
    what: str
    """Names the block in an error."""


@dataclass(frozen=True)
class ShardHeader:
    """Contents of one file: specs in order of offset, where their bytes start, and the header's own text."""

    path: Path
    text: str
    specs: tuple[TensorSpec, ...]
    starts: dict[str, int]
    """Absolute byte offset of each tensor's data."""


def read_header(path: Path, problems: list[str]) -> ShardHeader | None:
    """Read and check the header of one file; faults are added to `problems`, None means that nothing can be used."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _HEADER_LIMIT):
            problems.append(
                f"{path.name}: {size} bytes cannot hold the header of {length} bytes it announces; the file is cut "
                "off or is not safetensors: fetch it again"
            )
            return None
        raw = file.read(length)
    try:
        text = raw.decode()
        entries = json.loads(text)
        if not isinstance(entries, dict):
            raise ValueError(f"of type {type(entries).__name__}, not an object")
    except ValueError as error:
        problems.append(f"{path.name}: the header is not JSON ({error}); a safetensors file is needed: fetch it again")
        return None
    entries.pop("__metadata__", None)
    malformed = [name for name, entry in entries.items() if not _is_entry(entry)]
    if malformed:
        problems.append(
            f"{path.name}: {malformed[0]} lacks a valid dtype, shape or data_offsets in the header; fetch it again"
        )
        return None
    data_start = _LENGTH_BYTES + length
    specs, starts, expected = [], {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            problems.append(f"{path.name}: {name} has dtype {entry['dtype']}; accepted are {', '.join(DTYPES)}")
            continue
        spec = TensorSpec(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), path.name)
        if begin != expected or end - begin != spec.num_bytes:
            problems.append(
                f"{path.name}: {name} ({spec.text}) has bytes {begin} to {end}; {spec.num_bytes} from {expected} are "
                "expected, since tensors follow each other without gaps: fetch the file again"
            )
        expected = end
        if data_start + end > size:
            problems.append(
                f"{path.name}: {name} ends at byte {data_start + end}, the file at {size}; it is cut off: fetch it"
            )
        specs.append(spec)
        starts[name] = data_start + begin
    if size > data_start + expected:
        problems.append(
            f"{path.name}: {size - data_start - expected} bytes after the last tensor; none are expected: fetch it"
        )
    return ShardHeader(path, text, tuple(specs), starts)


def is_shape(value: object) -> bool:
    """Tell whether a value of a JSON file is a list of sizes."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or not is_shape(entry.get("shape")):
        return False
    return is_shape(entry.get("data_offsets")) and len(entry["data_offsets"]) == 2


def header_text(specs: Iterable[TensorSpec]) -> str:
    """Return the JSON header of a new file that holds `specs` in the given order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.num_bytes],
        }
        offset += spec.num_bytes
    text = json.dumps(entries, separators=(",", ":"))
    # The data starts at a multiple of eight bytes; spaces are JSON white space.
    return text + " " * (-len(text.encode()) % _LENGTH_BYTES)


def disk_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Order specs of one file as the safetensors package does: wide dtypes first, for alignment, then by name."""
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))


def write_file(
    path: Path, text: str, specs: Iterable[TensorSpec], blocks: Callable[[str], Iterable[Tensor | FileRange]],
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> None:  # fmt: skip
    """Write one file: header `text`, then each tensor of `specs` in order, in blocks fetched when their turn comes.

    Blocks that lie in other files are copied last, in the order in which they lie there, so that those files are read
    from front to back.

    Args:
        path: file to write; it is on disk when the function returns.
        text: of the header.
        specs: the tensors in order.
        blocks: returns the blocks of a tensor in order; their bytes lie one after the other.
        advance: called with the number of bytes after each part that was written.

    Raises:
        ValueError: the blocks of a tensor have another dtype or size than the spec says.
    """
    raw = text.encode()
    ranges: list[tuple[FileRange, int]] = []
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(_LENGTH_BYTES, "little"))
        file.write(raw)
        for spec in specs:
            start = file.tell()
            for block in blocks(spec.name):
                if isinstance(block, FileRange):
                    ranges.append((block, file.tell()))
                    file.seek(block.nbytes, os.SEEK_CUR)
                else:
                    file.write(byte_view(block).numpy().data)
                    advance(block.nbytes)
            written = file.tell() - start
            if written != spec.num_bytes:
                raise ValueError(
                    f"{path}: {spec.name} came with {written} bytes; {spec.text} was announced, pass that tensor"
                )
        file.flush()
        _copy_ranges(ranges, file.fileno(), advance)
        os.fsync(file.fileno())


def _copy_ranges(ranges: list[tuple[FileRange, int]], target: int, advance: Callable[[int], object]) -> None:
    """Copy each range to its place in an open file; the kernel moves the bytes, no memory of ours holds them."""
    ranges.sort(key=lambda item: (str(item[0].path), item[0].start))
    for path, group in itertools.groupby(ranges, key=lambda item: item[0].path):
        with path.open("rb", buffering=0) as source:
            for block, place in group:
                os.lseek(target, place, os.SEEK_SET)
                done = 0
                while done < block.nbytes:
                    count = min(block.nbytes - done, _COPIED_AT_ONCE)
                    step = os.sendfile(target, source.fileno(), block.start + done, count)
                    if not step:
                        raise _cut_off(path, block.what, block.start + done)
                    done += step
                    advance(step)


def read_bytes(path: Path, start: int, count: int, what: str) -> Tensor:
    """Return bytes of a file as uint8 [count] in memory of their own.

    Raises:
        ValueError: the file ends before; the message names it and `what`.
    """
    out = torch.empty(count, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        view, done = memoryview(out.numpy()), 0
        while done < count:
            step = file.readinto(view[done:])
            if not step:
                raise _cut_off(path, what, start + done)
            done += step
    return out


def _cut_off(path: Path, what: str, place: int) -> ValueError:
    return ValueError(f"{path}: ended inside {what} at byte {place}; it is cut off: copy it again")


def byte_view(tensor: Tensor) -> Tensor:
    """Return the bytes of a CPU tensor, uint8 [bytes], without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
