# SPDX-License-Identifier: Apache-2.0
"""ssd_scan on the CPU: reference, closeness, and what a row's bits may depend on."""

import pytest
import torch
from invariance import THREAD_COUNTS, assert_gradcheck, assert_within, bf16_step, num_threads
from sequences import CHUNK, ROW_INPUTS, among_others, cumulative, normal, scan_inputs, scan_rows

from vllm_forward_bridge.ops import ssd_scan
from vllm_forward_bridge.ops.ssd_gradients import ssd_scan_gradients
from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits
from vllm_forward_bridge.reference.ssd_scan import ssd_chunks, ssd_recurrence

LENGTH = 2 * CHUNK + 1


def scan(inputs, lengths, chunk_size=CHUNK, state=None):
    return ssd_scan(*inputs.values(), cumulative(lengths), chunk_size, state)


def wide(inputs):
    return {name: value.double() for name, value in inputs.items()}


def recurrence(inputs, lengths, states=None):
    """Return (y, states after all rows) of packed sequences by the definition."""
    found, start = [], 0
    for number, length in enumerate(lengths):
        rows = scan_rows(inputs, slice(start, start + length)).values()
        found.append(ssd_recurrence(*rows, None if states is None else states[number]))
        start += length
    return torch.cat([y for y, _ in found]), torch.stack([state for _, state in found])


def largest_sums(inputs, lengths):
    """Return the recurrence of the largest elements: no sum of the scan, nor any of its terms, is larger in size."""
    high = wide(inputs)
    high |= {name: high[name].abs().amax(-1, keepdim=True).expand_as(high[name]) for name in ("x", "B", "C")}
    return recurrence(high | {"D": high["D"].abs()}, lengths)


def test_ssd_scan_opcheck():
    inputs = {name: value.requires_grad_() for name, value in scan_inputs(21, heads=2, head_dim=4, state=4).items()}
    torch.library.opcheck(ssd_scan, (*inputs.values(), cumulative([17, 0, 4]), CHUNK, None))
    torch.library.opcheck(ssd_scan, (*inputs.values(), cumulative([17, 4]), CHUNK, torch.randn(2, 2, 4, 4)))


@pytest.mark.parametrize("chunk_size", [4, 16, 64])
def test_ssd_scan_reference_chunks_equal_the_recurrence(chunk_size):
    inputs = wide(scan_inputs(41))
    want, _ = recurrence(inputs, [41])
    batch = [value[None] if name in ROW_INPUTS else value for name, value in inputs.items()]
    got, state = ssd_chunks(*batch, chunk_size)
    # The same sums regrouped: a few hundred float64 roundings of sums no larger than these.
    high, high_state = largest_sums(inputs, [41])
    assert_within(got[0], want, 2.0**-44 * high, "chunked reference")
    boundary = 41 // chunk_size * chunk_size
    if boundary:
        _, want = recurrence(scan_rows(inputs, slice(boundary)), [boundary])
        assert_within(state, want, 2.0**-44 * high_state.amax().expand_as(want), "boundary state")


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_ssd_scan_close_to_reference(chunk_size):
    lengths = [chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size + 1]
    inputs = scan_inputs(sum(lengths))
    y, _ = scan(inputs, lengths, chunk_size)
    want, _ = recurrence(wide(inputs), lengths)
    high, _ = largest_sums(inputs, lengths)
    # Operands are off by 2^-20 of their row's largest element; a row of weights sums at most chunk_size such errors, on
    # each of three chunks, over two operands. The fp32 roundings are smaller. Then one rounding to bf16.
    assert_within(y, want, bf16_step(want) / 2 + 6 * chunk_size * 2.0**-20 * high, "scan")
    # The rounding to bf16 is off by a quarter step on average; anything coarser inside would show.
    assert ((y.double() - want).abs() / bf16_step(want)).mean() < 0.255


