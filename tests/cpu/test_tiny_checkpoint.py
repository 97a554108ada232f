# SPDX-License-Identifier: Apache-2.0
import filecmp
import json

import pytest
import torch

from vllm_forward_bridge.checkpoint import make_tiny_checkpoint, open_repository, tensor_table
from vllm_forward_bridge.checkpoint.tensor_table import linears
from vllm_forward_bridge.checkpoint.tiny_config import FAMILIES
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import Nvfp4Bytes, nvfp4_dequantize, unpack_codes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        make_tiny_checkpoint(path / family, family=family)
    return path


@pytest.fixture(scope="module")
def lightning(folder):
    return open_repository(folder / "lightning")


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_repository_passes_every_check(folder, family):
    repository = open_repository(folder / family)
    assert len(repository.headers) >= 6
    assert {entry.name for entry in tensor_table(repository.config) if entry.required} <= set(repository.table)
    for name, spec in repository.table.items():
        if spec.dtype in (torch.bfloat16, torch.float32):
            assert repository.read(name).isfinite().all(), name


def test_tiny_repository_is_a_function_of_the_seed(tmp_path, folder):
    make_tiny_checkpoint(tmp_path / "again")
    make_tiny_checkpoint(tmp_path / "other", seed=1, chunk_size=128)
    same = filecmp.dircmp(folder / "lightning", tmp_path / "again")
    assert not same.diff_files
    assert len(same.same_files) == len(list((folder / "lightning").iterdir()))
    other = open_repository(tmp_path / "other")
    assert other.config.chunk_size == 128
    name = "backbone.embeddings.weight"
    assert not torch.equal(other.read(name), open_repository(folder / "lightning").read(name))


def test_tiny_repository_has_the_released_dtypes_and_ranks(lightning):
    table = lightning.table
    mamba, moe = "backbone.layers.0.mixer.in_proj", "backbone.layers.1.mixer"
    expected = {
        f"{mamba}.weight": "F8_E4M3 [1296, 192]", f"{mamba}.weight_scale": "F32 []", f"{mamba}.input_scale": "F32 [1]",
        f"{moe}.gate.weight": "F32 [8, 192]", f"{moe}.experts.7.down_proj.weight": "U8 [192, 64]",
        f"{moe}.experts.7.down_proj.weight_scale": "F8_E4M3 [192, 8]",
        f"{moe}.experts.7.down_proj.weight_scale_2": "F32 []",
        "backbone.layers.3.mixer.k_proj.k_scale": "F32 [1]", "lm_head.weight": "U8 [1280, 96]",
        "backbone.layers.0.mixer.conv1d.weight": "BF16 [768, 1, 4]", "backbone.layers.0.mixer.A_log": "BF16 [16]",
        "mtp.layers.1.mixer.gate.weight": "BF16 [8, 192]", "mtp.layers.0.eh_proj.weight": "BF16 [192, 384]",
    }  # fmt: skip
    assert {name: table[name].text for name in expected} == expected
    assert not [name for name in table if "experts" in name and name.endswith("input_scale")]
    assert len([name for name in table if name.startswith("mtp.")]) == 10 + 4 + 2 * 8 + 2 - 2


