# SPDX-License-Identifier: Apache-2.0
"""Logprob and sampling under temperature, top-k and top-p, by sorting."""

import torch
from torch import Tensor

MASS_BITS = 35


def survivors(logits_V: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Return bool [V] of one row: rank by logit, then id; keep k; keep while the mass before is below p of it all."""
    ranked_V = logits_V.float().argsort(descending=True, stable=True)
    kept_K = ranked_V[: top_k or None]
    if top_p < 1.0:
        mass_K = masses(logits_V, temperature)[kept_K]
        before_K = mass_K.cumsum(0) - mass_K
        kept_K = kept_K[before_K < top_p * mass_K.sum()]
    return torch.zeros(len(logits_V), dtype=torch.bool).index_fill(0, kept_K, True)


def masses(logits_V: Tensor, temperature: float) -> Tensor:
    """Return float64 whole numbers floor(e^(z - max z) 2^35)."""
    z_V = scaled(logits_V, temperature)
    return (torch.exp((z_V - z_V.max()).double()).float().double() * 2**MASS_BITS).floor()


def scaled(logits_V: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in at least fp32; temperature 0 leaves them."""
    z_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
    return z_V / temperature if temperature else z_V


def logprob(logits_TV: Tensor, token_ids_T: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor) -> Tensor:
    """Return log_softmax over the survivors, at the token; -inf if the token is not one."""
    rows = []
    settings = zip(temperature_T.tolist(), top_p_T.tolist(), top_k_T.tolist(), strict=True)
    for logits_V, token_id, (temperature, top_p, top_k) in zip(logits_TV, token_ids_T, settings, strict=True):
        alive_V = survivors(logits_V, temperature, top_p, top_k)
        z_V = scaled(logits_V, temperature).masked_fill(~alive_V, -torch.inf)
        rows.append(torch.log_softmax(z_V, dim=0)[token_id])
    return torch.stack(rows)


def sample(logits_TV: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor, uniform_T: Tensor) -> Tensor:
    """Return the first token whose cumulative mass exceeds floor(uniform * total); argmax at temperature 0."""
    tokens = []
    settings = zip(temperature_T.tolist(), top_p_T.tolist(), top_k_T.tolist(), uniform_T.tolist(), strict=True)
    for logits_V, (temperature, top_p, top_k, uniform) in zip(logits_TV, settings, strict=True):
        alive_V = survivors(logits_V, temperature, top_p, top_k if temperature else 1)
        cumulative_V = (masses(logits_V, temperature) * alive_V).cumsum(0)
        tokens.append(int((cumulative_V > int(uniform * cumulative_V[-1].item())).nonzero()[0]))
    return torch.tensor(tokens)
