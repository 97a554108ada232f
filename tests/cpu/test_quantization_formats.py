# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_formats import E4M3, FP4, e4m3_code, e4m3_value, fp4_code, nvfp4_block

from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import (
    Nvfp4Bytes,
    e4m3_scale,
    fp8_dequantize,
    fp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    pack_codes,
    unpack_codes,
)
from vllm_forward_bridge.quantization.nvfp4 import round_to_codes

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_e4m3_every_code_reads_as_its_bits_say():
    want = torch.tensor([e4m3_value(code) for code in range(256)])
    got = ALL_CODES.view(torch.float8_e4m3fn).float()
    nan = want.isnan()
    assert nan.sum() == 2
    assert_same_bits(got[~nan], want[~nan], "e4m3 values")
    assert got[nan].isnan().all()


def test_fp8_quantize_gives_every_code_back():
    codes = ALL_CODES[(ALL_CODES & 127) != 127].view(1, -1)
    weight = codes.view(torch.float8_e4m3fn).float()
    assert_same_bits(fp8_quantize(weight, torch.tensor(1.0)).view(torch.uint8), codes, "codes of their own values")


def test_fp8_quantize_rounds_as_the_definition():
    # Every midpoint between neighbours, and one fp32 step to either side of it.
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E4M3)] + [455.0, 463.0, 464.0, 1e6])
    up, down = (torch.nextafter(middles, torch.full_like(middles, to)) for to in (math.inf, 0.0))
    values = torch.cat((middles, up, down, -middles, -up)).view(1, -1)
    want = torch.tensor([[e4m3_code(v) for v in values[0].tolist()]], dtype=torch.uint8)
    assert_same_bits(fp8_quantize(values, torch.tensor(1.0)).view(torch.uint8), want, "rounded codes")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_scale_may_have_rank_zero_or_one(shape):
    weight = torch.randn(8, 32, generator=generator(1)).bfloat16()
    scale = e4m3_scale(weight.abs().amax()).reshape(shape)
    codes = fp8_quantize(weight, scale)
    want = torch.tensor(
        [[e4m3_code(float(np.float32(w) / np.float32(scale.item()))) for w in row] for row in weight.float().tolist()],
        dtype=torch.uint8,
    )
    assert_same_bits(codes.view(torch.uint8), want, "codes")
    value = torch.tensor([[e4m3_value(c) for c in row] for row in want.tolist()]) * scale.item()
    assert_same_bits(fp8_dequantize(codes, scale, torch.float32), value, "values")


def test_pack_puts_the_first_element_into_the_low_nibble():
    pairs = torch.tensor(list(itertools.product(range(16), range(16))), dtype=torch.uint8)
    packed = pack_codes(pairs)
    assert packed.flatten().tolist() == [low + 16 * high for low, high in pairs.tolist()]
    assert_same_bits(unpack_codes(packed), pairs, "unpacked pairs")


def test_round_to_codes_at_every_bound_and_beside_it():
    bounds = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(FP4)] + [0.0, 6.0, 7.0, 1e9, 1e-30])
    beside = torch.cat((torch.nextafter(bounds, torch.tensor(0.0)), torch.nextafter(bounds, torch.tensor(math.inf))))
    values = torch.cat((bounds, beside, -bounds, -beside))
    want = torch.tensor([fp4_code(v) for v in values.tolist()], dtype=torch.uint8)
    assert_same_bits(round_to_codes(values), want, "codes")
    assert round_to_codes(torch.tensor([-1e-30])).item() == 8


