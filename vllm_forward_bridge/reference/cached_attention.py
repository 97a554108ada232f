# SPDX-License-Identifier: Apache-2.0
"""Causal attention of one sequence on a paged cache of e4m3 codes, in plain torch."""

import torch
from torch import Tensor


def cached_attention(
    q_Rqd: Tensor, key_pages_YZgd: Tensor, value_pages_YZgd: Tensor, pages: list[int], length: int, k_scale: Tensor,
    v_scale: Tensor, softmax_scale: float,
) -> Tensor:  # fmt: skip
    """Attend with the last R rows of the sequence whose `length` keys lie in `pages`; arguments as in the op."""
    k_Lgd, v_Lgd = (
        torch.cat([stored[page].to(q_Rqd.dtype) for page in pages])[:length] * scale
        for stored, scale in ((key_pages_YZgd, k_scale), (value_pages_YZgd, v_scale))
    )
    heads_a_kv_head = q_Rqd.shape[1] // k_Lgd.shape[1]
    rows = []
    for row, q_qd in enumerate(q_Rqd):
        visible = length - len(q_Rqd) + row + 1
        k, v = (x[:visible].repeat_interleave(heads_a_kv_head, dim=1) for x in (k_Lgd, v_Lgd))
        weights_Lq = torch.softmax((q_qd * k).sum(-1) * softmax_scale, 0)
        rows.append((weights_Lq[..., None] * v).sum(0))
    return torch.stack(rows)
