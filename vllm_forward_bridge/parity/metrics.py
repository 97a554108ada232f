# SPDX-License-Identifier: Apache-2.0
"""Differences between trainer and rollout logprobs over all sampled tokens, mergeable over ranks.

With d = trainer - rollout in float64 over the tokens that both sides have as finite numbers:
max = max |d|; mean = mean |d|; std = population standard deviation of d; k3 = mean(exp(d) - 1 - d), an estimate of
KL(rollout || trainer) on the rollout's own samples. A token that is missing on one side or not finite on either is a
mismatch and makes all four infinite: no finite number describes it. `mismatches` compares bits, so -0.0 against 0.0 is
one although its d is zero.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from vllm_forward_bridge.parity.bits import integer_view

PHASES = ("prefill", "decode", "unknown")
Values = Sequence[float] | Tensor


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """Where the first differing token is and what the two sides have there (None: nothing)."""

    sample: int
    position: int
    """Index among the sample's sampled tokens, from 0."""
    phase: str
    rollout: float | None
    trainer: float | None

    def __str__(self) -> str:
        shown = ["missing" if value is None else f"{value!r}" for value in (self.rollout, self.trainer)]
        return (
            f"sample {self.sample}, sampled token {self.position}, phase {self.phase}: "
            f"rollout {shown[0]}, trainer {shown[1]}"
        )


@dataclass(frozen=True, kw_only=True)
class ParityMetrics:
    """Counts and moments; `merge` adds those of other ranks or batches."""

    count: int
    """Sampled tokens of either side, the missing ones included."""
    mismatches: int
    """Tokens whose float32 bits differ, or that are missing or not finite."""
    invalid: int
    """Those of the mismatches that are missing or not finite."""
    decode_mismatches: int
    max_finite: float
    sum_absolute: float
    mean_signed: float
    squared_deviations: float
    sum_k3: float
    first: FirstDifference | None

    @property
    def is_zero(self) -> bool:
        """Tell whether something was compared and every bit was equal."""
        return self.count > 0 and self.mismatches == 0

    @property
    def max(self) -> float:
        """Return max |d|."""
        return math.inf if self.invalid else self.max_finite

    @property
    def mean(self) -> float:
        """Return mean |d|."""
        return self._average(self.sum_absolute)

    @property
    def std(self) -> float:
        """Return the population standard deviation of d."""
        return math.sqrt(self._average(self.squared_deviations))

    @property
    def k3_kl(self) -> float:
        """Return the k3 estimate of KL(rollout || trainer)."""
        return self._average(self.sum_k3)

    def _average(self, total: float) -> float:
        if self.invalid:
            return math.inf
        return total / self.count if self.count else 0.0


def compare_logprobs(
    rollout: Sequence[Values],
    trainer: Sequence[Values],
    *,
    phases: Sequence[Sequence[str]] | None = None,
    samples: Sequence[int] | None = None,
) -> ParityMetrics:
    """Compare every sampled token; nothing is masked, averaged per sample or dropped.

    Args:
        rollout: for each sample, the logprobs of its sampled tokens: float32 tensor or exact float32 values.
        trainer: likewise, from the trainer; samples or tokens that one side lacks count as mismatches.
        phases: for each sample, what computed each token; None if not known.
        samples: ids of the samples for the report; their index if None.

    Raises:
        ValueError: a value is not a float32 value, so bits could not be compared.
    """
    pairs = [(_float32(a), _float32(b)) for a, b in zip_longest(rollout, trainer, fillvalue=())]
    rollout_rows, trainer_rows = [a for a, _ in pairs], [b for _, b in pairs]
    lengths = [max(len(a), len(b)) for a, b in zip(rollout_rows, trainer_rows, strict=True)]
    rollout_N, rollout_known_N = _flat(rollout_rows, lengths)
    trainer_N, trainer_known_N = _flat(trainer_rows, lengths)
    known_N = rollout_known_N & trainer_known_N
    valid_N = known_N & rollout_N.isfinite() & trainer_N.isfinite()
    # bits: floats compared as integers; equal non-finite values are still no logprob of a sampled token.
    differs_N = (integer_view(rollout_N) != integer_view(trainer_N)) | ~valid_N
    phase_N = [phase for index, length in enumerate(lengths) for phase in _phases_of(phases, index, length)]
    first = None
    if differs_N.any():
        at = int(differs_N.nonzero()[0])
        sides = ((rollout_N, rollout_known_N), (trainer_N, trainer_known_N))
        first = _first_difference(at, lengths, samples, phase_N[at], *sides)
    return ParityMetrics(
        count=len(differs_N),
        mismatches=int(differs_N.sum()),
        invalid=int((~valid_N).sum()),
        decode_mismatches=sum(phase_N[at] == "decode" for at in differs_N.nonzero().flatten().tolist()),
        first=first,
        **_moments((trainer_N.double() - rollout_N.double())[valid_N]),
    )


