# SPDX-License-Identifier: Apache-2.0
"""Convert a Hugging Face / ModelOpt repository of nemotron_h into a Megatron distributed checkpoint."""

import argparse
import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint.megatron_keys import Chunk, chunk_units, key_problems, megatron_table
from vllm_forward_bridge.checkpoint.repository import Repository, open_repository
from vllm_forward_bridge.checkpoint.safetensors_file import DTYPE_NAMES
from vllm_forward_bridge.checkpoint.torch_dist_writer import StoredBlock, write_metadata, write_unit
from vllm_forward_bridge.checkpoint.transfer import (
    Conversion,
    Progress,
    Ticker,
    Unit,
    Workplace,
    check_space,
    run_units,
)
from vllm_forward_bridge.checkpoint.value_checks import check_codes, scalar_problems
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.quantization import Nvfp4Bytes, fp8_dequantize, nvfp4_dequantize

RELEASE = "release"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
SOURCE_FOLDER = "hf"
TENSORS_FILE = "tensors.json"
# Megatron reorders qkv of checkpoints that are older than this.
_CHECKPOINT_VERSION = 3.0


def convert_to_megatron(
    source: str | Path,
    target: str | Path,
    *,
    masters: bool = True,
    workers: int = 2,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> Conversion:
    """Write a Megatron checkpoint with the repository's bytes as they are and bf16 masters beside them.

    A master is bf16(dequantised bytes), or bf16 of an F32 router. No layout is chosen: Megatron loads any TP, EP, PP.
    An interrupted run goes on where it was when it is called again.

    Args:
        source: repository.
        target: folder to create.
        masters: False leaves out masters that follow from bytes; such a checkpoint can be exported, not trained from.
        workers: files written at a time.
        dry_run: check everything, write nothing.
        on_progress: called as bytes are written.

    Raises:
        ValueError: lists every fault of the repository; or a tensor has values that no valid one holds.
        FileExistsError: `target` exists.
        OSError: the disk is too small.
    """
    target = Path(target)
    repository = open_repository(source)
    problems = key_problems(repository.config)
    problems += scalar_problems(repository.config, repository.table, repository.fetch)
    if problems:
        raise ValueError(f"{source}: this repository cannot be converted:\n  - " + "\n  - ".join(problems))
    units = chunk_units(repository.config, repository.table)
    if not masters:
        units = {name: [c for c in chunks if c.derivation in ("copy", "one")] for name, chunks in units.items()}
    table = megatron_table(units)
    total = sum(chunk.num_bytes for chunks in units.values() for chunk in chunks)
    workplace = Workplace(target, _plan(repository, masters))
    if dry_run:
        workplace.finished()
        check_space(target, total)
        return Conversion(len(table), total)
    folder = workplace.folder / RELEASE
    work = [
        Unit(name, sum(c.num_bytes for c in chunks), partial(_write, repository, folder, number, chunks))
        for number, (name, chunks) in enumerate(units.items())
    ]
    results, reused = run_units(workplace, work, workers=workers, on_progress=on_progress)
    blocks = [StoredBlock(*entry) for name in units for entry in results[name]]
    write_metadata(folder, table, blocks, common_state(repository.config))
    _write_source_files(repository, workplace.folder / SOURCE_FOLDER)
    (workplace.folder / TRACKER_FILE).write_text(RELEASE)
    workplace.finish()
    return Conversion(len(table), total, reused)


def common_state(config: ModelConfig) -> dict:
    """Return Megatron's state that is not a tensor: enough for its checkpoint loader to accept the model."""
    arguments = argparse.Namespace(
        num_layers=len(config.layer_types),
        hybrid_layer_pattern=config.layer_types,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        group_query_attention=True,
        kv_channels=config.head_dim,
        position_embedding_type="none",
        normalization="RMSNorm",
        add_bias_linear=False,
        squared_relu=True,
        swiglu=False,
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        padded_vocab_size=config.vocab_size,
        num_experts=config.n_routed_experts,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_router_topk=config.num_experts_per_tok,
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_latent_size=config.moe_latent_size,
        mamba_num_heads=config.mamba_num_heads,
        mamba_head_dim=config.mamba_head_dim,
        mamba_num_groups=config.n_groups,
        mamba_state_dim=config.ssm_state_size,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        ckpt_format="torch_dist",
        consumed_train_samples=0,
    )
    return {"args": arguments, "checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0}


def _plan(repository: Repository, masters: bool) -> dict:
    """Return what identifies a conversion: parts of an interrupted one may be used only if all of it is the same."""
    shards = {}
    for name, header in repository.headers.items():
        stat = (repository.path / name).stat()
        shards[name] = [stat.st_size, stat.st_mtime_ns, header.text]
    config = repr(repository.config)
    return {"source": str(repository.path.absolute()), "shards": shards, "config": config, "masters": masters}


def _write(repository: Repository, folder: Path, number: int, chunks: list[Chunk], ticker: Ticker) -> list:
    """Write one unit; return its blocks as JSON."""

    def make(chunk: Chunk) -> Tensor:
        tensor = build_block(repository, chunk)
        ticker.advance(chunk.num_bytes)
        return tensor

    folder.mkdir(parents=True, exist_ok=True)
    return [dataclasses.astuple(block) for block in write_unit(folder, number, chunks, make)]


def build_block(repository: Repository, chunk: Chunk) -> Tensor:
    """Return the tensor of a block, from the bytes of a repository."""
    if chunk.derivation == "one":
        return torch.ones(chunk.shape, dtype=chunk.dtype)
    raw = [repository.fetch_bytes(run.name, run.start, run.num_bytes) for run in chunk.runs]
    if chunk.derivation == "copy":
        is_scale = ".nvfp4_block_scale" in chunk.key
        if is_scale or ".fp8_codes" in chunk.key:
            name = chunk.runs[0].name
            check_codes(name, repository.table[name].shard, raw[0], is_scale=is_scale)
        whole = raw[0] if len(raw) == 1 else torch.cat(raw)
        return whole.view(chunk.dtype).reshape(chunk.shape)
    if chunk.derivation == "f32":
        return raw[0].view(torch.float32).reshape(chunk.shape).to(chunk.dtype)
    rows, scalar = chunk.shape[-2], raw[-1].view(torch.float32).reshape(())
    codes = raw[0].view(rows, -1)
    if chunk.derivation == "fp8":
        master = fp8_dequantize(codes.view(torch.float8_e4m3fn), scalar, chunk.dtype)
    else:
        master = nvfp4_dequantize(
            Nvfp4Bytes(codes, raw[1].view(torch.float8_e4m3fn).view(rows, -1), scalar), chunk.dtype
        )
    return master.reshape(chunk.shape)


def _write_source_files(repository: Repository, folder: Path) -> None:
    """Keep everything of the source but its weights, so that an export needs nothing else."""
    for name in repository.other_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repository.path / name, folder / name)
    tensors = [
        {"name": spec.name, "dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "shard": spec.shard}
        for spec in repository.table.values()
    ]
    headers = {name: header.text for name, header in repository.headers.items()}
    (folder / TENSORS_FILE).write_text(json.dumps({"tensors": tensors, "headers": headers}))
