# SPDX-License-Identifier: Apache-2.0
"""Logprob of a given token under temperature, top-k and top-p, and the sampler that draws from what survives."""

# Legend: T rows (tokens), V vocabulary, b blocks of columns.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, triton_logprob
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.survivors import MAX_VOCAB, Cut, divisor, find_cut, masses, scaled_logits

BLOCK_COLUMNS = 1024
"""Columns summed at once; a vocabulary shard of whole blocks gives its part of the whole vocabulary's bits."""
_SUM_UNITS = 2.0**43


def logprob(logits_TV: Tensor, token_ids_T: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor) -> Tensor:
    """Return the log-probability of each row's token among the survivors of top-k and top-p.

    z = f32(logits) / temperature (temperature 0: no division); survivors as `ops.survivors` says; per block of 1,024
    columns m_b = max z and l_b = f32(sum e^(z - m_b)) over the survivors, summed in fixed point; blocks merged in
    order: m = max(m, m_b), l = l e^(m_old - m) + l_b e^(m_b - m); result = (z[token] - m) - ln l.

    Args:
        logits_TV: bf16, contiguous; V at most 2^18.
        token_ids_T: int64 in 0 to V - 1.
        temperature_T: fp32, finite, 0 or more.
        top_p_T: fp32 in (0, 1]; 1 is off.
        top_k_T: int32, 0 or more; 0 is off.

    Returns:
        logprob_T: fp32; -inf for a token that does not survive, and its gradient is then zero.

    Raises:
        ValueError: an argument has another dtype, shape, layout or range.
    """
    return _logprob(logits_TV, token_ids_T, temperature_T, top_p_T, top_k_T)[0]