def _moments(d: Tensor) -> dict[str, float]:
    mean_signed = d.mean().item() if len(d) else 0.0
    return {
        "max_finite": d.abs().max().item() if len(d) else 0.0,
        "sum_absolute": d.abs().sum().item(),
        "mean_signed": mean_signed,
        "squared_deviations": ((d - mean_signed) ** 2).sum().item(),
        "sum_k3": (torch.expm1(d) - d).sum().item(),
    }


def merge(parts: Iterable[ParityMetrics]) -> ParityMetrics:
    """Combine metrics of disjoint token sets, in the order given.

    The first difference is that of the worst part: most mismatches, ties to the earlier part.
    """
    parts = list(parts)
    worst = max(parts, key=lambda part: part.mismatches, default=None)
    valid, mean_signed, deviations = 0, 0.0, 0.0
    for part in parts:
        added = part.count - part.invalid
        if added:
            # Two-sample update of mean and squared deviations: no cancellation when all differences are alike.
            shift = part.mean_signed - mean_signed
            deviations += part.squared_deviations + shift * shift * valid * added / (valid + added)
            mean_signed += shift * added / (valid + added)
            valid += added
    return ParityMetrics(
        count=sum(part.count for part in parts),
        mismatches=sum(part.mismatches for part in parts),
        invalid=sum(part.invalid for part in parts),
        decode_mismatches=sum(part.decode_mismatches for part in parts),
        max_finite=max((part.max_finite for part in parts), default=0.0),
        sum_absolute=math.fsum(part.sum_absolute for part in parts),
        mean_signed=mean_signed,
        squared_deviations=deviations,
        sum_k3=math.fsum(part.sum_k3 for part in parts),
        first=worst.first if worst else None,
    )


def table(rows: Sequence[tuple[str, ParityMetrics]], *, first_column: str = "step") -> str:
    """Lay out metrics as text, one row each; a number is printed as 0 only if it is exactly zero."""
    head = (first_column, "tokens", "mismatches", "invalid", "max", "mean", "std", "k3 KL")
    cells = [
        (name, str(m.count), str(m.mismatches), str(m.invalid), *map(_number_text, (m.max, m.mean, m.std, m.k3_kl)))
        for name, m in rows
    ]
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *cells)
    )


def _number_text(value: float) -> str:
    return "0" if value == 0 else f"{value:.3e}"


def _float32(values: Values) -> Tensor:
    if isinstance(values, Tensor):
        if values.dtype != torch.float32 or values.dim() != 1:
            raise ValueError(
                f"logprobs are {values.dtype} with shape {tuple(values.shape)}; one float32 value a sampled token is "
                "needed, because bits are compared: take them from the logprob op without a cast"
            )
        return values.detach().cpu()
    exact = torch.tensor(values, dtype=torch.float64)
    rounded = exact.float()
    changed = (rounded.double() != exact) & ~exact.isnan()
    if changed.any():
        raise ValueError(
            f"logprob {exact[changed][0].item()!r} is not a float32 value; exact ones are needed, because bits are "
            "compared: keep what the logprob op returned"
        )
    return rounded


def _flat(rows: list[Tensor], lengths: list[int]) -> tuple[Tensor, Tensor]:
    flat = torch.full((sum(lengths),), math.nan)
    known = torch.zeros(sum(lengths), dtype=torch.bool)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        flat[start : start + len(row)] = row
        known[start : start + len(row)] = True
        start += length
    return flat, known


def _phases_of(phases: Sequence[Sequence[str]] | None, index: int, length: int) -> list[str]:
    given = list(phases[index])[:length] if phases is not None and index < len(phases) else []
    given = [phase if phase in PHASES else "unknown" for phase in given]
    return given + ["unknown"] * (length - len(given))


def _first_difference(at, lengths, samples, phase, rollout, trainer) -> FirstDifference:
    start, index = 0, 0
    while at >= start + lengths[index]:
        start += lengths[index]
        index += 1
    return FirstDifference(
        sample=samples[index] if samples is not None and index < len(samples) else index,
        position=at - start,
        phase=phase,
        rollout=rollout[0][at].item() if rollout[1][at] else None,
        trainer=trainer[0][at].item() if trainer[1][at] else None,
    )
