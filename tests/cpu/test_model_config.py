# SPDX-License-Identifier: Apache-2.0
import copy
import json
import math

import pytest

from vllm_forward_bridge.checkpoint.tiny_config import FAMILIES, model_json, quantization_config_json, quantization_json
from vllm_forward_bridge.model_config import load_model_config, parse_model_config

MODULES = [
    "backbone.embeddings",
    "backbone.layers.0.mixer.in_proj",
    "backbone.layers.1.mixer.experts.0.up_proj",
    "lm_head",
]


def parts(family="lightning"):
    config = model_json(FAMILIES[family], 16)
    quant = quantization_json(FAMILIES[family], MODULES)
    return config, quant["quantization"] if quant else None


def test_model_config_reads_modern_and_legacy_keys_alike():
    modern, _ = parts("lightning_bf16")
    legacy = copy.deepcopy(modern)
    legacy["hybrid_override_pattern"] = "MEM*E"
    legacy["mtp_hybrid_override_pattern"] = "*E"
    for key in ("layers_block_type", "mtp_layers_block_type"):
        del legacy[key]
    renamed = copy.deepcopy(modern)
    renamed["layers_block_type"] = ["linear_attention", "moe", "linear_attention", "full_attention", "moe"]
    scalars = copy.deepcopy(modern)
    # transformers lets a legacy scalar win over the modern one.
    for old, new in (
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_chunk_size", "chunk_size"),
    ):
        scalars[old], scalars[new] = scalars[new], 7
    want = parse_model_config(modern, None)
    assert want.layer_types == "MEM*E"
    assert want.mtp_layer_types == "*E"
    assert [parse_model_config(c, None) for c in (legacy, renamed, scalars)] == [want] * 3


@pytest.mark.parametrize("limit", [[0.0, math.inf], [0.0, "Infinity"], [0, 1e308], None])
def test_model_config_takes_every_released_infinity(limit, tmp_path):
    config, _ = parts("lightning_bf16")
    config["time_step_limit"] = limit
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(tmp_path).hidden_size == 192


def test_model_config_d_inner_is_heads_times_head_dim():
    config = parse_model_config(parts()[0], None)
    assert config.mamba_inner_size == 512 != 2 * config.hidden_size
    assert config.mamba_sections == {"z": 512, "x": 512, "B": 128, "C": 128, "dt": 16}
    assert list(config.conv_sections) == ["x", "B", "C"]


def test_model_config_reads_the_map_from_either_file():
    config, quant = parts()
    from_quant = parse_model_config(config, quant)
    config["quantization_config"] = quantization_config_json(quantization_json(FAMILIES["lightning"], MODULES))
    assert parse_model_config(config, None) == from_quant
    assert from_quant.quantization.kv_cache == "FP8"
    formats = {m: from_quant.quantization.format_of(m) for m in [*MODULES, "mtp.layers.0.eh_proj"]}
    assert list(formats.values()) == ["BF16", "FP8", "W4A16_NVFP4", "W4A16_NVFP4", "BF16"]


def test_model_config_one_algorithm_quantises_every_linear_but_the_excluded():
    config, quant = parts("nano_nvfp4")
    found = parse_model_config(config, quant).quantization
    modules = ("backbone.layers.0.mixer.out_proj", "backbone.layers.1.mixer.gate", "backbone.layers.0.norm", "lm_head")
    assert [found.format_of(module) for module in modules] == ["NVFP4", "BF16", "BF16", "BF16"]


