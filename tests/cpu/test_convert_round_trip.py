# SPDX-License-Identifier: Apache-2.0
import filecmp
import json

import pytest
import torch

from vllm_forward_bridge.checkpoint import convert_to_hf, convert_to_megatron, make_tiny_checkpoint, open_repository
from vllm_forward_bridge.checkpoint.compare import changed_masters, compare
from vllm_forward_bridge.checkpoint.megatron_checkpoint import MegatronCheckpoint
from vllm_forward_bridge.checkpoint.megatron_keys import CARRIED, chunk_units, megatron_table
from vllm_forward_bridge.checkpoint.tiny_config import FAMILIES
from vllm_forward_bridge.checkpoint.torch_dist_reader import TorchDistReader
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import Nvfp4Bytes, fp8_dequantize, nvfp4_dequantize


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("round_trip")
    for family in FAMILIES:
        make_tiny_checkpoint(path / family, family=family)
        convert_to_megatron(path / family, path / f"{family}.megatron")
    return path


def value_of(repository, module):
    """Return bf16 of a module's stored weight, whatever its format."""
    weight = repository.fetch(f"{module}.weight")
    weight_format = repository.config.quantization.format_of(module)
    if weight_format == "FP8":
        return fp8_dequantize(weight, repository.fetch(f"{module}.weight_scale"))
    if "NVFP4" in weight_format:
        leaves = ("weight_scale", "weight_scale_2")
        scale, scale_2 = (repository.fetch(f"{module}.{leaf}") for leaf in leaves)
        return nvfp4_dequantize(Nvfp4Bytes(weight, scale, scale_2.reshape(())))
    return weight.bfloat16()


