# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math

import pytest
import torch

from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits
from vllm_forward_bridge.quantization import (
    Fp8Bytes,
    Nvfp4Bytes,
    bytes_digest,
    e4m3_scale,
    fp8_dequantize,
    fp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    requantize,
    requantize_f32,
    requantize_fp8,
    requantize_nvfp4,
)

RULES = pytest.mark.parametrize("four_over_six", [False, True])


def stack(seed, experts=3):
    weight = torch.randn(experts, 4, 64, generator=torch.Generator().manual_seed(seed))
    weight *= torch.tensor([1.0, 0.03, 7.0])[:experts, None, None]
    weight[0, 0, :16] = 0.0
    weight[0, 1, 0] = -1e-5
    return weight.bfloat16()


def assert_same_bytes(got, want):
    for name in ("codes", "block_scale", "global_scale"):
        assert_same_bits(getattr(got, name), getattr(want, name), name)


@RULES
def test_requantize_nvfp4_of_loaded_bytes_changes_no_byte(four_over_six):
    loaded = nvfp4_quantize(stack(1), four_over_six=four_over_six)
    # What a checkpoint may hold and no quantiser would write again: a code 8, an odd scale on a zero block, a large F.
    codes = loaded.codes.clone()
    codes[0, 0, :8] = 0x08
    scales = loaded.block_scale.view(torch.uint8).clone()
    scales[0, 0, 0] = 0x31
    loaded = Nvfp4Bytes(codes, scales.view(torch.float8_e4m3fn), loaded.global_scale * 1.7, torch.tensor([0.25] * 3))
    new, report = requantize_nvfp4(nvfp4_dequantize(loaded), loaded, four_over_six=four_over_six)
    assert_same_bytes(new, loaded)
    assert (report.changed_blocks, report.overflowed_blocks) == (0, 0)
    assert_same_bits(new.input_scale, loaded.input_scale, "input scale")
    assert not same_bits(nvfp4_quantize(nvfp4_dequantize(loaded), four_over_six=four_over_six).codes, codes)


@RULES
def test_requantize_nvfp4_touches_only_changed_blocks(four_over_six):
    old = nvfp4_quantize(stack(2), four_over_six=four_over_six)
    master = nvfp4_dequantize(old)
    master[1, 2, 35] += 0.01
    new, report = requantize_nvfp4(master, old, four_over_six=four_over_six)
    assert (report.changed_blocks, report.overflowed_blocks) == (1, 0)
    elsewhere = torch.ones(3, 4, 4, dtype=torch.bool)
    elsewhere[1, 2, 2] = False
    assert_same_bits(
        new.block_scale.view(torch.uint8)[elsewhere], old.block_scale.view(torch.uint8)[elsewhere], "scales"
    )
    blocks = [b.codes.unflatten(-1, (4, 8)) for b in (new, old)]
    assert_same_bits(blocks[0][elsewhere], blocks[1][elsewhere], "codes")
    assert_same_bits(new.global_scale, old.global_scale, "global scale")
    fresh = nvfp4_quantize(master, global_scale=old.global_scale, four_over_six=four_over_six)
    assert_same_bits(blocks[0][1, 2, 2], fresh.codes.unflatten(-1, (4, 8))[1, 2, 2], "codes of the changed block")
    again, report = requantize_nvfp4(master, new, four_over_six=four_over_six)
    assert_same_bytes(again, new)
    # The master keeps more bits than the codes, so the block still counts as changed; its bytes are a fixed point.
    assert report.changed_blocks == 1


@RULES
def test_requantize_nvfp4_after_an_update_of_everything_is_a_fixed_point(four_over_six):
    old = nvfp4_quantize(stack(3), four_over_six=four_over_six)
    noise = torch.randn(old.codes.shape[0], 4, 64, generator=torch.Generator().manual_seed(4)) * 0.003
    master = (nvfp4_dequantize(old).float() + noise).bfloat16()
    once, _ = requantize_nvfp4(master, old, four_over_six=four_over_six)
    twice, _ = requantize_nvfp4(master, once, four_over_six=four_over_six)
    assert_same_bytes(twice, once)
    assert not same_bits(once.codes, old.codes)


