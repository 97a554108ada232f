# SPDX-License-Identifier: Apache-2.0
"""Make a tiny nemotron_h repository in ModelOpt's exact format, built so that wrong code shows.

d_inner is not expand x hidden, every section has another size, each expert and layer has its own scales, FP8 scales
are not amax / 448, KV scales do not fit bf16, and NVFP4 matrices hold a zero block, codes 8 and blocks of both kinds of
four-over-six.
"""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint.repository import shard_names, write_repository
from vllm_forward_bridge.checkpoint.safetensors_file import DTYPES, TensorSpec
from vllm_forward_bridge.checkpoint.tensor_table import ExpectedTensor, linears, tensor_table
from vllm_forward_bridge.checkpoint.tiny_config import (
    FAMILIES,
    Family,
    model_json,
    quantization_config_json,
    quantization_json,
    tokenizer_files,
)
from vllm_forward_bridge.model_config import ModelConfig, parse_model_config
from vllm_forward_bridge.quantization.fp8 import E4M3_MAX, e4m3_scale, fp8_quantize
from vllm_forward_bridge.quantization.nvfp4 import BLOCK, CODE_MAX, nvfp4_quantize

# Largest magnitude that the static scales of the activations foresee; a normalised row of 192 rarely exceeds it.
_ACTIVATION_AMAX = 5.0
_OUTPUT_LEAVES = ("out_proj", "o_proj", "down_proj", "fc2_latent_proj")


def make_tiny_checkpoint(path: str | Path, *, seed: int = 0, chunk_size: int = 16, family: str = "lightning") -> None:
    """Write a repository of about 3 million parameters in several shards with an index.

    Args:
        path: folder to create; must not exist.
        seed: decides the weights; the same seed gives the same bytes.
        chunk_size: chunk of the scan, in tokens.
        family: a key of `tiny_config.FAMILIES`.

    Raises:
        FileExistsError: `path` exists.
        ValueError: unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; accepted are {', '.join(FAMILIES)}: choose one of them")
    kind = FAMILIES[family]
    config_json = model_json(kind, chunk_size)
    plain = parse_model_config(config_json, None)
    modules = [entry.name.removesuffix(".weight") for entry in tensor_table(plain) if entry.name.endswith(".weight")]
    quant_json = quantization_json(kind, modules)
    files = tokenizer_files()
    files["generation_config.json"] = _text(
        {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0, "do_sample": True}
    )
    if quant_json:
        config_json["quantization_config"] = quantization_config_json(quant_json)
        files["hf_quant_config.json"] = _text(quant_json)
    files["config.json"] = _text(config_json)
    config = parse_model_config(config_json, quant_json["quantization"] if quant_json else None)
    tensors = _tensors(config, kind, seed)
    write_repository(path, files, _specs(config, kind, tensors), tensors.__getitem__)


def _text(content: dict) -> str:
    return json.dumps(content, indent=2) + "\n"


def _tensors(config: ModelConfig, family: Family, seed: int) -> dict[str, Tensor]:
    """Return every tensor by its name."""
    tensors = {}
    for linear in linears(config):
        weight = _linear_weight(linear.name, linear.shape, seed)
        if linear.weight_format == "BF16":
            tensors[f"{linear.name}.weight"] = weight.bfloat16()
        elif linear.weight_format == "FP8":
            tensors.update(_fp8_tensors(linear.name, weight, seed))
        else:
            tensors.update(_nvfp4_tensors(linear.name, weight, seed, family, linear.weight_format == "NVFP4"))
    for entry in tensor_table(config):
        is_kv_scale = entry.name.endswith(("k_scale", "v_scale"))
        if entry.name not in tensors and (family.stores_kv_scales or not is_kv_scale):
            tensors[entry.name] = _plain_tensor(entry, family, seed)
    for name, tensor in tensors.items():
        if name.endswith(family.vector_scalars) and family.vector_scalars:
            tensors[name] = tensor.reshape(1)
    return tensors


def _specs(config: ModelConfig, family: Family, tensors: dict[str, Tensor]) -> list[TensorSpec]:
    """Place each tensor: a shard for the root, one a layer, one for the MTP block, as ModelOpt's exporter does."""
    groups: dict[str, list[str]] = {}
    for entry in tensor_table(config):
        parts = entry.name.split(".")
        group = "mtp" if parts[0] == "mtp" else parts[2] if parts[1] == "layers" else "root"
        if entry.name in tensors:
            groups.setdefault(group, []).append(entry.name)
    shards = shard_names(len(groups))
    return [
        TensorSpec(name, tensors[name].dtype, tuple(tensors[name].shape), shard)
        for shard, names in zip(shards, groups.values(), strict=True)
        for name in names
    ]


