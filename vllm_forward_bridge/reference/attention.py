# SPDX-License-Identifier: Apache-2.0
"""Causal attention of one sequence on keys and values read back from e4m3 codes, in plain torch."""

import torch
from torch import Tensor

E4M3_LARGEST = 448.0


def stored(x: Tensor, scale: Tensor) -> Tensor:
    """Return x as an e4m3 cache gives it back: code(clamp(x / scale)) * scale, in the dtype of x."""
    codes = (x.float() / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return codes.to(x.dtype) * scale.to(x.dtype)


def attention(
    q_Rqd: Tensor, k_Lgd: Tensor, v_Lgd: Tensor, k_scale: Tensor, v_scale: Tensor, softmax_scale: float
) -> Tensor:
    """Attend with the last R rows of a sequence of L keys, without inner rounding.

    Args:
        q_Rqd: queries, any float dtype.
        k_Lgd: keys before quantisation.
        v_Lgd: values before quantisation.
        k_scale: what a key code is multiplied by.
        v_scale: what a value code is multiplied by.
        softmax_scale: factor of the scores.

    Returns:
        out_Rqd in the dtype of q.
    """
    queries, keys, repeats = len(q_Rqd), len(k_Lgd), q_Rqd.shape[1] // k_Lgd.shape[1]
    k_qLd = stored(k_Lgd, k_scale).repeat_interleave(repeats, dim=1).transpose(0, 1)
    v_qLd = stored(v_Lgd, v_scale).repeat_interleave(repeats, dim=1).transpose(0, 1)
    position_R = torch.arange(keys - queries, keys)
    hidden_RL = torch.arange(keys) > position_R[:, None]
    scores_qRL = (q_Rqd.transpose(0, 1) @ k_qLd.transpose(1, 2) * softmax_scale).masked_fill(hidden_RL, -torch.inf)
    return (torch.softmax(scores_qRL, -1) @ v_qLd).transpose(0, 1)
