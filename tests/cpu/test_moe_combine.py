# SPDX-License-Identifier: Apache-2.0
"""moe_combine on the CPU."""

import itertools

import pytest
import torch
from invariance import assert_gradcheck, assert_row_bits_ignore_batch, assert_within, bf16_step

from vllm_forward_bridge.ops import moe_combine
from vllm_forward_bridge.ops.moe_combine import moe_combine_gradients
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.moe_combine import moe_combine as plain

FACTOR = 2.5


def example(num_tokens=257, top_k=3, hidden=192):
    generator = torch.Generator().manual_seed(0)
    rows_TkH = torch.randn(num_tokens, top_k, hidden, generator=generator).bfloat16()
    shared_TH = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    return rows_TkH, torch.rand(num_tokens, top_k, generator=generator), shared_TH


def test_moe_combine_opcheck():
    rows_TkH, weights_Tk, shared_TH = (value.requires_grad_() for value in example(5, 3, 8))
    torch.library.opcheck(moe_combine, (rows_TkH, weights_Tk, FACTOR, shared_TH))
    torch.library.opcheck(moe_combine, (rows_TkH, weights_Tk, FACTOR, None))


def test_moe_combine_is_the_reference():
    rows_TkH, weights_Tk, shared_TH = example()
    for shared in (shared_TH, None):
        got = moe_combine(rows_TkH, weights_Tk, FACTOR, shared)
        assert_same_bits(got + 0.0, plain(rows_TkH, weights_Tk, FACTOR, shared) + 0.0, "all roundings in order")


def test_moe_combine_adds_in_slot_order():
    huge = 2.0**30
    for slots in set(itertools.permutations((huge, 1.0, -huge, 1.0))):
        rows_TkH = torch.tensor(slots).bfloat16().view(1, 4, 1)
        total = torch.zeros(())
        for slot in slots:
            total = total + slot
        got = moe_combine(rows_TkH, torch.ones(1, 4), 1.0)
        assert got.item() == total.item(), f"slots {slots} from left to right"
    probe = torch.tensor([huge, 1.0, -huge, 1.0]).bfloat16().view(1, 4, 1)
    assert moe_combine(probe, torch.ones(1, 4), 1.0).item() == 1.0


def test_moe_combine_rounds_each_product():
    weight = torch.tensor(1.0 + 2.0**-23)
    row = torch.tensor(1.0 + 2.0**-7)
    product = weight * row
    assert product.double() != weight.double() * row.double(), "this product does not round"
    rows_TkH = torch.stack((torch.tensor(-1.0), row)).bfloat16().view(1, 2, 1)
    got = moe_combine(rows_TkH, torch.stack((product, weight)).view(1, 2), 1.0)
    assert got.item() == 0.0, "a fused multiply-add would leave the rounding error"


def test_moe_combine_rounds_before_and_after_the_factor():
    rows_TkH, weights_Tk, shared_TH = example()
    fused = (rows_TkH.float() * weights_Tk[..., None]).sum(1) * FACTOR + shared_TH.float()
    assert (moe_combine(rows_TkH, weights_Tk, FACTOR, shared_TH) != fused.bfloat16()).float().mean() > 0.05


def test_moe_combine_row_bits_ignore_batch():
    def run(rows, weights, shared):
        return moe_combine(rows, weights, FACTOR, shared)

    assert_row_bits_ignore_batch(run, *example())


def test_moe_combine_backward_formula():
    rows_TkH, weights_Tk, _ = example(3, 2, 5)

    def forward(rows, weights):
        return plain(rows, weights, FACTOR)

    def gradients(grad, rows, weights):
        return moe_combine_gradients(grad, rows, weights, FACTOR)

    assert_gradcheck(forward, gradients, rows_TkH, weights_Tk)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_moe_combine_grads_close(needs):
    values = example(33)
    grad_TH = torch.randn(33, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = [value.double().requires_grad_() for value in values]
    want = torch.autograd.grad(plain(wide[0], wide[1], FACTOR, wide[2]), wide, grad_TH.double())
    for value, needed in zip(values, needs, strict=True):
        value.requires_grad_(bool(needed))
    moe_combine(values[0], values[1], FACTOR, values[2]).backward(grad_TH)
    # rows: two fp32 products and one rounding to bf16; weights: an fp32 sum of 192 terms; shared: the gradient itself.
    terms = (FACTOR * grad_TH.double()[:, None] * values[0].detach().double()).abs().sum(-1)
    bounds = (bf16_step(want[0]) / 2 + 2.0**-22 * want[0].abs(), 192 * 2.0**-24 * terms, torch.zeros(()))
    for value, gradient, bound in zip(values, want, bounds, strict=True):
        if value.requires_grad:
            assert_within(value.grad, gradient, bound, "gradient")
        else:
            assert value.grad is None


def test_moe_combine_grads_without_shared():
    rows_TkH, weights_Tk, _ = (value.requires_grad_() for value in example(3))
    moe_combine(rows_TkH, weights_Tk, FACTOR).float().sum().backward()
    assert rows_TkH.grad.any()
    assert weights_Tk.grad.any()


def test_moe_combine_rejects_wrong_tensors():
    rows_TkH, weights_Tk, shared_TH = example(4, 3, 8)
    with pytest.raises(ValueError, match="moe_combine cannot take this call") as error:
        moe_combine(rows_TkH.float(), weights_Tk[:, :2].contiguous(), FACTOR, shared_TH[:3])
    for part in ("rows_TkH is torch.float32", "k = 2, but k = 3 in rows_TkH", "T = 3, but T = 4 in rows_TkH"):
        assert part in str(error.value)
