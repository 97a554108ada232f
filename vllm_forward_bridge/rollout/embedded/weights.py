# SPDX-License-Identifier: Apache-2.0
"""Deployment bytes of a nemotron_h model, by Hugging Face name, made into the tensors that the ops take.

Every byte is used as it is stored. Two things are computed: an F32 router is rounded to bf16, as vLLM holds it on
Hopper, and the Mamba decay rates come from A_log through their op. The engine owns what it builds here: a sender may
change its tensors afterwards.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge import ops
from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec
from vllm_forward_bridge.checkpoint.tensor_table import linears, table_problems
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.ops.operands import nvfp4_operands

_LINEAR_FORMATS = ("BF16", "FP8", "W4A16_NVFP4")
_EXPERT_FORMATS = ("W4A16_NVFP4",)
_ATTENTION_FORMATS = ("BF16",)


@dataclass(frozen=True)
class Linear:
    """A matrix in its stored format; call it with rows."""

    weight_format: str
    tensors: tuple[Tensor, ...]
    """As the op of the format takes them on this device; see `ops.operands`."""
    num_features: int

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return x times the transposed matrix, by the op of the format."""
        if self.weight_format == "FP8":
            return ops.fp8_linear(x_TK, *self.tensors, None)
        if self.weight_format == "W4A16_NVFP4":
            return ops.nvfp4_linear(x_TK, *self.tensors, None, self.num_features)
        return ops.bf16_linear(x_TK, *self.tensors)


@dataclass(frozen=True)
class MambaWeights:
    """A Mamba-2 mixer."""

    in_proj: Linear
    conv_weight_CW: Tensor
    conv_bias_C: Tensor
    A_h: Tensor
    D_h: Tensor
    dt_bias_h: Tensor
    norm_gain_D: Tensor
    out_proj: Linear


@dataclass(frozen=True)
class AttentionWeights:
    """An attention mixer; q, k and v are one matrix: for each KV head its query heads, its key, its value."""

    qkv_proj: Linear
    o_proj: Linear
    k_scale: Tensor
    v_scale: Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """A mixture of experts, routed ones stacked over experts."""

    router_weight_EH: Tensor
    expert_bias_E: Tensor
    experts: tuple[Tensor, ...]
    """Codes, block scales and global scales of fc1, then of fc2: the six arguments of `moe_experts` on this device."""
    shared_up: Linear
    shared_down: Linear


@dataclass(frozen=True)
class LayerWeights:
    """One layer: the norm before the mixer, and the mixer."""

    norm_gain_H: Tensor
    mixer: MambaWeights | AttentionWeights | ExpertWeights


@dataclass(frozen=True)
class ModelWeights:
    """A whole model without its multi-token-prediction block."""

    embedding_VH: Tensor
    layers: tuple[LayerWeights, ...]
    final_gain_H: Tensor
    lm_head: Linear


def build_weights(config: ModelConfig, tensors: Mapping[str, Tensor], device: torch.device) -> ModelWeights:
    """Check a whole model against its configuration, then build the engine's own copy on `device`.

    Args:
        config: geometry and quantisation map.
        tensors: by Hugging Face name; those of the MTP block may be there and are not used.
        device: where the ops run.

    Raises:
        ValueError: lists every missing, unexpected or malformed tensor and every part outside the contract.
    """
    problems = model_problems(config, tensors)
    if problems:
        raise ValueError("the embedded engine cannot run this model:\n  - " + "\n  - ".join(problems))
    source = _Source(config, tensors, device)
    builders = {"M": _mamba, "*": _attention, "E": _experts}
    layers = []
    for number, letter in enumerate(config.layer_types):
        layer = f"backbone.layers.{number}"
        layers.append(LayerWeights(source.tensor(f"{layer}.norm.weight"), builders[letter](source, f"{layer}.mixer")))
    return ModelWeights(
        embedding_VH=source.tensor("backbone.embeddings.weight"),
        layers=tuple(layers),
        final_gain_H=source.tensor("backbone.norm_f.weight"),
        lm_head=source.linear("lm_head"),
    )


