# SPDX-License-Identifier: Apache-2.0
"""The op is the vLLM call where it claims to be one, and the stock paths that it avoids really do lose their bits."""

import pytest
import torch
from row_cases import normal
from shapes import CONV_CHANNELS, CONV_WIDTH, EPS, EXPERTS, HEAD_DIM, HIDDEN, IN_PROJ, INNER, KV_HEADS, QUERY_HEADS
from test_sequences import CHUNK, attention_inputs, cumulative, scan_inputs

from vllm_forward_bridge import ops
from vllm_forward_bridge.ops import fa3, ssd_cuda
from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits
from vllm_forward_bridge.vllm_symbols import symbol


def test_fp8_linear_same_bits_as_vllm():
    x, codes = normal(300, HIDDEN), normal(IN_PROJ, HIDDEN, scale=40.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight_scale, input_scale = torch.tensor([0.0005], device="cuda"), torch.tensor([0.011], device="cuda")
    quantised, _ = symbol("scaled_fp8_quant")(x, input_scale)
    want = symbol("cutlass_scaled_mm")(quantised, codes.t(), input_scale, weight_scale, torch.bfloat16)
    assert_same_bits(ops.fp8_linear(x, codes, weight_scale[0], input_scale, None), want, "fp8_linear")


def test_bf16_linear_same_bits_as_vllm():
    x, weight = normal(300, HIDDEN), normal(QUERY_HEADS * HEAD_DIM, HIDDEN, scale=0.02, seed=1)
    assert_same_bits(ops.bf16_linear(x, weight), symbol("matmul_persistent")(x, weight.t()), "bf16_linear")


def test_causal_conv1d_same_bits_as_the_decode_kernel():
    weight, bias = normal(CONV_CHANNELS, CONV_WIDTH, scale=0.5), normal(CONV_CHANNELS, scale=0.1, seed=1)
    x = normal(60, CONV_CHANNELS, seed=2)
    want = ops.causal_conv1d(x, weight, bias, cumulative([60]), None)
    tails = torch.zeros(2, CONV_WIDTH - 1, CONV_CHANNELS, dtype=torch.bfloat16, device="cuda")
    slot = torch.tensor([1], dtype=torch.int32, device="cuda")
    for t in range(60):
        step = symbol("causal_conv1d_update")(
            x[t : t + 1].clone(), tails.transpose(1, 2), weight, bias, "silu", conv_state_indices=slot
        )
        assert_same_bits(step[0], want[t], f"conv step {t}")


def test_ssd_kernels_are_pinned():
    ssd_cuda.pin_kernels()
    assert set(ssd_cuda.kernel_configs()) == set(ssd_cuda.PINNED_CONFIGS)


def test_stock_linear_differs():
    x, weight = normal(1024, INNER), normal(HIDDEN, INNER, scale=0.02, seed=1)
    whole = torch.nn.functional.linear(x, weight)
    assert not all(same_bits(torch.nn.functional.linear(x[:m], weight), whole[:m]) for m in (1, 2, 8, 16, 17))


def test_stock_router_differs():
    x, weight = normal(8192, HIDDEN), normal(EXPERTS, HIDDEN, scale=0.02, seed=1)
    whole = torch.mm(x, weight.t(), out_dtype=torch.float32)
    batches = (1, 2, 4, 8, 16, 17, 32, 64, 65, 128, 256, 512, 1024, 2048, 4096)
    assert not all(same_bits(torch.mm(x[:m], weight.t(), out_dtype=torch.float32), whole[:m]) for m in batches)


def test_stock_rms_norm_differs():
    from vllm import _custom_ops

    x, gain = normal(1024, HIDDEN), normal(HIDDEN, seed=1)
    whole, part = torch.empty_like(x), torch.empty_like(x[:64])
    _custom_ops.rms_norm(whole, x, gain, EPS)
    _custom_ops.rms_norm(part, x[:64].clone(), gain, EPS)
    assert not same_bits(part, whole[:64])


def test_stock_attention_splits_differ():
    length = 700
    q, k, v = attention_inputs(length)
    one, cu = torch.ones((), device="cuda"), cumulative([length])
    pages, table = zip(*(fa3.to_pages(fa3.quantize_kv(x, one), cu, length) for x in (k, v)), strict=True)
    rest = {"block_table": table[0], "seqused_k": cu.diff(), "max_seqlen_k": length, "causal": True, "fa_version": 3}

    def last_row(num_splits):
        flash = symbol("flash_attn_varlen_func")
        return flash(
            q[-1:].clone(), *pages, cu_seqlens_q=cumulative([1]), max_seqlen_q=1, num_splits=num_splits, **rest
        )

    whole = symbol("flash_attn_varlen_func")(q, *pages, cu_seqlens_q=cu, max_seqlen_q=length, num_splits=1, **rest)
    assert same_bits(last_row(1)[0], whole[-1])
    assert not same_bits(last_row(0)[0], whole[-1])


def test_stock_decode_step_of_the_scan_differs():
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    heads, dim, state_size = 64, 64, 128
    x, dt, B, C = scan_inputs(CHUNK + 1, seed=70)
    A, D, bias = -torch.rand(heads, device="cuda") - 0.1, normal(heads, seed=71), normal(heads, seed=72)
    want, state = ops.ssd_scan(x, dt, A, B, C, D, bias, cumulative([CHUNK + 1]), CHUNK, None)
    out = torch.empty_like(x[-1:])
    expand = (heads, dim)
    selective_state_update(
        state.clone(), x[-1:], dt[-1:, :, None].expand(1, *expand), A[:, None, None].expand(*expand, state_size),
        B[-1:], C[-1:], D[:, None].expand(*expand), z=None, dt_bias=bias[:, None].expand(*expand),
        dt_softplus=True, out=out,
    )  # fmt: skip
    assert not same_bits(out[0], want[-1])


@pytest.mark.parametrize("heads", [KV_HEADS])
def test_attention_counts_keys_not_pages(heads):
    q, k, v = attention_inputs(300, seed=80)
    assert k.shape[1] == heads
    scale = torch.tensor(0.02, device="cuda")
    want = ops.attention(q, k, v, scale, scale, cumulative([300]), cumulative([300]), HEAD_DIM**-0.5, 2048)
    codes = fa3.quantize_kv(k, scale).float() * scale, fa3.quantize_kv(v, scale).float() * scale
    keys, values = (c.double().repeat_interleave(QUERY_HEADS // KV_HEADS, 1).transpose(0, 1) for c in codes)
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * HEAD_DIM**-0.5
    scores = scores.masked_fill(torch.ones(300, 300, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    exact = (scores.softmax(-1) @ values).transpose(0, 1)
    # P is rounded to bf16 (2^-9 of each weight), the output twice to bf16 (v_scale comes after FA3's own rounding).
    bound = 3 * 2.0**-8 * (scores.softmax(-1) @ values.abs()).transpose(0, 1) + 1e-6
    assert ((want.double() - exact).abs() <= bound).all()