def _linear_weight(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    leaf = name.rpartition(".")[2]
    # Outputs add up in the residual stream, so they start smaller; the head starts near uniform logits.
    gain = 0.4 if leaf == "lm_head" else 0.5 if leaf in _OUTPUT_LEAVES else 0.8
    if ".experts." in name:
        expert = int(name.split(".experts.")[1].split(".")[0])
        gain *= 2.0 ** ((expert % 4 - 1.5) / 3)
    return _normal(name, shape, seed) * (gain / math.sqrt(shape[1]))


def _fp8_tensors(module: str, weight: Tensor, seed: int) -> dict[str, Tensor]:
    # A calibrated scale leaves headroom: it is not amax / 448, so deriving it again would change it.
    scale = e4m3_scale(weight.abs().amax() * (1.05 + 0.3 * _uniform(module, (), seed)))
    return {
        f"{module}.weight": fp8_quantize(weight, scale),
        f"{module}.weight_scale": scale,
        f"{module}.input_scale": _ACTIVATION_AMAX * (1.0 + 0.2 * _uniform(f"{module}.input", (), seed)) / E4M3_MAX,
    }


def _nvfp4_tensors(module: str, weight: Tensor, seed: int, family: Family, quantized_input: bool) -> dict[str, Tensor]:
    weight[3, :BLOCK] = 0.0
    weight[4, 0] = -1e-3 * weight[4, :BLOCK].abs().amax()
    stored = nvfp4_quantize(weight, four_over_six=family.four_over_six)
    tensors = {
        f"{module}.weight": stored.codes,
        f"{module}.weight_scale": stored.block_scale,
        f"{module}.weight_scale_2": stored.global_scale,
    }
    if quantized_input:
        amax = _ACTIVATION_AMAX * (1.0 + 0.2 * _uniform(f"{module}.input", (), seed))
        tensors[f"{module}.input_scale"] = amax / (CODE_MAX * E4M3_MAX)
    return tensors


def _plain_tensor(entry: ExpectedTensor, family: Family, seed: int) -> Tensor:
    name, shape = entry.name, entry.shapes[0]
    leaf = name.split(".")[-1] if not name.endswith(".weight") else name.split(".")[-2]
    if leaf in ("k_scale", "v_scale"):
        # bits: more significant bits than bf16 holds, so a scale that was rounded on the way shows.
        return 0.0117 + 0.003 * _uniform(name, shape, seed)
    if leaf == "e_score_correction_bias":
        # As released: a narrow band at a large offset, where bf16 steps are wider than the band's differences.
        return 7.0 + 0.03 * _normal(name, shape, seed)
    if leaf == "gate":
        dtype = torch.bfloat16 if name.startswith("mtp.") else DTYPES[family.router_dtype]
        return (_normal(name, shape, seed) * 0.06).to(dtype)
    return _bf16_value(leaf, name, shape, seed).bfloat16()


def _bf16_value(leaf: str, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if leaf == "embeddings":
        return 0.5 * _normal(name, shape, seed)
    if leaf == "A_log":
        return torch.log(1.0 + 15.0 * _uniform(name, shape, seed))
    if leaf == "dt_bias":
        # softplus(dt_bias) is spread evenly over the exponents of 0.001 to 0.1.
        step = torch.exp(math.log(0.001) + math.log(100.0) * _uniform(name, shape, seed))
        return step + torch.log(-torch.expm1(-step))
    if leaf in ("conv1d", "bias"):
        return _uniform(name, shape, seed) - 0.5
    # Norm gains and D.
    return 1.0 + 0.1 * _normal(name, shape, seed)


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a generator of the tensor's own, so that a tensor's bytes do not depend on which others are made."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _normal(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=_generator(name, seed))


def _uniform(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=_generator(name, seed))
