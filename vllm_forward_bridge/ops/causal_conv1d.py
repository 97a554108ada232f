# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution with fused SiLU over packed sequences; prefill, chunk and step are one arithmetic.

After vLLM's `causal_conv1d_fn` and `causal_conv1d_update`: the product of two bf16 numbers is bf16 before it is added.
"""

# T packed tokens, S sequences, C channels, W window width, N rows of the extended layout: T + S * (W - 1).

import torch
from torch import Tensor

from vllm_forward_bridge.ops import conv_cuda, exact, packed
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.gradients import wide

_BLOCK_ELEMENTS = 1 << 17  # a block of fp32 that stays in the cache; changes time, never bits


@torch.library.custom_op("vllm_forward_bridge::causal_conv1d", mutates_args=(), device_types="cpu")
def causal_conv1d(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor, cu_seqlens_S1: Tensor, tail_SWC: Tensor | None
) -> Tensor:
    """Convolve each packed sequence with its own past.

    a = f32(bias);  a = a + f32(bf16(x_{t-W+1+j} * weight_j)) for j = 0 .. W-1, the oldest input first;
    y = bf16(silu(a)).

    Args:
        x_TC: bf16; rows past cu_seqlens[-1] are padding: never read into a live row, and zero in the result.
        weight_CW: bf16; its last column multiplies the row itself.
        bias_C: bf16.
        cu_seqlens_S1: int32 [S + 1].
        tail_SWC: bf16 [S, W - 1, C], the inputs before each sequence's first row, oldest first; None stands for zeros.

    Returns:
        y_TC, bf16.

    Raises:
        ValueError: lists every shape, dtype or layout that is not accepted.

    Source: vLLM 0.26.0, model_executor/layers/mamba/ops/causal_conv1d.py.
    """
    _check(x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC)
    extended_NC, row_T = _extend(x_TC, cu_seqlens_S1, tail_SWC, weight_CW.shape[1])
    y_TC = torch.zeros_like(x_TC)
    taps_WC = weight_CW.t().contiguous()
    outputs = len(extended_NC) - len(taps_WC) + 1
    block = max(1, _BLOCK_ELEMENTS // x_TC.shape[1])
    y_NC = extended_NC.new_empty(outputs, x_TC.shape[1])
    for first in range(0, outputs, block):
        last = min(first + block, outputs)
        total = bias_C.float().expand(last - first, -1).clone()
        for j, tap_C in enumerate(taps_WC):
            # bits: the product is rounded to bf16 before the fp32 add, as in Triton's typing of two bf16 operands.
            total += extended_NC[first + j : last + j] * tap_C
        y_NC[first:last] = exact.silu(total)
    live = len(row_T)
    torch.index_select(y_NC, 0, row_T - (len(taps_WC) - 1), out=y_TC[:live])
    return y_TC


causal_conv1d.register_kernel("cuda")(conv_cuda.causal_conv1d)


@causal_conv1d.register_fake
def _(x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC):
    return torch.empty_like(x_TC)


def _check(x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC):
    problems = packed.cu_seqlens_problems("cu_seqlens_S1", cu_seqlens_S1, len(x_TC))
    if tail_SWC is not None and tail_SWC.dim() == 3 and tail_SWC.shape[1] != weight_CW.shape[-1] - 1:
        problems.append(
            f"tail_SWC has {tail_SWC.shape[1]} rows a sequence for a window of {weight_CW.shape[-1]}; one less than "
            "the window is accepted, the inputs the first row still sees: keep that many"
        )
    bf16 = torch.bfloat16
    check(
        "causal_conv1d", *problems,
        x_TC=(x_TC, bf16, "T C"), weight_CW=(weight_CW, bf16, "C W"), bias_C=(bias_C, bf16, "C"),
        tail_SWC=(tail_SWC, bf16, "S W-1 C"), **packed.ends_form("cu_seqlens_S1", cu_seqlens_S1),
    )  # fmt: skip


def _extend(x_TC: Tensor, cu_seqlens_S1: Tensor, tail_SWC: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Put each sequence's tail before it; return that tensor and where each packed row went."""
    gap = width - 1
    sequence_T = packed.sequence_of_rows(cu_seqlens_S1)
    row_T = torch.arange(len(sequence_T), device=x_TC.device) + (sequence_T + 1) * gap
    sequences = len(cu_seqlens_S1) - 1
    extended_NC = x_TC.new_zeros(len(sequence_T) + sequences * gap, x_TC.shape[1])
    extended_NC.index_copy_(0, row_T, x_TC[: len(sequence_T)])
    if tail_SWC is not None:
        first_S = cu_seqlens_S1[:-1].long() + torch.arange(sequences, device=x_TC.device) * gap
        extended_NC[(first_S[:, None] + torch.arange(gap, device=x_TC.device)).flatten()] = tail_SWC.flatten(0, 1)
    return extended_NC, row_T


