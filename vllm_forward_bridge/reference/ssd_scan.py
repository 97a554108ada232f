# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 scan twice: step by step as defined, and chunk by chunk as computed (Dao and Gu 2024, section 6)."""

# S sequences, L tokens of each, h heads, P head dim, G groups, n state size; c chunks of Q tokens, r heads of a group.

import torch
from torch.nn import functional


def ssd_recurrence(x_LhP, dt_Lh, A_h, B_LGn, C_LGn, D_h, dt_bias_h, state_hPn=None):
    """Scan one sequence by its definition: S = exp(dt A) S + dt x B^T;  y = S C + D x.

    Args:
        x_LhP: inputs of the heads.
        dt_Lh: raw time steps, before bias and softplus.
        A_h: decay rates, negative.
        B_LGn: input vectors of the groups.
        C_LGn: output vectors of the groups.
        D_h: skip weights.
        dt_bias_h: added to dt before softplus.
        state_hPn: state before the first token; None stands for zeros.

    Returns:
        (y_LhP, state after the last token); all in the dtype of x.
    """
    r = x_LhP.shape[1] // B_LGn.shape[1]
    B_Lhn, C_Lhn = B_LGn.repeat_interleave(r, dim=1), C_LGn.repeat_interleave(r, dim=1)
    dt_Lh = functional.softplus(dt_Lh + dt_bias_h)
    state_hPn = x_LhP.new_zeros(*x_LhP.shape[1:], B_LGn.shape[2]) if state_hPn is None else state_hPn
    y = []
    for x_hP, dt_h, B_hn, C_hn in zip(x_LhP, dt_Lh, B_Lhn, C_Lhn, strict=True):
        added_hPn = (dt_h[:, None] * x_hP)[:, :, None] * B_hn[:, None, :]
        state_hPn = torch.exp(dt_h * A_h)[:, None, None] * state_hPn + added_hPn
        y.append((state_hPn * C_hn[:, None, :]).sum(-1) + D_h[:, None] * x_hP)
    return torch.stack(y), state_hPn


def ssd_chunks(x_SLhP, dt_SLh, A_h, B_SLGn, C_SLGn, D_h, dt_bias_h, chunk_size: int, state_ShPn=None):
    """Scan a batch of equally long sequences chunk by chunk; `ssd_recurrence` regrouped, differentiable.

    Inside a chunk y = (C B^T o decay) (dt x), between chunks the state. The arguments are those of `ssd_recurrence`
    with a batch dimension in front; any L.

    Returns:
        (y_SLhP, state at the last complete chunk boundary).
    """
    (S, length, h, P), (G, n) = x_SLhP.shape, B_SLGn.shape[2:]
    x, dt, B, C = (_chunked(v, chunk_size) for v in (x_SLhP, dt_SLh, B_SLGn, C_SLGn))
    x = x.unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2, 5)  # S c G r Q P
    B, C = B.transpose(2, 3), C.transpose(2, 3)  # S c G Q n
    dt = functional.softplus(dt + dt_bias_h).unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2)  # S c G r Q
    decay = (dt * A_h.view(G, -1, 1)).cumsum(-1)  # log of the decay from the chunk's start to each token

    # 1. Inside a chunk: token s reaches token t >= s with the decay between them.
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)
    between = torch.exp((decay[..., :, None] - decay[..., None, :]).masked_fill(future, -torch.inf))
    y = (between * (C @ B.transpose(-1, -2))[:, :, :, None] * dt[..., None, :]) @ x
    # 2. What each chunk adds to the state by its end.
    to_end = torch.exp(decay[..., -1:] - decay) * dt
    added = (x * to_end[..., None]).transpose(-1, -2).flatten(3, 4) @ B  # S c G rP n
    # 3. The state before each chunk.
    kept = torch.exp(decay[..., -1]).repeat_interleave(P, dim=-1)[..., None]  # S c G rP 1
    state = torch.zeros_like(added[:, 0]) if state_ShPn is None else state_ShPn.view(S, G, -1, n)
    states = [state]
    for chunk in range(length // chunk_size):
        states.append(kept[:, chunk] * states[-1] + added[:, chunk])
    # 4. What the state before the chunk gives each token.
    given = C @ torch.stack(states[: x.shape[1]], 1).transpose(-1, -2)  # S c G Q rP
    y = y + torch.exp(decay)[..., None] * given.unflatten(-1, (-1, P)).transpose(-3, -2) + D_h.view(G, -1, 1, 1) * x
    return y.permute(0, 1, 4, 2, 3, 5).reshape(S, -1, h, P)[:, :length], states[-1].reshape(S, h, P, n)


def _chunked(rows, chunk_size):
    padding = rows.new_zeros(rows.shape[0], -rows.shape[1] % chunk_size, *rows.shape[2:])
    return torch.cat([rows, padding], 1).unflatten(1, (-1, chunk_size))
