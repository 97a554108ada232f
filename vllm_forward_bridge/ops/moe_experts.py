# SPDX-License-Identifier: Apache-2.0
"""Run every token through its experts (NVFP4 W4A16, squared ReLU); one unweighted row per token and slot.

Rows stay apart so that the owner of a token can add them in slot order however the experts are spread over ranks.
The gradient goes straight through to the bf16 masters.
"""

# Legend: T packed tokens, k top-k slots, R rows sorted by expert (slots with an expert here), E experts, H hidden,
# F expert width, N and K out and in features of either GEMM.

from dataclasses import dataclass
from itertools import batched

import torch
from torch import Tensor

from vllm_forward_bridge.ops import exact, humming_gemm, nvfp4_decode, operands
from vllm_forward_bridge.ops.arguments import check, require_master
from vllm_forward_bridge.ops.gradients import product, wide
from vllm_forward_bridge.ops.relu_squared import rectified_square, relu_squared_gradient

# Experts are decoded together up to this many weights: few calls when they are small, bounded memory when large.
_DECODED_WEIGHTS = 1 << 22


def moe_experts(
    x_TH: Tensor,
    expert_ids_Tk: Tensor,
    fc1_codes_EFB: Tensor,
    fc1_block_scale_EFB: Tensor,
    fc1_global_scale_E: Tensor,
    fc2_codes_EHB: Tensor,
    fc2_block_scale_EHB: Tensor,
    fc2_global_scale_E: Tensor,
    fc1_weight_EFH: Tensor | None = None,
    fc2_weight_EHF: Tensor | None = None,
) -> Tensor:
    """Apply each token's experts.

    rows[t, j] = bf16(W2[e] . relu_squared(bf16(W1[e] . x_t))) with e = expert_ids[t, j]; each product as in
    `nvfp4_linear`, relu_squared rounded to bf16.

    Args:
        x_TH: bf16, contiguous.
        expert_ids_Tk: int64, contiguous, -1 to E - 1; -1 marks a slot that is not computed here.
        fc1_codes_EFB: uint8 [E, F, H/2].
        fc1_block_scale_EFB: e4m3fn [E, F, H/16].
        fc1_global_scale_E: fp32.
        fc2_codes_EHB: uint8 [E, H, F/2].
        fc2_block_scale_EHB: e4m3fn [E, H, F/16].
        fc2_global_scale_E: fp32.
        fc1_weight_EFH: bf16 master, never read by the forward; None where no gradient is wanted.
        fc2_weight_EHF: bf16 master, never read by the forward; None where no gradient is wanted.

    Returns:
        rows_TkH: bf16, not weighted; zero where the id is -1.

    Raises:
        ValueError: an argument has another dtype, shape or layout, or an id is out of range; or, in the
            backward, there is no master.
    """
    rows_TkH, _ = _moe_experts(
        x_TH, expert_ids_Tk, fc1_codes_EFB, fc1_block_scale_EFB, fc1_global_scale_E,
        fc2_codes_EHB, fc2_block_scale_EHB, fc2_global_scale_E, fc1_weight_EFH, fc2_weight_EHF,
    )  # fmt: skip
    return rows_TkH


