# SPDX-License-Identifier: Apache-2.0
"""A Megatron checkpoint seen as the Hugging Face repository that it exports to."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint.megatron_keys import CARRIED, Chunk, chunk_units, placements
from vllm_forward_bridge.checkpoint.safetensors_file import DTYPES, FileRange, TensorSpec, byte_view, is_shape
from vllm_forward_bridge.checkpoint.tensor_table import table_problems
from vllm_forward_bridge.checkpoint.to_megatron import RELEASE, SOURCE_FOLDER, TENSORS_FILE, TRACKER_FILE
from vllm_forward_bridge.checkpoint.torch_dist_reader import TorchDistReader
from vllm_forward_bridge.checkpoint.torch_dist_writer import METADATA_FILE
from vllm_forward_bridge.model_config import ModelConfig, load_model_config, read_json_object

_SHOWN = 80
# Megatron pads the vocabulary of these to a multiple of its TP size.
_PADDED = ("embedding.word_embeddings.", "output_layer.")


class MegatronCheckpoint:
    """Reads tensors by their Hugging Face names from the bytes in the checkpoint."""

    def __init__(self, source: str | Path, base: str | Path | None = None) -> None:
        """Open a checkpoint and check that all it must export is there.

        Args:
            source: root folder, or one iteration's folder in it.
            base: root of the checkpoint that the run started from; used for what `source` lacks: the `hf` folder and
                the tensors that training does not use.

        Raises:
            ValueError: lists everything that is missing or has another dtype or shape.
        """
        self.folder = iteration_folder(Path(source))
        roots = [self.folder.parent] + ([iteration_folder(Path(base)).parent] if base else [])
        self.files_folder = _source_files(roots)
        self.config = load_model_config(self.files_folder)
        self.headers, self.table = _stored_tensors(self.files_folder / TENSORS_FILE, self.config)
        self._units = chunk_units(self.config, self.table)
        self._places = placements(self._units)
        self._reader = TorchDistReader(self.folder)
        self._carried = self._carried_reader(roots)
        problems = self._problems()
        if problems:
            raise ValueError(f"{self.folder}: this checkpoint cannot be exported:\n  - " + "\n  - ".join(problems))

    def names(self) -> list[str]:
        """Return the names of the tensors in the source's order."""
        return list(self.table)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's bytes block by block, in order; each block has the dtype that the checkpoint stores."""
        for _, chunk in self._places.get(name, []):
            yield self._reader_of(chunk.key).read(chunk.key, chunk.offset, chunk.shape)

    def pieces(self, name: str) -> Iterator[Tensor | FileRange]:
        """Yield a tensor's bytes as `blocks` does, a block that lies in one piece as its place in a file."""
        for _, chunk in self._places.get(name, []):
            reader, block = self._reader_of(chunk.key), (chunk.key, chunk.offset, chunk.shape)
            yield reader.place(*block) or reader.read(*block)

    def fetch(self, name: str) -> Tensor:
        """Return a tensor with its Hugging Face dtype and shape."""
        spec = self.table[name]
        raw = [byte_view(block) for block in self.blocks(name)]
        whole = torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8)
        return whole.view(spec.dtype).reshape(spec.shape)

    def masters(self) -> Iterator[tuple[str, Chunk]]:
        """Yield (Hugging Face name, block of its bf16 master) for every weight that has bytes of its own."""
        for chunks in self._units.values():
            yield from ((chunk.runs[0].name, chunk) for chunk in chunks if chunk.derivation not in ("copy", "one"))

    def read_block(self, chunk: Chunk) -> Tensor | None:
        """Return a block of a master, or None if the checkpoint was written without masters."""
        if chunk.key not in self._reader.table():
            return None
        return self._reader.read(chunk.key, chunk.offset, chunk.shape)

    def other_files(self) -> list[Path]:
        """Return every file of the source repository that is not a shard, relative to `files_folder`."""
        files = (f.relative_to(self.files_folder) for f in self.files_folder.rglob("*") if f.is_file())
        return sorted(f for f in files if str(f) != TENSORS_FILE)

    def identity(self) -> dict:
        """Return what tells this checkpoint, in this state, from any other."""
        files = {}
        for folder in {self.folder, self._carried.folder if self._carried else self.folder}:
            for path in sorted(folder.iterdir()):
                files[str(path.absolute())] = [path.stat().st_size, path.stat().st_mtime_ns]
        return {"source": str(self.folder.absolute()), "files": files, "headers": self.headers}

    def _reader_of(self, key: str) -> TorchDistReader:
        return self._carried if self._carried and key.startswith(CARRIED) else self._reader

    def _carried_reader(self, roots: list[Path]) -> TorchDistReader | None:
        """Return the reader of tensors that training does not save: this iteration, else the one it started from."""
        wanted = [chunk.key for chunks in self._units.values() for chunk in chunks if chunk.key.startswith(CARRIED)]
        if not wanted or wanted[0] in self._reader.table():
            return None
        folders = [root / RELEASE for root in roots if (root / RELEASE / METADATA_FILE).exists()]
        readers = [TorchDistReader(folder) for folder in folders]
        return next((reader for reader in readers if wanted[0] in reader.table()), None)

    def _problems(self) -> list[str]:
        tables: dict[str, Mapping] = {}
        problems = {}
        for name, places in self._places.items():
            for _, chunk in places:
                reader = self._reader_of(chunk.key)
                stored = tables.setdefault(str(reader.folder), reader.table())
                if chunk.key not in problems:
                    problem = _key_problem(name, chunk, stored)
                    if problem:
                        problems[chunk.key] = problem
        return list(problems.values())


