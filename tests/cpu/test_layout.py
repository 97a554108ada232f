# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from vllm_forward_bridge.checkpoint.layout import Layout, layout_problems, parse_layout
from vllm_forward_bridge.checkpoint.released import released_config
from vllm_forward_bridge.model_config import parse_model_config
from vllm_forward_bridge.quantization_map import NVFP4_GROUP_SIZE


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


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 8, 4), Layout(2, 128, 52), Layout(1, 64, 2)])
def test_lightning_layouts_that_are_possible(lightning, layout):
    assert layout_problems(lightning, layout) == []


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(tensor=3), ["mamba_num_heads is 64, tp is 3", "n_groups is 8", "num_key_value_heads is 2, tp is 3"]),
        (Layout(tensor=16), ["n_groups is 8, tp is 16; a multiple is needed, because B and C are split by group"]),
        (
            Layout(tensor=4),
            ["num_key_value_heads is 2, tp is 4; a multiple is needed, because a rank has whole key/value"],
        ),
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


def test_columns_of_a_rank_need_not_be_whole_nvfp4_blocks(lightning):
    """Each rank has the whole bytes; only the master is split, and its columns have no blocks."""
    columns = 2 * 8 * 115
    assert columns // 2 % NVFP4_GROUP_SIZE != 0
    odd = dataclasses.replace(lightning, moe_shared_expert_intermediate_size=columns)
    assert layout_problems(odd, Layout(tensor=2)) == []
