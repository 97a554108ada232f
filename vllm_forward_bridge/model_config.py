# SPDX-License-Identifier: Apache-2.0
"""Geometry and quantisation map of a nemotron_h checkpoint, read from its two JSON files. Imports no torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_forward_bridge.quantization_map import (
    NVFP4_GROUP_SIZE,
    QuantizationMap,
    disagreements,
    is_list_of_strings,
    parse_quantization,
)

LAYER_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}
SUPPORTED_LETTERS = "ME*"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A nemotron_h model; field names are Hugging Face's."""

    layer_types: str
    """One letter a layer: M Mamba-2, * attention, E mixture of experts."""
    mtp_layer_types: str = ""
    """Letters of one multi-token-prediction depth; empty without MTP."""
    num_nextn_predict_layers: int = 0
    hidden_size: int
    vocab_size: int
    norm_eps: float
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int
    chunk_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    routed_scaling_factor: float
    moe_latent_size: int | None = None
    quantization: QuantizationMap = field(default_factory=QuantizationMap)

    @property
    def mamba_inner_size(self) -> int:
        """Channels of the scan: heads x head dim. Never `expand * hidden_size`, which differs in released models."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_sections(self) -> dict[str, int]:
        """Rows of `in_proj` by section, in order."""
        states = self.n_groups * self.ssm_state_size
        inner = self.mamba_inner_size
        return {"z": inner, "x": inner, "B": states, "C": states, "dt": self.mamba_num_heads}

    @property
    def conv_sections(self) -> dict[str, int]:
        """Channels of the convolution by section, in order."""
        return {name: size for name, size in self.mamba_sections.items() if name in "xBC"}

    @property
    def expert_input_size(self) -> int:
        """Width of a routed expert's input: the latent width if there is one."""
        return self.moe_latent_size or self.hidden_size


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` and, if present, `hf_quant_config.json` of a checkpoint folder.

    Raises:
        ValueError: names every key and layer that is not supported, at once.
        FileNotFoundError: there is no config.json.
    """
    folder = Path(folder)
    config = read_json_object(folder / "config.json")
    quant_file = folder / "hf_quant_config.json"
    quant = read_json_object(quant_file).get("quantization", {}) if quant_file.exists() else None
    return parse_model_config(config, quant, where=str(folder))


def read_json_object(path: Path) -> dict:
    """Return the JSON object that a file of a checkpoint holds.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    try:
        # Python's reader takes Infinity, which some released files hold although it is not JSON.
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); a whole file is needed: fetch or copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds JSON of type {type(content).__name__}; an object is needed: fetch or copy the file again"
        )
    return content


def parse_model_config(config: Mapping, quant: Mapping | None, *, where: str = "config.json") -> ModelConfig:
    """Build a ModelConfig from the two parsed JSON objects; see `load_model_config`."""
    problems: list[str] = []
    inner = _object(config.get("quantization_config"), "config.json's quantization_config", problems)
    quant = _object(quant, "hf_quant_config.json's quantization", problems)
    problems += disagreements(inner, quant)
    # transformers lets the legacy name of a scalar win over the modern one.
    config = {**config, **{modern: config[legacy] for legacy, modern in _LEGACY_NAMES.items() if legacy in config}}
    layer_types = _layer_letters(config, "layers_block_type", "hybrid_override_pattern", problems)
    mtp, mtp_types = 0, ""
    if config.get("num_nextn_predict_layers"):
        mtp = _number(config, "num_nextn_predict_layers", problems)
        mtp_types = _layer_letters(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern", problems)
    _check_fixed_choices(config, layer_types, problems)
    values = {name: _number(config, name, problems) for name in _NUMBERS}
    epsilon = "norm_eps" if "norm_eps" in config else "layer_norm_epsilon"
    values["norm_eps"] = _positive(config, epsilon, 1e-5, problems)
    values["routed_scaling_factor"] = _positive(config, "routed_scaling_factor", 1.0, problems)
    latent = config.get("moe_latent_size")
    values["moe_latent_size"] = None if latent is None else _number(config, "moe_latent_size", problems)
    quantization = parse_quantization(quant if quant is not None else inner, problems)
    if not problems:
        problems += _divisibility_problems(values)
    if problems:
        raise ValueError(f"{where}: this nemotron_h configuration is not supported:\n  - " + "\n  - ".join(problems))
    return ModelConfig(
        layer_types=layer_types,
        mtp_layer_types=mtp_types,
        num_nextn_predict_layers=mtp,
        quantization=quantization,
        **values,
    )


_LEGACY_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_chunk_size": "chunk_size",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}

_NUMBERS = (
    "hidden_size", "vocab_size", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
    "chunk_size", "num_attention_heads", "num_key_value_heads", "head_dim", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip

_FIXED = {
    "model_type": ("nemotron_h", "the layer equations are those of nemotron_h"),
    "tie_word_embeddings": (False, "lm_head has its own bytes"),
    "attention_bias": (False, "the linears have no bias"),
    "mlp_bias": (False, "the linears have no bias"),
    "use_bias": (False, "the linears have no bias"),
    "mamba_proj_bias": (False, "the linears have no bias"),
    "use_conv_bias": (True, "the convolution has a bias"),
    "mlp_hidden_act": ("relu2", "experts are not gated and square their ReLU"),
    "mamba_hidden_act": ("silu", "the convolution ends in SiLU"),
    "norm_topk_prob": (True, "the router renormalises the chosen scores"),
    "n_group": (1, "expert groups are not part of the router's contract"),
    "topk_group": (1, "expert groups are not part of the router's contract"),
    "n_shared_experts": (1, "one shared expert is added after the combine"),
    "residual_in_fp32": (False, "only one bf16 tensor crosses a layer"),
    "sliding_window": (None, "attention sees the whole prefix"),
}


def _check_fixed_choices(config: Mapping, layer_types: str, problems: list[str]) -> None:
    for name, (accepted, why) in _FIXED.items():
        given = config.get(name, accepted)
        if given != accepted:
            problems.append(f"{name} is {given!r}; only {accepted!r} is accepted, because {why}")
    limit = config.get("time_step_limit")
    if limit and not _is_unlimited(limit):
        problems.append(f"time_step_limit is {limit!r}; only [0, infinity] is accepted, the scan does not clamp dt")
    layers = config.get("num_hidden_layers", len(layer_types))
    if layer_types and layers != len(layer_types):
        problems.append(
            f"num_hidden_layers is {layers}, but the layer list has {len(layer_types)} entries; make them agree"
        )


def _is_unlimited(limit: object) -> bool:
    try:
        low, high = map(float, limit)
    except (TypeError, ValueError):
        return False
    return low == 0.0 and high >= 1e300


def _layer_letters(config: Mapping, words_key: str, pattern_key: str, problems: list[str]) -> str:
    words, pattern = config.get(words_key), config.get(pattern_key)
    if not words and not pattern:
        problems.append(f"neither {words_key} nor {pattern_key} is given; one must list the layers")
        return ""
    if words and not is_list_of_strings(words):
        problems.append(f"{words_key} is {words!r}; a list of layer names is needed, one a layer")
        return ""
    if pattern and not isinstance(pattern, str):
        problems.append(f"{pattern_key} is {pattern!r}; a string is needed, one letter a layer")
        return ""
    letters = "".join(LAYER_LETTERS.get(word, "?") for word in words) if words else pattern
    if words and pattern and letters != pattern:
        problems.append(
            f"{words_key} means {letters!r}, but {pattern_key} is {pattern!r}; loaders differ: make them agree"
        )
    key = words_key if words else pattern_key
    unknown = sorted({str(word) for word in words if word not in LAYER_LETTERS}) if words else []
    unknown += sorted(set(letters) - set(SUPPORTED_LETTERS) - {"?", "|", "/"})
    if unknown:
        problems.append(
            f"{key} has {', '.join(map(repr, unknown))}; accepted are M (mamba), * (attention) and E (moe), because "
            "only those have ops in the contract"
        )
    if set(letters) & {"|", "/"}:
        problems.append(
            f"{key} is {letters!r}; '|' (pipeline cut) and '/' (MTP) belong to Megatron's patterns: write the main "
            "layers alone, and the MTP layers in mtp_layers_block_type"
        )
    return letters


def _object(value: object, name: str, problems: list[str]) -> Mapping | None:
    if value is None or isinstance(value, Mapping):
        return value
    problems.append(f"{name} is {value!r}; an object is needed, as ModelOpt writes it")
    return None


def _positive(config: Mapping, name: str, default: float, problems: list[str]) -> float:
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        problems.append(f"{name} is {value!r}; a positive number is needed")
        return default
    return float(value)


def _number(config: Mapping, name: str, problems: list[str]) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        problems.append(f"{name} is {value!r}; a positive integer is needed")
        return 0
    return value


def _divisibility_problems(values: Mapping) -> list[str]:
    rules = (
        ("mamba_num_heads", "n_groups", "every group serves the same number of heads"),
        ("num_attention_heads", "num_key_value_heads", "every KV head serves the same number of query heads"),
    )
    problems = [
        f"{a} is {values[a]}, not a multiple of {b} = {values[b]}; {why}"
        for a, b, why in rules
        if values[a] % values[b]
    ]
    for name in ("hidden_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"):
        if (values[name] or 0) % NVFP4_GROUP_SIZE:
            problems.append(
                f"{name} is {values[name]}; a multiple of {NVFP4_GROUP_SIZE} is needed, the NVFP4 block length"
            )
    if values["num_experts_per_tok"] > values["n_routed_experts"]:
        problems.append(
            f"num_experts_per_tok {values['num_experts_per_tok']} exceeds n_routed_experts {values['n_routed_experts']}"
        )
    return problems