def iteration_folder(path: Path) -> Path:
    """Return the folder with the tensors: `path` itself, or the iteration that its tracker file names.

    Raises:
        ValueError: neither is a finished checkpoint.
    """
    if (path / METADATA_FILE).exists():
        return path
    tracker = path / TRACKER_FILE
    if not tracker.exists():
        raise ValueError(
            f"{path}: has neither {METADATA_FILE} nor {TRACKER_FILE}; name the root of a Megatron checkpoint"
        )
    text = tracker.read_text().strip()
    if text != RELEASE and not text.isdecimal():
        raise ValueError(f"{tracker}: says {text!r}; '{RELEASE}' or a number is expected: name the iteration's folder")
    folder = path / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not (folder / METADATA_FILE).exists():
        raise ValueError(f"{folder}: {TRACKER_FILE} names it, but it has no {METADATA_FILE}; name a finished iteration")
    return folder


def _source_files(roots: list[Path]) -> Path:
    for root in roots:
        if (root / SOURCE_FOLDER / TENSORS_FILE).exists():
            return root / SOURCE_FOLDER
    raise ValueError(
        f"{roots[0]}: has no {SOURCE_FOLDER}/{TENSORS_FILE}, which says what to export; name the checkpoint "
        "that the run started from as base"
    )


def _stored_tensors(path: Path, config: ModelConfig) -> tuple[dict[str, str], dict[str, TensorSpec]]:
    """Return the header of each shard and the tensors that a conversion to Megatron noted."""
    stored = read_json_object(path)
    headers, entries = stored.get("headers"), stored.get("tensors")
    problems = [
        f"{key} is {str(value)[:_SHOWN]}; {kind} is needed"
        for key, value, kind, wanted in (("headers", headers, "an object", dict), ("tensors", entries, "a list", list))
        if not isinstance(value, wanted)
    ]
    if not problems:
        problems += [
            f"tensors has {str(entry)[:_SHOWN]}; a name, a dtype of {', '.join(DTYPES)}, a shape, and a shard of "
            "headers are needed"
            for entry in entries
            if not _is_tensor(entry, headers)
        ]
    if not problems:
        specs = (TensorSpec(e["name"], DTYPES[e["dtype"]], tuple(e["shape"]), e["shard"]) for e in entries)
        table = {spec.name: spec for spec in specs}
        problems += table_problems(config, table)
    if problems:
        raise ValueError(f"{path}: not what a conversion wrote; copy it again:\n  - " + "\n  - ".join(problems))
    return headers, table


def _is_tensor(entry: object, headers: Mapping[str, str]) -> bool:
    if not isinstance(entry, dict) or not is_shape(entry.get("shape")):
        return False
    name, dtype, shard = (entry.get(key) for key in ("name", "dtype", "shard"))
    return all(isinstance(text, str) for text in (name, dtype, shard)) and dtype in DTYPES and shard in headers


def _key_problem(name: str, chunk: Chunk, stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str | None:
    """Compare one block with what the checkpoint stores."""
    if chunk.key in stored:
        dtype, shape = stored[chunk.key]
        tail = 1 if chunk.key.startswith(_PADDED) else 0
        fits = len(shape) == len(chunk.global_shape) and shape[tail:] == chunk.global_shape[tail:]
        fits = fits and shape[:tail] >= chunk.global_shape[:tail]
        if dtype == chunk.dtype and fits:
            return None
        return (
            f"{chunk.key} is {dtype} {list(shape)}; {chunk.dtype} {list(chunk.global_shape)} is expected for {name}: "
            "the checkpoint is of another model"
        )
    if chunk.key.startswith(CARRIED):
        return f"{chunk.key}: missing; training does not save it: name the checkpoint that the run started from as base"
    module, _, leaf = chunk.key.rpartition(".nvfp4_") if ".nvfp4_" in chunk.key else chunk.key.rpartition(".fp8_")
    if module and any(key.startswith(f"{module}.weight") for key in stored):
        return (
            f"{module}: has a master but no {leaf.partition('.')[0]} bytes; an export takes the bytes that the forward "
            "read: train with the bridge's modules, which save them"
        )
    return f"{chunk.key}: missing; {chunk.dtype} {list(chunk.global_shape)} is expected for {name}"
