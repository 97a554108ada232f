# SPDX-License-Identifier: Apache-2.0
"""Which tokens top-k and top-p leave: one integer rule for the sampler and for the logprob, free of summation order.

Tokens rank by logit, highest first, equal logits by id, smallest first. Top-k keeps the first k. Top-p keeps a token
if the mass of those ranked before it (among the ones top-k kept) is below p times their total mass. So the survivors
are a prefix of the ranking, and its last token, the cut, says everything.
"""

# Legend: T rows (tokens), R rows with top-k or top-p on, V vocabulary (in `_find_cut`: by rank).

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact
from vllm_forward_bridge.ops.gradients import wide

MASS_BITS = 35
"""Fraction bits of a probability mass: a sum over up to 2^18 tokens is a whole number within 2^53."""
MAX_VOCAB = 1 << 18
_LOWEST_KEY = -(1 << 15)


@dataclass(frozen=True)
class Cut:
    """The last surviving token of each row, as its place in the ranking."""

    key_T: Tensor
    """int16 key of its logit."""
    id_T: Tensor
    """int64 id; among equal logits, smaller ids survive too."""

    def drop(self, values_TV: Tensor, logits_TV: Tensor, fill: float) -> Tensor:
        """Set the values of the tokens behind the cut to `fill`, in place; return the values."""
        if (self.key_T > _LOWEST_KEY).any():
            values_TV.masked_fill_(~self.survivors(logits_TV), fill)
        return values_TV

    def survivors(self, logits_TV: Tensor) -> Tensor:
        """Return bool [T, V]."""
        keys_TV, key_T1 = order_keys(logits_TV), self.key_T.unsqueeze(-1)
        ids_V = torch.arange(logits_TV.shape[-1], device=logits_TV.device)
        return (keys_TV > key_T1) | ((keys_TV == key_T1) & (ids_V <= self.id_T.unsqueeze(-1)))


def scaled_logits(logits_TV: Tensor, temperature_T: Tensor) -> Tensor:
    """Return fp32 (float64 for float64) logits / temperature; a temperature of 0 does not divide."""
    return wide(logits_TV) / divisor(temperature_T)


def divisor(temperature_T: Tensor) -> Tensor:
    """Return [T, 1]: the temperature, or 1 where it is 0."""
    return torch.where(temperature_T == 0, 1.0, temperature_T).unsqueeze(-1)


def order_keys(logits_TV: Tensor) -> Tensor:
    """Return int16 keys that order as the bf16 logits do."""
    # bits: -0.0 equals 0.0 as a logit, so it must get the same key; adding 0.0 leaves only 0.0.
    bits_TV = (logits_TV + 0.0).view(torch.int16)
    return torch.where(bits_TV < 0, bits_TV ^ 0x7FFF, bits_TV)


def masses(z_TV: Tensor) -> Tensor:
    """Return floor(e^(z - max z) 2^35): whole numbers in float64, whose sums are exact in any order."""
    largest_T1 = z_TV.amax(-1, keepdim=True)
    return exact.exp(z_TV - largest_T1).double().mul_(2.0**MASS_BITS).floor_()


def find_cut(logits_TV: Tensor, z_TV: Tensor, top_p_T: Tensor, top_k_T: Tensor) -> Cut:
    """Return where top-k, then top-p, cut each row off; with both off, behind its last token.

    Args:
        logits_TV: bf16.
        z_TV: fp32, `scaled_logits` of them.
        top_p_T: fp32 in (0, 1]; 1 is off.
        top_k_T: int32; 0 is off, as is V and more.
    """
    vocab = logits_TV.shape[-1]
    cut = uncut(logits_TV)
    num_kept_T = torch.where(top_k_T == 0, vocab, top_k_T).clamp(max=vocab)
    rows = ((num_kept_T < vocab) | (top_p_T < 1.0)).nonzero().squeeze(-1)
    if len(rows):
        part = _find_cut(order_keys(logits_TV[rows]), masses(z_TV[rows]), top_p_T[rows], num_kept_T[rows])
        cut.key_T[rows], cut.id_T[rows] = part.key_T, part.id_T
    return cut


def uncut(logits_TV: Tensor) -> Cut:
    """Return the cut behind the last token of every row."""
    num_rows, vocab = logits_TV.shape
    device = logits_TV.device
    return Cut(
        torch.full((num_rows,), _LOWEST_KEY, dtype=torch.int16, device=device),
        torch.full((num_rows,), vocab - 1, dtype=torch.int64, device=device),
    )


def _find_cut(keys_RV: Tensor, masses_RV: Tensor, top_p_R: Tensor, num_kept_R: Tensor) -> Cut:
    # bits: a stable sort ranks equal logits by their id.
    ranked_RV, id_RV = keys_RV.sort(dim=-1, descending=True, stable=True)
    kept_RV = torch.arange(keys_RV.shape[-1], device=keys_RV.device) < num_kept_R.unsqueeze(-1)
    mass_RV = masses_RV.gather(-1, id_RV) * kept_RV
    before_RV = mass_RV.cumsum(-1) - mass_RV
    target_R = torch.where(top_p_R < 1.0, mass_RV.sum(-1) * top_p_R.double(), torch.inf)
    num_alive_R1 = (kept_RV & (before_RV < target_R.unsqueeze(-1))).sum(-1, keepdim=True)
    last_R1 = (num_alive_R1 - 1).clamp_(min=0)
    return Cut(ranked_RV.gather(-1, last_R1).squeeze(-1), id_RV.gather(-1, last_R1).squeeze(-1))
