# SPDX-License-Identifier: Apache-2.0
"""The JSON files of the tiny checkpoints: one family a released repository of nemotron_h, cut down to five layers."""

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass

PATTERN = "MEM*E"
_WORDS = {"M": "mamba", "*": "attention", "E": "moe"}
_FP8 = {"quant_algo": "FP8"}
_W4A16 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
_W4A4 = {"quant_algo": "NVFP4", "group_size": 16}


@dataclass(frozen=True)
class Family:
    """How one released repository differs from its siblings."""

    quant_algo: str | None = None
    layer_formats: tuple[tuple[str, Mapping], ...] = ()
    """MIXED_PRECISION: glob of module names and their entry; the first that fits wins."""
    exclude: tuple[str, ...] = ()
    kv_cache: bool = False
    stores_kv_scales: bool = False
    vector_scalars: tuple[str, ...] = ()
    """Scalars stored with shape [1] instead of []."""
    router_dtype: str = "F32"
    four_over_six: bool = False
    mtp: bool = True
    legacy_keys: bool = False
    latent_size: int | None = None
    producer: str = "0.44.0rc5"


_ATTENTION = ("backbone.layers.*.mixer.[qkvo]_proj",)
FAMILIES = {
    "lightning": Family(
        quant_algo="MIXED_PRECISION",
        layer_formats=(
            ("backbone.layers.*.mixer.in_proj", _FP8),
            ("backbone.layers.*.mixer.out_proj", _FP8),
            ("backbone.layers.*experts*", _W4A16),
            ("lm_head", _W4A16),
        ),
        exclude=("backbone.embeddings", "*.conv1d", "*.gate", *_ATTENTION, "mtp*"),
        kv_cache=True,
        stores_kv_scales=True,
        vector_scalars=("input_scale", "k_scale", "v_scale"),
        four_over_six=True,
    ),
    "lightning_bf16": Family(),
    "nano_nvfp4": Family(
        quant_algo="NVFP4",
        exclude=(
            "lm_head",
            "backbone.layers.2.mixer.in_proj",
            "backbone.layers.2.mixer.out_proj",
            *_ATTENTION,
            "*.conv1d",
        ),
        kv_cache=True,
        mtp=False,
        legacy_keys=True,
        producer="0.29.0",
    ),
    "nano_fp8": Family(
        quant_algo="FP8",
        exclude=("lm_head", *_ATTENTION, "*.conv1d"),
        kv_cache=True,
        stores_kv_scales=True,
        mtp=False,
        legacy_keys=True,
    ),
    "super_nvfp4": Family(
        quant_algo="MIXED_PRECISION",
        layer_formats=(
            ("backbone.layers.1.mixer.shared_experts.down_proj", _W4A4),
            ("backbone.layers.*.shared_experts.*", _FP8),
            ("backbone.layers.*.experts.*", _W4A4),
            ("backbone.layers.*.mixer.in_proj", _FP8),
            ("backbone.layers.0.mixer.out_proj", _FP8),
            ("backbone.layers.*.mixer.fc1_latent_proj", _FP8),
            ("backbone.layers.3.mixer.o_proj", _FP8),
        ),
        exclude=("backbone.embeddings", "lm_head", "*.conv1d", "*.gate", "backbone.layers.*.mixer.[qkv]_proj", "mtp*"),
        kv_cache=True,
        stores_kv_scales=True,
        router_dtype="BF16",
        legacy_keys=True,
        latent_size=96,
    ),
}
"""Tiny likenesses of 3.5-Lightning (NVFP4, BF16), 3-Nano (NVFP4 W4A4, FP8) and 3-Super (mixed, latent experts)."""


