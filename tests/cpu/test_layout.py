# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from vllm_forward_bridge.checkpoint.layout import Layout, layout_problems, parse_layout
from vllm_forward_bridge.checkpoint.released import released_config
from vllm_forward_bridge.model_config import QuantizationMap, parse_model_config


@pytest.fixture(scope="module")
def lightning():
    config, quant = released_config("lightning_nvfp4")
    return parse_model_config(config, quant["quantization"])


def test_parse_layout():
    assert parse_layout("tp=2,ep=8,pp=4") == Layout(2, 8, 4)
    assert parse_layout("ep=4") == Layout(1, 4, 1)
    for text in ("", "tp=0", "tp=2,tp=2", "dp=3", "tp=x", "tp=2;ep=4"):
        with pytest.raises(ValueError, match="parts like tp=2,ep=8,pp=4 are accepted"):
            parse_layout(text)


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 8, 4), Layout(4, 128, 52), Layout(8, 64, 2)])
def test_lightning_layouts_that_are_possible(lightning, layout):
    assert layout_problems(lightning, layout) == []


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(tensor=3), ["mamba_num_heads is 64, tp is 3", "n_groups is 8", "num_key_value_heads is 2, tp is 3"]),
        (Layout(tensor=16), ["n_groups is 8, tp is 16; a multiple is needed, because B and C are split by group"]),
        (
            Layout(expert=3),
            ["n_routed_experts is 128, ep is 3; a multiple is needed, because a rank has whole experts"],
        ),
        (Layout(pipeline=53), ["pp is 53, the model has 52 layers"]),
    ],
)
def test_lightning_layouts_that_are_not(lightning, layout, parts):
    problems = "\n".join(layout_problems(lightning, layout))
    assert all(part in problems for part in parts)


def test_columns_that_cut_an_nvfp4_block(lightning):
    """Row-parallel weights are cut along the blocks: (columns / TP) must be a multiple of 16."""
    assert layout_problems(lightning, Layout(tensor=8)) == []
    narrow = dataclasses.replace(lightning, moe_shared_expert_intermediate_size=3712 - 64)
    problems = layout_problems(narrow, Layout(tensor=8))
    assert len(problems) == 1
    assert (
        "backbone.layers.1.mixer.shared_experts.down_proj.weight has 3648 columns, tp is 8: 456 a rank" in problems[0]
    )
    assert "a multiple of 16 is needed, because the NVFP4 blocks run along the columns" in problems[0]
    # The same width in BF16 cuts no block.
    plain = dataclasses.replace(narrow, quantization=QuantizationMap())
    assert layout_problems(plain, Layout(tensor=8)) == []