def test_tiny_sizes_differ_where_wrong_code_would_pass(lightning):
    config = lightning.config
    assert config.mamba_inner_size != 2 * config.hidden_size
    assert config.num_attention_heads * config.head_dim not in (config.hidden_size, config.mamba_inner_size // 2)
    sections = list(config.mamba_sections.values())
    assert len(set(sections)) == 3
    assert config.moe_intermediate_size != config.moe_shared_expert_intermediate_size
    assert config.head_dim == 128


def test_tiny_scales_are_distinct_and_calibrated(lightning):
    globals_2 = [lightning.read(name).item() for name in lightning.table if name.endswith("weight_scale_2")]
    assert len(globals_2) == len(set(globals_2)) == 37
    for name in lightning.table:
        if name.endswith("proj.weight") and lightning.table[name].dtype == torch.float8_e4m3fn:
            assert lightning.read(name).float().abs().max() < 448, "amax / 448 would put the largest code at 448"
        if name.endswith(("k_scale", "v_scale")):
            assert lightning.read(name).bfloat16().float() != lightning.read(name)
        if name.endswith("gate.weight") and not name.startswith("mtp."):
            assert (lightning.read(name).bfloat16().float() != lightning.read(name)).float().mean() > 0.9
        if name.endswith("e_score_correction_bias"):
            bias = lightning.read(name)
            assert bias.unique().numel() == 8 > bias.bfloat16().unique().numel()


def test_tiny_nvfp4_matrices_hold_a_zero_block_code_8_and_both_kinds_of_blocks(lightning):
    for linear in linears(lightning.config):
        if linear.weight_format != "W4A16_NVFP4":
            continue
        parts = [lightning.read(f"{linear.name}.{leaf}") for leaf in ("weight", "weight_scale", "weight_scale_2")]
        codes = unpack_codes(parts[0]).unflatten(-1, (-1, 16))
        assert not codes[3, 0].any()
        assert codes[4, 0, 0] == 8
        assert parts[1][3, 0].float() == 448
        largest = (codes & 7).amax(-1)
        assert {6, 7} <= set(largest.flatten().tolist()), "codes 6 and 7 are the values 4 and 6"
        assert nvfp4_dequantize(Nvfp4Bytes(*parts)).isfinite().all()


def test_tiny_initial_values_are_those_of_mamba_2(lightning):
    for layer in (0, 2):
        mixer = f"backbone.layers.{layer}.mixer"
        rate = lightning.read(f"{mixer}.A_log").float().exp()
        assert (rate > 0.99).all()
        assert (rate < 16.2).all()
        step = torch.nn.functional.softplus(lightning.read(f"{mixer}.dt_bias").float())
        assert (step > 9e-4).all()
        assert (step < 0.11).all()


def test_tiny_quantization_files_follow_modelopt(folder):
    config = json.loads((folder / "lightning" / "config.json").read_text())["quantization_config"]
    quant = json.loads((folder / "lightning" / "hf_quant_config.json").read_text())
    assert quant["producer"]["name"] == "modelopt"
    layers = quant["quantization"]["quantized_layers"]
    assert layers == config["quantized_layers"]
    assert layers["backbone.layers.0.mixer.in_proj"] == {"quant_algo": "FP8"}
    assert layers["lm_head"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert len(layers) == 2 * 2 + 2 * (2 * 8 + 2) + 1
    assert config["ignore"] == quant["quantization"]["exclude_modules"]
    assert "mtp*" in config["ignore"]
    groups = {len(group["targets"]): group for group in config["config_groups"].values()}
    assert "input_activations" not in groups[37]
    assert groups[4]["weights"]["num_bits"] == 8


def test_tiny_tokenizer_is_one_id_a_byte(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "lightning" / "tokenizer.json"))
    text = "Hi, \n\x00ß 猫"
    ids = tokenizer.encode(text).ids
    assert ids == [3 + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("</s>").ids == [2]


def test_tiny_config_is_read_by_transformers(folder):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it comes with vllm")
    for family in FAMILIES:
        config = transformers.AutoConfig.from_pretrained(folder / family)
        assert type(config).__name__ == "NemotronHConfig"
        assert config.hybrid_override_pattern == "MEM*E"


def test_tiny_rejects_an_unknown_family_and_an_existing_folder(tmp_path):
    with pytest.raises(ValueError, match="family is 'opus'; accepted are lightning, lightning_bf16"):
        make_tiny_checkpoint(tmp_path / "new", family="opus")
    with pytest.raises(FileExistsError, match="exists; a new folder is needed"):
        make_tiny_checkpoint(tmp_path)


def test_tiny_same_weights_under_every_other_family_switch(folder):
    names = ["backbone.layers.0.mixer.A_log", "backbone.norm_f.weight"]
    for name in names:
        want = open_repository(folder / "lightning").fetch(name)
        for family in FAMILIES:
            assert_same_bits(open_repository(folder / family).fetch(name), want, f"{name} of {family}")
