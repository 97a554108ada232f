# SPDX-License-Identifier: Apache-2.0
"""Corrections of a run whose trainer and rollout disagree: token weights (TIS, MIS), for comparison with the bridge.

Where the two agree in every bit all weights are exactly one, so a bridged run needs none of this.
"""

import torch
from torch import Tensor

CORRECTIONS = ("none", "tis", "mis")


def importance_weights(old_T: Tensor, rollout_T: Tensor, *, correction: str, cap: float) -> Tensor:
    """Weigh each token for having been sampled by the rollout's distribution instead of the trainer's.

    ratio = exp(old - rollout)
    none: 1;   tis (truncated importance sampling): min(ratio, cap);   mis (masked): ratio if ratio <= cap, else 0

    Args:
        old_T: float32 logprobs by the trainer's forward on the weights that sampled.
        rollout_T: float32 logprobs that the rollout reported.
        correction: one of `CORRECTIONS`.
        cap: at least 1, so that a ratio of exactly one passes unchanged.

    Returns:
        float32, detached.

    Source:
        Yao et al. 2025 (truncated); Liu et al. 2025 (masked).
    """
    ratio_T = (old_T - rollout_T).detach().exp()
    if correction == "none":
        return torch.ones_like(ratio_T)
    if correction == "tis":
        return ratio_T.clamp(max=cap)
    if correction == "mis":
        return torch.where(ratio_T <= cap, ratio_T, 0.0)
    accepted = ", ".join(CORRECTIONS)
    raise ValueError(f"correction is {correction!r}; accepted are {accepted}; set it in [gate] of the TOML file")