def _setup(ctx, inputs, output):
    x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC = inputs
    if ctx.needs_input_grad[4]:
        raise ValueError(
            "causal_conv1d: tail requires a gradient; only a constant tail is accepted, as training starts every "
            "sequence at its first token: pass tail.detach(), or None"
        )
    ctx.save_for_backward(x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC)


def _backward(ctx, grad_TC):
    x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC = ctx.saved_tensors
    gradients = causal_conv1d_backward(grad_TC, x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC)
    pairs = zip(gradients, (x_TC, weight_CW, bias_C), ctx.needs_input_grad, strict=False)
    return *(gradient.to(value.dtype) if needed else None for gradient, value, needed in pairs), None, None


@torch.library.custom_op("vllm_forward_bridge::causal_conv1d_backward", mutates_args=())
def causal_conv1d_backward(
    grad_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor, cu_seqlens_S1: Tensor, tail_SWC: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias in fp32 (float64 for float64).

    An op of its own, because tracing cannot follow lengths that are data.
    With a the sum before SiLU and d = grad * silu'(a), zero outside the sequence: grad_x_t = sum_j d_{t+W-1-j} w_j;
    grad_w_j = sum_t d_t x_{t-W+1+j};  grad_bias = sum_t d_t.
    """
    gap = weight_CW.shape[1] - 1
    extended_NC, row_T = _extend(x_TC, cu_seqlens_S1, tail_SWC, gap + 1)
    extended_NC, taps_WC = wide(extended_NC), wide(weight_CW).t().contiguous()
    outputs = len(extended_NC) - gap
    total_NC = wide(bias_C) + sum(extended_NC[j : outputs + j] * tap_C for j, tap_C in enumerate(taps_WC))
    sigmoid_NC = torch.sigmoid(total_NC)
    slope_NC = sigmoid_NC * (1 + total_NC * (1 - sigmoid_NC))
    # Rows of the tails get no gradient: they are the gaps that keep sequences apart.
    d_NC = extended_NC.new_zeros(outputs + 2 * gap, x_TC.shape[1])
    d_NC[row_T] = wide(grad_TC)[: len(row_T)] * slope_NC[row_T - gap]
    spread_NC = sum(d_NC[gap - j : gap - j + outputs + gap] * tap_C for j, tap_C in enumerate(taps_WC))
    grad_x_TC = wide(torch.zeros_like(x_TC))
    grad_x_TC[: len(row_T)] = spread_NC[row_T]
    live_NC = d_NC[gap : gap + outputs]
    columns = [(live_NC * extended_NC[j : outputs + j]).sum(0) for j in range(gap + 1)]
    return grad_x_TC, torch.stack(columns, 1), d_NC.sum(0)


@causal_conv1d_backward.register_fake
def _(grad_TC, x_TC, weight_CW, bias_C, cu_seqlens_S1, tail_SWC):
    return tuple(torch.empty_like(wide(value)) for value in (x_TC, weight_CW, bias_C))


causal_conv1d.register_autograd(_backward, setup_context=_setup)
