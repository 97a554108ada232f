# SPDX-License-Identifier: Apache-2.0
"""Where each byte of a Hugging Face repository lies in a Megatron checkpoint: the one table that both directions use.

Keys are Megatron-core's own. A quantised weight has its bf16 master under `<module>.weight` and its bytes beside it
under `<module>.nvfp4_codes` and so on; rows that Megatron splits or regroups (in_proj, convolution, qkv) are split the
same way for masters and bytes. What training does not use lies, untouched, under `carried.<Hugging Face name>`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec
from vllm_forward_bridge.model_config import ModelConfig

CARRIED = "carried."
CHUNK_BYTES = 64 << 20
"""Largest chunk of a large tensor; bounds the memory of a conversion."""
_ROOT = {
    "backbone.embeddings.weight": "embedding.word_embeddings.weight",
    "backbone.norm_f.weight": "decoder.final_norm.weight",
}
_LAYER_NORM = {
    "M": "mixer.in_proj.layer_norm_weight",
    "*": "self_attention.linear_qkv.layer_norm_weight",
    "E": "pre_mlp_layernorm.weight",
}
_MODULES = {
    "mixer.o_proj": "self_attention.linear_proj",
    "mixer.shared_experts.up_proj": "mlp.shared_experts.linear_fc1",
    "mixer.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    "mixer.fc1_latent_proj": "mlp.fc1_latent_proj",
    "mixer.fc2_latent_proj": "mlp.fc2_latent_proj",
}
_EXPERT = {"up_proj": "mlp.experts.experts.linear_fc1", "down_proj": "mlp.experts.experts.linear_fc2"}
_TENSORS = {
    "mixer.k_proj.k_scale": "self_attention.core_attention.k_scale",
    "mixer.v_proj.v_scale": "self_attention.core_attention.v_scale",
    "mixer.gate.e_score_correction_bias": "mlp.router.expert_bias",
}
_CODES = {"FP8": "fp8_codes", "NVFP4": "nvfp4_codes", "W4A16_NVFP4": "nvfp4_codes"}
_SCALARS = {"weight_scale": "fp8_weight_scale", "weight_scale_2": "nvfp4_global_scale"}


@dataclass(frozen=True)
class ByteRun:
    """Consecutive bytes of one Hugging Face tensor."""

    name: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """One block of a Megatron tensor, and what it is made of."""

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    runs: tuple[ByteRun, ...]
    """Equal parts of the block along dim 0 for `copy`; else the inputs of the derivation."""
    derivation: str = "copy"
    """`copy`; or how a bf16 master comes from bytes: `nvfp4` (codes, block scales, global scale), `fp8` (codes, scale),
    `f32`; or `one`: the value 1, a scale that the source does not store."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Rows:
    """Rows of a module and their place in the Megatron tensor."""

    suffix: str
    first: int
    count: int
    target: int
    total: int


@dataclass(frozen=True)
class _Place:
    """A module's key, its rows, and its place among those that share a Megatron tensor (experts; q, k and v)."""

    key: str
    rows: tuple[_Rows, ...]
    expert: tuple[int, int] | None = None
    member: tuple[int, int] | None = None


def chunk_units(config: ModelConfig, table: Mapping[str, TensorSpec]) -> dict[str, list[Chunk]]:
    """Return every chunk of the Megatron checkpoint in units that become one file each: the root, each layer, the rest.

    Args:
        config: geometry and quantisation map.
        table: the tensors of the repository; must fit the configuration.
    """
    units: dict[str, list[Chunk]] = {}
    for name, spec in table.items():
        parts = name.split(".")
        unit = "carried" if parts[0] == "mtp" else parts[2] if parts[1] == "layers" else "root"
        maker = _carried if unit == "carried" else partial(_chunks, config, table)
        units.setdefault(unit, []).extend(maker(spec))
    for layer, letter in enumerate(config.layer_types):
        if letter == "*" and config.quantization.kv_cache:
            units[str(layer)] += _missing_kv_scales(layer, table)
    return {unit: _merge_scalars(chunks) for unit, chunks in units.items()}


