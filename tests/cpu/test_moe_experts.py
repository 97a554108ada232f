# SPDX-License-Identifier: Apache-2.0
"""moe_experts on the CPU."""

import pytest
import torch
from invariance import assert_gradcheck, assert_inputs_unchanged, assert_row_bits_ignore_batch, assert_within

from vllm_forward_bridge.ops import moe_experts, nvfp4_linear, relu_squared
from vllm_forward_bridge.ops.moe_experts import moe_experts_gradients
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization.nvfp4 import nvfp4_dequantize, nvfp4_quantize
from vllm_forward_bridge.reference.moe_experts import moe_experts as plain

E, H, F, K = 8, 192, 128, 3
# The schema test compares inputs with torch.allclose, which has no float8; `assert_inputs_unchanged` does its work.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def weights(num_experts=E, hidden=H, width=F):
    """Return (bytes of both GEMMs, bf16 masters equal to the dequantised bytes)."""
    generator = torch.Generator().manual_seed(0)
    stored = []
    for out, num_in in ((width, hidden), (hidden, width)):
        weight = torch.randn(num_experts, out, num_in, generator=generator) / num_in**0.5
        # A power of two for each expert, so that bf16 holds the dequantised weight exactly.
        scale = 2.0 ** (torch.arange(num_experts) % 3 - 12.0)
        stored.append(nvfp4_quantize(weight, global_scale=scale, four_over_six=False))
    packed = [value for part in stored for value in (part.codes, part.block_scale, part.global_scale)]
    masters = [nvfp4_dequantize(part, torch.bfloat16) for part in stored]
    for part, master in zip(stored, masters, strict=True):
        assert torch.equal(nvfp4_dequantize(part, torch.float32), master.float())
    return packed, masters


def tokens(num_tokens=257, num_experts=E, hidden=H):
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    ids_Tk = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)[:, :K].contiguous()
    ids_Tk[torch.rand(num_tokens, K, generator=generator) < 0.1] = -1
    return x_TH, ids_Tk


def test_moe_experts_opcheck():
    packed, masters = weights(4, 32, 16)
    x_TH, ids_Tk = tokens(5, 4, 32)
    op = torch.ops.vllm_forward_bridge.moe_experts.default
    torch.library.opcheck(
        op, (x_TH.requires_grad_(), ids_Tk, *packed, *(m.requires_grad_() for m in masters)), test_utils=OPCHECKS
    )
    torch.library.opcheck(op, (x_TH.detach(), ids_Tk, *packed, None, None), test_utils=OPCHECKS)
    assert_inputs_unchanged(moe_experts, x_TH.detach(), ids_Tk, *packed)
    grad_TkH, first_TkF = torch.ones(5, K, 32).bfloat16(), torch.ones(5, K, 16).bfloat16()
    values = [value.detach() for value in (grad_TkH, x_TH, ids_Tk, first_TkF, *masters)]
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(moe_experts_gradients, (*values, needs))


def test_moe_experts_rows_are_two_nvfp4_linears():
    (codes1, scale1, global1, codes2, scale2, global2), _ = weights()
    x_TH, ids_Tk = tokens(33)
    rows_TkH = moe_experts(x_TH, ids_Tk, codes1, scale1, global1, codes2, scale2, global2)
    for token, slot in torch.cartesian_prod(torch.arange(33), torch.arange(K)).tolist():
        expert = int(ids_Tk[token, slot])
        want = torch.zeros(1, H, dtype=torch.bfloat16)
        if expert >= 0:
            first = nvfp4_linear(x_TH[token : token + 1], codes1[expert], scale1[expert], global1[expert])
            want = nvfp4_linear(relu_squared(first), codes2[expert], scale2[expert], global2[expert])
        assert_same_bits(rows_TkH[token, slot], want[0], f"token {token}, slot {slot}, expert {expert}")
    assert (ids_Tk < 0).any()


