# SPDX-License-Identifier: Apache-2.0
"""Repositories with a released model's true tensors and made-up values, for measurements without the model."""

import json
from pathlib import Path

import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint.released import released_config
from vllm_forward_bridge.checkpoint.repository import INDEX_FILE, SINGLE_FILE, even_shards, index_text, write_repository
from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec, header_text, read_header
from vllm_forward_bridge.checkpoint.tensor_table import tensor_table
from vllm_forward_bridge.model_config import parse_model_config

SHARDS = 52
_NOISE_BYTES = 1 << 25
_SCALE = 1e-4


def make_synthetic_repository(folder: Path, name: str, layers: int | None = None) -> None:
    """Write a repository with the names, dtypes and shapes of a released one; values are valid, otherwise random.

    Args:
        folder: to create.
        name: one of `released.RELEASED`.
        layers: keep only the first ones.
    """
    files, specs = _contents(name, layers)
    table = {spec.name: spec for spec in specs}
    noise = torch.randint(0, 256, (_NOISE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    write_repository(folder, files, specs, lambda tensor: _random_tensor(table[tensor], noise))


def make_sparse_repository(folder: Path, name: str, layers: int | None = None) -> None:
    """Write the same repository without contents: headers and scalar scales; all else is a hole and reads as zero."""
    files, specs = _contents(name, layers)
    folder.mkdir()
    for file_name, content in {**files, INDEX_FILE: index_text(specs)}.items():
        (folder / file_name).write_text(content)
    for shard in {spec.shard: None for spec in specs}:
        members, path = [spec for spec in specs if spec.shard == shard], folder / shard
        header = header_text(members).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with path.open("r+b") as file:
            file.truncate(8 + len(header) + sum(spec.num_bytes for spec in members))
            starts = read_header(path, []).starts
            for spec in members:
                if _is_scale(spec):
                    file.seek(starts[spec.name])
                    file.write(torch.tensor(_SCALE).numpy().tobytes())


def _contents(name: str, layers: int | None) -> tuple[dict[str, str], list[TensorSpec]]:
    config, quant = released_config(name, layers)
    parsed = parse_model_config(config, quant and quant["quantization"])
    # Where both dtypes are valid, released routers are F32 and those of MTP blocks BF16.
    specs = [
        TensorSpec(e.name, e.dtypes[-1 if e.name.startswith("mtp.") else 0], e.shapes[0], SINGLE_FILE)
        for e in tensor_table(parsed)
    ]
    files = {"config.json": json.dumps(config)} | ({"hf_quant_config.json": json.dumps(quant)} if quant else {})
    return files, even_shards(specs, SHARDS)


def _is_scale(spec: TensorSpec) -> bool:
    return spec.dtype == torch.float32 and spec.num_bytes == 4


def _random_tensor(spec: TensorSpec, noise: Tensor) -> Tensor:
    if _is_scale(spec):
        return torch.full(spec.shape, _SCALE * (1 + len(spec.name) / 100))
    start = len(spec.name) * 4096
    if spec.dtype == torch.float32:
        return torch.rand(spec.shape, generator=torch.Generator().manual_seed(start))
    end = start + spec.num_bytes
    raw = (noise if end <= len(noise) else noise.repeat(-(-end // len(noise))))[start:end]
    if spec.dtype == torch.float8_e4m3fn:
        # Never a NaN; block scales are not negative.
        raw = raw & (0x77 if spec.name.endswith("weight_scale") else 0xF7)
    elif spec.dtype == torch.bfloat16:
        # Without the exponent's highest bit a value is finite and below 2.
        raw = raw & 0xBF
    return raw.contiguous().view(spec.dtype).reshape(spec.shape)