def placements(units: Mapping[str, list[Chunk]]) -> dict[str, list[tuple[int, Chunk]]]:
    """Return, for each Hugging Face tensor, where its bytes are: (first byte, block of a Megatron tensor), in order."""
    found: dict[str, list[tuple[int, Chunk]]] = {}
    for chunk in (chunk for chunks in units.values() for chunk in chunks if chunk.derivation == "copy"):
        count = len(chunk.runs)
        for place, run in enumerate(chunk.runs):
            block = chunk
            if count > 1:
                rows = chunk.shape[0] // count
                offset = (chunk.offset[0] + place * rows, *chunk.offset[1:])
                block = Chunk(chunk.key, chunk.dtype, chunk.global_shape, offset, (rows, *chunk.shape[1:]), (run,))
            found.setdefault(run.name, []).append((run.start, block))
    return {name: sorted(blocks, key=lambda item: item[0]) for name, blocks in found.items()}


def _chunks(config: ModelConfig, table: Mapping[str, TensorSpec], spec: TensorSpec) -> Iterator[Chunk]:
    """Yield the chunks that one tensor becomes, with the master that is derived from it."""
    module, _, leaf = spec.name.rpartition(".")
    key = _plain_key(config, spec.name)
    if key:
        yield from _copied(spec, _Place("", _whole(spec.shape[0] if spec.shape else 1)), key, spec.dtype)
    elif module.endswith(".gate"):
        yield from _router(spec, _layer_key(module) + "mlp.router")
    elif leaf in ("weight_scale_2", "input_scale") or (leaf == "weight_scale" and not len(spec.shape) == 2):
        yield _scalar(_place(config, module), config.quantization.format_of(module), spec, leaf)
    else:
        yield from _matrix(config, table, spec, module, leaf)


def _plain_key(config: ModelConfig, name: str) -> str | None:
    """Return the key of a tensor that goes over whole."""
    if name in _ROOT:
        return _ROOT[name]
    if not name.startswith("backbone.layers."):
        return None
    layer, tail = name.split(".", 3)[2:]
    prefix = f"decoder.layers.{layer}."
    if tail == "norm.weight":
        return prefix + _LAYER_NORM[config.layer_types[int(layer)]]
    if tail in _TENSORS:
        return prefix + _TENSORS[tail]
    return prefix + tail if tail in ("mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight") else None


def _place(config: ModelConfig, module: str) -> _Place:
    """Return where the rows of a module lie."""
    if module == "lm_head":
        return _Place("output_layer", _whole(config.vocab_size))
    layer, tail = module.split(".", 3)[2:]
    prefix, leaf = f"decoder.layers.{layer}.", tail.rpartition(".")[2]
    if leaf in ("in_proj", "conv1d"):
        sections = config.mamba_sections if leaf == "in_proj" else config.conv_sections
        return _Place(prefix + tail, _sections(sections))
    if leaf in ("q_proj", "k_proj", "v_proj"):
        return _Place(
            f"{prefix}self_attention.linear_qkv", _group_rows(config, leaf[0]), member=("qkv".index(leaf[0]), 3)
        )
    if ".experts." in tail:
        rows = config.moe_intermediate_size if leaf == "up_proj" else config.expert_input_size
        expert = int(tail.split(".")[2])
        return _Place(prefix + _EXPERT[leaf], _whole(rows), expert=(expert, config.n_routed_experts))
    rows = {
        "out_proj": config.hidden_size, "o_proj": config.hidden_size, "down_proj": config.hidden_size,
        "up_proj": config.moe_shared_expert_intermediate_size, "fc1_latent_proj": config.expert_input_size,
        "fc2_latent_proj": config.hidden_size,
    }[leaf]  # fmt: skip
    return _Place(prefix + _MODULES.get(tail, tail), _whole(rows))


def _whole(rows: int) -> tuple[_Rows, ...]:
    return (_Rows("", 0, rows, 0, rows),)


