# SPDX-License-Identifier: Apache-2.0
"""A column of a product ignores the other columns: a cut weight gives the same columns, as tensor parallelism needs."""

import pytest
from row_cases import CASES, normal, nvfp4_bytes
from shapes import HIDDEN, SHARED_WIDTH

from vllm_forward_bridge import ops
from vllm_forward_bridge.ops.operands import nvfp4_operands
from vllm_forward_bridge.parity.bits import assert_same_bits

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize(
    ("whole", "cut"),
    [
        ("bf16_linear[4096x2688]", lambda w: (w[0][:2048],)),
        ("fp8_linear[10304x2688]", lambda w: (w[0][:5152], *w[1:])),
        ("fp8_linear[2688x4096]", lambda w: (w[0][:1344], *w[1:])),
    ],
)
def test_column_ignores_others(whole, cut, rows):
    case = BY_NAME[whole]
    weights, inputs = case.weights(), case.rows(rows)
    part = case.call(cut(weights), inputs)[0]
    assert_same_bits(part, case.call(weights, inputs)[0][:, : part.shape[1]], whole)


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("part", [1792, 1856])
def test_packed_column_ignores_others(rows, part):
    codes, scales, global_scale = nvfp4_bytes(SHARED_WIDTH, HIDDEN)
    x = normal(rows, HIDDEN, seed=1)
    whole = ops.nvfp4_linear(x, *nvfp4_operands(codes, scales), global_scale, None, SHARED_WIDTH)
    cut = ops.nvfp4_linear(x, *nvfp4_operands(codes[:part], scales[:part]), global_scale, None, part)
    assert_same_bits(cut, whole[:, :part], f"the first {part} of {SHARED_WIDTH} columns")
