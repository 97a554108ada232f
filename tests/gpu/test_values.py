# SPDX-License-Identifier: Apache-2.0
"""Values: the kernels compute the formulas, within the error that their formats allow. Bits are proved elsewhere."""

import pytest
import torch
from row_cases import normal, nvfp4_bytes
from shapes import CHUNK, EPS, GROUP_SIZE, HIDDEN, IN_PROJ, INNER, SHARED_WIDTH, TOP_K

from vllm_forward_bridge import ops
from vllm_forward_bridge.ops.operands import nvfp4_operands
from vllm_forward_bridge.reference.ssd_scan import ssd_chunks
from vllm_forward_bridge.vllm_symbols import symbol

BF16_STEP = 2.0**-8


def assert_close(got, want, bound, what):
    assert want.abs().max() > 0, "the reference is all zero: this would compare nothing"
    excess = (got.double() - want).abs() - bound
    assert (excess <= 0).all(), f"{what}: largest excess {excess.max().item():.3g} over the bound"


def decoded(codes, scales, global_scale):
    table = torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cuda", dtype=torch.float64
    )
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    blocks = table[nibbles].unflatten(-1, (-1, 16)) * scales.double()[..., None]
    return blocks.flatten(-2) * global_scale.double().reshape(*global_scale.shape, 1, 1)


@pytest.mark.parametrize(("N", "K"), [(SHARED_WIDTH, HIDDEN), (HIDDEN // 2, SHARED_WIDTH), (192, 256)])
def test_nvfp4_linear(N, K):
    codes, scales, global_scale = nvfp4_bytes(N, K)
    x = normal(33, K, seed=1)
    got = ops.nvfp4_linear(x, *nvfp4_operands(codes, scales), global_scale, None, N)
    weight = decoded(codes, scales, global_scale)
    # One bf16 rounding, and K additions in fp32 of which each may lose 2^-23 (tensor cores truncate).
    bound = BF16_STEP * (x.double() @ weight.t()).abs() + K * 2.0**-23 * (x.double().abs() @ weight.abs().t())
    assert got.shape == (33, N)
    assert_close(got, x.double() @ weight.t(), bound, "nvfp4_linear")


def test_moe_experts():
    E, F, H, T = 8, 128, 192, 40
    fc1, fc2 = nvfp4_bytes(E, F, H), nvfp4_bytes(E, H, F, seed=1)
    x, ids = normal(T, H, seed=2), torch.rand(T, E, device="cuda").topk(3).indices
    ids[::5, 1] = -1
    got = ops.moe_experts(x, ids, *nvfp4_operands(*fc1[:2]), fc1[2], *nvfp4_operands(*fc2[:2]), fc2[2], None, None)
    W1, W2 = decoded(*fc1), decoded(*fc2)
    assert not got[ids < 0].any()
    for t, j in [(0, 0), (1, 1), (7, 2), (39, 0)]:
        inner = (W1[ids[t, j]] @ x[t].double()).clamp(min=0).square()
        want = W2[ids[t, j]] @ inner
        # Three bf16 roundings before the sum, one after; relu squared doubles the first one's relative error.
        assert_close(got[t, j], want, 5 * BF16_STEP * (W2[ids[t, j]].abs() @ inner) + 1e-6, f"expert row {t}, {j}")


def test_fp8_linear():
    x, codes = normal(33, HIDDEN), normal(IN_PROJ, HIDDEN, scale=40.0, seed=1).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight_scale, input_scale = torch.tensor(0.0005, device="cuda"), torch.tensor(0.011, device="cuda")
    quantised = (x.float() * (1 / input_scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(symbol("scaled_fp8_quant")(x, input_scale.view(1))[0].float(), quantised.float())
    scale = input_scale.double() * weight_scale.double()
    want = quantised.double() @ codes.double().t() * scale
    # Tensor cores keep about 13 bits of the largest term at each step of K = 32.
    steps = HIDDEN / 32
    bound = BF16_STEP * want.abs() + steps * 2.0**-13 * (quantised.double().abs() @ codes.double().abs().t()) * scale
    got = ops.fp8_linear(x, codes, weight_scale, input_scale, None)
    assert_close(got, want, bound, "fp8_linear")
    assert (got.double() - want).square().mean() <= 2.0**-14 * want.square().mean()


def test_norms():
    x, residual, gain = normal(33, HIDDEN), normal(33, HIDDEN, seed=1), normal(HIDDEN, seed=2)
    y, s = ops.fused_add_rms_norm(x, residual, gain, EPS)
    assert torch.equal(s, (x.float() + residual.float()).bfloat16())
    want = s.double() * (s.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * gain.double()
    assert_close(y, want, BF16_STEP * want.abs(), "fused_add_rms_norm")
    assert torch.equal(ops.rms_norm(s, gain, EPS), y)
    scanned, gate, gain = normal(33, INNER, seed=3), normal(33, INNER, seed=4), normal(INNER, seed=5)
    u = (scanned.double() * torch.nn.functional.silu(gate.double())).unflatten(-1, (-1, GROUP_SIZE))
    want = (u * (u.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(-2) * gain.double()
    assert_close(
        ops.gated_rms_norm(scanned, gate, gain, GROUP_SIZE, EPS), want, 2 * BF16_STEP * want.abs(), "gated_rms_norm"
    )


def test_router_prefers_the_smaller_id_and_adds_in_slot_order():
    x, weight = torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device="cuda"), normal(128, HIDDEN)
    bias = torch.zeros(128, device="cuda")
    bias[[5, 90, 17]] = 1.0
    weights, ids = ops.router(x, weight, bias, TOP_K)
    assert ids.tolist() == [[5, 17, 90, 0, 1, 2]] * 3
    total = torch.zeros((), device="cuda")
    for _ in range(TOP_K):
        total = total + 0.5
    assert torch.equal(weights, torch.full_like(weights, 0.5) / total)


def test_moe_combine_adds_in_slot_order():
    big = 2.0**100
    rows = torch.tensor([big, 1.0, -big, 1.0], device="cuda").bfloat16().view(1, 4, 1).expand(1, 4, 64).contiguous()
    got = ops.moe_combine(rows, torch.ones(1, 4, device="cuda"), 1.0, None)
    assert torch.equal(got, torch.ones_like(got)), (
        "((big + 1) - big) + 1 is 1 from left to right, 0 or 2 in other orders"
    )


@pytest.mark.parametrize("length", [CHUNK, 2 * CHUNK])
def test_ssd_scan(length):
    h, P, G, n = 4, 64, 2, 128
    x, dt = normal(length, h, P), normal(length, h, scale=0.5, seed=1)
    B, C = normal(length, G, n, scale=0.3, seed=2), normal(length, G, n, scale=0.3, seed=3)
    A, D, bias = -torch.rand(h, device="cuda") - 0.1, normal(h, seed=4), normal(h, seed=5)
    cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    y, state = ops.ssd_scan(x, dt, A, B, C, D, bias, cu, CHUNK, None)
    x, dt, B, C = (v[None].double() for v in (x, dt, B, C))
    A, D, bias = (v.double() for v in (A, D, bias))
    want, want_state = ssd_chunks(x, dt, A, B, C, D, bias, CHUNK, None)
    # Operands of the matrix products are rounded to bf16: every term may be off by a few steps of the largest.
    for got, exact, what in ((y[None], want, "y"), (state, want_state, "state")):
        assert_close(got, exact, 16 * BF16_STEP * exact.abs().amax(), f"ssd_scan {what}")