def model_json(family: Family, chunk_size: int, pattern: str = PATTERN) -> dict:
    """Return config.json without quantization_config; sizes that other models have equal by accident all differ."""
    config = {
        "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "chunk_size": chunk_size, "conv_kernel": 4, "dtype": "bfloat16", "eos_token_id": 2, "expand": 2,
        "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 192, "initializer_range": 0.02, "intermediate_size": 128,
        "layer_norm_epsilon": 1e-05, "mamba_head_dim": 32, "mamba_hidden_act": "silu", "mamba_num_heads": 16,
        "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 8192,
        "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
        "moe_intermediate_size": 128, "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True, "n_group": 1, "n_groups": 2,
        "n_routed_experts": 8, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
        "num_attention_heads": 4, "num_experts_per_tok": 3, "num_hidden_layers": len(pattern), "num_key_value_heads": 2,
        "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
        "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None,
        "ssm_state_size": 64, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1,
        "time_step_min": 0.001, "topk_group": 1, "transformers_version": "5.8.1", "use_bias": False, "use_cache": True,
        "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 1280,
    }  # fmt: skip
    config["moe_latent_size"] = family.latent_size
    if family.legacy_keys:
        config["hybrid_override_pattern"] = pattern
        config["torch_dtype"] = config.pop("dtype")
        config["time_step_limit"] = [0.0, float("inf")]
    else:
        config["layers_block_type"] = [_WORDS[letter] for letter in pattern]
    if family.mtp:
        config["num_nextn_predict_layers"] = 1
        words = (
            {"mtp_hybrid_override_pattern": "*E"}
            if family.legacy_keys
            else {"mtp_layers_block_type": ["attention", "moe"]}
        )
        config.update(words)
    return dict(sorted(config.items()))


def quantization_json(family: Family, modules: list[str]) -> dict | None:
    """Return hf_quant_config.json for a family, or None for a BF16 repository.

    Args:
        family: what is quantised.
        modules: every module that holds a weight, without `.weight`.
    """
    if family.quant_algo is None:
        return None
    quantization: dict = {"quant_algo": family.quant_algo, "kv_cache_quant_algo": "FP8" if family.kv_cache else None}
    if family.quant_algo == "NVFP4":
        quantization["group_size"] = 16
    # A trailing-star glob is ModelOpt's own; the others stand for the names they match.
    excluded = {glob for glob in family.exclude if glob == "mtp*"}
    excluded |= {
        m for m in modules if not m.startswith("mtp.") and any(fnmatch.fnmatchcase(m, g) for g in family.exclude)
    }
    quantization["exclude_modules"] = sorted(excluded)
    if family.layer_formats:
        layers = {}
        for module in sorted(modules):
            entry = next((dict(e) for glob, e in family.layer_formats if fnmatch.fnmatchcase(module, glob)), None)
            if entry:
                layers[module] = entry
        quantization["quantized_layers"] = layers
    return {"producer": {"name": "modelopt", "version": family.producer}, "quantization": quantization}


_GROUPS = {
    "FP8": {
        "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
    },
    "W4A16_NVFP4": {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}},
    "NVFP4": {
        "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    },
}


def quantization_config_json(quant: dict) -> dict:
    """Return config.json's quantization_config for the contents of hf_quant_config.json, with ModelOpt's keys."""
    quantization = quant["quantization"]
    algo = quantization["quant_algo"]
    if algo == "MIXED_PRECISION":
        by_algo: dict[str, list[str]] = {}
        for module, entry in quantization["quantized_layers"].items():
            by_algo.setdefault(entry["quant_algo"], []).append(module)
    else:
        by_algo = {algo: ["Linear"]}
    groups = {f"group_{i}": {**_GROUPS[a], "targets": targets} for i, (a, targets) in enumerate(by_algo.items())}
    config = {"config_groups": groups, "ignore": quantization["exclude_modules"], "quant_algo": algo}
    if "quantized_layers" in quantization:
        config["quantized_layers"] = quantization["quantized_layers"]
    if quantization["kv_cache_quant_algo"]:
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {**config, "producer": quant["producer"], "quant_method": "modelopt"}


def tokenizer_files() -> dict[str, str]:
    """Return a byte-level tokenizer: ids 0, 1, 2 are <pad>, <s>, </s>; byte b is id 3 + b; nothing is merged."""
    special = ["<pad>", "<s>", "</s>"]
    vocab = {token: place for place, token in enumerate(special)}
    vocab |= {letter: len(special) + byte for byte, letter in enumerate(_byte_letters())}
    added = [
        {
            "id": place,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, token in enumerate(special)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": [],
        },
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "model_max_length": 8192, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=2) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def _byte_letters() -> list[str]:
    """Return the printable letter that the byte-level format writes for each byte 0..255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
