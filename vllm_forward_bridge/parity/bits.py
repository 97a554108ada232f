# SPDX-License-Identifier: Apache-2.0
"""Compare tensors as integers: the only comparison that "same bits" may mean here."""

import torch
from torch import Tensor

_INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integer_view(values: Tensor) -> Tensor:
    """Return the bytes of `values` as integers of the same width.

    Equality of floats is the wrong test: it takes -0.0 for 0.0 and refuses equal NaNs.
    """
    return values.detach().contiguous().view(_INTEGER_VIEW[values.element_size()])


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Tell whether both tensors have the same dtype, shape and bits."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return bool((integer_view(got) == integer_view(want)).all())


def assert_same_bits(got: Tensor, want: Tensor, what: str) -> None:
    """Raise unless `got` and `want` have the same dtype, shape and bits.

    Args:
        got: any tensor.
        want: the tensor it must equal.
        what: the claim in words, first in the message.

    Raises:
        AssertionError: counts the differing elements and shows the first.
    """
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(f"{what}: got {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}")
    differs = integer_view(got) != integer_view(want)
    if differs.any():
        at = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ; first at {at}: "
            f"got {got[at].item()!r}, want {want[at].item()!r}"
        )
