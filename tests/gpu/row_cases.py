# SPDX-License-Identifier: Apache-2.0
"""Every op whose rows are tokens: seeded weights, seeded rows, one call. A row's bits must ignore the rest."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from shapes import (
    EPS,
    EXPERT_WIDTH,
    EXPERTS,
    FACTOR,
    GROUP_SIZE,
    HIDDEN,
    IN_PROJ,
    INNER,
    KV_HEADS,
    QUERY_HEADS,
    ROWS,
    SHARED_WIDTH,
    TOP_K,
    VOCAB,
)
from torch import Tensor

from vllm_forward_bridge import ops
from vllm_forward_bridge.ops.operands import nvfp4_operands

Rows = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """`weights()` and `rows(T)` are seeded; `call(weights, rows)` returns tensors whose first dim is the token."""

    name: str
    weights: Callable[[], Rows]
    rows: Callable[[int], Rows]
    call: Callable[[Rows, Rows], Rows]
    rows_at_most: int = ROWS


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Return seeded normal numbers, generated on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)


def nvfp4_bytes(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random codes, block scales around 1/2, and a global scale (one an expert) that give weights near 0.02."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, device="cuda", dtype=torch.uint8)
    scales = torch.rand(*shape[:-1], shape[-1] // 16, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    stack = torch.rand(shape[:-2], generator=generator, device="cuda") * 0.01 + 0.005
    return codes, scales, stack


def _fp8(N: int, K: int) -> Case:
    def weights():
        codes = normal(N, K, scale=40.0).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes, torch.tensor(0.0005, device="cuda"), torch.tensor(0.011, device="cuda")

    return Case(f"fp8_linear[{N}x{K}]", weights, _rows(K), lambda w, r: (ops.fp8_linear(r[0], w[0], w[1], w[2], None),))


def _bf16(N: int, K: int) -> Case:
    def weights():
        return (normal(N, K, scale=K**-0.5),)

    return Case(f"bf16_linear[{N}x{K}]", weights, _rows(K), lambda w, r: (ops.bf16_linear(r[0], w[0]),))


def _nvfp4(N: int, K: int) -> Case:
    def weights():
        codes, scales, global_scale = nvfp4_bytes(N, K)
        return *nvfp4_operands(codes, scales), global_scale

    def call(w, r):
        return (ops.nvfp4_linear(r[0], *w, None, N),)

    return Case(f"nvfp4_linear[{N}x{K}]", weights, _rows(K), call)


def _experts() -> Case:
    def weights():
        fc1, fc2 = nvfp4_bytes(EXPERTS, EXPERT_WIDTH, HIDDEN), nvfp4_bytes(EXPERTS, HIDDEN, EXPERT_WIDTH, seed=1)
        return *nvfp4_operands(*fc1[:2]), fc1[2], *nvfp4_operands(*fc2[:2]), fc2[2]

    def rows(T):
        generator = torch.Generator(device="cuda").manual_seed(2)
        ids = torch.rand(T, EXPERTS, generator=generator, device="cuda").topk(TOP_K).indices
        return normal(T, HIDDEN, seed=3), ids

    return Case("moe_experts", weights, rows, lambda w, r: (ops.moe_experts(r[0], r[1], *w, None, None),))


def _router() -> Case:
    def weights():
        return normal(EXPERTS, HIDDEN, scale=HIDDEN**-0.5), normal(EXPERTS, scale=0.1, dtype=torch.float32, seed=1)

    return Case("router", weights, _rows(HIDDEN), lambda w, r: ops.router(r[0], w[0], w[1], TOP_K))


def _combine() -> Case:
    def rows(T):
        weights = normal(T, TOP_K, dtype=torch.float32, seed=4).softmax(-1)
        return normal(T, TOP_K, HIDDEN, seed=5), weights, normal(T, HIDDEN, seed=6)

    return Case("moe_combine", tuple, rows, lambda w, r: (ops.moe_combine(r[0], r[1], FACTOR, r[2]),))


def _logprob(name: str, temperature: float, top_p: float, top_k: int) -> Case:
    def rows(T):
        generator = torch.Generator(device="cuda").manual_seed(11)
        ids = torch.randint(0, VOCAB, (T,), generator=generator, device="cuda")
        settings = [torch.full((T,), value, device="cuda") for value in (temperature, top_p)]
        uniform = torch.rand(T, generator=generator, device="cuda", dtype=torch.float64)
        return (
            normal(T, VOCAB, scale=3.0, seed=12),
            ids,
            *settings,
            torch.full_like(ids, top_k, dtype=torch.int32),
            uniform,
        )

    def call(w, r):
        *sampling, uniform = r[2:]
        drawn = ops.sample(r[0], *sampling, uniform)
        return drawn, ops.logprob(r[0], drawn, *sampling), ops.logprob(r[0], r[1], *sampling)

    return Case(f"logprob[{name}]", tuple, rows, call, rows_at_most=1024)


def _rows(width: int) -> Callable[[int], Rows]:
    return lambda T: (normal(T, width, seed=7),)


def _two_rows(width: int) -> Callable[[int], Rows]:
    return lambda T: (normal(T, width, seed=8), normal(T, width, seed=9))


def _gain(width: int) -> Callable[[], Rows]:
    return lambda: (normal(width, seed=10).abs(),)


CASES = (
    Case("rms_norm", _gain(HIDDEN), _rows(HIDDEN), lambda w, r: (ops.rms_norm(r[0], w[0], EPS),)),
    Case("fused_add_rms_norm", _gain(HIDDEN), _two_rows(HIDDEN), lambda w, r: ops.fused_add_rms_norm(*r, w[0], EPS)),
    Case(
        "gated_rms_norm", _gain(INNER), _two_rows(INNER), lambda w, r: (ops.gated_rms_norm(*r, w[0], GROUP_SIZE, EPS),)
    ),
    Case("relu_squared", tuple, _rows(EXPERT_WIDTH), lambda w, r: (ops.relu_squared(r[0]),)),
    _router(),
    _combine(),
    _bf16(QUERY_HEADS * 128, HIDDEN),
    _bf16(QUERY_HEADS * 64, HIDDEN),
    _bf16((QUERY_HEADS + 2 * KV_HEADS) * 128, HIDDEN),
    _bf16(KV_HEADS * 128, HIDDEN),
    _bf16(KV_HEADS * 64, HIDDEN),
    _bf16(HIDDEN, QUERY_HEADS * 128),
    _bf16(HIDDEN // 2, QUERY_HEADS * 128),
    _fp8(IN_PROJ, HIDDEN),
    _fp8(IN_PROJ // 2, HIDDEN),
    _fp8(HIDDEN, INNER),
    _fp8(HIDDEN // 2, INNER),
    _nvfp4(SHARED_WIDTH, HIDDEN),
    _nvfp4(SHARED_WIDTH // 2, HIDDEN),
    _nvfp4(HIDDEN, SHARED_WIDTH),
    _nvfp4(HIDDEN // 2, SHARED_WIDTH),
    _nvfp4(VOCAB, HIDDEN),
    _nvfp4(VOCAB // 2, HIDDEN),
    _experts(),
    _logprob("plain", 1.0, 1.0, 0),
    _logprob("T=0.7, top-p 0.95", 0.7, 0.95, 0),
    _logprob("top-k 50", 1.0, 1.0, 50),
)
