# SPDX-License-Identifier: Apache-2.0
"""Sigmoid router with a selection bias."""

import torch
from torch import Tensor


def router(x_TH: Tensor, weight_EH: Tensor, expert_bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return (weights_Tk, expert_ids_Tk): experts by falling score + bias, weights the scores over their sum."""
    compute = torch.promote_types(x_TH.dtype, torch.float32)
    scores_TE = torch.sigmoid(x_TH.to(compute) @ weight_EH.to(compute).T)
    ranked_TE = (scores_TE + expert_bias_E).argsort(dim=-1, descending=True, stable=True)
    expert_ids_Tk = ranked_TE[:, :top_k]
    chosen_Tk = scores_TE.gather(-1, expert_ids_Tk)
    return chosen_Tk / chosen_Tk.sum(dim=-1, keepdim=True), expert_ids_Tk