def model_problems(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """List what keeps the engine from running these tensors; empty if nothing does."""
    return _contract_problems(config) + _tensor_problems(config, tensors)


class _Source:
    """Reads tensors by name into memory of the engine's own."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.config = config
        self.tensors = tensors
        self.device = device

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name].detach().to(self.device, copy=True).contiguous()

    def stacked(self, names: list[str]) -> Tensor:
        # Bytes are stacked through their integer view, which every device and dtype supports.
        first = self.tensors[names[0]]
        view = torch.uint8 if first.dtype == torch.float8_e4m3fn else first.dtype
        return torch.stack([self.tensors[name].detach().view(view) for name in names]).to(self.device).view(first.dtype)

    def linear(self, module: str) -> Linear:
        weight_format = self.config.quantization.format_of(module)
        leaves = {"BF16": ("weight",), "FP8": ("weight", "weight_scale", "input_scale")}
        names = leaves.get(weight_format, ("weight", "weight_scale", "weight_scale_2"))
        tensors = [self.tensor(f"{module}.{leaf}") for leaf in names]
        # Releases store scalars with rank 0 or 1; one shape here, so that a later version fits the place of this one.
        tensors = [tensor.reshape(()) if tensor.numel() == 1 else tensor for tensor in tensors]
        num_features = len(tensors[0])
        if weight_format == "W4A16_NVFP4":
            tensors[:2] = nvfp4_operands(*tensors[:2])
        return Linear(weight_format, tuple(tensors), num_features)


def _mamba(source: _Source, mixer: str) -> MambaWeights:
    return MambaWeights(
        in_proj=source.linear(f"{mixer}.in_proj"),
        conv_weight_CW=source.tensor(f"{mixer}.conv1d.weight").squeeze(1),
        conv_bias_C=source.tensor(f"{mixer}.conv1d.bias"),
        A_h=ops.ssd_decay(source.tensor(f"{mixer}.A_log")),
        D_h=source.tensor(f"{mixer}.D"),
        dt_bias_h=source.tensor(f"{mixer}.dt_bias"),
        norm_gain_D=source.tensor(f"{mixer}.norm.weight"),
        out_proj=source.linear(f"{mixer}.out_proj"),
    )


def _attention(source: _Source, mixer: str) -> AttentionWeights:
    # By KV head, as Megatron stacks them, so that recordings of both sides can be compared column by column.
    groups = source.config.num_key_value_heads
    parts = [source.tensor(f"{mixer}.{letter}_proj.weight").unflatten(0, (groups, -1)) for letter in "qkv"]
    scales = {}
    for letter in "kv":
        name = f"{mixer}.{letter}_proj.{letter}_scale"
        # A repository that declares an FP8 cache and stores no scale means 1.
        stored = source.tensor(name) if name in source.tensors else torch.ones((), device=source.device)
        scales[letter] = stored.reshape(())
    qkv_weight = torch.cat(parts, dim=1).flatten(0, 1)
    qkv_proj = Linear("BF16", (qkv_weight,), len(qkv_weight))
    return AttentionWeights(qkv_proj, source.linear(f"{mixer}.o_proj"), scales["k"], scales["v"])


def _experts(source: _Source, mixer: str) -> ExpertWeights:
    experts: list[Tensor] = []
    for proj in ("up_proj", "down_proj"):
        names = [f"{mixer}.experts.{expert}.{proj}" for expert in range(source.config.n_routed_experts)]
        leaves = ("weight", "weight_scale", "weight_scale_2")
        codes, block_scale, global_scale = (source.stacked([f"{name}.{leaf}" for name in names]) for leaf in leaves)
        experts += [*nvfp4_operands(codes, block_scale), global_scale.reshape(-1)]
    return ExpertWeights(
        # bits: vLLM on Hopper holds the router weight as bf16 of the stored F32.
        router_weight_EH=source.tensor(f"{mixer}.gate.weight").bfloat16(),
        expert_bias_E=source.tensor(f"{mixer}.gate.e_score_correction_bias"),
        experts=tuple(experts),
        shared_up=source.linear(f"{mixer}.shared_experts.up_proj"),
        shared_down=source.linear(f"{mixer}.shared_experts.down_proj"),
    )


def _contract_problems(config: ModelConfig) -> list[str]:
    problems = []
    if config.moe_latent_size:
        problems.append(f"moe_latent_size is {config.moe_latent_size}; no latent experts are accepted, none are wired")
    if "*" in config.layer_types and config.quantization.kv_cache != "FP8":
        problems.append(
            f"kv_cache_quant_algo is {config.quantization.kv_cache}; only FP8 is accepted, because the contract's "
            "attention reads K and V back from e4m3 codes"
        )
    for linear in linears(config):
        accepted = _accepted_formats(linear.name)
        if not linear.name.startswith("mtp.") and linear.weight_format not in accepted:
            given = linear.weight_format
            problems.append(f"{linear.name} is {given}; accepted is {' or '.join(accepted)}, the formats its op reads")
    return problems


def _accepted_formats(module: str) -> tuple[str, ...]:
    if ".experts." in module:
        return _EXPERT_FORMATS
    return _ATTENTION_FORMATS if module.endswith(("q_proj", "k_proj", "v_proj")) else _LINEAR_FORMATS


def _tensor_problems(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    without_mtp = dataclasses.replace(config, num_nextn_predict_layers=0, mtp_layer_types="")
    given = {
        name: TensorSpec(name, tensor.dtype, tuple(tensor.shape), "given")
        for name, tensor in tensors.items()
        if not name.startswith("mtp.")
    }
    problems = table_problems(without_mtp, given)
    scales = [
        f"backbone.layers.{layer}.mixer.{letter}_proj.{letter}_scale"
        for layer, kind in enumerate(config.layer_types)
        if kind == "*"
        for letter in "kv"
    ]
    missing = [name for name in scales if name not in given]
    if missing and len(missing) < len(scales):
        problems += [f"{name}: missing while other KV scales are there; all or none is accepted" for name in missing]
    return problems
