# SPDX-License-Identifier: Apache-2.0
"""The tensor table at the true sizes of released repositories, against their published counts and bytes."""

import functools
import math

import pytest

from vllm_forward_bridge.checkpoint import tensor_table
from vllm_forward_bridge.checkpoint.megatron_keys import chunk_units, placements
from vllm_forward_bridge.checkpoint.released import released_config
from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec
from vllm_forward_bridge.model_config import parse_model_config


@functools.cache
def config_of(name):
    config, quant = released_config(name)
    return parse_model_config(config, quant and quant["quantization"])


@functools.cache
def table_of(name):
    """Return the table with the first of the accepted dtypes and shapes, and without KV scales for Nano."""
    return {
        entry.name: TensorSpec(entry.name, entry.dtypes[0], entry.shapes[0], "model.safetensors")
        for entry in tensor_table(config_of(name))
    }


def total_bytes(table, mtp):
    # Rows of MTP gates are listed as F32 or BF16; released ones are BF16.
    return sum(
        spec.num_bytes // (2 if mtp and name.endswith("gate.weight") else 1)
        for name, spec in table.items()
        if name.startswith("mtp.") == mtp
    )


def test_lightning_nvfp4_has_the_published_tensors_and_bytes():
    table = table_of("lightning_nvfp4")
    mtp = [name for name in table if name.startswith("mtp.")]
    assert (len(table), len(mtp)) == (18487, 270)
    assert total_bytes(table, mtp=False) == 18_888_937_436
    assert total_bytes(table, mtp=True) == 2_670_652_160
    assert table["backbone.layers.0.mixer.in_proj.weight"].text == "F8_E4M3 [10304, 2688]"
    assert table["backbone.layers.1.mixer.experts.127.down_proj.weight_scale"].text == "F8_E4M3 [2688, 116]"


def test_lightning_map_has_the_published_entries():
    _, quant = released_config("lightning_nvfp4")
    assert len(quant["quantization"]["quantized_layers"]) == 5981
    assert len(quant["quantization"]["exclude_modules"]) == 72


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"), [("lightning_bf16", 6513, 32_913_266_240), ("nano_bf16", 6243, 31_577_940_288)]
)
def test_bf16_repositories_have_the_published_parameters(name, tensors, parameters):
    table = table_of(name)
    assert len(table) == tensors
    assert sum(math.prod(spec.shape) for spec in table.values()) == parameters


def test_nano_nvfp4_has_the_published_tensors_and_bytes():
    table = {name: spec for name, spec in table_of("nano_nvfp4").items() if not name.endswith(("k_scale", "v_scale"))}
    assert len(table) == 24147
    assert sum(spec.num_bytes for spec in table.values()) == 19_339_781_632
    _, quant = released_config("nano_nvfp4")
    assert len(quant["quantization"]["exclude_modules"]) == 60


def test_super_nvfp4_has_the_published_matrices():
    table = table_of("super_nvfp4")
    assert sum(name.endswith("weight_scale_2") for name in table) == 40_961
    assert table["backbone.layers.1.mixer.experts.0.up_proj.weight"].text == "U8 [2688, 512]"
    assert table["backbone.layers.1.mixer.experts.0.down_proj.weight_scale"].text == "F8_E4M3 [1024, 168]"
    assert table["backbone.layers.0.mixer.in_proj.weight"].text == "F8_E4M3 [18560, 4096]"
    assert table["backbone.layers.1.mixer.fc1_latent_proj.weight"].text == "F8_E4M3 [1024, 4096]"


@pytest.mark.parametrize("name", ["lightning_nvfp4", "super_nvfp4"])
def test_megatron_plan_places_every_byte_once_in_bounded_blocks(name):
    table = table_of(name)
    units = chunk_units(config_of(name), table)
    placed = placements(units)
    assert set(placed) == set(table)
    for tensor, blocks in placed.items():
        end = 0
        for start, chunk in blocks:
            assert start == end
            end += chunk.num_bytes
        assert end == table[tensor].num_bytes
    covered = {}
    for chunk in (chunk for chunks in units.values() for chunk in chunks):
        covered[chunk.key] = covered.get(chunk.key, 0) + math.prod(chunk.shape)
        assert chunk.num_bytes <= 64 << 20
    for chunk in (chunk for chunks in units.values() for chunk in chunks):
        assert covered[chunk.key] == math.prod(chunk.global_shape)