NO_LIST = {"layers_block_type": None}
FAULTS = {
    "slash in the pattern": ({**NO_LIST, "hybrid_override_pattern": "MEM*E/*E"}, {}, "'/' (MTP) belong"),
    "pipe in the pattern": ({**NO_LIST, "hybrid_override_pattern": "ME|M*E"}, {}, "'|' (pipeline cut)"),
    "dense layer": ({"layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe"]}, {}, "has '-'; accepted"),
    "unknown layer word": ({"layers_block_type": ["mamba", "rnn", "mamba", "attention", "moe"]}, {}, "has 'rnn'"),
    "two lists": ({"hybrid_override_pattern": "MEMM*"}, {}, "but hybrid_override_pattern is 'MEMM*'"),
    "no list": (NO_LIST, {}, "neither layers_block_type nor hybrid_override_pattern"),
    "MTP without a list": ({"mtp_layers_block_type": None}, {}, "neither mtp_layers_block_type nor"),
    "wrong layer count": ({"num_hidden_layers": 6}, {}, "num_hidden_layers is 6, but the layer list has 5"),
    "clamped dt": ({"time_step_limit": [0.0, 0.1]}, {}, "time_step_limit is [0.0, 0.1]"),
    "tied head": ({"tie_word_embeddings": True}, {}, "tie_word_embeddings is True; only False"),
    "odd width": ({"moe_intermediate_size": 120}, {}, "moe_intermediate_size is 120; a multiple of 16"),
    "odd latent width": ({"moe_latent_size": 40}, {}, "moe_latent_size is 40; a multiple of 16"),
    "unknown algorithm": ({}, {"quant_algo": "AWQ"}, "quant_algo is 'AWQ'; accepted are MIXED_PRECISION, FP8"),
    "MXFP8 layer": ({}, {"quantized_layers": {"lm_head": {"quant_algo": "MXFP8"}}}, "gives MXFP8 to 1 modules"),
    "no layers": ({}, {"quantized_layers": {}}, "MIXED_PRECISION without quantized_layers"),
    "group size": ({}, {"quantized_layers": {"lm_head": {"quant_algo": "NVFP4", "group_size": 32}}}, "group_size 32"),
    "excluded head": ({}, {"exclude_modules": ["lm_head*"]}, "lm_head is in quantized_layers, but"),
    "null factor": ({"routed_scaling_factor": None}, {}, "routed_scaling_factor is None; a positive number is needed"),
    "text as epsilon": ({"norm_eps": "x"}, {}, "norm_eps is 'x'; a positive number is needed"),
    "text as MTP": ({"num_nextn_predict_layers": "x"}, {}, "num_nextn_predict_layers is 'x'; a positive integer"),
    "number as layers": ({"layers_block_type": 5}, {}, "layers_block_type is 5; a list of layer names is needed"),
    "list in the layers": ({"layers_block_type": ["moe", []]}, {}, "layers_block_type is ['moe', []]; a list of"),
    "number as pattern": ({**NO_LIST, "hybrid_override_pattern": 5}, {}, "hybrid_override_pattern is 5; a string"),
    "number as limit": ({"time_step_limit": 5}, {}, "time_step_limit is 5; only [0, infinity]"),
    "text as limit": ({"time_step_limit": "x"}, {}, "time_step_limit is 'x'; only [0, infinity]"),
    "list as quantization": ({"quantization_config": [1]}, {}, "quantization_config is [1]; an object is needed"),
    "number as exclusion": ({}, {"exclude_modules": 5}, "exclude_modules is 5; a list of module names"),
    "text as exclusion": ({}, {"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'; a list of module names"),
    "text as formats": ({}, {"quantized_layers": "x"}, "quantized_layers is 'x'; an object is needed"),
    "text as a format": ({}, {"quantized_layers": {"lm_head": "FP8"}}, "gives 'FP8' to lm_head; an object"),
    "unknown KV cache": ({}, {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_model_config_rejects(case):
    changes, quant_changes, message = FAULTS[case]
    config, quant = parts()
    with pytest.raises(ValueError) as error:
        parse_model_config({**config, **changes}, {**quant, **quant_changes}, where="somewhere")
    assert message in str(error.value)
    assert str(error.value).startswith("somewhere: ")


def test_model_config_lists_every_fault_at_once():
    config, quant = parts()
    config.update(tie_word_embeddings=True, num_hidden_layers=9)
    with pytest.raises(ValueError) as error:
        parse_model_config(config, {**quant, "quant_algo": "AWQ"})
    assert len(str(error.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kv_cache_scheme", None, "the KV cache's format differs"),
        ("quantized_layers", {"lm_head": {"quant_algo": "FP8"}}, "the map of formats differs"),
        ("ignore", [], "the list of excluded modules differs"),
    ],
)
def test_model_config_rejects_two_files_that_disagree(key, value, message):
    config, quant = parts()
    inner = quantization_config_json(quantization_json(FAMILIES["lightning"], MODULES))
    config["quantization_config"] = {**inner, key: value}
    with pytest.raises(ValueError, match=message):
        parse_model_config(config, quant)


def test_model_config_names_a_file_that_is_not_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load_model_config(tmp_path)


def test_model_config_names_wrong_types_at_once():
    config, _ = parts()
    config.update(layers_block_type=5, routed_scaling_factor=None)
    with pytest.raises(ValueError) as error:
        parse_model_config(config, 7)
    lines = str(error.value).splitlines()[1:]
    assert [line.split(" is ")[0].strip(" -") for line in lines] == [
        "hf_quant_config.json's quantization", "layers_block_type", "routed_scaling_factor",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("content", ["null", "[]", '"x"', "5"])
def test_model_config_names_a_file_that_is_not_an_object(tmp_path, name, content):
    (tmp_path / "config.json").write_text(json.dumps(parts()[0]))
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"/{name} holds JSON of type \w+; an object is needed: fetch or copy"):
        load_model_config(tmp_path)
