# SPDX-License-Identifier: Apache-2.0
"""Tests that `test_triton_interpreter` runs with TRITON_INTERPRET=1, where the launchers take CPU tensors.

The interpreter runs a kernel's own steps with NumPy's arithmetic: indices, masks, rounding points and orders are the
kernel's, the layout of a sum inside a block is not. Triton 3.6's interpreter cuts fp32 off at bf16's width and takes a
bf16 matrix product of the raw bytes; here it rounds to nearest even and multiplies values, as the GPU does.
"""

import math

import pytest
import torch
import triton.language as tl
from invariance import assert_within, bf16_step
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from vllm_forward_bridge.ops import triton_combine, triton_gated_norm, triton_logprob, triton_rms_norm, triton_router
from vllm_forward_bridge.ops.survivors import uncut
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.reference import fused_add_rms_norm as plain_fused_norm
from vllm_forward_bridge.reference import gated_rms_norm as plain_gated_norm
from vllm_forward_bridge.reference import logprob as plain_logprob
from vllm_forward_bridge.reference import moe_combine as plain_combine
from vllm_forward_bridge.reference import relu_squared as plain_relu_squared
from vllm_forward_bridge.reference import rms_norm as plain_norm
from vllm_forward_bridge.reference import router as plain_router

EPS = 1e-5
VOCAB = 2 * triton_logprob.BLOCK_COLUMNS + 77  # three blocks, the last one cut


@pytest.fixture(autouse=True)
def bf16_as_on_a_gpu(monkeypatch):
    """Round fp32 to bf16 in the interpreter to nearest even; multiply bf16 matrices by value."""
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self, source, target):
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        return TensorHandle(torch.tensor(source.data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    def dot_of_values(self, a, b, *rest):
        return dot(self, self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32), *rest)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_of_values)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def eighths(*shape, seed=0):
    """Return bf16 multiples of 1/8 whose products and short sums fp32 holds exactly, in any order."""
    return (torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 8).bfloat16()


def assert_rows_stand_alone(run, *rows):
    """Check each row alone, last, and between rows of NaN, against the whole batch."""

    def outputs(values):
        result = run(*values)
        return [result] if isinstance(result, torch.Tensor) else list(result)

    whole = outputs(rows)
    for row in (0, len(rows[0]) // 2, len(rows[0]) - 1):
        for values, place in ((rows, slice(row, row + 1)), (rows, slice(0, row + 1)), (between_nans(rows, row), None)):
            part = [value if place is None else value[place] for value in values]
            for got, want in zip(outputs(part), whole, strict=True):
                at = 1 if place is None else -1
                assert_same_bits(got[at], want[row], f"row {row}, {place or 'between rows of NaN'}")


def between_nans(rows, row):
    """Return three rows of each tensor: the middle one is `row`, the others are NaN (integers: repeated)."""
    part = [value[[row, row, row]].clone() for value in rows]
    for value in part:
        if value.is_floating_point():
            value[::2] = torch.nan
    return part


def test_kernels_are_interpreted():
    modules = (triton_combine, triton_gated_norm, triton_logprob, triton_rms_norm, triton_router)
    kernels = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    assert len(kernels) == 9
    assert all(isinstance(kernel, InterpretedFunction) for kernel in kernels.values())


def test_interpreter_rounds_to_nearest_even():
    # One half of a bf16 step above an even and above an odd number, and a little more: down, up, up.
    slots = torch.tensor([1.0, 1.0, 1.0]).bfloat16().reshape(3, 1, 1)
    weights = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20]).reshape(3, 1)
    got = triton_combine.moe_combine(slots, weights, 1.0).flatten().tolist()
    assert got == [1.0, 1 + 2.0**-6, 1 + 2.0**-7]


