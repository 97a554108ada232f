# SPDX-License-Identifier: Apache-2.0
"""router on the CPU."""

import pytest
import torch
from invariance import assert_gradcheck, assert_row_bits_ignore_batch, assert_within, bf16_step

from vllm_forward_bridge.ops import exact, router
from vllm_forward_bridge.ops.router import chosen_logit_gradients
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference.router import router as plain


def example(num_tokens=257, hidden=192, num_experts=8):
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    weight_EH = (torch.randn(num_experts, hidden, generator=generator) / hidden**0.5).bfloat16()
    return x_TH, weight_EH, torch.randn(num_experts, generator=generator) / 10


def test_router_opcheck():
    x_TH, weight_EH, bias_E = example(5, 16)
    arguments = (x_TH.requires_grad_(), weight_EH.requires_grad_(), bias_E, 3)
    torch.library.opcheck(torch.ops.vllm_forward_bridge.router.default, arguments)


def test_router_close_to_reference():
    x_TH, weight_EH, bias_E = example()
    weights_Tk, ids_Tk = router(x_TH, weight_EH, bias_E, 3)
    want_Tk, want_ids_Tk = plain(x_TH.double(), weight_EH.double(), bias_E.double(), 3)
    assert torch.equal(ids_Tk, want_ids_Tk), "no near tie in this example, so the choice is certain"
    # Logits near 1 with fp32 accuracy (fixed point: 192 terms of at most 2^-19 of the largest), then fp32 steps.
    assert_within(weights_Tk, want_Tk, torch.tensor(192 * 2.0**-19), "weights")
    assert ((weights_Tk.sum(-1) - 1).abs() < 1e-6).all()


def test_router_ties_go_to_the_smaller_id():
    x_TH = torch.zeros(3, 16, dtype=torch.bfloat16)
    weight_EH = example(1, 16, 64)[1]
    weights_Tk, ids_Tk = router(x_TH, weight_EH, torch.zeros(64), 5)
    assert ids_Tk.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert_same_bits(weights_Tk, torch.full((3, 5), 0.5) / 2.5, "equal weights")
    bias_E = torch.zeros(64)
    bias_E[[60, 7, 33]] = 1.0
    assert router(x_TH, weight_EH, bias_E, 5)[1].tolist() == [[7, 33, 60, 0, 1]] * 3
    bias_E[::2] = -0.0
    assert router(x_TH, weight_EH, torch.where(bias_E == 0, bias_E, 0.0), 3)[1].tolist() == [[0, 1, 2]] * 3


def test_router_bias_chooses_but_does_not_weigh():
    x_TH, weight_EH, bias_E = example(9)
    bias_E[5] = 100.0
    weights_Tk, ids_Tk = router(x_TH, weight_EH, bias_E, 3)
    assert (ids_Tk[:, 0] == 5).all()
    scores_Tk = exact.sigmoid(exact.matmul(x_TH, weight_EH).float()).gather(-1, ids_Tk)
    total_T = (scores_Tk[:, 0] + scores_Tk[:, 1]) + scores_Tk[:, 2]
    assert_same_bits(weights_Tk, scores_Tk / total_T[:, None], "scores over their sum in slot order")


def test_router_sums_in_slot_order():
    # One large score, then three of 0.4 of its step: each is lost by itself, together they would not be.
    large, small = 0.75, 0.4 * 2.0**-24
    logits_E = torch.logit(torch.tensor([large, small, small, small], dtype=torch.float64))
    x_TH = torch.ones(1, 1, dtype=torch.bfloat16)
    weight_EH = logits_E.bfloat16()[:, None]
    scores_E = exact.sigmoid(weight_EH.float().squeeze(-1))
    in_order = ((scores_E[0] + scores_E[1]) + scores_E[2]) + scores_E[3]
    assert in_order != scores_E[0] + ((scores_E[1] + scores_E[2]) + scores_E[3]), "this probe shows no order"
    weights_Tk, ids_Tk = router(x_TH, weight_EH, torch.zeros(4), 4)
    assert ids_Tk.tolist() == [[0, 1, 2, 3]]
    assert_same_bits(weights_Tk[0], scores_E / in_order, "the sum runs over the slots")


def test_router_row_bits_ignore_batch():
    x_TH, weight_EH, bias_E = example()
    assert_row_bits_ignore_batch(lambda x: router(x, weight_EH, bias_E, 3), x_TH)


def test_router_backward_formula():
    def forward(logits_Tk):
        scores_Tk = torch.sigmoid(logits_Tk)
        return scores_Tk / scores_Tk.sum(-1, keepdim=True)

    def gradients(grad_Tk, logits_Tk):
        return chosen_logit_gradients(grad_Tk, forward(logits_Tk), torch.sigmoid(logits_Tk))

    assert_gradcheck(forward, gradients, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_router_grads_close(needs):
    x_TH, weight_EH, bias_E = example(33)
    grad_Tk = torch.randn(33, 3, generator=torch.Generator().manual_seed(1))
    wide = [value.double().requires_grad_() for value in (x_TH, weight_EH)]
    want = torch.autograd.grad(plain(*wide, bias_E, 3)[0], wide, grad_Tk.double())
    values = x_TH.requires_grad_(needs[0]), weight_EH.requires_grad_(needs[1])
    weights_Tk, ids_Tk = router(*values, bias_E.requires_grad_(), 3)
    assert not ids_Tk.requires_grad
    weights_Tk.backward(grad_Tk)
    assert bias_E.grad is None
    for value, gradient in zip(values, want, strict=True):
        if value.requires_grad:
            # fp32 scores and sums over at most 33 terms of the size of the largest gradient; then one rounding to bf16.
            bound = bf16_step(gradient) / 2 + 33 * 2.0**-20 * gradient.abs().max()
            assert_within(value.grad, gradient, bound, "gradient")
        else:
            assert value.grad is None


def test_router_rejects_wrong_arguments():
    x_TH, weight_EH, bias_E = example(4, 16)
    with pytest.raises(ValueError, match="router cannot take this call") as error:
        router(x_TH, weight_EH.float(), bias_E.bfloat16(), 9)
    for part in ("top_k is 9; 1 to 8", "weight_EH is torch.float32", "expert_bias_E is torch.bfloat16"):
        assert part in str(error.value)