def test_ssd_scan_boundary_state_close_to_reference():
    lengths = [CHUNK - 1, CHUNK, CHUNK + 1, LENGTH]
    inputs = scan_inputs(sum(lengths))
    start = torch.randn(4, 4, 8, 16, generator=torch.Generator().manual_seed(1))
    _, state = scan(inputs, lengths, state=start)
    assert_same_bits(state[0], start[0], "no chunk completed")
    begin = 0
    for number, length in enumerate(lengths):
        rows = scan_rows(wide(inputs), slice(begin, begin + length // CHUNK * CHUNK))
        begin += length
        if length >= CHUNK:
            _, want = recurrence(rows, [length // CHUNK * CHUNK], start[number : number + 1].double())
            high = largest_sums(rows, [length // CHUNK * CHUNK])[1] + start[number].abs().max()
            assert_within(state[number], want[0], 6 * CHUNK * 2.0**-20 * high[0], f"state of sequence {number}")


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_ssd_scan_row_bits_ignore_batch(chunk_size):
    others = scan_inputs(3 * chunk_size, seed=50)
    rows_of = lambda inputs: tuple(inputs[name] for name in ROW_INPUTS)  # noqa: E731
    for length in (chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size + 1):
        inputs = scan_inputs(length)
        y, state = scan(inputs, [length], chunk_size)
        for place, poison in ((0, None), (1, None), (3, None), (1, torch.nan), (2, torch.inf)):
            company = rows_of(others)
            if poison is not None:
                company = tuple(torch.full_like(value, poison) for value in company)
            lengths = (1, chunk_size, chunk_size + 5)
            packed, cu_seqlens, own = among_others(rows_of(inputs), company, lengths, place)
            batch = inputs | dict(zip(ROW_INPUTS, packed, strict=True))
            got, states = ssd_scan(*batch.values(), cu_seqlens, chunk_size, None)
            assert_same_bits(got[own], y, f"{length} rows at place {place} of 4, others {poison}")
            assert_same_bits(states[place], state[0], f"state of {length} rows at place {place}, others {poison}")


def test_ssd_scan_bits_ignore_threads():
    # Twenty sequences of this size are two blocks, so the cut into blocks is covered as well.
    lengths = [33, 1, 20, 64] * 5
    inputs = scan_inputs(sum(lengths), heads=16, head_dim=32, state=64)
    with num_threads(1):
        want = scan(inputs, lengths)
    for threads in THREAD_COUNTS:
        with num_threads(threads):
            for got, expected in zip(scan(inputs, lengths), want, strict=True):
                assert_same_bits(got, expected, f"{threads} threads")
    alone, _ = scan(scan_rows(inputs, slice(-64, None)), [64])
    assert_same_bits(want[0][-64:], alone, "the last sequence alone")


@pytest.mark.parametrize("row", [0, 3, CHUNK - 2, CHUNK - 1, CHUNK, CHUNK + 7, 2 * CHUNK - 1])
def test_ssd_scan_rows_do_not_see_later_rows(row):
    inputs = scan_inputs(LENGTH)
    want, _ = scan(inputs, [LENGTH])
    for later in (0.0, 2.0**40, torch.inf, torch.nan):
        changed = {name: value.clone() for name, value in inputs.items()}
        for name in ROW_INPUTS:
            changed[name][row + 1 :] = later
        got, _ = scan(changed, [LENGTH])
        assert_same_bits(got[: row + 1], want[: row + 1], f"rows up to {row}, later ones {later}")
        short, _ = scan(scan_rows(inputs, slice(row + 1)), [row + 1])
        assert_same_bits(short, want[: row + 1], f"the first {row + 1} rows alone")


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_ssd_scan_replays_from_its_boundary_state(chunk_size):
    length = 2 * chunk_size + 1
    inputs = scan_inputs(length)
    want, want_state = scan(inputs, [length], chunk_size)
    for cut in range(1, length, 1 if chunk_size == CHUNK else 37):
        _, state = scan(scan_rows(inputs, slice(cut)), [cut], chunk_size)
        boundary = cut // chunk_size * chunk_size
        rest = scan_rows(inputs, slice(boundary, None))
        rest["C"][: cut - boundary] = 0.0
        got, got_state = scan(rest, [length - boundary], chunk_size, state)
        assert_same_bits(got[cut - boundary :], want[cut:], f"rows after a cut at {cut}")
        assert_same_bits(got_state, want_state, f"boundary state after a cut at {cut}")


def test_ssd_scan_differs_off_the_chunk_grid():
    # Negative control: a grid that starts at the cut instead of the boundary changes bits, so the tests above can fail.
    inputs = scan_inputs(LENGTH)
    want, _ = scan(inputs, [LENGTH])
    # A chunk as long as the cut makes the state after the cut a boundary state.
    _, state = scan(scan_rows(inputs, slice(8)), [8], 8)
    got, _ = scan(scan_rows(inputs, slice(8, None)), [LENGTH - 8], CHUNK, state)
    assert not same_bits(got, want[8:])


def test_ssd_scan_of_some_heads_has_their_bits():
    inputs = scan_inputs(LENGTH, heads=8, groups=4)
    want, want_state = scan(inputs, [LENGTH])
    for groups in (slice(0, 1), slice(1, 3), slice(3, 4)):
        heads = slice(groups.start * 2, groups.stop * 2)
        part = {name: inputs[name][:, heads].contiguous() for name in ("x", "dt")}
        part |= {name: inputs[name][:, groups].contiguous() for name in ("B", "C")}
        part |= {name: inputs[name][heads] for name in ("A", "D", "dt_bias")}
        got, state = scan({name: part[name] for name in inputs}, [LENGTH])
        assert_same_bits(got, want[:, heads], f"heads {heads}")
        assert_same_bits(state, want_state[:, heads].contiguous(), f"states of heads {heads}")


def test_ssd_scan_row_without_C_is_its_skip():
    inputs = scan_inputs(LENGTH)
    want, want_state = scan(inputs, [LENGTH])
    last = [LENGTH - 1, 5, CHUNK]
    inputs["C"] = torch.zeros_like(inputs["C"]).index_copy_(0, torch.tensor(last), inputs["C"][last])
    got, state = scan(inputs, [LENGTH])
    assert_same_bits(got[last], want[last], "rows with C")
    skip = (inputs["x"].float() * inputs["D"].float()[:, None] + 0.0).bfloat16()
    without = [row for row in range(LENGTH) if row not in last]
    assert_same_bits(got[without], skip[without], "rows without C")
    assert_same_bits(state, want_state, "state")


def test_ssd_scan_products_over_the_state_are_exact():
    # Two halves of the state that cancel: a rounding inside the sum would be left over, in an order that BLAS chooses.
    inputs = scan_inputs(LENGTH)
    skip = (inputs["x"].float() * inputs["D"].float()[:, None] + 0.0).bfloat16()
    inputs["B"][..., 8:] = -inputs["B"][..., :8]
    inputs["C"][..., 8:] = inputs["C"][..., :8]
    start = torch.randn(1, 4, 8, 16, generator=torch.Generator().manual_seed(1))
    start[..., 8:] = -start[..., :8]
    assert_same_bits(scan(inputs, [LENGTH], state=start)[0], skip, "C.S and C.B are zero")


def test_ssd_scan_products_over_the_chunk_are_exact():
    # Rows a, b, -(a + b) under equal weights cancel: with A = 0 and one B and dt for all rows nothing is left of them.
    inputs = scan_inputs(CHUNK)
    for name in ("dt", "B", "C"):
        inputs[name][1:] = inputs[name][:1]
    inputs["A"] = torch.zeros(4)
    a, b = torch.randint(1, 64, (2, 5, 4, 8), generator=torch.Generator().manual_seed(2))
    inputs["x"] = torch.stack([a, b, -(a + b)], 1).flatten(0, 1).bfloat16() * 2.0**-5
    inputs["x"] = torch.cat([inputs["x"], torch.zeros(1, 4, 8).bfloat16()])
    skip = (inputs["x"].float() * inputs["D"].float()[:, None] + 0.0).bfloat16()
    y, _ = scan(inputs, [CHUNK])
    assert_same_bits(y[2::3], skip[2::3], "every third row")
    assert not same_bits(y[1::3], skip[1::3])


def test_ssd_scan_ignores_padding_and_empty_sequences():
    inputs = scan_inputs(50)
    want, want_state = scan(scan_rows(inputs, slice(40)), [7, 33])
    for name in ROW_INPUTS:
        inputs[name][40:] = torch.nan
    got, state = scan(inputs, [0, 7, 0, 33, 0])
    assert_same_bits(got[:40], want, "rows before the padding")
    assert_same_bits(got[40:], torch.zeros_like(got[40:]), "padding")
    assert_same_bits(state[[1, 3]], want_state, "states")
    assert_same_bits(state[[0, 2, 4]], torch.zeros_like(state[:3]), "states of empty sequences")


@pytest.mark.parametrize("with_state", [False, True])
def test_ssd_scan_backward_formula(with_state):
    lengths = [1, 5, 3]
    inputs = scan_inputs(9, heads=2, head_dim=2, groups=1, state=2)
    states = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(9)).double() if with_state else None

    def forward(*values):
        return recurrence(dict(zip(inputs, values, strict=True)), lengths, states)[0]

    def gradients(grad, *values):
        return tuple(ssd_scan_gradients(grad, *values, cumulative(lengths), 2, states))

    assert_gradcheck(forward, gradients, *inputs.values())


@pytest.mark.parametrize("lengths", [[5, LENGTH, CHUNK, 7], [2 * CHUNK, 0, 1, 28]])
def test_ssd_scan_grads_close(lengths):
    inputs = scan_inputs(sum(lengths))
    grad_ThP = normal(sum(lengths), 4, 8, seed=30)
    leaves = {name: value.double().requires_grad_() for name, value in inputs.items()}
    y, _ = recurrence(leaves, [length for length in lengths if length])
    want = torch.autograd.grad(y, list(leaves.values()), grad_ThP.double())
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    scan(inputs, lengths)[0].backward(grad_ThP)
    for (name, value), gradient in zip(inputs.items(), want, strict=True):
        # fp32 sums of at most tokens * state terms no larger than a few times the largest gradient; bf16 at the end.
        step = 0.0 if value.dtype == torch.float32 else bf16_step(gradient) / 2
        terms = sum(lengths) * 16
        assert_within(value.grad, gradient, step + terms * 2.0**-23 * gradient.abs().max(), f"gradient of {name}")


def test_ssd_scan_grads_only_where_needed():
    inputs = scan_inputs(20)
    inputs["B"].requires_grad_()
    y, state = scan(inputs, [20])
    assert y.requires_grad
    assert not state.requires_grad
    y.sum().backward()
    assert inputs["B"].grad.abs().max() > 0
    assert inputs["x"].grad is None


def test_ssd_scan_rejects_wrong_arguments():
    inputs = scan_inputs(9, heads=3)
    wrong = inputs | {"A": inputs["A"].neg().bfloat16()}
    with pytest.raises(ValueError, match="ssd_scan cannot take this call") as error:
        ssd_scan(*wrong.values(), cumulative([4, 7]), 24, torch.zeros(3, 3, 8, 16))
    for part in (
        "3 heads with 2 groups", "chunk_size is 24; a power of two", "A_h is torch.bfloat16", "ends at 11; up to 9",
        "A_h has 3 positive entries",
        "cu_seqlens_S1[1:] has shape [2], so S = 2, but S = 3 in boundary_state_ShPn",
    ):  # fmt: skip
        assert part in str(error.value)


def test_ssd_scan_rejects_a_trained_state():
    inputs = scan_inputs(5)
    with pytest.raises(ValueError, match="boundary_state requires a gradient"):
        scan(inputs, [5], state=torch.zeros(1, 4, 8, 16, requires_grad=True))