@torch.library.custom_op("vllm_forward_bridge::moe_experts", mutates_args=(), device_types="cpu")
def _moe_experts(
    x_TH: Tensor,
    expert_ids_Tk: Tensor,
    fc1_codes_EFB: Tensor,
    fc1_block_scale_EFB: Tensor,
    fc1_global_scale_E: Tensor,
    fc2_codes_EHB: Tensor,
    fc2_block_scale_EHB: Tensor,
    fc2_global_scale_E: Tensor,
    fc1_weight_EFH: Tensor | None,
    fc2_weight_EHF: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return rows_TkH and, for the backward, the first GEMM's output, bf16 [T, k, F]."""
    check(
        "moe_experts",
        nvfp4_decode.features_problem("x_TH", x_TH),
        _ids_problem(expert_ids_Tk, fc1_global_scale_E.numel()),
        x_TH=(x_TH, torch.bfloat16, "T H"),
        expert_ids_Tk=(expert_ids_Tk, torch.int64, "T k"),
        fc1_codes_EFB=(fc1_codes_EFB, torch.uint8, "E F H/2"),
        fc1_block_scale_EFB=(fc1_block_scale_EFB, torch.float8_e4m3fn, "E F H/16"),
        fc1_global_scale_E=(fc1_global_scale_E, torch.float32, "E"),
        fc2_codes_EHB=(fc2_codes_EHB, torch.uint8, "E H F/2"),
        fc2_block_scale_EHB=(fc2_block_scale_EHB, torch.float8_e4m3fn, "E H F/16"),
        fc2_global_scale_E=(fc2_global_scale_E, torch.float32, "E"),
        fc1_weight_EFH=(fc1_weight_EFH, torch.bfloat16, "E F H"),
        fc2_weight_EHF=(fc2_weight_EHF, torch.bfloat16, "E H F"),
    )
    plan = _sort_by_expert(expert_ids_Tk, fc1_global_scale_E.numel())
    first_RF = _grouped_linear(x_TH, plan.token_R, plan, fc1_codes_EFB, fc1_block_scale_EFB, fc1_global_scale_E)
    squared_RF = rectified_square(first_RF)
    rows_RH = _grouped_linear(squared_RF, None, plan, fc2_codes_EHB, fc2_block_scale_EHB, fc2_global_scale_E)
    return plan.by_slot(rows_RH), plan.by_slot(first_RF)


def _ids_problem(expert_ids_Tk: Tensor, num_experts: int) -> str:
    if expert_ids_Tk.numel():
        low, high = (int(bound) for bound in expert_ids_Tk.aminmax())
        if low < -1 or high >= num_experts:
            return (
                f"expert_ids_Tk spans {low} to {high}; -1 to {num_experts - 1} is accepted, the experts whose bytes "
                "are here: mark the others -1"
            )
    return ""


@dataclass(frozen=True)
class _Plan:
    """Slots in order of their expert."""

    slot_R: Tensor
    """Place t * k + j of each row."""
    expert_R: Tensor
    spans: tuple[tuple[int, int, int], ...]
    """(expert, first row, one past its last row) of the experts that have rows."""
    num_tokens: int
    top_k: int

    @property
    def token_R(self) -> Tensor:
        return self.slot_R // self.top_k

    def by_slot(self, rows_RN: Tensor) -> Tensor:
        """Return [T, k, N]: each row at its slot, zero elsewhere."""
        slots = rows_RN.new_zeros(self.num_tokens * self.top_k, rows_RN.shape[1])
        return slots.index_copy_(0, self.slot_R, rows_RN).view(self.num_tokens, self.top_k, rows_RN.shape[1])


def _sort_by_expert(expert_ids_Tk: Tensor, num_experts: int) -> _Plan:
    expert_S, slot_S = expert_ids_Tk.flatten().sort(stable=True)
    absent, *counts = torch.bincount(expert_S + 1, minlength=num_experts + 1).tolist()
    spans, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, start, start + count))
        start += count
    # Slots of -1 sort to the front.
    return _Plan(slot_S[absent:], expert_S[absent:], tuple(spans), *expert_ids_Tk.shape)