@pytest.mark.parametrize("width", [1, 48, 64, 130])
def test_rms_norm(width):
    x_TH, gain_H = normal(5, width) * 3, normal(width, seed=1)
    want = plain_norm.rms_norm(x_TH.double(), gain_H, EPS)
    # fp32 is off by far less than a bf16 step, so the last rounding alone shows: half a step, and a little.
    assert_within(triton_rms_norm.rms_norm(x_TH, gain_H, EPS), want, 0.51 * bf16_step(want), "norm")
    assert_rows_stand_alone(lambda x: triton_rms_norm.rms_norm(x, gain_H, EPS), x_TH)


@pytest.mark.parametrize("width", [48, 64])
def test_fused_add_rms_norm(width):
    x_TH, residual_TH, gain_H = normal(5, width), normal(5, width, seed=1) * 9, normal(width, seed=2)
    y_TH, s_TH = triton_rms_norm.fused_add_rms_norm(x_TH, residual_TH, gain_H, EPS)
    _, sum_TH = plain_fused_norm.fused_add_rms_norm(x_TH, residual_TH, gain_H, EPS)
    assert_same_bits(s_TH, sum_TH, "sum")
    assert_same_bits(y_TH, triton_rms_norm.rms_norm(sum_TH, gain_H, EPS), "norm of the rounded sum")
    assert_rows_stand_alone(lambda x, s: triton_rms_norm.fused_add_rms_norm(x, s, gain_H, EPS), x_TH, residual_TH)


@pytest.mark.parametrize(("channels", "group_size"), [(48, 48), (48, 16)])
def test_gated_rms_norm(channels, group_size):
    y_TD, gate_TD, gain_D = normal(5, channels), normal(5, channels, seed=1) * 4, normal(channels, seed=2)
    got = triton_gated_norm.gated_rms_norm(y_TD, gate_TD, gain_D, group_size, EPS)
    want = plain_gated_norm.gated_rms_norm(y_TD.double(), gate_TD, gain_D, group_size, EPS)
    # Rounded to bf16 twice: before the gain (a relative 2^-8 at most) and at the end.
    assert_within(got, want, 0.51 * bf16_step(want) + 1.01 * 2.0**-8 * want.abs(), "gated norm")
    assert_rows_stand_alone(
        lambda y, gate: triton_gated_norm.gated_rms_norm(y, gate, gain_D, group_size, EPS), y_TD, gate_TD
    )


def test_gated_rms_norm_rounds_before_the_gain():
    # Times a gain of 1 + 2^-7, one rounding and two differ for some of these rows.
    y_TD, gate_TD = normal(24, 4), normal(24, 4, seed=1)
    gain_D = torch.full((4,), 1 + 2.0**-7).bfloat16()
    got = triton_gated_norm.gated_rms_norm(y_TD, gate_TD, gain_D, 4, EPS)
    unit = triton_gated_norm.gated_rms_norm(y_TD, gate_TD, torch.ones_like(gain_D), 4, EPS)
    assert_same_bits(got, (unit.float() * gain_D.float()).bfloat16(), "gain on the rounded norm")
    once = plain_gated_norm.gated_rms_norm(y_TD.double(), gate_TD, gain_D, 4, EPS).bfloat16()
    assert (got != once).any()


def test_router():
    # Sums of multiples of 1/64 are exact, so the logits have one value, whatever NumPy's order is.
    x_TH, weight_EH, bias_E = eighths(17, 150), eighths(70, 150, seed=1), torch.linspace(-0.2, 0.2, 70)
    logits_TE = triton_router.router_logits(x_TH, weight_EH)
    assert_same_bits(logits_TE, x_TH.float() @ weight_EH.float().T, "logits")
    weights_Tk, ids_Tk, scores_Tk = triton_router.router(x_TH, weight_EH / 8, bias_E, 3)
    want_Tk, want_ids_Tk = plain_router.router(x_TH.double(), weight_EH / 8, bias_E.double(), 3)
    assert_same_bits(ids_Tk, want_ids_Tk, "ids")
    # exp, one sum and two divisions of fp32, each within a few 2^-24; the sum has three terms.
    assert_within(weights_Tk, want_Tk, 16 * 2.0**-24 * want_Tk, "weights")
    sums_T = scores_Tk[:, 0] + scores_Tk[:, 1] + scores_Tk[:, 2]
    assert_same_bits(weights_Tk, scores_Tk / sums_T[:, None], "scores over their sum in slot order")
    assert_rows_stand_alone(lambda x: triton_router.router(x, weight_EH / 8, bias_E, 3), x_TH)


