# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 scan twice: step by step as it is defined, and chunk by chunk as it is computed (Dao and Gu 2024, listing 1)."""

# S sequences, L tokens of each, h heads, P head dim, G groups, n state size, Q chunk size, c chunks.

import torch
from torch import Tensor
from torch.nn import functional


def ssd_recurrence(x_LhP, dt_Lh, A_h, B_LGn, C_LGn, D_h, dt_bias_h, state_hPn=None):
    """Scan one sequence by its definition: S = exp(dt A) S + dt x B^T;  y = S C + D x.

    Args:
        x_LhP: inputs of the heads.
        dt_Lh: raw time steps, before bias and softplus.
        A_h: decay rates, negative.
        B_LGn, C_LGn: input and output vectors of each group of h / G heads.
        D_h: skip weights.
        dt_bias_h: added to dt before softplus.
        state_hPn: state before the first token; None stands for zeros.

    Returns:
        (y_LhP, state after the last token); all in the dtype of x.
    """
    heads_a_group = x_LhP.shape[1] // B_LGn.shape[1]
    B_Lhn, C_Lhn = (v.repeat_interleave(heads_a_group, dim=1) for v in (B_LGn, C_LGn))
    dt_Lh = functional.softplus(dt_Lh + dt_bias_h)
    state_hPn = x_LhP.new_zeros(*x_LhP.shape[1:], B_LGn.shape[2]) if state_hPn is None else state_hPn
    y = []
    for x_hP, dt_h, B_hn, C_hn in zip(x_LhP, dt_Lh, B_Lhn, C_Lhn, strict=True):
        state_hPn = torch.exp(dt_h * A_h)[:, None, None] * state_hPn + (dt_h[:, None] * x_hP)[:, :, None] * B_hn[:, None, :]
        y.append((state_hPn * C_hn[:, None, :]).sum(-1) + D_h[:, None] * x_hP)
    return torch.stack(y), state_hPn


def ssd_chunks(x_SLhP, dt_SLh, A_h, B_SLGn, C_SLGn, D_h, dt_bias_h, chunk_size: int, state_ShPn=None):
    """Scan a batch of equally long sequences chunk by chunk; the same function as `ssd_recurrence`, differentiable.

    Within a chunk y = (C B^T o decay) (dt x), between chunks the state; the four steps are marked. The arguments are those
    of `ssd_recurrence` with a batch dimension in front; L may be any length.

    Returns:
        (y_SLhP, state at the last complete chunk boundary).
    """
    length, heads, groups = x_SLhP.shape[1], x_SLhP.shape[2], B_SLGn.shape[2]
    padding = -length % chunk_size
    x, dt, B, C = (_chunked(v, padding, chunk_size) for v in (x_SLhP, dt_SLh, B_SLGn, C_SLGn))
    B, C = (v.repeat_interleave(heads // groups, dim=3).transpose(2, 3) for v in (B, C))  # S c h Q n
    dt = functional.softplus(dt + dt_bias_h).transpose(2, 3)  # S c h Q
    x = x.transpose(2, 3)  # S c h Q P
    decay = (dt * A_h[:, None]).cumsum(-1)  # log of the decay from the chunk's start to each token

    # 1. Inside a chunk: every token s reaches token t >= s with the decay between them.
    between = decay[..., :, None] - decay[..., None, :]
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool).triu(1)
    weights = torch.exp(between.masked_fill(future, -torch.inf)) * (C @ B.transpose(-1, -2)) * dt[..., None, :]
    y = weights @ x
    # 2. What each chunk adds to the state by its end.
    to_end = torch.exp(decay[..., -1:] - decay) * dt
    added = (x * to_end[..., None]).transpose(-1, -2) @ B  # S c h P n
    # 3. The state before each chunk.
    state = torch.zeros_like(added[:, 0]) if state_ShPn is None else state_ShPn
    states = [state]
    for c in range(length // chunk_size):
        states.append(torch.exp(decay[:, c, :, -1])[..., None, None] * states[-1] + added[:, c])
    # 4. What the state before the chunk gives each token.
    before = torch.stack(states[: x.shape[1]], 1)
    y = y + torch.exp(decay)[..., None] * (C @ before.transpose(-1, -2)) + D_h[:, None, None] * x
    return y.transpose(2, 3).flatten(1, 2)[:, :length], states[-1]


def _chunked(rows, padding, chunk_size):
    rows = torch.cat([rows, rows.new_zeros(rows.shape[0], padding, *rows.shape[2:])], 1)
    return rows.unflatten(1, (-1, chunk_size))
