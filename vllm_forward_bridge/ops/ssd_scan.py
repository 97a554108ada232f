# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 scan over packed sequences by chunks; a chunk continued from its boundary state has a one-shot scan's bits.

After vLLM's `mamba_chunk_scan_combined_varlen` without gate; the chunk grid of a sequence starts at its first row.
"""

# T packed tokens, S sequences, h heads, P head dim, G groups, n state size, Q chunk size; on the CPU b sequences of one
# block, R output rows of a chunk and s = P * h / G state rows of a group.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, packed, ssd_cuda
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.gradients import wide
from vllm_forward_bridge.ops.ssd_gradients import ssd_scan_gradients

_BLOCK_ELEMENTS = 1 << 19  # of the largest tensor of a block, to stay in the cache; changes time, never bits
_LARGEST_SUM = 8192  # terms of one exact product: 20 + 20 bits of the operands and 13 of the count fill a float64


@torch.library.custom_op("vllm_forward_bridge::ssd_scan", mutates_args=(), device_types="cpu")
def ssd_scan(
    x_ThP: Tensor, dt_Th: Tensor, A_h: Tensor, B_TGn: Tensor, C_TGn: Tensor, D_h: Tensor, dt_bias_h: Tensor,
    cu_seqlens_S1: Tensor, chunk_size: int, boundary_state_ShPn: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scan each packed sequence from its boundary state: S = exp(dt A) S + dt x B^T;  y = S C + D x.

    In fp32 unless said: dt = softplus(dt + dt_bias);  a = running sum of dt * A inside the chunk (doubling tree);
    m_ts = C_t.B_s * exp(a_t - a_s) * dt_s for s <= t;  y_t = bf16((C_t.S * exp(a_t) + sum_s m_ts x_s) + D x_t);
    after a chunk's last row S = S * exp(a_last) + sum_s (x_s * (dt_s * exp(a_last - a_s))) B_s.
    The four sums are exact on operands rounded to 20 bits below their row's largest element, then rounded once. Before
    that, x_s is divided by its own row's power of two, which goes into m_ts. A row with C = 0 is D x and costs nothing.

    Args:
        x_ThP: bf16; rows past cu_seqlens[-1] are padding: never read into a live row, and zero in the result.
        dt_Th: bf16, raw.
        A_h: fp32, negative (`ssd_decay`).
        B_TGn: bf16; group g serves heads g * h / G and following.
        C_TGn: bf16.
        D_h: bf16.
        dt_bias_h: bf16.
        cu_seqlens_S1: int32 [S + 1].
        chunk_size: rows between boundaries.
        boundary_state_ShPn: fp32 state before each sequence's first row here; None stands for zeros.

    Returns:
        (y_ThP bf16, fp32 state at each sequence's last complete chunk boundary; the given one if no chunk completed).
        The bits of row t depend on the state and on rows 0 .. t of its sequence, head and group, on nothing else.

    Raises:
        ValueError: lists every argument that is not accepted.

    Source: vLLM 0.26.0, model_executor/layers/mamba/ops/ssd_combined.py; Dao and Gu 2024, section 6.
    """
    _check(x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, chunk_size, boundary_state_ShPn)
    grid = packed.chunk_grid(cu_seqlens_S1, chunk_size)
    h, P, n = *x_ThP.shape[1:], B_TGn.shape[2]
    x, dt, B, C = (grid.spread(rows) for rows in (x_ThP, dt_Th, B_TGn, C_TGn))
    y = torch.empty_like(x)
    state = boundary_state_ShPn
    boundary = x_ThP.new_zeros(len(grid.order_S), h, P, n, dtype=torch.float32) if state is None else state.clone()
    block = max(1, _BLOCK_ELEMENTS // (h * max(P * n, chunk_size * P, chunk_size * chunk_size)))
    done = 0
    for chunk, (reaching, completing) in enumerate(zip(grid.reaching, grid.completing, strict=True)):
        for first in range(0, reaching, block):
            members = grid.order_S[first : min(first + block, reaching)]
            rows = slice(done + first, done + first + len(members))
            before = None if chunk == 0 and state is None else boundary.index_select(0, members)
            steps = _time_steps(dt[rows], A_h, dt_bias_h)
            y[rows] = _scan_chunks(x[rows], *steps, B[rows], C[rows], D_h, before)
            full = slice(0, max(completing - first, 0))
            if full.stop:
                start = None if before is None else before[full]
                after = _advance(x[rows][full], *(v[full] for v in steps), B[rows][full], start)
                boundary.index_copy_(0, members[full], after)
        done += reaching
    return grid.gather(y, len(x_ThP)), boundary


ssd_scan.register_kernel("cuda")(ssd_cuda.ssd_scan)


@ssd_scan.register_fake
def _(x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, chunk_size, boundary_state_ShPn):
    shape = (cu_seqlens_S1.shape[0] - 1, *x_ThP.shape[1:], B_TGn.shape[2])
    return torch.empty_like(x_ThP), x_ThP.new_empty(shape, dtype=torch.float32)


def _check(x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, chunk_size, boundary_state_ShPn):
    problems = packed.cu_seqlens_problems("cu_seqlens_S1", cu_seqlens_S1, len(x_ThP))
    if x_ThP.dim() == 3 and B_TGn.dim() == 3 and x_ThP.shape[1] % max(B_TGn.shape[1], 1):
        problems.append(
            f"{x_ThP.shape[1]} heads with {B_TGn.shape[1]} groups; a multiple is accepted, every group serves as many "
            "heads: change either"
        )
    if (A_h > 0).any():
        problems.append(
            f"A_h has {int((A_h > 0).sum())} positive entries; zero and below are accepted, as the state decays: pass "
            "ssd_decay(A_log)"
        )
    if not 1 <= chunk_size <= _LARGEST_SUM or chunk_size & (chunk_size - 1):
        problems.append(
            f"chunk_size is {chunk_size}; a power of two up to {_LARGEST_SUM} is accepted, as the running sum is a "
            "doubling tree and the sums over a chunk are exact only so far: use the checkpoint's chunk_size"
        )
    if B_TGn.shape[-1] > _LARGEST_SUM:
        problems.append(
            f"state size is {B_TGn.shape[-1]}; up to {_LARGEST_SUM} is accepted, as a longer C.S is not exact: split it"
        )
    bf16, fp32 = torch.bfloat16, torch.float32
    check(
        "ssd_scan", *problems,
        x_ThP=(x_ThP, bf16, "T h P"), dt_Th=(dt_Th, bf16, "T h"), A_h=(A_h, fp32, "h"), B_TGn=(B_TGn, bf16, "T G n"),
        C_TGn=(C_TGn, bf16, "T G n"), D_h=(D_h, bf16, "h"), dt_bias_h=(dt_bias_h, bf16, "h"),
        boundary_state_ShPn=(boundary_state_ShPn, fp32, "S h P n"), **packed.ends_form("cu_seqlens_S1", cu_seqlens_S1),
    )  # fmt: skip


def _time_steps(dt_bQh: Tensor, A_h: Tensor, dt_bias_h: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 [b, h, Q]: dt after bias and softplus, and the log of the decay since the chunk's start."""
    dt_bhQ = exact.softplus(dt_bQh.float() + dt_bias_h.float()).transpose(1, 2).contiguous()
    return dt_bhQ, _running_sum(dt_bhQ * A_h[:, None])


def _scan_chunks(x_bQhP, dt_bhQ, decay_bhQ, B_bQGn, C_bQGn, D_h, state_bhPn):
    """Return y [b, Q, h, P] in fp32 of one chunk of each of b sequences; no state stands for zeros."""
    b, Q, h, P = x_bQhP.shape
    G = B_bQGn.shape[2]
    y_bQhP = x_bQhP.float().mul_(D_h.float()[:, None]).add_(0.0)
    row_bR = _rows_with_output(C_bQGn)
    if row_bR.shape[1] == 0:
        return y_bQhP
    picked = ... if row_bR.shape[1] == Q else (torch.arange(b)[:, None], row_bR)
    C_bGRn = C_bQGn[picked].transpose(1, 2).contiguous()
    decay_bhR = decay_bhQ.gather(2, row_bR[:, None].expand(b, h, -1))

    scores_bGRQ = exact.matmul(C_bGRn, B_bQGn.transpose(1, 2).contiguous()).float()
    weights_bhRQ = exact.exp(decay_bhR[..., :, None] - decay_bhQ[..., None, :])
    weights_bhRQ = (weights_bhRQ.view(b, G, h // G, -1, Q) * scores_bGRQ[:, :, None]).view_as(weights_bhRQ)
    weights_bhRQ = weights_bhRQ.mul_(dt_bhQ[:, :, None])
    inside_bhRP = _causal_product(weights_bhRQ, x_bQhP.transpose(1, 2).contiguous(), row_bR)
    y_bRhP = inside_bhRP.transpose(1, 2)
    if state_bhPn is not None:
        before_bGRs = exact.matmul(C_bGRn, state_bhPn.view(b, G, -1, state_bhPn.shape[3])).float()
        before_bRhP = before_bGRs.transpose(1, 2).reshape(b, -1, h, P)
        y_bRhP = before_bRhP.mul_(exact.exp(decay_bhR).transpose(1, 2)[..., None]).add_(y_bRhP)
    y_bQhP[picked] += y_bRhP
    return y_bQhP


def _rows_with_output(C_bQGn: Tensor) -> Tensor:
    """Return rows [b, R] that include all whose C is not zero: a few a sequence, or all Q in order."""
    wanted_bQ = (C_bQGn != 0).flatten(2).any(2)
    largest = int(wanted_bQ.sum(1).max())
    if largest > wanted_bQ.shape[1] // 2:
        return torch.arange(wanted_bQ.shape[1]).expand(len(wanted_bQ), -1)
    return wanted_bQ.byte().argsort(dim=1, descending=True, stable=True)[:, :largest]


def _causal_product(weights_bhRQ: Tensor, x_bhQP: Tensor, row_bR: Tensor) -> Tensor:
    """Return sum over s <= t of weights_ts x_s; row t does not see later rows, not even through a scale."""
    # bits: one power of two for a column of x would depend on later rows. Each x row has its own, moved into the
    # weights, whose row t is scaled after the mask. An x row with an infinity is zero here and reaches only rows that
    # see it.
    integers_bhQP, unit_bhQ1 = exact.fixed_point(x_bhQP, exact.FIXED_POINT_BITS)
    infinite_bhQ1 = ~integers_bhQP.sum(-1, keepdim=True).isfinite()
    if infinite_bhQ1.any():
        integers_bhQP.masked_fill_(infinite_bhQ1, 0.0)
        unit_bhQ1.masked_fill_(infinite_bhQ1, torch.nan)
    future_b1RQ = (torch.arange(x_bhQP.shape[2]) > row_bR[:, :, None])[:, None]
    scaled_bhRQ = (weights_bhRQ * unit_bhQ1.float().transpose(2, 3)).masked_fill_(future_b1RQ, 0.0)
    weights_bhRQ, row_unit_bhR1 = exact.fixed_point(scaled_bhRQ, exact.FIXED_POINT_BITS)
    return exact.integer_matmul(weights_bhRQ, integers_bhQP.transpose(2, 3)).mul_(row_unit_bhR1).float()


def _advance(x_bQhP, dt_bhQ, decay_bhQ, B_bQGn, state_bhPn):
    """Return the states [b, h, P, n] after a complete chunk; no state stands for zeros."""
    b, Q, h, P = x_bQhP.shape
    G, n = B_bQGn.shape[2:]
    to_end_bQh1 = (dt_bhQ * exact.exp(decay_bhQ[..., -1:] - decay_bhQ)).transpose(1, 2)[..., None]
    x_bGQs = (x_bQhP * to_end_bQh1).view(b, Q, G, -1).transpose(1, 2).contiguous()
    B_bGQn = B_bQGn.transpose(1, 2).contiguous()
    added_bGsn = exact.matmul(x_bGQs.transpose(2, 3), B_bGQn.transpose(2, 3)).float()
    added_bhPn = added_bGsn.view(b, h, P, n)
    if state_bhPn is None:
        # bits: what 0 * exp(..) + added gives, an underflow to -0.0 included.
        return added_bhPn.add_(0.0)
    return (state_bhPn * exact.exp(decay_bhQ[..., -1])[:, :, None, None]).add_(added_bhPn)


def _running_sum(values_bhQ: Tensor) -> Tensor:
    """Sum along the chunk; element t adds elements 0 .. t in a tree that depends on t alone."""
    step = 1
    while step < values_bhQ.shape[-1]:
        # bits: torch.cumsum may group its terms by length; this doubling tree may not.
        values_bhQ = torch.cat([values_bhQ[..., :step], values_bhQ[..., step:] + values_bhQ[..., :-step]], -1)
        step *= 2
    return values_bhQ


def _setup(ctx, inputs, output):
    *tensors, chunk_size, boundary_state_ShPn = inputs
    if boundary_state_ShPn is not None and ctx.needs_input_grad[9]:
        raise ValueError(
            "ssd_scan: boundary_state requires a gradient; only a constant state is accepted, as training starts every "
            "sequence at its first token: pass boundary_state.detach(), or None"
        )
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, boundary_state_ShPn)
    ctx.chunk_size = chunk_size


def _backward(ctx, grad_ThP, _):
    *tensors, boundary_state_ShPn = ctx.saved_tensors
    gradients = ssd_scan_backward(grad_ThP, *tensors, ctx.chunk_size, boundary_state_ShPn)
    pairs = zip(gradients, tensors, ctx.needs_input_grad, strict=False)
    return *(gradient.to(value.dtype) if needed else None for gradient, value, needed in pairs), None, None, None


@torch.library.custom_op("vllm_forward_bridge::ssd_scan_backward", mutates_args=())
def ssd_scan_backward(
    grad_ThP: Tensor, x_ThP: Tensor, dt_Th: Tensor, A_h: Tensor, B_TGn: Tensor, C_TGn: Tensor, D_h: Tensor,
    dt_bias_h: Tensor, cu_seqlens_S1: Tensor, chunk_size: int, boundary_state_ShPn: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Return `ssd_scan_gradients`; an op, because tracing cannot follow lengths that are data."""
    return ssd_scan_gradients(
        grad_ThP, x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, chunk_size, boundary_state_ShPn
    )


@ssd_scan_backward.register_fake
def _(grad_ThP, x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, chunk_size, boundary_state_ShPn):
    return [torch.empty_like(wide(value)) for value in (x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h)]


ssd_scan.register_autograd(_backward, setup_context=_setup)