@RULES
def test_requantize_nvfp4_overflow_gives_one_matrix_a_new_scale(four_over_six):
    old = nvfp4_quantize(stack(5), four_over_six=four_over_six)
    master = nvfp4_dequantize(old)
    master[2, 3, 0] = master[2].abs().max() * 4
    new, report = requantize_nvfp4(master, old, four_over_six=four_over_six)
    assert report.overflowed_blocks == 1
    assert_same_bits(new.global_scale[:2], old.global_scale[:2], "scales of the other experts")
    fresh = nvfp4_quantize(master[2], four_over_six=four_over_six)
    assert_same_bits(new.global_scale[2], fresh.global_scale, "the new scale")
    assert_same_bits(new.codes[2], fresh.codes, "codes of the whole matrix")
    assert_same_bits(new.codes[:2], old.codes[:2], "codes of the other experts")
    again, report = requantize_nvfp4(master, new, four_over_six=four_over_six)
    assert_same_bytes(again, new)
    assert report.overflowed_blocks == 0


def test_requantize_nvfp4_growth_that_rounds_to_448_is_no_overflow():
    old = nvfp4_quantize(stack(6), four_over_six=False)
    master = nvfp4_dequantize(old)
    largest = master[0].abs().max()
    at = tuple((master[0].abs() == largest).nonzero()[0].tolist())
    for growth, overflows in ((1.03, 0), (1.05, 1)):
        grown = master.clone()
        grown[0][at] = grown[0][at] * growth
        new, report = requantize_nvfp4(grown, old, four_over_six=False)
        assert report.overflowed_blocks == overflows
        assert same_bits(new.global_scale, old.global_scale) == (not overflows)


@RULES
def test_requantize_nvfp4_shards_agree_with_the_whole(four_over_six):
    old = nvfp4_quantize(stack(7), four_over_six=four_over_six)
    master = nvfp4_dequantize(old)
    master[0, 3, 5] = 9.0
    whole, report = requantize_nvfp4(master, old, four_over_six=four_over_six)
    amax = master.float().abs().amax(dim=(1, 2))
    for rows in (slice(0, 2), slice(2, 4)):
        part = Nvfp4Bytes(old.codes[:, rows], old.block_scale[:, rows], old.global_scale)
        new, _ = requantize_nvfp4(master[:, rows], part, four_over_six=four_over_six, amax=amax)
        assert_same_bits(new.codes, whole.codes[:, rows], "codes of a shard")
        assert_same_bits(new.global_scale, whole.global_scale, "global scale of a shard")
    assert report.overflowed_blocks == 1


@RULES
@pytest.mark.parametrize("elements", [1, 256, 512])
def test_requantize_nvfp4_in_groups_gives_the_same_bytes(four_over_six, elements, monkeypatch):
    old = dataclasses.replace(nvfp4_quantize(stack(12), four_over_six=four_over_six), input_scale=torch.ones(3))
    master = nvfp4_dequantize(old)
    master[0, 0, 40] = 0.5
    master[2, 3, 5] = 90.0
    amax = master.float().abs().amax(dim=(1, 2))
    whole, report = requantize_nvfp4(master, old, four_over_six=four_over_six)
    monkeypatch.setattr(requantize, "GROUP_ELEMENTS", elements)
    for given_amax in (None, amax):
        parts, again = requantize_nvfp4(master, old, four_over_six=four_over_six, amax=given_amax)
        assert_same_bytes(parts, whole)
        assert_same_bits(parts.input_scale, old.input_scale, "input scale")
        assert again == report
    assert report.overflowed_blocks == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_requantize_refuses_nan_and_infinity(bad):
    old = nvfp4_quantize(stack(8), four_over_six=True)
    master = nvfp4_dequantize(old)
    master[1, 1, 1] = bad
    with pytest.raises(ValueError, match="1 of 768 elements are NaN or infinite; find the step"):
        requantize_nvfp4(master, old, four_over_six=True)
    scale = torch.tensor(0.01)
    stored = Fp8Bytes(fp8_quantize(master[0], scale), scale, scale)
    with pytest.raises(ValueError, match="1 of 256 are NaN or infinite"):
        requantize_fp8(master[1], stored)


