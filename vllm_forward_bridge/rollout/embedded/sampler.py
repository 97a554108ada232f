# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens and their logprobs, each row by its own request's parameters."""

# Legend: R rows whose logits are wanted, V vocabulary.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge import ops
from vllm_forward_bridge.rollout.protocol import SamplingParams
from vllm_forward_bridge.rollout.uniform import token_uniform


@dataclass(frozen=True)
class LogitsRow:
    """What is wanted of one row of logits."""

    sampling: SamplingParams
    position: int
    """Index, in its sequence, of the token that these logits give."""
    token: int | None = None
    """The token to score; None to sample one."""


def sample_rows(logits_RV: Tensor, rows: Sequence[LogitsRow]) -> tuple[list[int], Tensor]:
    """Sample each row that has no token yet, and return all tokens with their logprobs.

    Returns:
        (token ids, fp32 [R] logprobs of the processed distribution). A row's result depends on that row alone.
    """

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row.sampling, name) for row in rows], dtype=dtype, device=logits_RV.device)

    temperature_R = column("temperature", torch.float32)
    top_p_R, top_k_R = column("top_p", torch.float32), column("top_k", torch.int32)
    given_R = torch.tensor([-1 if row.token is None else row.token for row in rows], device=logits_RV.device)
    position_R = torch.tensor([row.position for row in rows], device=logits_RV.device)
    uniform_R = token_uniform(column("seed", torch.int64), position_R)
    token_R = torch.where(given_R < 0, ops.sample(logits_RV, temperature_R, top_p_R, top_k_R, uniform_R), given_R)
    logprob_R = ops.logprob(logits_RV, token_R, temperature_R, top_p_R, top_k_R)
    return token_R.tolist(), logprob_R
