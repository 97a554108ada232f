# SPDX-License-Identifier: Apache-2.0
"""The output layer, and the logprob of given tokens with only a chunk of logits in memory, forward and backward."""

# Legend: T tokens, H hidden, V vocab, B batch, S sequence.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.linear import Linear
from megatron.vllm_forward.sharding import shard_gradients, whole_rows_product
from vllm_forward_bridge.ops.gradients import product as multiply
from vllm_forward_bridge.ops.gradients import wide


@dataclass(frozen=True)
class Sampling:
    """How each token was sampled; the logprob is that of the truncated, rescaled distribution."""

    temperature: Tensor
    """fp32 [b, s]; 0 stands for greedy: no division."""
    top_p: Tensor
    """fp32 [b, s]; 1 switches it off."""
    top_k: Tensor
    """int32 [b, s]; 0 switches it off."""

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three as [T], sequence-contiguous."""
        return (
            self.temperature.reshape(-1).float().contiguous(),
            self.top_p.reshape(-1).float().contiguous(),
            self.top_k.reshape(-1).to(torch.int32).contiguous(),
        )


def plain_sampling(tokens_BS: Tensor) -> Sampling:
    """Return temperature 1 without truncation, for every token."""
    ones = torch.ones(tokens_BS.shape, dtype=torch.float32, device=tokens_BS.device)
    return Sampling(ones, ones, torch.zeros_like(tokens_BS, dtype=torch.int32))


class OutputLayer(Linear):
    """logits_TV = lm_head(y_TH)."""

    def __init__(self, *, config: TransformerConfig, bridge: Bridge, tp_group: Any) -> None:
        super().__init__(
            bridge.model.hidden_size, bridge.model.vocab_size, config=config, init_method=config.init_method,
            bridge=bridge, name="lm_head", split=0, tp_group=tp_group,
            format=bridge.model.quantization.format_of("lm_head"),
        )  # fmt: skip
        self.chunk_tokens = bridge.config.forward.logprob_chunk_tokens

    def product(self, x_TK: Tensor) -> Tensor:
        """Return all logits of own rows; a tensor-parallel rank's master is a share of the vocabulary."""
        self.check_current()
        if self.shard is None:
            return self.whole_product(x_TK)
        return whole_rows_product(x_TK, self.weight, self.shard, self.whole_product)

    def gradients(self, grad_TV: Tensor, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (grad_x, fp32 gradient of the master)."""
        if self.shard is not None:
            return shard_gradients(self.shard, grad_TV, x_TH, self.weight)
        return multiply(grad_TV, self.weight, x_TH.dtype), wide(grad_TV.t()) @ wide(x_TH)

    def logprob(self, hidden_TH: Tensor, token_ids_T: Tensor, sampling: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (logprob_T fp32, entropy_T fp32) of given tokens; the entropy carries no gradient.

        Chunking over tokens changes memory, never bits: every row of logits is independent of the others.
        """
        return _ChunkedLogprob.apply(hidden_TH, self.weight, self, token_ids_T, *sampling)


class _ChunkedLogprob(torch.autograd.Function):
    """An autograd.Function because its backward computes the logits again instead of saving them."""

    @staticmethod
    def forward(ctx, hidden_TH: Tensor, weight_VH: Tensor, layer: OutputLayer, *rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        ctx.save_for_backward(hidden_TH, weight_VH, *rows)
        results = []
        for part in zip(*(tensor.split(layer.chunk_tokens) for tensor in (hidden_TH, *rows)), strict=True):
            hidden, token_ids, *sampling = part
            logits = layer.product(hidden)
            results.append((layer.kernels.logprob(logits, token_ids, *sampling), _entropy(logits, sampling[0])))
        logprob_T, entropy_T = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T: Tensor, grad_entropy: Tensor) -> tuple:
        hidden_TH, weight_VH, *rows = ctx.saved_tensors
        layer = ctx.layer
        grad_hidden = []
        # fp32 over chunks: summing bf16 gradients would lose what a large vocabulary spreads thinly.
        grad_weight = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        for part in zip(*(tensor.split(layer.chunk_tokens) for tensor in (grad_T, hidden_TH, *rows)), strict=True):
            grad, hidden, token_ids, *sampling = part
            logits = layer.product(hidden).requires_grad_()
            with torch.enable_grad():
                logprob = layer.kernels.logprob(logits, token_ids, *sampling)
            (grad_logits,) = torch.autograd.grad(logprob, logits, grad.contiguous())
            grad_part, grad_weight_part = layer.gradients(grad_logits, hidden)
            grad_hidden.append(grad_part)
            grad_weight += grad_weight_part
        return torch.cat(grad_hidden), grad_weight.to(weight_VH.dtype), None, *(None for _ in rows)


def _entropy(logits_TV: Tensor, temperature_T: Tensor) -> Tensor:
    scale = torch.where(temperature_T > 0, temperature_T, 1.0).unsqueeze(1)
    log_p = torch.log_softmax(logits_TV.float() / scale, dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)
