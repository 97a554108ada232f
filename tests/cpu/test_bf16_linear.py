# SPDX-License-Identifier: Apache-2.0
"""bf16_linear on the CPU."""

import pytest
import torch
from invariance import (
    assert_gradcheck,
    assert_linear_grads_close,
    assert_row_bits_ignore_batch,
    assert_within,
    bf16_step,
)

from vllm_forward_bridge.ops import bf16_linear
from vllm_forward_bridge.ops.gradients import linear_gradients
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.bf16_linear import bf16_linear as plain


def example(num_tokens=257, num_in=192, num_out=160):
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(num_tokens, num_in, generator=generator)
    weight_NK = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
    return x_TK.bfloat16(), weight_NK.bfloat16()


def test_bf16_linear_opcheck():
    x_TK, weight_NK = example(5, 32, 7)
    torch.library.opcheck(bf16_linear, (x_TK.requires_grad_(), weight_NK.requires_grad_()))


def test_bf16_linear_backward_formula():
    def gradients(grad_y, x, weight):
        return linear_gradients(grad_y, x, weight, needs_x=True, needs_weight=True)

    x_TK, weight_NK = example(5, 8, 7)
    assert_gradcheck(plain, gradients, x_TK, weight_NK)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_bf16_linear_grads_close(needs):
    x_TK, weight_NK = example(33)
    assert_linear_grads_close(bf16_linear, x_TK, weight_NK, needs)


def test_bf16_linear_close_to_reference():
    x_TK, weight_NK = example()
    want = plain(x_TK.double(), weight_NK.double())
    # Fixed point drops at most 2^-20 of either row's largest for each of K terms; then one rounding to bf16.
    largest = x_TK.abs().amax(-1, keepdim=True).double() * weight_NK.abs().amax(-1).double()
    bound = bf16_step(want) / 2 + x_TK.shape[1] * 2.0**-19 * largest
    assert_within(bf16_linear(x_TK, weight_NK), want, bound, "product")


def test_bf16_linear_row_bits_ignore_batch():
    x_TK, weight_NK = example()
    assert_row_bits_ignore_batch(lambda x: bf16_linear(x, weight_NK), x_TK)


def test_bf16_linear_column_bits_ignore_shards():
    x_TK, weight_NK = example(3)
    whole = bf16_linear(x_TK, weight_NK)
    for shards in (2, 3, 5, 160):
        parts = [bf16_linear(x_TK, shard) for shard in weight_NK.chunk(shards)]
        assert_same_bits(torch.cat(parts, dim=1), whole, f"{shards} shards of the out features")


def test_bf16_linear_takes_no_rows():
    assert bf16_linear(torch.empty(0, 32, dtype=torch.bfloat16), example(1, 32, 7)[1]).shape == (0, 7)


def test_bf16_linear_rejects_wrong_tensors():
    x_TK, weight_NK = example(4, 32, 8)
    with pytest.raises(ValueError, match="x_TK is torch.float32; torch.bfloat16 is accepted") as error:
        bf16_linear(x_TK.float(), weight_NK[:, ::2])
    assert "weight_NK has strides (32, 2)" in str(error.value)
    assert "K = 16, but K = 32 in x_TK" in str(error.value)
    with pytest.raises(ValueError, match=r"x_TK has shape \[1, 4, 32\]; \[T, K\] is accepted: reshape"):
        bf16_linear(x_TK[None], weight_NK)