def test_requantize_nvfp4_rejects_another_shape():
    old = nvfp4_quantize(stack(9), four_over_six=True)
    with pytest.raises(ValueError, match=r"master is torch.bfloat16 \(4, 64\).*bfloat16 \(3, 4, 64\) is needed"):
        requantize_nvfp4(stack(9)[0], old, four_over_six=True)


def test_requantize_fp8_keeps_unchanged_codes_and_counts_clipping():
    weight = stack(10)[0]
    scale = e4m3_scale(weight.abs().amax()) * 1.2
    codes = fp8_quantize(weight, scale)
    # Minus zero: its value is minus zero, so the master keeps the sign and the code stays.
    raw = codes.view(torch.uint8).clone()
    raw[0, 0] = 0x80
    old = Fp8Bytes(raw.view(torch.float8_e4m3fn), scale, torch.tensor([0.02]))
    master = fp8_dequantize(old.codes, scale)
    new, report = requantize_fp8(master, old)
    assert_same_bits(new.codes, old.codes, "codes of loaded bytes")
    assert (report.changed_blocks, report.overflowed_blocks) == (0, 0)
    master[1, 1] += 0.5
    master[2, 2] = 464.5 * scale.item()
    master[3, 3] = 1000 * scale.item()
    new, report = requantize_fp8(master, old)
    assert (report.changed_blocks, report.overflowed_blocks) == (3, 2 if master[2, 2].float() > 464 * scale else 1)
    assert (new.codes.view(torch.uint8) != raw).sum() == 3
    assert new.codes[3, 3].float() == 448
    assert_same_bits(new.weight_scale, scale, "scale")


def test_requantize_f32_keeps_source_values_under_unchanged_masters():
    source = torch.randn(4, 32, generator=torch.Generator().manual_seed(11))
    master = source.bfloat16()
    assert_same_bits(requantize_f32(master, source), source, "unchanged")
    master[2, 3] += 0.25
    new = requantize_f32(master, source)
    assert (new != source).sum() == 1
    assert new[2, 3] == master[2, 3].float()


def test_digest_sees_every_bit_and_no_order():
    tensors = {"a": torch.zeros(4), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.tensor(1.0)}
    want = bytes_digest(tensors.items())
    assert bytes_digest(reversed(tensors.items())) == want
    changes = [
        {"a": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {"b": torch.ones(4, dtype=torch.bfloat16)},
        {"c": torch.tensor([1.0])},
        {"b": torch.ones(2, 2, dtype=torch.bfloat16).view(torch.float16)},
    ]
    assert len({bytes_digest({**tensors, **change}.items()) for change in changes} | {want}) == len(changes) + 1
    large = torch.arange(3 << 20, dtype=torch.int32)
    want = bytes_digest([("large", large)])
    for place in (0, 1 << 18, (1 << 18) - 1, (3 << 20) - 1):
        other = large.clone()
        other[place] ^= 1 << 31
        assert bytes_digest([("large", other)]) != want
    swapped = large.clone()
    swapped[:2] = large[[1, 0]]
    assert bytes_digest([("large", swapped)]) != want
    odd = torch.arange(1001, dtype=torch.uint8)
    assert bytes_digest([("odd", odd[1:])]) == bytes_digest([("odd", odd[1:].clone())])
    assert bytes_digest([("empty", odd[:0])]) != bytes_digest([("empty", odd[:1])])
    assert bytes_digest([("b", tensors["a"])]) != bytes_digest([("a", tensors["a"])])
    with pytest.raises(ValueError, match="a comes twice"):
        bytes_digest([("a", tensors["a"]), ("a", tensors["a"])])
