# SPDX-License-Identifier: Apache-2.0
"""fp8_linear on the CPU."""

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

from vllm_forward_bridge.ops import fp8_linear
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization.fp8 import fp8_quantize
from vllm_forward_bridge.reference.fp8_linear import fp8_linear as plain

# The schema test compares inputs with torch.allclose, which has no float8; `assert_inputs_unchanged` does its work.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def example(num_tokens=257, num_in=192, num_out=160):
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(num_tokens, num_in, generator=generator).bfloat16()
    weight_NK = (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).bfloat16()
    weight_scale, input_scale = torch.tensor(0.00123), torch.tensor([0.0071])
    return x_TK, fp8_quantize(weight_NK, weight_scale), weight_scale, input_scale, weight_NK


def test_fp8_linear_opcheck():
    x_TK, *quantised, weight_NK = example(5, 32, 7)
    arguments = (x_TK.requires_grad_(), *quantised, weight_NK.requires_grad_())
    torch.library.opcheck(fp8_linear, arguments, test_utils=OPCHECKS)
    assert_inputs_unchanged(fp8_linear, *example(5, 32, 7))


def test_fp8_linear_close_to_reference():
    x_TK, codes_NK, weight_scale, input_scale, _ = example()
    want = plain(x_TK, codes_NK, weight_scale, input_scale)
    # Same codes; the reference's fp32 sum may round another way at each of K terms, and so cross one bf16 step.
    scale = (input_scale * weight_scale).double()
    terms = (x_TK.float() / input_scale).clamp(-448, 448).to(
        torch.float8_e4m3fn
    ).double().abs() @ codes_NK.double().abs().T
    bound = bf16_step(want) + x_TK.shape[1] * 2.0**-24 * terms * scale
    assert_within(fp8_linear(*example()[:4]), want, bound, "product")


def test_fp8_linear_multiplies_by_the_reciprocal_and_saturates():
    codes_NK = torch.eye(16).to(torch.float8_e4m3fn)
    # Every bf16 number from 2^-8 to 2^8, both signs; with this scale 19 of them tell a division from a product.
    x_TK = torch.arange(119 << 7, 135 << 7, dtype=torch.int16).view(torch.bfloat16)
    x_TK = torch.cat((x_TK, -x_TK)).view(-1, 16)
    scale = torch.tensor(7 / 256)
    want = (x_TK.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    divided = (x_TK.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    got = fp8_linear(x_TK, codes_NK, torch.tensor(1.0), scale)
    assert_same_bits(got, (want * scale).bfloat16(), "codes of x / scale by way of the reciprocal")
    assert want.abs().max() == 448
    assert (want != divided).any()


def test_fp8_linear_scalars_may_have_one_dim():
    x_TK, codes_NK, weight_scale, input_scale, _ = example(3)
    got = fp8_linear(x_TK, codes_NK, weight_scale.view(1), input_scale.view(()))
    assert_same_bits(got, fp8_linear(x_TK, codes_NK, weight_scale, input_scale), "scalars [] and [1]")


def test_fp8_linear_row_bits_ignore_batch():
    x_TK, *quantised, _ = example()
    assert_row_bits_ignore_batch(lambda x: fp8_linear(x, *quantised), x_TK)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_fp8_linear_grads_close(needs):
    x_TK, *quantised, weight_NK = example(33)
    assert_linear_grads_close(lambda x, weight: fp8_linear(x, *quantised, weight), x_TK, weight_NK, needs)


def test_fp8_linear_master_serves_the_backward_alone():
    x_TK, *quantised, weight_NK = example(3)
    assert_master_serves_the_backward_alone(
        lambda x, weight: fp8_linear(x, *quantised, weight), x_TK, weight_NK, "fp8_linear"
    )


def test_fp8_linear_rejects_wrong_tensors():
    x_TK, codes_NK, weight_scale, input_scale, weight_NK = example(4, 32, 8)
    with pytest.raises(ValueError, match="codes_NK is torch.uint8; torch.float8_e4m3fn is accepted") as error:
        fp8_linear(x_TK, codes_NK.view(torch.uint8), weight_scale.double(), input_scale.expand(2), weight_NK[:5])
    for part in (
        "weight_scale is torch.float64",
        "input_scale has shape [2]; [] or [1]",
        "N = 5, but N = 8 in codes_NK",
    ):
        assert part in str(error.value)
