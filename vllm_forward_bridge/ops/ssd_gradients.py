# SPDX-License-Identifier: Apache-2.0
"""Closed-form gradients of `ssd_scan`, chunk by chunk, from its inputs; fp32, or float64 for float64 inputs.

Not bit-critical: batched over a few sequences with equally many chunks, with ordinary matrix products.
"""

# T packed tokens, S sequences of a batch, c chunks, Q chunk size, h heads, P head dim, G groups, r heads of a group,
# n state size, s = r * P state rows of a group. Names starting with g are gradients.

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge.ops.gradients import wide

_BATCH_ELEMENTS = 1 << 19  # of the states of one batch, to stay in the cache


def ssd_scan_gradients(
    grad_ThP: Tensor, x_ThP: Tensor, dt_Th: Tensor, A_h: Tensor, B_TGn: Tensor, C_TGn: Tensor, D_h: Tensor,
    dt_bias_h: Tensor, cu_seqlens_S1: Tensor, chunk_size: int, boundary_state_ShPn: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x, dt, A, B, C, D and dt_bias, given that of y; the formula is in `_chunk_gradients`."""
    rows, shared = (x_ThP, dt_Th, B_TGn, C_TGn), [wide(value) for value in (A_h, D_h, dt_bias_h)]
    totals = [wide(torch.zeros_like(value)) for value in (*rows, A_h, D_h, dt_bias_h)]
    for members, num_chunks in _alike(cu_seqlens_S1, chunk_size, x_ThP[0].numel() * B_TGn.shape[2]):
        offset_L = torch.arange(num_chunks * chunk_size, device=x_ThP.device)
        index_SL = cu_seqlens_S1[members, None].long() + offset_L
        live_SL = index_SL < cu_seqlens_S1[members + 1, None]
        index_SL = index_SL.where(live_SL, 0)
        inputs = [_chunked(value, index_SL, live_SL, chunk_size) for value in (*rows, grad_ThP)]
        state = None if boundary_state_ShPn is None else wide(boundary_state_ShPn[members])
        of_rows, of_shared = _batch_gradients(*inputs, *shared, state)
        for total, gradient in zip(totals[:4], of_rows, strict=True):
            total[index_SL[live_SL]] = gradient.flatten(1, 2)[live_SL]
        for total, gradient in zip(totals[4:], of_shared, strict=True):
            total += gradient
    gx, gdt, gB, gC, gA, gD, gdt_bias = totals
    return [gx, gdt, gA, gB, gC, gD, gdt_bias]


def _alike(cu_seqlens_S1: Tensor, chunk_size: int, state_elements: int) -> Iterator[tuple[Tensor, int]]:
    """Yield (sequence numbers, their number of chunks), a cache full at a time."""
    chunks_S = (cu_seqlens_S1.diff().long() + chunk_size - 1) // chunk_size
    for num_chunks in chunks_S.unique().tolist():
        alike = (chunks_S == num_chunks).nonzero()[:, 0]
        if num_chunks:
            for members in alike.split(max(1, _BATCH_ELEMENTS // (state_elements * num_chunks))):
                yield members, num_chunks


def _chunked(rows: Tensor, index_SL: Tensor, live_SL: Tensor, chunk_size: int) -> Tensor:
    """Return [S, c, Q, ...], zero where a sequence has no row."""
    picked = wide(rows[index_SL]).masked_fill(~live_SL.view(*live_SL.shape, *[1] * (rows.dim() - 1)), 0.0)
    return picked.unflatten(1, (-1, chunk_size))


@dataclass(frozen=True)
class _Chunks:
    """The forward's values that the gradients need."""

    x_ScGrQP: Tensor
    gy_ScGrQP: Tensor
    B_ScGQn: Tensor
    C_ScGQn: Tensor
    dt_ScGrQ: Tensor
    decay_ScGrQ: Tensor
    """Log of the decay from the chunk's start to each token, a below."""
    state_ScGsn: Tensor
    """State before each chunk."""
    gstate_ScGsn: Tensor
    """Gradient of the state after each chunk; zero after the last, which nothing reads."""


def _batch_gradients(x, dt, B, C, gy, A_h, D_h, dt_bias_h, state_ShPn):
    """Return the gradients of (x, dt, B, C), each [S, c, Q, ...], and of (A, D, dt_bias)."""
    G, P = B.shape[3], x.shape[-1]
    raw_ScGrQ = (dt + dt_bias_h).unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2)
    dt_ScGrQ = torch.nn.functional.softplus(raw_ScGrQ)
    A_Gr1, D_Gr11 = A_h.view(G, -1, 1), D_h.view(G, -1, 1, 1)
    x, gy = (value.unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2, 5).contiguous() for value in (x, gy))
    B, C = B.transpose(2, 3).contiguous(), C.transpose(2, 3).contiguous()
    decay = (dt_ScGrQ * A_Gr1).cumsum(-1)
    states = _states(x, gy, B, C, dt_ScGrQ, decay, None if state_ShPn is None else state_ShPn.unflatten(1, (G, -1)))
    gx, gdt, gdecay, gB, gC = _chunk_gradients(_Chunks(x, gy, B, C, dt_ScGrQ, decay, *states))
    gx = gx + D_Gr11 * gy
    gstep = gdecay.flip(-1).cumsum(-1).flip(-1)  # of dt * A: token s moves a of all tokens from s on
    graw = (gdt + gstep * A_Gr1) * torch.sigmoid(raw_ScGrQ)
    by_token = (gx.permute(0, 1, 4, 2, 3, 5).reshape(*dt.shape, P), graw.permute(0, 1, 4, 2, 3).reshape(dt.shape),
                gB.transpose(2, 3), gC.transpose(2, 3))  # fmt: skip
    gA_h, gD_h, gdt_bias_h = (gstep * dt_ScGrQ).sum((0, 1, 4)), (gy * x).sum((0, 1, 4, 5)), graw.sum((0, 1, 4))
    return by_token, (gA_h.flatten(), gD_h.flatten(), gdt_bias_h.flatten())


