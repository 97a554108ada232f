# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 scan over packed sequences by chunks; a chunk continued from its boundary state has the bits of a one-shot scan.

After vLLM's `mamba_chunk_scan_combined_varlen` without gate, with the chunk grid of each sequence starting at its first row.
"""

# T packed tokens, S sequences, h heads, P head dim, G groups, n state size, Q chunk size; b sequences of one block.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, packed, ssd_cuda
from vllm_forward_bridge.reference.ssd_scan import ssd_chunks

_BLOCK_ELEMENTS = 1 << 18  # state elements a block of sequences holds, to stay in the cache; changes time, never bits
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
    The four sums are exact on operands rounded to 20 bits below their row's largest element, then rounded once.

    Args:
        x_ThP: bf16; rows past cu_seqlens[-1] are padding: never read into a live row, and zero in the result.
        dt_Th: bf16, raw.
        A_h: fp32, negative (`ssd_decay`).
        B_TGn, C_TGn: bf16; group g serves heads g * h / G and following.
        D_h, dt_bias_h: bf16.
        cu_seqlens_S1: int32 [S + 1].
        chunk_size: rows between boundaries.
        boundary_state_ShPn: fp32 state before each sequence's first row here; None stands for zeros.

    Returns:
        (y_ThP bf16, fp32 state at each sequence's last complete chunk boundary; the given one if no chunk completed).
        The bits of row t depend on the state and on rows 0 .. t of its sequence and of its head and group, nothing else.

    Raises:
        ValueError: lists every argument that is not accepted.

    Source: vLLM 0.26.0, model_executor/layers/mamba/ops/ssd_combined.py; Dao and Gu 2024, section 6.
    """
    _check(x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, chunk_size, boundary_state_ShPn)
    grid = packed.chunk_grid(cu_seqlens_S1, chunk_size)
    shape = (len(grid.order_S), *x_ThP.shape[1:], B_TGn.shape[2])
    state = x_ThP.new_zeros(shape, dtype=torch.float32) if boundary_state_ShPn is None else boundary_state_ShPn[grid.order_S]
    x, dt, B, C = (grid.spread(rows) for rows in (x_ThP, dt_Th, B_TGn, C_TGn))
    y = torch.empty_like(x)
    block = max(1, _BLOCK_ELEMENTS // state[0].numel())
    done = 0
    for reaching, completing in zip(grid.reaching, grid.completing, strict=True):
        for first in range(0, reaching, block):
            last = min(first + block, reaching)
            full = min(max(completing, first), last)
            rows = slice(done + first, done + last)
            _scan_chunks(x[rows], dt[rows], A_h, B[rows], C[rows], D_h, dt_bias_h, state[first:last], full - first, y[rows])
        done += reaching
    boundary = torch.empty_like(state)
    boundary[grid.order_S] = state
    return grid.gather(y, len(x_ThP)), boundary


ssd_scan.register_kernel("cuda")(ssd_cuda.ssd_scan)


@ssd_scan.register_fake
def _(x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, chunk_size, boundary_state_ShPn):
    shape = (cu_seqlens_S1.shape[0] - 1, *x_ThP.shape[1:], B_TGn.shape[2])
    return torch.empty_like(x_ThP), x_ThP.new_empty(shape, dtype=torch.float32)


def _check(x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, chunk_size, boundary_state_ShPn):
    if x_ThP.dim() != 3 or B_TGn.dim() != 3:
        packed.raise_if_any("ssd_scan", [
            f"x has shape {tuple(x_ThP.shape)} and B {tuple(B_TGn.shape)}; [tokens, heads, head dim] and [tokens, groups, state] "
            "are accepted, one row a token: view the last dimension by heads and groups"
        ])  # fmt: skip
    tokens, heads, head_dim = x_ThP.shape
    groups, state_size = B_TGn.shape[1:]
    bf16, fp32 = torch.bfloat16, torch.float32
    problems = packed.shape_problems({
        "x": (x_ThP, x_ThP.shape, bf16), "dt": (dt_Th, (tokens, heads), bf16), "A": (A_h, (heads,), fp32),
        "B": (B_TGn, (tokens, groups, state_size), bf16), "C": (C_TGn, (tokens, groups, state_size), bf16),
        "D": (D_h, (heads,), bf16), "dt_bias": (dt_bias_h, (heads,), bf16),
        "boundary_state": (boundary_state_ShPn, (cu_seqlens_S1.numel() - 1, heads, head_dim, state_size), fp32),
    })  # fmt: skip
    problems += packed.cu_seqlens_problems("cu_seqlens", cu_seqlens_S1, tokens)
    if heads % groups:
        problems.append(f"{heads} heads with {groups} groups; a multiple is accepted, every group serves as many heads: change either")
    if not 1 <= chunk_size <= _LARGEST_SUM or chunk_size & (chunk_size - 1):
        problems.append(
            f"chunk_size is {chunk_size}; a power of two up to {_LARGEST_SUM} is accepted, the running sum is a doubling tree and "
            "the sums over a chunk are exact only so far: use the checkpoint's chunk_size"
        )
    if state_size > _LARGEST_SUM:
        problems.append(f"state size is {state_size}; up to {_LARGEST_SUM} is accepted, beyond it C.S is not exact: split the state")
    packed.raise_if_any("ssd_scan", problems)


def _scan_chunks(x_bQhP, dt_bQh, A_h, B_bQGn, C_bQGn, D_h, dt_bias_h, state_bhPn, num_full, y_bQhP):
    """Scan one chunk of each of b sequences into y; advance the states of the first num_full, whose chunk is complete."""
    b, Q, h, P = x_bQhP.shape
    G, n = B_bQGn.shape[2:]
    dt_bhQ = exact.softplus(dt_bQh.float() + dt_bias_h.float()).transpose(1, 2)
    decay_bhQ = _running_sum(dt_bhQ * A_h[:, None])
    C_bGQn = C_bQGn.transpose(1, 2)

    scores_bGQQ = exact.matmul(C_bGQn, B_bQGn.transpose(1, 2)).float()
    between_bhQQ = exact.exp(decay_bhQ[..., :, None] - decay_bhQ[..., None, :])
    weights_bhQQ = (scores_bGQQ[:, :, None] * between_bhQQ.view(b, G, -1, Q, Q)).view_as(between_bhQQ) * dt_bhQ[:, :, None]
    inside_bhQP = _causal_product(weights_bhQQ, x_bQhP.transpose(1, 2))

    before_bGQR = exact.matmul(C_bGQn, state_bhPn.view(b, G, -1, n)).float()  # R: rows h/G * P of a group's state
    before_bQhP = before_bGQR.transpose(1, 2).reshape(b, Q, h, P)
    y_bQhP.copy_(
        before_bQhP * exact.exp(decay_bhQ).transpose(1, 2)[..., None] + inside_bhQP.transpose(1, 2) + x_bQhP.float() * D_h.float()[:, None]
    )
    if num_full:
        full = slice(0, num_full)
        _advance(x_bQhP[full], dt_bhQ[full], decay_bhQ[full], B_bQGn[full], state_bhPn[full])


def _causal_product(weights_bhQQ: Tensor, x_bhQP: Tensor) -> Tensor:
    """Return sum over s <= t of weights_ts x_s; row t does not see later rows, not even through a scale."""
    # bits: one power of two for a column of x would depend on later rows. Each x row has its own, moved into the weights,
    # whose row t is scaled after the mask. A row with an infinity keeps zeros here and poisons only weights it is visible to.
    integers_bhQP, unit_bhQ1 = exact.fixed_point(x_bhQP, exact.FIXED_POINT_BITS)
    infinite_bhQ1 = ~integers_bhQP.isfinite().all(-1, keepdim=True)
    integers_bhQP.masked_fill_(infinite_bhQ1, 0.0)
    unit_bhQ1.masked_fill_(infinite_bhQ1, torch.nan)
    future_QQ = torch.ones(weights_bhQQ.shape[-2:], dtype=torch.bool).triu(1)
    scaled_bhQQ = (weights_bhQQ * unit_bhQ1.float().transpose(2, 3)).masked_fill_(future_QQ, 0.0)
    weights_bhQQ, row_unit_bhQ1 = exact.fixed_point(scaled_bhQQ, exact.FIXED_POINT_BITS)
    return exact.integer_matmul(weights_bhQQ, integers_bhQP.transpose(2, 3)).mul_(row_unit_bhQ1).float()


def _advance(x_bQhP, dt_bhQ, decay_bhQ, B_bQGn, state_bhPn):
    """Carry the states over a complete chunk, in place."""
    b, Q, h, P = x_bQhP.shape
    G, n = B_bQGn.shape[2:]
    to_end_bhQ = dt_bhQ * exact.exp(decay_bhQ[..., -1:] - decay_bhQ)
    x_bhPQ = x_bQhP.float().permute(0, 2, 3, 1) * to_end_bhQ[:, :, None]
    added_bhPn = exact.matmul(x_bhPQ.reshape(b, G, -1, Q), B_bQGn.permute(0, 2, 3, 1)).float().view(b, h, P, n)
    state_bhPn.copy_(state_bhPn * exact.exp(decay_bhQ[..., -1])[:, :, None, None] + added_bhPn)


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
            "ssd_scan: boundary_state requires a gradient; training starts every sequence at its first token, so only a constant "
            "state is accepted: pass boundary_state.detach(), or None"
        )
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, boundary_state_ShPn)
    ctx.chunk_size = chunk_size