def read(folder, family):
    reader = TorchDistReader(folder / f"{family}.megatron" / "release")
    return lambda key: reader.read(key, (0,) * len(reader.table()[key][1]), reader.table()[key][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_gives_every_file_back_byte_for_byte(folder, family):
    convert_to_hf(folder / f"{family}.megatron", folder / f"{family}.back")
    source, back = folder / family, folder / f"{family}.back"
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*"))
    assert names == sorted(str(path.relative_to(back)) for path in back.rglob("*"))
    assert filecmp.cmpfiles(source, back, names, shallow=False) == (names, [], [])
    # Files may be equal while the claim is about tensors: read them too.
    original, exported = open_repository(source), open_repository(back)
    assert list(original.table.values()) == list(exported.table.values())
    for name in original.names():
        assert_same_bits(exported.fetch(name), original.fetch(name), name)


@pytest.mark.parametrize("family", FAMILIES)
def test_masters_are_the_rounded_values_of_the_bytes(folder, family):
    repository, get = open_repository(folder / family), read(folder, family)
    config = repository.config
    assert_same_bits(get("output_layer.weight"), value_of(repository, "lm_head"), "lm_head")
    for layer, letter in enumerate(config.layer_types):
        mixer, decoder = f"backbone.layers.{layer}.mixer", f"decoder.layers.{layer}"
        if letter == "M":
            whole, first = value_of(repository, f"{mixer}.in_proj"), 0
            for section, rows in config.mamba_sections.items():
                got = get(f"{decoder}.mixer.in_proj.weight.{section}")
                assert_same_bits(got, whole[first : first + rows], f"{section} of layer {layer}")
                first += rows
            assert first == len(whole)
            assert_same_bits(
                get(f"{decoder}.mixer.out_proj.weight"), value_of(repository, f"{mixer}.out_proj"), "out_proj"
            )
        elif letter == "*":
            q, k, v = (value_of(repository, f"{mixer}.{leaf}_proj") for leaf in "qkv")
            groups = config.num_key_value_heads
            per_group = [t.unflatten(0, (groups, -1)) for t in (q, k, v)]
            assert_same_bits(
                get(f"{decoder}.self_attention.linear_qkv.weight"), torch.cat(per_group, 1).flatten(0, 1), "qkv"
            )
        else:
            for leaf, fc in (("up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
                want = torch.stack([value_of(repository, f"{mixer}.experts.{e}.{leaf}") for e in range(8)])
                assert_same_bits(get(f"{decoder}.mlp.experts.experts.{fc}.weight"), want, f"{fc} of layer {layer}")
                want = value_of(repository, f"{mixer}.shared_experts.{leaf}")
                assert_same_bits(get(f"{decoder}.mlp.shared_experts.{fc}.weight"), want, f"shared {fc}")
            assert_same_bits(get(f"{decoder}.mlp.router.weight"), value_of(repository, f"{mixer}.gate"), "router")


def test_lightning_keys_are_those_of_the_contract(folder):
    get, repository = read(folder, "lightning"), open_repository(folder / "lightning")
    layer = "backbone.layers"
    sources = {
        "embedding.word_embeddings.weight": "backbone.embeddings.weight",
        "decoder.final_norm.weight": "backbone.norm_f.weight",
        "decoder.layers.0.mixer.in_proj.layer_norm_weight": f"{layer}.0.norm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight": f"{layer}.1.norm.weight",
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight": f"{layer}.3.norm.weight",
        "decoder.layers.3.self_attention.linear_proj.weight": f"{layer}.3.mixer.o_proj.weight",
        "decoder.layers.3.self_attention.core_attention.k_scale": f"{layer}.3.mixer.k_proj.k_scale",
        "decoder.layers.1.mlp.router.weight_f32": f"{layer}.1.mixer.gate.weight",
        "decoder.layers.1.mlp.router.expert_bias": f"{layer}.1.mixer.gate.e_score_correction_bias",
        "decoder.layers.0.mixer.A_log": f"{layer}.0.mixer.A_log",
        "decoder.layers.0.mixer.norm.weight": f"{layer}.0.mixer.norm.weight",
        "decoder.layers.0.mixer.out_proj.fp8_weight_scale": f"{layer}.0.mixer.out_proj.weight_scale",
        "decoder.layers.0.mixer.out_proj.fp8_input_scale": f"{layer}.0.mixer.out_proj.input_scale",
        "output_layer.nvfp4_codes": "lm_head.weight",
        "output_layer.nvfp4_global_scale": "lm_head.weight_scale_2",
    }
    for key, name in sources.items():
        assert_same_bits(get(key), repository.fetch(name), key)
    scale = repository.fetch("lm_head.weight_scale").view(torch.uint8)
    assert_same_bits(get("output_layer.nvfp4_block_scale"), scale, "block scales")
    conv = repository.fetch(f"{layer}.0.mixer.conv1d.weight")
    parts = [get(f"decoder.layers.0.mixer.conv1d.weight.{section}") for section in "xBC"]
    assert_same_bits(torch.cat(parts), conv, "convolution")
    assert conv.dim() == 3
    scales = [repository.fetch(f"{layer}.4.mixer.experts.{e}.up_proj.weight_scale_2") for e in range(8)]
    assert_same_bits(
        get("decoder.layers.4.mlp.experts.experts.linear_fc1.nvfp4_global_scale"), torch.stack(scales), "scales"
    )


def test_carried_tensors_are_untouched_bytes_under_their_own_prefix(folder):
    get, repository = read(folder, "lightning"), open_repository(folder / "lightning")
    names = [name for name in repository.table if name.startswith("mtp.")]
    assert names
    for name in names:
        assert_same_bits(get(CARRIED + name), repository.fetch(name).reshape(-1).view(torch.uint8), name)


def test_nano_w4a4_input_scales_and_missing_kv_scales(folder):
    get, repository = read(folder, "nano_nvfp4"), open_repository(folder / "nano_nvfp4")
    want = [repository.fetch(f"backbone.layers.1.mixer.experts.{e}.down_proj.input_scale") for e in range(8)]
    assert_same_bits(
        get("decoder.layers.1.mlp.experts.experts.linear_fc2.nvfp4_input_scale"), torch.stack(want), "input scales"
    )
    assert_same_bits(get("decoder.layers.0.mixer.in_proj.nvfp4_input_scale").reshape(()),
                     repository.fetch("backbone.layers.0.mixer.in_proj.input_scale"), "input scale")  # fmt: skip
    # The FP8 cache has no scales in the source: one in Megatron, and none in the export.
    assert "backbone.layers.3.mixer.k_proj.k_scale" not in repository.table
    assert_same_bits(get("decoder.layers.3.self_attention.core_attention.k_scale"), torch.ones(1), "k_scale")


def test_nvfp4_in_proj_blocks_follow_their_section(folder):
    """A contiguous split of block scales gives rows another section's scale; each section has its own here."""
    get, repository = read(folder, "nano_nvfp4"), open_repository(folder / "nano_nvfp4")
    scale_2 = get("decoder.layers.0.mixer.in_proj.nvfp4_global_scale")
    whole, first = value_of(repository, "backbone.layers.0.mixer.in_proj"), 0
    for section, rows in repository.config.mamba_sections.items():
        # The second of two tensor-parallel ranks has the second half of each section.
        half = slice(rows // 2, rows)
        codes, scales = (
            get(f"decoder.layers.0.mixer.in_proj.{n}.{section}")[half] for n in ("nvfp4_codes", "nvfp4_block_scale")
        )
        got = nvfp4_dequantize(Nvfp4Bytes(codes, scales.view(torch.float8_e4m3fn), scale_2))
        assert_same_bits(got, whole[first + rows // 2 : first + rows], section)
        first += rows


def test_dry_run_checks_and_writes_nothing(folder, tmp_path):
    plan = convert_to_megatron(folder / "lightning", tmp_path / "new", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    done = convert_to_megatron(folder / "lightning", tmp_path / "new")
    assert (plan.tensors, plan.num_bytes) == (done.tensors, done.num_bytes) == (135, 8076892)
    plan = convert_to_hf(tmp_path / "new", tmp_path / "back", dry_run=True)
    assert not (tmp_path / "back").exists()
    assert plan.tensors == 182
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        convert_to_megatron(folder / "lightning", tmp_path / "new", dry_run=True)


def test_without_masters_exports_the_same_and_is_smaller(folder, tmp_path):
    small = convert_to_megatron(folder / "lightning", tmp_path / "small", masters=False)
    assert small.num_bytes == sum(spec.num_bytes for spec in open_repository(folder / "lightning").table.values())
    convert_to_hf(tmp_path / "small", tmp_path / "back")
    assert compare(open_repository(folder / "lightning"), open_repository(tmp_path / "back")).same
    reader = TorchDistReader(tmp_path / "small" / "release")
    assert "output_layer.weight" not in reader.table()
    assert "decoder.layers.3.self_attention.linear_qkv.weight" in reader.table()


def test_source_files_and_table_travel_with_the_checkpoint(folder):
    stored = json.loads((folder / "lightning.megatron" / "hf" / "tensors.json").read_text())
    repository = open_repository(folder / "lightning")
    assert [entry["name"] for entry in stored["tensors"]] == repository.names()
    assert stored["tensors"][0] == {"name": "lm_head.weight_scale_2", "dtype": "F32", "shape": [],
                                    "shard": "model-00001-of-00007.safetensors"}  # fmt: skip
    assert (folder / "lightning.megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_table_of_the_plan_is_the_table_on_disk(folder):
    for family in FAMILIES:
        repository = open_repository(folder / family)
        reader = TorchDistReader(folder / f"{family}.megatron" / "release")
        assert reader.table() == megatron_table(chunk_units(repository.config, repository.table))


def test_untouched_masters_are_no_difference(folder):
    for family in FAMILIES:
        checkpoint = MegatronCheckpoint(folder / f"{family}.megatron")
        assert list(changed_masters(checkpoint, open_repository(folder / family))) == []
        assert len(list(checkpoint.masters())) > 0 or family == "lightning_bf16"
