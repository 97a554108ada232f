# SPDX-License-Identifier: Apache-2.0
"""Rows of every token-wise op: same bits alone and in any batch, at any place, repeated, beside poisoned rows."""

import pytest
import torch
from row_cases import CASES
from shapes import BATCHES

from vllm_forward_bridge.parity.bits import assert_same_bits, same_bits

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=BY_NAME, scope="module")
def case(request):
    chosen = BY_NAME[request.param]
    weights = chosen.weights()
    yield chosen, weights, chosen.rows(chosen.rows_at_most)
    torch.cuda.empty_cache()


def test_row_bits_ignore_batch(case):
    chosen, weights, rows = case
    whole, most = chosen.call(weights, rows), chosen.rows_at_most
    for batch in (b for b in BATCHES if b < most):
        for name, first in (("first", 0), ("middle", (most - batch) // 2), ("last", most - batch)):
            part = chosen.call(weights, tuple(r[first : first + batch].clone() for r in rows))
            for got, want in zip(part, whole, strict=True):
                assert_same_bits(
                    got, want[first : first + batch], f"{chosen.name}: {batch} {name} rows alone and among {most}"
                )


def test_row_bits_ignore_alignment(case):
    chosen, weights, rows = case
    whole = chosen.call(weights, tuple(r[:40].clone() for r in rows))
    shifted = chosen.call(weights, tuple(r[3:40] for r in rows))
    for got, want in zip(shifted, whole, strict=True):
        assert_same_bits(got, want[3:], f"{chosen.name}: rows read from a slice of a larger tensor")


def test_repeats(case):
    chosen, weights, rows = case
    rows = tuple(r[:1024].clone() for r in rows)
    want = chosen.call(weights, rows)
    for _ in range(4):
        for got, first in zip(chosen.call(weights, rows), want, strict=True):
            assert_same_bits(got, first, f"{chosen.name}: the same call again")


def test_ignores_padding(case):
    chosen, weights, rows = case
    live = 40
    want = chosen.call(weights, tuple(r[:live].clone() for r in rows))
    for poison in (float("nan"), float("inf")):
        padded = tuple(r[: 2 * live].clone() for r in rows)
        for r in padded:
            if r.is_floating_point():
                r[live:] = poison
        for got, first in zip(chosen.call(weights, padded), want, strict=True):
            assert_same_bits(got[:live], first, f"{chosen.name}: live rows beside rows of {poison}")


def test_inputs_are_left_alone(case):
    chosen, weights, rows = case
    rows = tuple(r[:64].clone() for r in rows)
    before = tuple(r.clone() for r in (*weights, *rows))
    chosen.call(weights, rows)
    assert all(same_bits(a, b) for a, b in zip((*weights, *rows), before, strict=True))


@pytest.mark.parametrize("batch", [1, 64, 256, 1024, 4096])
def test_time(case, batch, measure):
    chosen, weights, rows = case
    rows = tuple(r[:batch].clone() for r in rows)
    chosen.call(weights, rows)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    milliseconds = []
    for _ in range(20):
        start.record()
        chosen.call(weights, rows)
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    measure(op=chosen.name, rows=batch, microseconds=round(sorted(milliseconds)[10] * 1000, 1))