@torch.library.custom_op("vllm_forward_bridge::logprob", mutates_args=(), device_types="cpu")
def _logprob(
    logits_TV: Tensor, token_ids_T: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the logprob and, for the backward, ln of the sum of e^z and the cut (key and id of the last survivor)."""
    _check("logprob", logits_TV, temperature_T, top_p_T, top_k_T, token_ids_T=token_ids_T)
    z_TV = scaled_logits(logits_TV, temperature_T)
    cut = find_cut(logits_TV, z_TV, top_p_T, top_k_T)
    largest_T, sum_T = merged_in_order(*block_sums(cut.drop(z_TV, logits_TV, -torch.inf)))
    log_sum_T = exact.log(sum_T)
    chosen_T = z_TV.gather(-1, token_ids_T.unsqueeze(-1)).squeeze(-1)
    return (chosen_T - largest_T) - log_sum_T, largest_T + log_sum_T, cut.key_T, cut.id_T


def block_sums(z_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 (m_Tb, l_Tb): the maximum of each block of 1,024 columns and the sum of e^(z - m) over it."""
    largest, sums = [], []
    for block in z_TV.split(BLOCK_COLUMNS, dim=-1):
        largest_T1 = block.amax(-1, keepdim=True)
        # bits: whole numbers below 2^53, so the sum is exact in any order; 43 fraction bits are more than fp32 has.
        fixed = exact.exp(block - _finite(largest_T1)).double().mul_(_SUM_UNITS).round_()
        largest.append(largest_T1.squeeze(-1))
        sums.append((fixed.sum(-1) / _SUM_UNITS).float())
    return torch.stack(largest, dim=-1), torch.stack(sums, dim=-1)


def merged_in_order(largest_Tb: Tensor, sum_Tb: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 (m_T, l_T): the blocks' maxima and sums merged from the first to the last."""
    running_T, total_T = largest_Tb[:, 0], sum_Tb[:, 0]
    for block in range(1, largest_Tb.shape[1]):
        pair_2T = torch.stack((running_T, largest_Tb[:, block]))
        running_T = torch.maximum(*pair_2T)
        # bits: each product is rounded before the sum.
        old_T, new_T = exact.exp(pair_2T - _finite(running_T)) * torch.stack((total_T, sum_Tb[:, block]))
        total_T = old_T + new_T
    return running_T, total_T


def _finite(largest: Tensor) -> Tensor:
    """Replace -inf, the maximum of a block without survivors, by 0: its exponentials are then 0, not NaN."""
    return torch.where(largest == -torch.inf, 0.0, largest)


@torch.library.custom_op("vllm_forward_bridge::sample", mutates_args=(), device_types="cpu")
def sample(logits_TV: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor, uniform_T: Tensor) -> Tensor:
    """Draw a token a row from the survivors of top-k and top-p, in proportion to their integer masses.

    mass = floor(e^(z - max z) 2^35) for survivors, else 0; the token is the first, in id order, whose cumulative mass
    exceeds floor(uniform * total). Temperature 0 takes the largest logit, the smaller id of equal ones. A token drawn
    here has a finite `logprob` under the same arguments.

    Args:
        logits_TV: bf16, contiguous; V at most 2^18.
        temperature_T: fp32, finite, 0 or more.
        top_p_T: fp32 in (0, 1]; 1 is off.
        top_k_T: int32, 0 or more; 0 is off.
        uniform_T: float64 in [0, 1).

    Returns:
        token_ids_T: int64.

    Raises:
        ValueError: an argument has another dtype, shape, layout or range.
    """
    _check("sample", logits_TV, temperature_T, top_p_T, top_k_T, uniform_T=uniform_T)
    z_TV = scaled_logits(logits_TV, temperature_T)
    cut = find_cut(logits_TV, z_TV, top_p_T, torch.where(temperature_T == 0, 1, top_k_T))
    cumulative_TV = cut.drop(masses(z_TV), logits_TV, 0.0).cumsum(-1)
    total_T = cumulative_TV[:, -1]
    threshold_T = torch.minimum((uniform_T * total_T).floor(), total_T - 1)
    return (cumulative_TV <= threshold_T.unsqueeze(-1)).sum(-1)


def _check(op: str, logits_TV: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor, **last: Tensor) -> None:
    vocab = logits_TV.shape[-1] if logits_TV.dim() else 0
    [(name, value_T)] = last.items()
    dtype, limit = (torch.int64, vocab) if name == "token_ids_T" else (torch.float64, 1)
    check(
        op,
        ""
        if 0 < vocab <= MAX_VOCAB
        else f"logits_TV has V = {vocab}; 1 to {MAX_VOCAB} is accepted, as sums of masses "
        "are exact up to there: split the vocabulary",
        _range_problem(
            "temperature_T", temperature_T, (temperature_T >= 0) & temperature_T.isfinite(), "0 or positive"
        ),
        _range_problem("top_p_T", top_p_T, (top_p_T > 0) & (top_p_T <= 1), "above 0 up to 1 (off)"),
        _range_problem("top_k_T", top_k_T, top_k_T >= 0, "0 (off) or more"),
        _range_problem(name, value_T, (value_T >= 0) & (value_T < limit), f"0 up to, not including, {limit}"),
        logits_TV=(logits_TV, torch.bfloat16, "T V"),
        temperature_T=(temperature_T, torch.float32, "T"),
        top_p_T=(top_p_T, torch.float32, "T"),
        top_k_T=(top_k_T, torch.int32, "T"),
        **{name: (value_T, dtype, "T")},
    )


def _range_problem(name: str, values_T: Tensor, allowed_T: Tensor, accepted: str) -> str:
    if allowed_T.all():
        return ""
    first = values_T[~allowed_T][0].item()
    return f"{name} has {int((~allowed_T).sum())} values such as {first}; {accepted} is accepted: correct the request"


_logprob.register_kernel("cuda")(triton_logprob.logprob)


@_logprob.register_fake
def _(logits_TV, token_ids_T, temperature_T, top_p_T, top_k_T) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprob_T = torch.empty_like(temperature_T)
    return (
        logprob_T,
        torch.empty_like(logprob_T),
        logits_TV.new_empty(len(temperature_T), dtype=torch.int16),
        (torch.empty_like(token_ids_T)),
    )


sample.register_kernel("cuda")(triton_logprob.sample)


@sample.register_fake
def _(logits_TV, temperature_T, top_p_T, top_k_T, uniform_T) -> Tensor:
    return torch.empty_like(uniform_T, dtype=torch.int64)


def logit_gradients(
    grad_T: Tensor, logits_TV: Tensor, token_ids_T: Tensor, temperature_T: Tensor, log_sum_T: Tensor, alive_TV: Tensor
) -> Tensor:
    """Return the gradient of the logits: grad (one_hot(token) - softmax over the survivors) / temperature.

    Zero in a row whose token does not survive. In fp32 (float64 for float64 logits); log_sum_T is ln sum e^z.
    """
    token_T1 = token_ids_T.unsqueeze(-1)
    grad_T1 = torch.where(alive_TV.gather(-1, token_T1), grad_T.unsqueeze(-1), 0.0)
    softmax_TV = (scaled_logits(logits_TV, temperature_T) - log_sum_T.unsqueeze(-1)).exp() * alive_TV
    grad_z_TV = (softmax_TV * -grad_T1).scatter_add(-1, token_T1, grad_T1)
    return grad_z_TV / divisor(temperature_T)


def _setup(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    logits_TV, token_ids_T, temperature_T, _, _ = inputs
    _, log_sum_T, key_T, id_T = output
    ctx.mark_non_differentiable(log_sum_T, key_T, id_T)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits_TV, token_ids_T, temperature_T, log_sum_T, key_T, id_T)


def _backward(ctx, grad_T: Tensor, *_: None) -> tuple[Tensor, None, None, None, None]:
    logits_TV, token_ids_T, temperature_T, log_sum_T, key_T, id_T = ctx.saved_tensors
    alive_TV = Cut(key_T, id_T).survivors(logits_TV)
    grad_TV = logit_gradients(grad_T, logits_TV, token_ids_T, temperature_T, log_sum_T, alive_TV)
    return grad_TV.to(logits_TV.dtype), None, None, None, None


_logprob.register_autograd(_backward, setup_context=_setup)