def test_dequantize_every_code_with_every_valid_scale():
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).view(127, 1)
    codes = pack_codes(torch.arange(16, dtype=torch.uint8)).expand(127, 8).contiguous()
    global_scale = torch.tensor(8.6e-5)
    got = nvfp4_dequantize(Nvfp4Bytes(codes, scales, global_scale), torch.float32)
    # The product of code and block scale is exact in fp32, so one rounding remains, which numpy repeats.
    signed = [size * sign for sign in (1, -1) for size in FP4]
    want = [
        [np.float32(np.float32(e4m3_value(s) * v) * np.float32(global_scale.item())) for v in signed]
        for s in range(127)
    ]
    # Code 8 and anything times scale 0 is plus zero, as in ModelOpt's table.
    want = torch.from_numpy(np.array(want)) + 0.0
    zero_scale = got[0] == 0
    assert zero_scale.all()
    assert_same_bits(got[1:], want[1:], "dequantised values")
    assert not torch.signbit(got[1:, 8]).any()


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("calibrated", [False, True])
def test_nvfp4_quantize_equals_the_slow_reference(four_over_six, calibrated):
    weight = torch.randn(6, 64, generator=generator(2)).bfloat16()
    weight[0, :16] = 0.0
    weight[1, 3] = -1e-4
    weight[2, 16:32] *= 2.0**-12
    amax = np.float32(weight.float().abs().max().item())
    derived = amax / np.float32(6 * (256 if four_over_six else 448))
    global_scale = np.float32(derived * np.float32(1.37)) if calibrated else derived
    given = torch.tensor(global_scale) if calibrated else None
    stored = nvfp4_quantize(weight, global_scale=given, four_over_six=four_over_six)
    assert stored.global_scale.item() == float(global_scale)
    codes, scales = unpack_codes(stored.codes), stored.block_scale.view(torch.uint8)
    chosen = set()
    for row, column in itertools.product(range(6), range(4)):
        block = weight[row, column * 16 : column * 16 + 16].float().tolist()
        scale, want, errors = nvfp4_block(block, global_scale, four_over_six)
        if len(errors) == 2 and errors[0] != errors[1]:
            # A tie within the rounding of sixteen fp32 squares and adds may fall either way; none is in this data.
            assert abs(errors[0] - errors[1]) > 32 * 2.0**-24 * max(errors)
            chosen.add(errors[1] < errors[0])
        assert scales[row, column].item() == scale, (row, column)
        assert codes[row, column * 16 : column * 16 + 16].tolist() == want, (row, column)
    assert chosen == ({False, True} if four_over_six else set())
    assert codes[0, :16].tolist() == [0] * 16
    assert codes[1, 3] == 8


def test_nvfp4_stack_equals_its_members():
    weight = torch.randn(3, 4, 32, generator=generator(3)) * torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
    stack = nvfp4_quantize(weight.bfloat16(), four_over_six=True)
    for expert in range(3):
        alone = nvfp4_quantize(weight[expert].bfloat16(), four_over_six=True)
        assert_same_bits(stack.codes[expert], alone.codes, "codes")
        assert_same_bits(stack.block_scale[expert], alone.block_scale, "block scales")
        assert_same_bits(stack.global_scale[expert], alone.global_scale, "global scale")
        assert_same_bits(nvfp4_dequantize(stack)[expert], nvfp4_dequantize(alone), "values")


def test_nvfp4_all_zero_matrix_has_only_zeros():
    for four_over_six in (False, True):
        stored = nvfp4_quantize(torch.zeros(2, 32, dtype=torch.bfloat16), four_over_six=four_over_six)
        assert stored.codes.sum() == 0
        assert nvfp4_dequantize(stored, torch.float32).abs().sum() == 0
        assert stored.block_scale.float().isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-64, 64, width=32), min_size=32, max_size=32), st.booleans())
def test_nvfp4_error_is_bounded_by_half_a_step(values, four_over_six):
    weight = torch.tensor(values).view(1, 32)
    stored = nvfp4_quantize(weight, four_over_six=four_over_six)
    steps = stored.block_scale.float() * stored.global_scale
    amax = weight.unflatten(-1, (2, 16)).abs().amax(-1)
    # The largest gap between codes is 2 steps, half of it 1; what exceeds code 6 (the scale rounded down to e4m3, at
    # most by a sixteenth, or was clamped) is clipped by amax - 6 steps. fp32 rounds a few times on the way.
    bound = torch.maximum(steps, amax - 6 * steps) * (1 + 2.0**-20) + 1e-37
    error = (nvfp4_dequantize(stored, torch.float32) - weight).abs().unflatten(-1, (2, 16)).amax(-1)
    assert (error <= bound).all()


@pytest.mark.parametrize(
    ("weight", "parts"),
    [
        (torch.tensor([[math.nan] * 16]), ["16 of 16", "find the step"]),
        (torch.zeros(2, 24), ["(2, 24)", "multiple of 16"]),
        (torch.zeros(2, 16, dtype=torch.float16), ["torch.float16", "bfloat16 or float32"]),
    ],
)
def test_nvfp4_quantize_rejects(weight, parts):
    with pytest.raises(ValueError) as error:
        nvfp4_quantize(weight, four_over_six=False)
    assert all(part in str(error.value) for part in parts)


def test_fp8_quantize_rejects_nan_and_zero_scale():
    with pytest.raises(ValueError, match="1 of 4 are NaN"):
        fp8_quantize(torch.tensor([[1.0, math.inf], [0.0, 0.0]]), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"weight_scale is 0\.0; it must be positive"):
        fp8_quantize(torch.ones(2, 2), torch.tensor(0.0))
