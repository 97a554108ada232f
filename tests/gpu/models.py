# SPDX-License-Identifier: Apache-2.0
"""Models for the engine proofs: the tiny checkpoint, and random ones of Lightning's width and any depth."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import shapes
import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint import make_tiny_checkpoint, open_repository
from vllm_forward_bridge.checkpoint.tensor_table import Linear, linears, tensor_table
from vllm_forward_bridge.checkpoint.tiny_config import (
    FAMILIES,
    model_json,
    quantization_config_json,
    quantization_json,
)
from vllm_forward_bridge.model_config import ModelConfig, load_model_config, parse_model_config

LIGHTNING = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SIZES = {
    "hidden_size": shapes.HIDDEN,
    "vocab_size": shapes.VOCAB,
    "mamba_num_heads": shapes.MAMBA_HEADS,
    "mamba_head_dim": shapes.MAMBA_HEAD_DIM,
    "n_groups": shapes.GROUPS,
    "ssm_state_size": shapes.STATE,
    "num_attention_heads": shapes.QUERY_HEADS,
    "num_key_value_heads": shapes.KV_HEADS,
    "head_dim": shapes.HEAD_DIM,
    "n_routed_experts": shapes.EXPERTS,
    "num_experts_per_tok": shapes.TOP_K,
    "moe_intermediate_size": shapes.EXPERT_WIDTH,
    "moe_shared_expert_intermediate_size": shapes.SHARED_WIDTH,
}


@dataclass(frozen=True)
class Scale:
    """How large a proof is."""

    layers: str
    """Letters of the layers; empty for the tiny checkpoint."""
    vocabulary: int
    num_seqs: int
    new_tokens: int
    """Tokens that each of `num_seqs` requests samples in the long run."""
    kv_gib: float
    trains: bool
    """The trainer has an optimizer."""


SCALES = {
    "tiny": Scale("", 1280, 64, 160, 0.5, trains=True),
    "short": Scale("ME*", shapes.VOCAB, 64, 48, 4.0, trains=False),
    "wide": Scale("MEM*EME", shapes.VOCAB, 256, 800, 8.0, trains=True),
    "full": Scale(LIGHTNING, shapes.VOCAB, 96, 224, 12.0, trains=False),
}


def make_folder(scale: Scale, folder: Path) -> Path:
    """Write the tiny checkpoint, or the configuration alone of a wide model, and return its folder."""
    if not scale.layers:
        make_tiny_checkpoint(folder, chunk_size=shapes.CHUNK)
        return folder
    family = dataclasses.replace(FAMILIES["lightning"], mtp=False)
    config = {**model_json(family, shapes.CHUNK, scale.layers), **_SIZES}
    plain = parse_model_config(config, None)
    modules = [entry.name.removesuffix(".weight") for entry in tensor_table(plain) if entry.name.endswith(".weight")]
    quantization = quantization_json(family, modules)
    config["quantization_config"] = quantization_config_json(quantization)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    return folder


def deployment(scale: Scale, folder: Path) -> dict[str, Tensor]:
    """Return a model's deployment tensors on the GPU."""
    if scale.layers:
        return random_deployment(load_model_config(folder))
    repository = open_repository(folder)
    return {name: repository.read(name).cuda() for name in repository.names()}


def random_deployment(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Make random bytes that keep activations near one and give peaked logits."""
    random = _Random(seed)
    tensors = {}
    for linear in linears(config):
        tensors |= random.linear(linear)
    for entry in tensor_table(config):
        if entry.name not in tensors:
            tensors[entry.name] = random.plain(entry.name, entry.shapes[0], entry.dtypes[0])
    return tensors


class _Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda")

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device="cuda")

    def linear(self, linear: Linear) -> dict[str, Tensor]:
        leaf = linear.name.rpartition(".")[2]
        gain = 2.0 if leaf == "lm_head" else 0.5 if leaf in ("out_proj", "o_proj", "down_proj") else 0.8
        rows, columns = linear.shape
        std = gain / math.sqrt(columns)
        if linear.weight_format == "BF16":
            return {f"{linear.name}.weight": (self.normal(rows, columns) * std).bfloat16()}
        if linear.weight_format == "FP8":
            codes = (self.normal(rows, columns) * 40).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales = {"weight_scale": std / 40, "input_scale": 0.0117}
            return {f"{linear.name}.weight": codes} | {
                f"{linear.name}.{name}": torch.tensor(value, device="cuda") for name, value in scales.items()
            }
        codes = torch.randint(0, 256, (rows, columns // 2), generator=self.generator, device="cuda", dtype=torch.uint8)
        block_scale = (0.25 + 0.75 * self.uniform(rows, columns // 16)).to(torch.float8_e4m3fn)
        # Uniform codes have a root mean square of 2.93, these block scales one of 0.66.
        values = (codes, block_scale, torch.tensor(std / (2.93 * 0.66), device="cuda"))
        leaves = ("weight", "weight_scale", "weight_scale_2")
        return {f"{linear.name}.{name}": value for name, value in zip(leaves, values, strict=True)}

    def plain(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        leaf = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
        if leaf in ("k_scale", "v_scale"):
            return torch.tensor(0.0117, device="cuda").expand(shape).clone()  # no bf16 number
        values = {
            "e_score_correction_bias": lambda: 7.0 + 0.03 * self.normal(*shape),
            "gate": lambda: self.normal(*shape) / math.sqrt(shape[-1]),
            "embeddings": lambda: 0.5 * self.normal(*shape),
            "A_log": lambda: torch.log(1.0 + 15.0 * self.uniform(*shape)),
            "dt_bias": lambda: torch.log(torch.expm1(0.001 * 100.0 ** self.uniform(*shape))),
            "conv1d": lambda: self.uniform(*shape) - 0.5,
            "bias": lambda: self.uniform(*shape) - 0.5,
        }
        return values.get(leaf, lambda: 1.0 + 0.1 * self.normal(*shape))().to(dtype)