def _states(x, gy, B, C, dt, decay, state_SGrPn):
    """Return the state before each chunk and the gradient of the state after each chunk, [S, c, G, s, n]."""
    kept_ScGs1 = torch.exp(decay[..., -1]).repeat_interleave(x.shape[-1], dim=-1)[..., None]
    to_end = torch.exp(decay[..., -1:] - decay) * dt
    added = _rows(x * to_end[..., None]).transpose(-1, -2) @ B
    read = _rows(gy * torch.exp(decay)[..., None]).transpose(-1, -2) @ C
    before, after = torch.empty_like(added), torch.empty_like(read)
    before[:, 0] = 0.0 if state_SGrPn is None else state_SGrPn.flatten(2, 3)
    after[:, -1] = 0.0
    for c in range(added.shape[1] - 1):
        torch.addcmul(added[:, c], kept_ScGs1[:, c], before[:, c], out=before[:, c + 1])
    for c in reversed(range(1, added.shape[1])):
        torch.addcmul(read[:, c], kept_ScGs1[:, c], after[:, c], out=after[:, c - 1])
    return before, after


def _chunk_gradients(k: _Chunks):
    """Return the gradients of x (without D), dt (not through a), a, B and C.

    With M_ts = C_t.B_s exp(a_t - a_s) dt_s for s <= t, w_s = exp(a_Q - a_s) dt_s, S the state before and g the gradient
    of the state after the chunk: y_t = sum_s M_ts x_s + exp(a_t) S C_t, and the state after the chunk is
    exp(a_Q) S + sum_s w_s x_s B_s^T. The product rules of these two follow.
    """
    Q, P = k.x_ScGrQP.shape[-2:]
    future = torch.ones(Q, Q, dtype=torch.bool, device=k.decay_ScGrQ.device).triu(1)
    between = torch.exp((k.decay_ScGrQ[..., :, None] - k.decay_ScGrQ[..., None, :]).masked_fill_(future, -torch.inf))
    scores = (k.C_ScGQn @ k.B_ScGQn.transpose(-1, -2))[:, :, :, None]
    start, to_end = torch.exp(k.decay_ScGrQ), torch.exp(k.decay_ScGrQ[..., -1:] - k.decay_ScGrQ)
    w = to_end * k.dt_ScGrQ

    gM_between = (k.gy_ScGrQP @ k.x_ScGrQP.transpose(-1, -2)).mul_(between)
    gB_state = _heads(k.B_ScGQn @ k.gstate_ScGsn.transpose(-1, -2), P)  # g B_s
    S_C = _heads(k.C_ScGQn @ k.state_ScGsn.transpose(-1, -2), P)
    gx = (between * scores * k.dt_ScGrQ[..., None, :]).transpose(-1, -2) @ k.gy_ScGrQP + gB_state * w[..., None]
    gscores = (gM_between * k.dt_ScGrQ[..., None, :]).sum(3)
    gC = gscores @ k.B_ScGQn + _rows(k.gy_ScGrQP * start[..., None]) @ k.state_ScGsn
    gB = gscores.transpose(-1, -2) @ k.C_ScGQn + _rows(k.x_ScGrQP * w[..., None]) @ k.gstate_ScGsn

    gM_M = gM_between.mul_(scores)  # over dt_s
    by_source = gM_M.sum(-2)
    gw = (k.x_ScGrQP * gB_state).sum(-1)
    gdt = by_source + gw * to_end
    gdecay = (gM_M * k.dt_ScGrQ[..., None, :]).sum(-1) - by_source * k.dt_ScGrQ
    gdecay += start * (k.gy_ScGrQP * S_C).sum(-1) - gw * w
    kept = (k.gstate_ScGsn * k.state_ScGsn).sum(-1).unflatten(-1, (-1, P)).sum(-1)
    gdecay[..., -1] += start[..., -1] * kept + (gw * w).sum(-1)
    return gx, gdt, gdecay, gB, gC


def _rows(values_ScGrQP: Tensor) -> Tensor:
    """Return [S, c, G, Q, s]."""
    return values_ScGrQP.transpose(3, 4).flatten(4, 5)


def _heads(values_ScGQs: Tensor, head_dim: int) -> Tensor:
    """Return [S, c, G, r, Q, P]; undoes `_rows`."""
    return values_ScGQs.unflatten(-1, (-1, head_dim)).transpose(3, 4)