def test_router_ties_go_to_the_smaller_id():
    weight_EH = torch.zeros(6, 16).bfloat16()
    x_TH = torch.ones(2, 16).bfloat16()
    _, ids_Tk, _ = triton_router.router(x_TH, weight_EH, torch.zeros(6), 4)
    assert ids_Tk.tolist() == [[0, 1, 2, 3]] * 2
    # Sigmoids of 64, 32 and 48 are all 1 in fp32: the logits differ, the ranks do not.
    weight_EH[[5, 1, 3]] = torch.tensor([[4.0], [2.0], [3.0]]).bfloat16()
    weights_Tk, ids_Tk, _ = triton_router.router(x_TH, weight_EH, torch.zeros(6), 4)
    assert ids_Tk.tolist() == [[1, 3, 5, 0]] * 2
    assert weights_Tk[0, 0] == weights_Tk[0, 2] > weights_Tk[0, 3] > 0


def test_router_bias_chooses_but_does_not_weigh():
    x_TH, weight_EH = torch.ones(1, 16).bfloat16(), torch.zeros(5, 16).bfloat16()
    weights_Tk, ids_Tk, _ = triton_router.router(x_TH, weight_EH, torch.tensor([-9.0, 0.0, 3.0, 0.0, 1.0]), 4)
    assert ids_Tk.tolist() == [[2, 4, 1, 3]]
    assert weights_Tk.tolist() == [[0.25] * 4]


@pytest.mark.parametrize("width", [40, 1100])
@pytest.mark.parametrize("with_shared", [False, True])
def test_moe_combine(width, with_shared):
    rows_TkH, shared_TH = normal(4, 3, width), normal(4, width, seed=1) if with_shared else None
    weights_Tk = torch.rand(4, 3, generator=torch.Generator().manual_seed(2))
    got = triton_combine.moe_combine(rows_TkH, weights_Tk, 2.5, shared_TH)
    assert_same_bits(got, plain_combine.moe_combine(rows_TkH, weights_Tk, 2.5, shared_TH), "combine")
    inputs = (rows_TkH, weights_Tk, *([shared_TH] if with_shared else []))
    assert_rows_stand_alone(lambda rows, w, *shared: triton_combine.moe_combine(rows, w, 2.5, *shared), *inputs)


def combined(slots, weights):
    """Return the combine of one token of one column."""
    rows_TkH = torch.tensor(slots).bfloat16().reshape(1, -1, 1)
    return triton_combine.moe_combine(rows_TkH, torch.tensor([weights]), 1.0).item()


@pytest.mark.parametrize(
    ("slots", "want"),
    [
        # (huge, small, -huge, small): a small term next to the huge one is lost, so each order has a result of its own.
        ([2.0**30, 1.0, -(2.0**30), 1.0], 1.0),
        ([1.0, 1.0, 2.0**30, -(2.0**30)], 0.0),
        ([2.0**30, -(2.0**30), 1.0, 1.0], 2.0),
        ([1.0, 2.0**30, 1.0, -(2.0**30)], 0.0),
    ],
)
def test_moe_combine_adds_in_slot_order(slots, want):
    assert combined(slots, [1.0] * 4) == want


def test_moe_combine_rounds_a_product_before_it_is_added():
    weight = 1.0 + 2.0**-23
    rounded = (torch.tensor(weight) * torch.tensor(1.0078125)).item()
    assert rounded != weight * 1.0078125, "the product is exact in fp32, this would prove nothing"
    assert combined([-1.0, 1.0078125], [rounded, weight]) == 0.0


