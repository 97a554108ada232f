# SPDX-License-Identifier: Apache-2.0
"""What the tests of the CPU ops share: a row's bits, alone and in company; a backward formula against its forward."""

import contextlib

import pytest
import torch
from torch import Tensor

from vllm_forward_bridge.parity.bits import assert_same_bits

ROW_COUNTS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 257)
THREAD_COUNTS = (1, 2, 3)


@contextlib.contextmanager
def num_threads(count: int):
    """Run the block with torch on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_row_bits_ignore_batch(run, *rows: Tensor) -> None:
    """Check that each output row depends on its own input rows alone.

    A row stands first, in the middle and last in batches of `ROW_COUNTS` rows, on other numbers of threads, and between
    rows of NaN and of infinity.

    Args:
        run: maps the row tensors to a tensor or a tuple of tensors with as many rows.
        rows: tensors of `ROW_COUNTS[-1]` rows each.
    """
    total = ROW_COUNTS[-1]
    assert {len(value) for value in rows} == {total}
    whole = _outputs(run, rows)
    assert any(value.float().nan_to_num().abs().sum() > 0 for value in whole), "all zero: this would compare nothing"
    for threads in THREAD_COUNTS:
        with num_threads(threads):
            _assert_rows(_outputs(run, rows), whole, f"all rows on {threads} threads")
    row = total // 2
    for count in ROW_COUNTS:
        for place, start in (("first", row), ("middle", row - count // 2), ("last", row - count + 1)):
            part = slice(max(0, min(start, total - count)), max(0, min(start, total - count)) + count)
            got = _outputs(run, [value[part] for value in rows])
            _assert_rows(got, [value[part] for value in whole], f"{count} rows, row {row} {place}")
    for poison in (torch.nan, torch.inf, -torch.inf):
        for count in (2, 3, 17, 65):
            got = _outputs(run, [_poisoned(value[row : row + count], poison, count // 2) for value in rows])
            place = slice(count // 2, count // 2 + 1)
            alone = [value[row + count // 2 : row + count // 2 + 1] for value in whole]
            _assert_rows([value[place] for value in got], alone, f"a row between {count - 1} rows of {poison}")


def assert_gradcheck(forward, gradients, *inputs: Tensor) -> None:
    """Check a backward formula against numerical derivatives in float64.

    Args:
        forward: the reference, inputs -> one tensor.
        gradients: (grad_output, *inputs) -> one gradient an input.
        inputs: float64.
    """

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *values):
            ctx.save_for_backward(*values)
            return forward(*values)

        @staticmethod
        def backward(ctx, grad):
            return gradients(grad, *ctx.saved_tensors)

    values = tuple(value.detach().double().requires_grad_() for value in inputs)
    assert torch.autograd.gradcheck(Formula.apply, values)


def assert_linear_grads_close(linear, x_TK: Tensor, weight_NK: Tensor, needs: tuple[bool, bool]) -> None:
    """Check (grad_y W, grad_y^T x) of y = linear(x, W), for the inputs that need one; W may be a master."""
    values = [x_TK.requires_grad_(needs[0]), weight_NK.requires_grad_(needs[1])]
    generator = torch.Generator().manual_seed(1)
    grad_TN = torch.randn(len(x_TK), len(weight_NK), generator=generator).bfloat16()
    linear(x_TK, weight_NK).backward(grad_TN)
    for value, left, right in zip(values, (grad_TN, grad_TN.T), (weight_NK, x_TK), strict=True):
        if value.requires_grad:
            want = left.double() @ right.double()
            # An fp32 sum is off by at most a step of the sum of magnitudes for each term; then one rounding to bf16.
            sums = left.shape[1] * 2.0**-24 * (left.double().abs() @ right.double().abs())
            assert_within(value.grad, want, bf16_step(want) / 2 + sums, "gradient")
        else:
            assert value.grad is None


def assert_master_serves_the_backward_alone(linear, x_TK: Tensor, weight_NK: Tensor, name: str) -> None:
    """Check that y = linear(x, master) does not read the master, and that a backward without one is refused."""
    got = linear(x_TK, torch.full_like(weight_NK, torch.nan))
    assert_same_bits(got, linear(x_TK, None), "forward with a master of NaN")
    y_TN = linear(x_TK.requires_grad_(), None)
    with pytest.raises(ValueError, match=f"{name} was called without its bf16 master weight"):
        y_TN.sum().backward()


def assert_norm_grads_close(values: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Check the .grad of the inputs of a norm (the gain last) against float64 gradients; None where not required."""
    num_terms = [values[0].shape[1]] * (len(values) - 1) + [values[0].shape[0]]
    for value, gradient, terms in zip(values, want, num_terms, strict=True):
        if value.requires_grad:
            # fp32 sums over `terms` values of the size of the largest gradient; then one rounding to bf16.
            bound = bf16_step(gradient) / 2 + terms * 2.0**-22 * gradient.abs().max()
            assert_within(value.grad, gradient, bound, "gradient")
        else:
            assert value.grad is None


def bf16_step(values: Tensor) -> Tensor:
    """Return the distance between bf16 numbers at the size of each value: 2^-7 of its power of two."""
    _, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - 8)


def assert_within(got: Tensor, want: Tensor, bound: Tensor, what: str) -> None:
    """Check |got - want| <= bound element by element; `want` must not be all zero."""
    assert want.abs().max() > 0, f"{what}: the reference is all zero, this would compare nothing"
    excess = ((got.double() - want.double()).abs() - bound).flatten()
    at = int(excess.argmax())
    assert excess[at] <= 0, (
        f"{what}: {int((excess > 0).sum())} of {len(excess)} elements are off; element {at} is "
        f"{got.flatten()[at].item()}, want {want.flatten()[at].item()}, {excess[at].item()} beyond the bound"
    )


def assert_inputs_unchanged(run, *inputs) -> None:
    """Check that a call leaves the bytes of its tensors alone."""
    before = [value.clone() for value in inputs if isinstance(value, Tensor)]
    run(*inputs)
    for old, now in zip(before, (value for value in inputs if isinstance(value, Tensor)), strict=True):
        assert_same_bits(now, old, "an input after the call")


def _outputs(run, rows) -> list[Tensor]:
    result = run(*rows)
    return [result] if isinstance(result, Tensor) else list(result)


def _assert_rows(got: list[Tensor], want: list[Tensor], what: str) -> None:
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(mine, theirs, f"output {place}, {what}")


def _poisoned(rows: Tensor, poison: float, keep: int) -> Tensor:
    if not rows.is_floating_point():
        return rows
    poisoned = torch.full_like(rows, poison)
    poisoned[keep] = rows[keep]
    return poisoned
