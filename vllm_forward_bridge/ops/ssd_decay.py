# SPDX-License-Identifier: Apache-2.0
"""Decay rate of each Mamba-2 head: one op, so that both sides take the same exponential of the stored logarithm."""

# h heads.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact
from vllm_forward_bridge.ops.arguments import check


@torch.library.custom_op("vllm_forward_bridge::ssd_decay", mutates_args=(), device_types="cpu")
def ssd_decay(A_log_h: Tensor) -> Tensor:
    """Return A = -exp(f32(A_log)).

    Args:
        A_log_h: bf16 or fp32.

    Returns:
        A_h, fp32.

    Raises:
        ValueError: A_log is not a vector of bf16 or fp32.

    Source: vLLM 0.26.0, model_executor/layers/mamba/mamba_mixer2.py, the loader of A.
    """
    accepted = A_log_h.dtype if A_log_h.dtype == torch.bfloat16 else torch.float32
    check("ssd_decay", A_log_h=(A_log_h, accepted, "h"))
    return -exact.exp(A_log_h.float())


@ssd_decay.register_kernel("cuda")
def _(A_log_h):
    return -torch.exp(A_log_h.float())


@ssd_decay.register_fake
def _(A_log_h):
    return torch.empty_like(A_log_h, dtype=torch.float32)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_h):
    (A_log_h,) = ctx.saved_tensors
    return (-grad_h * torch.exp(A_log_h.float())).to(A_log_h.dtype)


ssd_decay.register_autograd(_backward, setup_context=_setup)