def _sections(sections: Mapping[str, int]) -> tuple[_Rows, ...]:
    """Split packed rows by section, because Megatron shards each section, not the packed matrix, over TP."""
    rows, first = [], 0
    for name, size in sections.items():
        rows.append(_Rows(f".{name}", first, size, 0, size))
        first += size
    return tuple(rows)


def _group_rows(config: ModelConfig, letter: str) -> tuple[_Rows, ...]:
    """Interleave q, k and v by KV group, Megatron's order: the group's query heads, its key head, its value head."""
    groups, d = config.num_key_value_heads, config.head_dim
    queries = config.num_attention_heads // groups * d
    size, place = {"q": (queries, 0), "k": (d, queries), "v": (d, queries + d)}[letter]
    pitch = queries + 2 * d
    return tuple(_Rows("", g * size, size, g * pitch + place, groups * pitch) for g in range(groups))


def _matrix(
    config: ModelConfig, table: Mapping[str, TensorSpec], spec: TensorSpec, module: str, leaf: str
) -> Iterator[Chunk]:
    """Yield the chunks of a weight, a convolution's bias or block scales; and a quantised weight's master."""
    place, weight_format = _place(config, module), config.quantization.format_of(module)
    if leaf == "weight_scale":
        yield from _copied(spec, place, f"{place.key}.nvfp4_block_scale", torch.uint8)
    elif leaf == "weight" and weight_format != "BF16":
        yield from _copied(spec, place, f"{place.key}.{_CODES[weight_format]}", torch.uint8)
        yield from _masters(table, spec, place, module, weight_format)
    else:
        yield from _copied(spec, place, f"{place.key}.{leaf}", spec.dtype)


def _copied(spec: TensorSpec, place: _Place, key: str, dtype: torch.dtype) -> Iterator[Chunk]:
    # A KV scale may have rank 0; the Megatron buffer has rank 1.
    shape = spec.shape or (1,)
    row_bytes = spec.num_bytes // shape[0]
    for rows in _split(place.rows, row_bytes):
        runs = (ByteRun(spec.name, rows.first * row_bytes, rows.count * row_bytes),)
        yield _block(key, dtype, place, rows, shape[1:], runs)


