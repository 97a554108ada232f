# SPDX-License-Identifier: Apache-2.0
"""nvfp4_linear on the CPU."""

import pytest
import torch
from invariance import (
    assert_inputs_unchanged,
    assert_linear_grads_close,
    assert_master_serves_the_backward_alone,
    assert_row_bits_ignore_batch,
    assert_within,
    bf16_step,
)

from vllm_forward_bridge.ops import nvfp4_decode, nvfp4_linear
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization.nvfp4 import Nvfp4Bytes, nvfp4_dequantize, nvfp4_quantize
from vllm_forward_bridge.reference.nvfp4_linear import dequantised

# The schema test compares inputs with torch.allclose, which has no float8; `assert_inputs_unchanged` does its work.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def example(num_tokens=257, num_in=192, num_out=160):
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(num_tokens, num_in, generator=generator).bfloat16()
    weight_NK = (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).bfloat16()
    stored = nvfp4_quantize(weight_NK, four_over_six=True)
    return x_TK, stored.codes, stored.block_scale, stored.global_scale, weight_NK


def test_nvfp4_linear_opcheck():
    x_TK, *quantised, weight_NK = example(5, 32, 7)
    arguments = (x_TK.requires_grad_(), *quantised, weight_NK.requires_grad_())
    torch.library.opcheck(nvfp4_linear, arguments, test_utils=OPCHECKS)
    assert_inputs_unchanged(nvfp4_linear, *example(5, 32, 7))


def test_nvfp4_linear_decodes_every_byte_under_every_scale():
    # Row = scale byte, columns = all 256 code bytes; the two NaN scales are left out.
    scale = torch.arange(256, dtype=torch.uint8)
    scale = scale[(scale & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    codes = torch.arange(256, dtype=torch.uint8).expand(len(scale), -1).contiguous()
    block_scale = scale[:, None].expand(-1, 32).contiguous()
    got = nvfp4_decode.decoded_integers(codes, block_scale)
    assert_same_bits(got, got.round(), "whole numbers")
    assert got.abs().max() == nvfp4_decode.LARGEST
    one = torch.tensor(1.0)
    want = dequantised(codes, block_scale, one)
    assert_same_bits((got * nvfp4_decode.UNIT).float() + 0.0, want + 0.0, "as the reference decodes")
    stored = nvfp4_dequantize(Nvfp4Bytes(codes, block_scale, one), torch.float32)
    assert_same_bits(stored + 0.0, want + 0.0, "as the checkpoint's format decodes")


def test_nvfp4_linear_reads_code_8_as_zero():
    x_TK = torch.ones(3, 16, dtype=torch.bfloat16)
    codes_NB = torch.full((2, 8), 0x88, dtype=torch.uint8)
    y_TN = nvfp4_linear(x_TK, codes_NB, torch.ones(2, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))
    assert_same_bits(y_TN, torch.zeros(3, 2, dtype=torch.bfloat16), "a weight of minus zeros")


def test_nvfp4_linear_close_to_reference():
    x_TK, codes_NB, block_scale_NB, global_scale, _ = example()
    weight_NK = dequantised(codes_NB, block_scale_NB, global_scale).double()
    want = x_TK.double() @ weight_NK.T
    # Fixed point drops at most 2^-20 of the activation row's largest a term; the decoded weight is exact up to the fp32
    # rounding of the reference's own product with the global scale (2^-24); then one rounding to bf16.
    terms = x_TK.abs().amax(-1, keepdim=True).double() * weight_NK.abs().sum(-1)
    assert_within(nvfp4_linear(*example()[:4]), want, bf16_step(want) / 2 + 2.0**-19 * terms, "product")


def test_nvfp4_linear_is_exact_at_the_largest_sum():
    num_in = nvfp4_decode.MAX_FEATURES
    x_TK = torch.full((1, num_in), 2.0 - 2.0**-7, dtype=torch.bfloat16)
    integers = nvfp4_decode.decoded_integers(
        torch.full((1, num_in // 2), 0x77, dtype=torch.uint8),
        torch.full((1, num_in // 16), 448.0).to(torch.float8_e4m3fn),
    )
    assert integers.sum() * 2.0 ** nvfp4_decode.activation_bits(num_in) <= 2.0**53
    y_TN = nvfp4_linear(
        x_TK, torch.full((1, num_in // 2), 0x77, dtype=torch.uint8),
        torch.full((1, num_in // 16), 448.0).to(torch.float8_e4m3fn), torch.tensor(1.0),
    )  # fmt: skip
    assert y_TN.item() == torch.tensor(num_in * 2688 * (2.0 - 2.0**-7)).bfloat16().item()


def test_nvfp4_linear_row_bits_ignore_batch():
    x_TK, *quantised, _ = example()
    assert_row_bits_ignore_batch(lambda x: nvfp4_linear(x, *quantised), x_TK)


def test_nvfp4_linear_column_bits_ignore_shards():
    x_TK, codes_NB, block_scale_NB, global_scale, _ = example(3)
    whole = nvfp4_linear(x_TK, codes_NB, block_scale_NB, global_scale)
    for shards in (2, 5, 160):
        pairs = zip(codes_NB.chunk(shards), block_scale_NB.chunk(shards), strict=True)
        parts = [nvfp4_linear(x_TK, codes, scale, global_scale) for codes, scale in pairs]
        assert_same_bits(torch.cat(parts, dim=1), whole, f"{shards} shards of the out features")


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_nvfp4_linear_grads_close(needs):
    x_TK, *quantised, weight_NK = example(33)
    assert_linear_grads_close(lambda x, weight: nvfp4_linear(x, *quantised, weight), x_TK, weight_NK, needs)


def test_nvfp4_linear_master_serves_the_backward_alone():
    x_TK, *quantised, weight_NK = example(3)
    assert_master_serves_the_backward_alone(
        lambda x, weight: nvfp4_linear(x, *quantised, weight), x_TK, weight_NK, "nvfp4_linear"
    )


def test_nvfp4_linear_rejects_wrong_tensors():
    x_TK, codes_NB, block_scale_NB, global_scale, _ = example(4, 32, 8)
    with pytest.raises(ValueError, match="K = 24; a multiple of 16") as error:
        nvfp4_linear(x_TK[:, :24].contiguous(), codes_NB, block_scale_NB.view(torch.uint8), global_scale.view(1, 1))
    for part in ("K = 32, but K = 24 in x_TK", "block_scale_NB is torch.uint8", "global_scale has shape [1, 1]"):
        assert part in str(error.value)
