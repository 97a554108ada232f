# SPDX-License-Identifier: Apache-2.0
"""Choose each token's experts: sigmoid scores, a bias for the choice alone, weights renormalised in slot order."""

# Legend: T packed tokens, H hidden, E experts, k top-k slots.

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, triton_router
from vllm_forward_bridge.ops.arguments import check
from vllm_forward_bridge.ops.gradients import linear_gradients, wide


def router(x_TH: Tensor, weight_EH: Tensor, expert_bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for each token and weigh them.

    logits = f32(sum_h x weight); s = sigmoid(logits); experts sorted by f32(s + bias) falling, equal ones by smaller
    id; weight of a slot = s / (((s_0 + s_1) + s_2) + ...), the chosen scores without bias summed in slot order.

    Args:
        x_TH: bf16, contiguous.
        weight_EH: bf16, contiguous.
        expert_bias_E: fp32, contiguous; no gradient.
        top_k: slots, 1 to E.

    Returns:
        (weights_Tk fp32, expert_ids_Tk int64), slot 0 first.

    Raises:
        ValueError: an argument has another dtype, shape or layout, or top_k is outside 1 to E.
    """
    weights_Tk, expert_ids_Tk, _ = _router(x_TH, weight_EH, expert_bias_E, top_k)
    return weights_Tk, expert_ids_Tk


@torch.library.custom_op("vllm_forward_bridge::router", mutates_args=(), device_types="cpu")
def _router(x_TH: Tensor, weight_EH: Tensor, expert_bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, expert ids and the chosen scores, which the backward needs."""
    check(
        "router",
        _top_k_problem(top_k, expert_bias_E),
        x_TH=(x_TH, torch.bfloat16, "T H"),
        weight_EH=(weight_EH, torch.bfloat16, "E H"),
        expert_bias_E=(expert_bias_E, torch.float32, "E"),
    )
    scores_TE = exact.sigmoid(exact.matmul(x_TH, weight_EH).float())
    # bits: a stable sort gives equal experts in the order of their ids; torch.topk promises no order.
    order_TE = torch.sort(scores_TE + expert_bias_E, dim=-1, descending=True, stable=True).indices
    expert_ids_Tk = order_TE[:, :top_k].contiguous()
    chosen_Tk = scores_TE.gather(-1, expert_ids_Tk)
    total_T = chosen_Tk[:, 0]
    for slot in range(1, top_k):
        total_T = total_T + chosen_Tk[:, slot]
    return chosen_Tk / total_T.unsqueeze(-1), expert_ids_Tk, chosen_Tk


def _top_k_problem(top_k: int, expert_bias_E: Tensor) -> str:
    if 1 <= top_k <= expert_bias_E.numel():
        return ""
    return f"top_k is {top_k}; 1 to {expert_bias_E.numel()} is accepted, the number of experts: take it from the model"


_router.register_kernel("cuda")(triton_router.router)


@_router.register_fake
def _(x_TH: Tensor, weight_EH: Tensor, expert_bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = (x_TH.shape[0], top_k)
    weights_Tk = x_TH.new_empty(slots, dtype=torch.float32)
    return weights_Tk, x_TH.new_empty(slots, dtype=torch.int64), torch.empty_like(weights_Tk)


def chosen_logit_gradients(grad_weights_Tk: Tensor, weights_Tk: Tensor, scores_Tk: Tensor) -> Tensor:
    """Return the gradient of the chosen logits: through w = s / sum(s) and s = sigmoid(logit).

    grad_s = (grad_w - sum_k grad_w w) / sum_k s; grad_logit = grad_s s (1 - s).
    """
    mean_T1 = (grad_weights_Tk * weights_Tk).sum(-1, keepdim=True)
    grad_scores_Tk = (grad_weights_Tk - mean_T1) / scores_Tk.sum(-1, keepdim=True)
    return grad_scores_Tk * scores_Tk * (1 - scores_Tk)


def _setup(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TH, weight_EH, _, _ = inputs
    weights_Tk, expert_ids_Tk, scores_Tk = output
    ctx.mark_non_differentiable(expert_ids_Tk, scores_Tk)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TH, weight_EH, weights_Tk, expert_ids_Tk, scores_Tk)


def _backward(ctx, grad_weights_Tk: Tensor, grad_ids: None, grad_scores: None) -> tuple[Tensor | None, ...]:
    x_TH, weight_EH, weights_Tk, expert_ids_Tk, scores_Tk = ctx.saved_tensors
    grad_chosen_Tk = chosen_logit_gradients(wide(grad_weights_Tk), weights_Tk, scores_Tk)
    grad_logits_TE = grad_chosen_Tk.new_zeros(x_TH.shape[0], weight_EH.shape[0])
    grad_logits_TE = grad_logits_TE.scatter(-1, expert_ids_Tk, grad_chosen_Tk)
    needs_x, needs_weight, _, _ = ctx.needs_input_grad
    gradients = linear_gradients(grad_logits_TE, x_TH, weight_EH, needs_x=needs_x, needs_weight=needs_weight)
    return *gradients, None, None


_router.register_autograd(_backward, setup_context=_setup)