def _grouped_linear(
    x: Tensor, index_R: Tensor | None, plan: _Plan, codes_ENB: Tensor, block_scale_ENB: Tensor, global_scale_E: Tensor
) -> Tensor:
    """Return bf16 [R, N]: each row (x itself, or x at index) times the weight of its expert, as `nvfp4_linear`."""
    integers_RK, unit_R1 = exact.fixed_point(x, nvfp4_decode.activation_bits(x.shape[-1]))
    if index_R is not None:
        integers_RK, unit_R1 = integers_RK[index_R], unit_R1[index_R]
    num_out = codes_ENB.shape[1]
    sums_RN = integers_RK.new_empty(len(integers_RK), num_out)
    for spans in batched(plan.spans, max(1, _DECODED_WEIGHTS // (num_out * x.shape[-1]))):
        experts = torch.tensor([expert for expert, _, _ in spans])
        # index_select takes bytes, not every float8 type.
        scale = block_scale_ENB.view(torch.uint8).index_select(0, experts).view(torch.float8_e4m3fn)
        weights = nvfp4_decode.decoded_integers(codes_ENB.index_select(0, experts), scale)
        for weight_NK, (_, start, stop) in zip(weights, spans, strict=True):
            sums_RN[start:stop] = exact.integer_matmul(integers_RK[start:stop], weight_NK)
    scale_R1 = global_scale_E.double()[plan.expert_R].unsqueeze(-1) * nvfp4_decode.UNIT
    return sums_RN.mul_(unit_R1).mul_(scale_R1).float().bfloat16()


_moe_experts.register_kernel("cuda")(humming_gemm.moe_experts)


@_moe_experts.register_fake
def _(x_TH, expert_ids_Tk, fc1_codes_EFB, fc1_block_scale_EFB, fc1_global_scale_E, fc2_codes_EHB, *_) -> tuple:
    slots = tuple(expert_ids_Tk.shape)
    return x_TH.new_empty(*slots, x_TH.shape[1]), x_TH.new_empty(*slots, operands.num_columns(fc2_codes_EHB))


@torch.library.custom_op("vllm_forward_bridge::moe_experts_gradients", mutates_args=())
def moe_experts_gradients(
    grad_rows_TkH: Tensor,
    x_TH: Tensor,
    expert_ids_Tk: Tensor,
    first_TkF: Tensor,
    fc1_weight_EFH: Tensor,
    fc2_weight_EHF: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, fc1 and fc2 (an empty tensor where not needed), products in fp32.

    Per expert, over its rows: h = relu_squared(first); grad_fc2 = g^T h; grad_first = (g W2) 2 max(first, 0);
    grad_fc1 = grad_first^T x; grad_x += grad_first W1.
    """
    needs_x, needs_fc1, needs_fc2 = needs
    plan = _sort_by_expert(expert_ids_Tk, len(fc1_weight_EFH))
    grad_RH = wide(grad_rows_TkH.flatten(0, 1)[plan.slot_R])
    first_RF, x_RH = first_TkF.flatten(0, 1)[plan.slot_R], x_TH[plan.token_R]
    grad_x_RH = torch.zeros_like(grad_RH) if needs_x else grad_RH.new_empty(0)
    grad_fc1 = torch.zeros_like(fc1_weight_EFH) if needs_fc1 else grad_RH.new_empty(0)
    grad_fc2 = torch.zeros_like(fc2_weight_EHF) if needs_fc2 else grad_RH.new_empty(0)
    for expert, start, stop in plan.spans:
        grad, first, x = grad_RH[start:stop], first_RF[start:stop], x_RH[start:stop]
        if needs_fc2:
            grad_fc2[expert] = product(grad.T, rectified_square(first), grad_fc2.dtype)
        if needs_fc1 or needs_x:
            grad_first = relu_squared_gradient(product(grad, fc2_weight_EHF[expert], grad.dtype), first)
        if needs_fc1:
            grad_fc1[expert] = product(grad_first.T, x, grad_fc1.dtype)
        if needs_x:
            grad_x_RH[start:stop] = product(grad_first, fc1_weight_EFH[expert], grad.dtype)
    grad_x = plan.by_slot(grad_x_RH).sum(1).to(x_TH.dtype) if needs_x else grad_x_RH
    return grad_x, grad_fc1, grad_fc2


@moe_experts_gradients.register_fake
def _(grad_rows_TkH, x_TH, expert_ids_Tk, first_TkF, fc1_weight_EFH, fc2_weight_EHF, needs) -> tuple:
    return tuple(
        torch.empty_like(value) if needed else grad_rows_TkH.new_empty(0, dtype=torch.float32)
        for value, needed in zip((x_TH, fc1_weight_EFH, fc2_weight_EHF), needs, strict=True)
    )


def _setup(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x_TH, expert_ids_Tk, *_, fc1_weight_EFH, fc2_weight_EHF = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TH, expert_ids_Tk, output[1], fc1_weight_EFH, fc2_weight_EHF)


def _backward(ctx, grad_rows_TkH: Tensor, grad_first: None) -> tuple[Tensor | None, ...]:
    x_TH, expert_ids_Tk, first_TkF, fc1_weight_EFH, fc2_weight_EHF = ctx.saved_tensors
    require_master("moe_experts", fc1_weight_EFH, fc2_weight_EHF)
    needs = [ctx.needs_input_grad[place] for place in (0, 8, 9)]
    gradients = moe_experts_gradients(
        grad_rows_TkH, x_TH, expert_ids_Tk, first_TkF, fc1_weight_EFH, fc2_weight_EHF, needs
    )
    grad_x, grad_fc1, grad_fc2 = (
        gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)
    )
    return grad_x, None, None, None, None, None, None, None, grad_fc1, grad_fc2


_moe_experts.register_autograd(_backward, setup_context=_setup)