def test_relu_squared():
    x = normal(3, 700) * 5
    x[0, :4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert_same_bits(triton_combine.relu_squared(x), plain_relu_squared.relu_squared(x), "squares")
    assert_same_bits(triton_combine.relu_squared(x[1:, 1:]), triton_combine.relu_squared(x)[1:, 1:], "a strided view")
    assert triton_combine.relu_squared(torch.full((1,), torch.nan).bfloat16()).isnan().all()


def sampling(num_rows, seed=0):
    """Return logits with ties and a mix of (temperature, top_p, top_k)."""
    logits_TV = (normal(num_rows, VOCAB, seed=seed) * 8).round() / 2
    logits_TV[1, : triton_logprob.BLOCK_COLUMNS] = -torch.inf  # a whole block
    temperature_T = torch.tensor([1.0, 0.0, 0.7, 1.5]).repeat(num_rows)[:num_rows]
    top_p_T = torch.tensor([1.0, 0.9, 0.95]).repeat(num_rows)[:num_rows]
    top_k_T = torch.tensor([0, 5, 0, 40, 1], dtype=torch.int32).repeat(num_rows)[:num_rows]
    return logits_TV, temperature_T, top_p_T, top_k_T


def test_logprob():
    logits_TV, *settings = sampling(5)
    largest_T = logits_TV.float().argmax(-1)
    for token_ids_T in (largest_T, (largest_T + 5) % VOCAB, torch.full((5,), VOCAB - 1)):
        got, log_norm_T, _, _ = triton_logprob.logprob(logits_TV, token_ids_T, *settings)
        want = plain_logprob.logprob(logits_TV.double(), token_ids_T, *(value.double() for value in settings[:2]),
                                     settings[2])  # fmt: skip
        assert torch.equal(got == -torch.inf, want == -torch.inf)
        alive_T = want > -torch.inf
        # A few fp32 roundings of numbers below the largest |logit| / temperature plus ln V.
        bound_T = 8 * 2.0**-24 * (logits_TV.float().clamp(min=-99).abs().amax(-1) / 0.7 + 8)
        assert (got - want).abs()[alive_T].le(bound_T[alive_T]).all()
        assert log_norm_T.isfinite().all()
    assert_rows_stand_alone(
        lambda ids, *rest: triton_logprob.logprob(rest[0], ids, *rest[1:])[:2], largest_T, logits_TV, *settings
    )


def test_logprob_ignores_the_order_inside_a_block():
    logits_TV = normal(2, VOCAB) * 4
    order = torch.cat([torch.randperm(1024, generator=torch.Generator().manual_seed(1)), torch.arange(1024, VOCAB)])
    token_T, one_T = torch.tensor([VOCAB - 1, 1024]), torch.ones(2)
    straight = triton_logprob.normalised(logits_TV, token_T, one_T, uncut(logits_TV))
    shuffled = triton_logprob.normalised(logits_TV[:, order], token_T, one_T, uncut(logits_TV))
    for got, want in zip(shuffled, straight, strict=True):
        assert_same_bits(got, want, "another order of columns")


def test_logprob_of_equal_logits_behind_the_cut():
    logits_TV = torch.zeros(4, VOCAB).bfloat16()
    ids_T, one_T = torch.tensor([0, 1, 2, VOCAB - 1]), torch.ones(4)
    got, *_ = triton_logprob.logprob(logits_TV, ids_T, one_T, one_T, torch.full((4,), 2, dtype=torch.int32))
    assert got[:2].tolist() == pytest.approx([-math.log(2.0)] * 2, rel=2.0**-22)
    assert got[2:].tolist() == [-math.inf] * 2


def test_sample():
    logits_TV, *settings = sampling(12)
    uniform_T = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    token_ids_T = triton_logprob.sample(logits_TV, *settings, uniform_T)
    assert_same_bits(token_ids_T, plain_logprob.sample(logits_TV, *settings, uniform_T), "tokens")
    assert triton_logprob.logprob(logits_TV, token_ids_T, *settings)[0].isfinite().all()
    assert_rows_stand_alone(triton_logprob.sample, logits_TV, *settings, uniform_T)