def _masters(
    table: Mapping[str, TensorSpec], spec: TensorSpec, place: _Place, module: str, weight_format: str
) -> Iterator[Chunk]:
    row_bytes = spec.num_bytes // spec.shape[0]
    is_fp8 = weight_format == "FP8"
    columns = row_bytes if is_fp8 else 2 * row_bytes
    names = ("weight", "weight_scale") if is_fp8 else ("weight", "weight_scale", "weight_scale_2")
    inputs = [table[f"{module}.{leaf}"] for leaf in names]
    for rows in _split(place.rows, 2 * columns):
        runs = [
            ByteRun(i.name, rows.first * (i.num_bytes // i.shape[0]), rows.count * (i.num_bytes // i.shape[0]))
            if len(i.shape) == 2
            else ByteRun(i.name, 0, i.num_bytes)
            for i in inputs
        ]
        derivation = "fp8" if is_fp8 else "nvfp4"
        yield _block(f"{place.key}.weight", torch.bfloat16, place, rows, (columns,), tuple(runs), derivation)


def _block(
    key: str, dtype: torch.dtype, place: _Place, rows: _Rows, tail: tuple[int, ...], runs: tuple[ByteRun, ...],
    derivation: str = "copy",
) -> Chunk:  # fmt: skip
    shape, offset, block = (rows.total, *tail), (rows.target, *(0 for _ in tail)), (rows.count, *tail)
    if place.expert:
        expert, experts = place.expert
        shape, offset, block = (experts, *shape), (expert, *offset), (1, *block)
    return Chunk(f"{key}{rows.suffix}", dtype, shape, offset, block, runs, derivation)


def _split(rows: tuple[_Rows, ...], row_bytes: int) -> Iterator[_Rows]:
    """Cut runs of rows so that none exceeds CHUNK_BYTES."""
    most = max(1, CHUNK_BYTES // row_bytes)
    for run in rows:
        for start in range(0, run.count, most):
            count = min(most, run.count - start)
            yield _Rows(run.suffix, run.first + start, count, run.target + start, run.total)


def _scalar(place: _Place, weight_format: str, spec: TensorSpec, leaf: str) -> Chunk:
    name = _SCALARS.get(leaf) or ("fp8_input_scale" if weight_format == "FP8" else "nvfp4_input_scale")
    key, runs = f"{place.key}.{name}", (ByteRun(spec.name, 0, spec.num_bytes),)
    shared = place.expert or place.member
    if shared:
        position, count = shared
        return Chunk(key, spec.dtype, (count,), (position,), (1,), runs)
    # Megatron's buffers have one rank each, whatever the source stores: input scales 1, the others 0.
    shape = (1,) if name == "fp8_input_scale" else ()
    return Chunk(key, spec.dtype, shape, (0,) * len(shape), shape, runs)


def _router(spec: TensorSpec, key: str) -> Iterator[Chunk]:
    place = _Place(key, _whole(spec.shape[0]))
    if spec.dtype == torch.bfloat16:
        yield from _copied(spec, place, f"{key}.weight", spec.dtype)
        return
    yield from _copied(spec, place, f"{key}.weight_f32", spec.dtype)
    whole = (ByteRun(spec.name, 0, spec.num_bytes),)
    yield _block(f"{key}.weight", torch.bfloat16, place, place.rows[0], spec.shape[1:], whole, "f32")


def _carried(spec: TensorSpec) -> Iterator[Chunk]:
    """Yield the bytes of a tensor that training does not use, as they are."""
    total = spec.num_bytes
    for start in range(0, total, CHUNK_BYTES):
        count = min(CHUNK_BYTES, total - start)
        run = ByteRun(spec.name, start, count)
        yield Chunk(f"{CARRIED}{spec.name}", torch.uint8, (total,), (start,), (count,), (run,))


def _missing_kv_scales(layer: int, table: Mapping[str, TensorSpec]) -> Iterator[Chunk]:
    """Yield scales of one for an FP8 cache whose scales the source does not store; they are not exported."""
    for letter in "kv":
        if f"backbone.layers.{layer}.mixer.{letter}_proj.{letter}_scale" not in table:
            key = f"decoder.layers.{layer}.self_attention.core_attention.{letter}_scale"
            yield Chunk(key, torch.float32, (1,), (0,), (1,), (), "one")


def _merge_scalars(chunks: list[Chunk]) -> list[Chunk]:
    """Join the scalars of all experts (or of q, k and v) into one chunk: four bytes cost as much as a large block."""
    whole, members = [], {}
    for chunk in chunks:
        if chunk.shape == (1,) and chunk.global_shape != (1,) and chunk.dtype == torch.float32:
            members.setdefault(chunk.key, {})[chunk.offset] = chunk
        else:
            whole.append(chunk)
    for parts in members.values():
        ordered = [parts[offset] for offset in sorted(parts)]
        runs = tuple(part.runs[0] for part in ordered)
        whole.append(replace(ordered[0], shape=ordered[0].global_shape, runs=runs))
    return whole


def _layer_key(module: str) -> str:
    return f"decoder.layers.{module.split('.')[2]}."


def megatron_table(units: Mapping[str, list[Chunk]]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and global shape of every key."""
    return {chunk.key: (chunk.dtype, chunk.global_shape) for chunks in units.values() for chunk in chunks}


def key_problems(config: ModelConfig) -> list[str]:
    """Return what cannot be laid out in Megatron's tensors: q, k and v of a layer share one, so also a format."""
    problems = []
    for layer, letter in enumerate(config.layer_types):
        modules = [f"backbone.layers.{layer}.mixer.{leaf}_proj" for leaf in "qkv"]
        formats = {module: config.quantization.format_of(module) for module in modules}
        if letter == "*" and len(set(formats.values())) > 1:
            given = ", ".join(f"{module} {weight_format}" for module, weight_format in formats.items())
            problems.append(f"{given}: Megatron fuses them into one linear_qkv; give all three one format")
    return problems
