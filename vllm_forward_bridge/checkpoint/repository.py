# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face repository of nemotron_h on disk: open, check, read tensor by tensor, write, finish atomically."""

import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint.safetensors_file import (
    ShardHeader,
    TensorSpec,
    disk_order,
    header_text,
    read_bytes,
    read_header,
    write_file,
)
from vllm_forward_bridge.checkpoint.tensor_table import table_problems
from vllm_forward_bridge.model_config import ModelConfig, load_model_config, read_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_BLOCK_BYTES = 64 << 20
_SHOWN = 80
_DOWNLOAD_FOLDERS = (".git", ".cache")


class Repository:
    """An opened repository; build it with `open_repository`."""

    def __init__(self, path: Path, config: ModelConfig, headers: Mapping[str, ShardHeader]) -> None:
        self.path = path
        self.config = config
        self.headers = headers
        self.table: dict[str, TensorSpec] = {spec.name: spec for h in headers.values() for spec in h.specs}
        self._maps: dict[str, mmap.mmap] = {}

    @property
    def files_folder(self) -> Path:
        """Folder that `other_files` are relative to."""
        return self.path

    def names(self) -> list[str]:
        """Return tensor names in order of shard file and place in it."""
        return list(self.table)

    def read(self, name: str) -> Tensor:
        """Return a tensor mapped from its file: no copy, pages come when touched. Treat it as read-only."""
        spec = self._spec(name)
        if not spec.num_bytes:
            return torch.empty(spec.shape, dtype=spec.dtype)
        if spec.shard not in self._maps:
            with (self.path / spec.shard).open("rb") as file:
                # A private mapping, because torch wants writable memory; the file never changes.
                self._maps[spec.shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = self.headers[spec.shard].starts[name]
        raw = torch.frombuffer(self._maps[spec.shard], dtype=torch.uint8, count=spec.num_bytes, offset=start)
        if start % spec.dtype.itemsize:
            raw = raw.clone()
        return raw.view(spec.dtype).reshape(spec.shape)

    def fetch(self, name: str) -> Tensor:
        """Return a tensor read into memory of its own; threads may call it at once."""
        spec = self._spec(name)
        return self.fetch_bytes(name, 0, spec.num_bytes).view(spec.dtype).reshape(spec.shape)

    def fetch_bytes(self, name: str, start: int, count: int) -> Tensor:
        """Return `count` bytes of a tensor from byte `start`, uint8 [count]."""
        spec = self._spec(name)
        return read_bytes(self.path / spec.shard, self.headers[spec.shard].starts[name] + start, count, name)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's bytes in order, uint8, a bounded number at a time."""
        total = self._spec(name).num_bytes
        for start in range(0, total, _BLOCK_BYTES):
            yield self.fetch_bytes(name, start, min(_BLOCK_BYTES, total - start))

    def other_files(self) -> list[Path]:
        """Return every file that is not a shard, relative to the repository, sorted; not those of a download tool."""
        files = (f.relative_to(self.path) for f in self.path.rglob("*") if f.is_file())
        return sorted(f for f in files if str(f) not in self.headers and f.parts[0] not in _DOWNLOAD_FOLDERS)

    def _spec(self, name: str) -> TensorSpec:
        if name not in self.table:
            raise ValueError(f"{self.path}: has no tensor {name}; names() lists the {len(self.table)} it has")
        return self.table[name]


def open_repository(path: str | Path, *, check: bool = True) -> Repository:
    """Open a repository and check it: configuration, shards and index, names, dtypes and shapes; reads no weights.

    Args:
        path: folder with config.json, safetensors shards, and hf_quant_config.json if it is quantised.
        check: False skips the comparison with the family's tensor table, for tools that look at a faulty repository.

    Raises:
        ValueError: lists every fault at once: file, tensor, what was expected, what to do.
        FileNotFoundError: there is no config.json.
    """
    path = Path(path)
    config = load_model_config(path)
    problems: list[str] = []
    headers = _read_headers(path, problems)
    repository = Repository(path, config, headers)
    if check and not problems:
        problems += table_problems(config, repository.table)
    if problems:
        raise ValueError(f"{path}: this repository cannot be used:\n  - " + "\n  - ".join(problems))
    return repository


def _read_headers(path: Path, problems: list[str]) -> dict[str, ShardHeader]:
    index_path = path / INDEX_FILE
    on_disk = sorted(f.name for f in path.glob("*.safetensors"))
    weight_map = _weight_map(index_path, problems) if index_path.exists() else {}
    if weight_map is None:
        return {}
    listed = sorted(set(weight_map.values())) or [SINGLE_FILE]
    if not weight_map and on_disk != [SINGLE_FILE]:
        problems.append(
            f"{INDEX_FILE}: not there; files are {on_disk}: without an index only {SINGLE_FILE} is read, fetch it"
        )
        return {}
    problems += [f"{name}: listed in {INDEX_FILE} but not there; fetch it" for name in listed if name not in on_disk]
    for name in on_disk:
        if name not in listed:
            problems.append(f"{name}: not in {INDEX_FILE}; its tensors would be lost: add it to the index or remove it")
    headers = {}
    for name in listed:
        header = read_header(path / name, problems) if name in on_disk else None
        if header is not None:
            headers[name] = header
    if weight_map:
        _compare_with_index(weight_map, headers, problems)
    return headers


def _weight_map(path: Path, problems: list[str]) -> dict[str, str] | None:
    """Return the shard of each tensor; None if the index has no such table."""
    found = read_json_object(path).get("weight_map")
    if isinstance(found, dict) and found and all(isinstance(shard, str) for shard in found.values()):
        return found
    shown = "has no weight_map" if found is None else f"has weight_map {str(found)[:_SHOWN]}"
    problems.append(
        f"{path.name}: {shown}; an object with the file of each tensor is needed: fetch it again, or remove it if "
        f"there is only {SINGLE_FILE}"
    )
    return None


def _compare_with_index(weight_map: dict[str, str], headers: dict[str, ShardHeader], problems: list[str]) -> None:
    seen: dict[str, str] = {}
    for shard, header in headers.items():
        for spec in header.specs:
            if spec.name in seen:
                problems.append(f"{shard}: {spec.name} is also in {seen[spec.name]}; one of them must go")
            seen[spec.name] = shard
            if weight_map.get(spec.name) != shard:
                listed = weight_map.get(spec.name, "nowhere")
                problems.append(f"{shard}: holds {spec.name}, which {INDEX_FILE} lists {listed}; correct the index")
    for name, shard in weight_map.items():
        if name not in seen and shard in headers:
            problems.append(
                f"{shard}: lacks {name}, which {INDEX_FILE} lists there; fetch it again or correct the index"
            )


def write_repository(
    path: str | Path,
    files: Mapping[str, str | bytes],
    specs: Iterable[TensorSpec],
    read: Callable[[str], Tensor],
) -> None:
    """Write a repository: into a temporary folder beside `path`, which is renamed when everything is on disk.

    Args:
        path: folder to create; must not exist.
        files: name and content of everything that is not a weight; the index is made here for several shards.
        specs: every tensor with its shard file.
        read: returns the tensor of a name; called once for each, in file order.

    Raises:
        FileExistsError: `path` exists.
        ValueError: `read` returned another dtype or shape than the spec says.
    """
    path = Path(path)
    refuse_existing(path)
    partial = partial_folder(path)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    shards: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        shards.setdefault(spec.shard, []).append(spec)
    for name, members in shards.items():
        ordered = disk_order(members)
        announced = {spec.name: spec for spec in ordered}
        write_file(partial / name, header_text(ordered), ordered, lambda n, a=announced: [_checked(a[n], read(n))])
    contents = dict(files)
    if list(shards) != [SINGLE_FILE]:
        contents[INDEX_FILE] = index_text([spec for members in shards.values() for spec in members])
    for name, content in contents.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(content.encode() if isinstance(content, str) else content)
    finish_folder(partial, path)


def _checked(spec: TensorSpec, tensor: Tensor) -> Tensor:
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise ValueError(
            f"{spec.name} is {tensor.dtype} {tuple(tensor.shape)}; {spec.text} was announced: pass the tensor it names"
        )
    return tensor


def index_text(specs: Iterable[TensorSpec]) -> str:
    """Return the index file of specs in their shards."""
    specs = list(specs)
    weight_map = {spec.name: spec.shard for spec in sorted(specs, key=lambda spec: spec.name)}
    index = {"metadata": {"total_size": sum(spec.num_bytes for spec in specs)}, "weight_map": weight_map}
    return json.dumps(index, indent=2) + "\n"


def partial_folder(path: Path) -> Path:
    """Return the temporary folder in which `path` is built; the same name after a kill, so that work can go on."""
    return path.with_name(path.name + ".partial")


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if `path` exists: nothing is ever overwritten."""
    if path.exists():
        raise FileExistsError(
            f"{path} exists; a new folder is needed, nothing is overwritten: remove it or name another"
        )


def finish_folder(partial: Path, path: Path) -> None:
    """Put a finished temporary folder in its place: flush the folder entry, then one rename."""
    _sync_folder(partial)
    partial.rename(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shard_names(count: int) -> list[str]:
    """Return Hugging Face's file names for `count` shards."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{place:05d}-of-{count:05d}.safetensors" for place in range(1, count + 1)]


def even_shards(specs: Iterable[TensorSpec], count: int) -> list[TensorSpec]:
    """Spread specs, in order, over `count` shards of about equal size."""
    specs = list(specs)
    share = math.ceil(sum(spec.num_bytes for spec in specs) / count)
    names, placed, filled = shard_names(count), [], 0
    for spec in specs:
        placed.append(TensorSpec(spec.name, spec.dtype, spec.shape, names[min(filled // share, count - 1)]))
        filled += spec.num_bytes
    return placed