def test_moe_experts_close_to_reference():
    packed, masters = weights()
    x_TH, ids_Tk = tokens(33)
    want = plain(x_TH, ids_Tk, *masters)
    # An fp32-sized difference may turn any of three bf16 roundings the other way: by 2^-8 of the first product, which
    # squaring doubles, by 2^-8 of the square and by 2^-8 of the result; no more than that of the sum of magnitudes.
    sizes = plain(x_TH.abs(), ids_Tk, *(master.abs() for master in masters)).double()
    got = moe_experts(x_TH, ids_Tk, *packed)
    assert_within(got, want, 4 * 2.0**-8 * sizes, "rows")
    assert (got != want).float().mean() < 0.01, "they turn seldom"


def test_moe_experts_row_bits_ignore_batch():
    packed, _ = weights()
    assert_row_bits_ignore_batch(lambda x, ids: moe_experts(x, ids, *packed), *tokens())


def test_moe_experts_bits_ignore_how_experts_are_spread():
    packed, _ = weights()
    x_TH, ids_Tk = tokens(65)
    whole = moe_experts(x_TH, ids_Tk, *packed)
    for ranks in (2, 4, 8):
        total = torch.zeros_like(whole)
        for rank, shard in enumerate(zip(*(value.chunk(ranks) for value in packed), strict=True)):
            local_Tk = ids_Tk - rank * (E // ranks)
            here_Tk = (local_Tk >= 0) & (local_Tk < E // ranks) & (ids_Tk >= 0)
            rows = moe_experts(x_TH, torch.where(here_Tk, local_Tk, -1), *(value.contiguous() for value in shard))
            total = torch.where(here_Tk[..., None], rows, total)
            assert not rows[~here_Tk].any()
        assert_same_bits(total, whole, f"experts on {ranks} ranks")


def test_moe_experts_large_weights_are_decoded_in_parts():
    generator = torch.Generator().manual_seed(2)
    experts, hidden, width = 3, 2048, 1024  # two experts of this size fit into one decoding, three do not
    packed = []
    for out, num_in in ((width, hidden), (hidden, width)):
        packed += [
            torch.randint(0, 256, (experts, out, num_in // 2), dtype=torch.uint8, generator=generator),
            torch.rand(experts, out, num_in // 16, generator=generator).to(torch.float8_e4m3fn),
            torch.tensor([0.001, 0.002, 0.003]),
        ]
    x_TH = torch.randn(3, hidden, generator=generator).bfloat16()
    ids_Tk = torch.tensor([[0, 2, 1], [1, -1, 2], [2, 1, 0]])
    whole = moe_experts(x_TH, ids_Tk, *packed)
    for expert in range(experts):
        one_Tk = torch.where(ids_Tk == expert, expert, -1)
        rows = moe_experts(x_TH, one_Tk, *packed)
        assert_same_bits(rows[one_Tk >= 0], whole[one_Tk >= 0], f"expert {expert} alone")


def test_moe_experts_takes_no_tokens_and_no_experts():
    packed, _ = weights()
    x_TH, _ = tokens(4)
    assert moe_experts(x_TH[:0], torch.empty(0, K, dtype=torch.int64), *packed).shape == (0, K, H)
    assert not moe_experts(x_TH, torch.full((4, K), -1), *packed).any()


def test_moe_experts_backward_formula():
    generator = torch.Generator().manual_seed(3)
    x_TH = torch.randn(4, 5, generator=generator)
    fc1, fc2 = torch.randn(3, 6, 5, generator=generator), torch.randn(3, 5, 6, generator=generator)
    ids_Tk = torch.tensor([[0, 2], [2, -1], [2, 0], [-1, -1]])  # expert 1 has no token

    def forward(x, fc1, fc2):
        return plain(x, ids_Tk, fc1, fc2)

    def gradients(grad, x, fc1, fc2):
        first_TkF = torch.einsum("tkfh,th->tkf", fc1[ids_Tk], x)
        return moe_experts_gradients(grad, x, ids_Tk, first_TkF, fc1, fc2, [True, True, True])

    assert_gradcheck(forward, gradients, x_TH, fc1, fc2)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_moe_experts_grads_close(needs):
    packed, masters = weights()
    x_TH, ids_Tk = tokens(33)
    values = [x_TH, *masters]
    grad_TkH = torch.randn(33, K, H, generator=torch.Generator().manual_seed(4)).bfloat16()
    wide = [value.double().requires_grad_() for value in values]
    want = torch.autograd.grad(plain(wide[0], ids_Tk, *wide[1:]), wide, grad_TkH.double())
    # The op's rounded inner values are each within 2^-8 of the reference's, three deep, and the result is rounded once:
    # no more than four such steps of the sum of magnitudes, which the same formula gives for absolute values.
    sizes = [value.detach().double().abs() for value in values]
    first_TkF = torch.einsum("tkfh,th->tkf", sizes[1][ids_Tk], sizes[0])
    bounds = moe_experts_gradients(grad_TkH.double().abs(), sizes[0], ids_Tk, first_TkF, *sizes[1:], [True] * 3)
    for value, needed in zip(values, needs, strict=True):
        value.requires_grad_(bool(needed))
    moe_experts(x_TH, ids_Tk, *packed, *masters).backward(grad_TkH)
    for value, gradient, bound in zip(values, want, bounds, strict=True):
        if value.requires_grad:
            assert value.grad.dtype == torch.bfloat16
            assert_within(value.grad, gradient, 4 * 2.0**-8 * bound, "gradient")
            typical = (value.grad.double() - gradient).norm() / gradient.norm()
            assert typical < 2.0**-7, "in the mean the error is that of one or two roundings"
        else:
            assert value.grad is None


def test_moe_experts_absent_slots_have_no_gradient():
    packed, masters = weights()
    x_TH, ids_Tk = tokens(9)
    ids_Tk[4] = -1
    ids_Tk[ids_Tk == 6] = 5
    grad_TkH = torch.ones(9, K, H, dtype=torch.bfloat16)
    poisoned_TkH = torch.where(ids_Tk[..., None] < 0, torch.nan, grad_TkH)
    gradients = []
    for grad in (grad_TkH, poisoned_TkH):
        values = [value.clone().requires_grad_() for value in (x_TH, *masters)]
        moe_experts(values[0], ids_Tk, *packed, *values[1:]).backward(grad)
        gradients.append([value.grad for value in values])
    for clean, poisoned in zip(*gradients, strict=True):
        assert_same_bits(poisoned, clean, "a NaN gradient of a slot that is not computed here")
    grad_x, grad_fc1, grad_fc2 = gradients[0]
    assert not grad_x[4].any()
    assert not grad_fc1[6].any()
    assert not grad_fc2[6].any()
    assert grad_x.any()
    assert grad_fc1.any()
    assert grad_fc2.any()


def test_moe_experts_rejects_backward_without_masters():
    packed, masters = weights()
    x_TH, ids_Tk = tokens(3)
    rows_TkH = moe_experts(x_TH.requires_grad_(), ids_Tk, *packed, masters[0], None)
    with pytest.raises(ValueError, match="moe_experts was called without its bf16 master weight"):
        rows_TkH.sum().backward()


def test_moe_experts_rejects_wrong_arguments():
    packed, _ = weights()
    x_TH, ids_Tk = tokens(4)
    ids_Tk[1, 1] = E
    with pytest.raises(ValueError, match="moe_experts cannot take this call") as error:
        moe_experts(x_TH, ids_Tk, *packed[:5], packed[5].double())
    assert "expert_ids_Tk spans -1 to 8; -1 to 7 is accepted" in str(error.value)
    assert "fc2_global_scale_E is torch.float64" in str(error.value)
    with pytest.raises(ValueError, match="F = 256, but F = 128 in fc1_codes_EFB"):
        moe_experts(x_TH, tokens(4)[1], *packed[:3], packed[3].repeat(1, 1, 2), *packed[4:])