def _backward(ctx, grad_ThP, _):
    """Return the gradients of the chunked formulation in fp32; sequences with as many chunks are taken together."""
    x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, cu_seqlens_S1, state_ShPn = ctx.saved_tensors
    rows = [v.float() for v in (x_ThP, dt_Th, B_TGn, C_TGn)]
    shared = [v.float() for v in (A_h, D_h, dt_bias_h)]
    grad_rows, grad_shared = [torch.zeros_like(v) for v in rows], [torch.zeros_like(v) for v in shared]
    lengths_S = cu_seqlens_S1.diff().long()
    chunks_S = -(-lengths_S // ctx.chunk_size)
    for num_chunks in chunks_S.unique().tolist():
        if num_chunks == 0:
            continue
        members = (chunks_S == num_chunks).nonzero()[:, 0]
        state = None if state_ShPn is None else state_ShPn[members]
        index_SL = cu_seqlens_S1[members, None].long() + torch.arange(num_chunks * ctx.chunk_size)
        live_SL = index_SL < cu_seqlens_S1[members + 1, None]
        index_SL = index_SL.where(live_SL, 0)
        grads = _chunks_vjp([_masked(v, index_SL, live_SL) for v in rows], shared, state, _masked(grad_ThP, index_SL, live_SL), ctx.chunk_size)
        for total, grad in zip(grad_rows, grads[:4], strict=True):
            total[index_SL[live_SL]] = grad[live_SL]
        for total, grad in zip(grad_shared, grads[4:], strict=True):
            total += grad
    grad_x, grad_dt, grad_B, grad_C = (g.to(v.dtype) for g, v in zip(grad_rows, (x_ThP, dt_Th, B_TGn, C_TGn), strict=True))
    grad_A, grad_D, grad_bias = (g.to(v.dtype) for g, v in zip(grad_shared, (A_h, D_h, dt_bias_h), strict=True))
    return grad_x, grad_dt, grad_A, grad_B, grad_C, grad_D, grad_bias, None, None, None


def _masked(rows: Tensor, index_SL: Tensor, live_SL: Tensor) -> Tensor:
    picked = rows[index_SL].float()
    return picked.masked_fill_(~live_SL.view(*live_SL.shape, *[1] * (rows.dim() - 1)), 0.0)


def _chunks_vjp(rows, shared, state, grad_SLhP, chunk_size):
    with torch.enable_grad():
        x, dt, B, C, A, D, dt_bias = inputs = [v.detach().requires_grad_() for v in (*rows, *shared)]
        y, _ = ssd_chunks(x, dt, A, B, C, D, dt_bias, chunk_size, state)
        return torch.autograd.grad(y, inputs, grad_SLhP)


ssd_scan.register_autograd(_backward, setup_context=_setup)
