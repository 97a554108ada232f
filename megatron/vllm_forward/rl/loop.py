# SPDX-License-Identifier: Apache-2.0
"""One GRPO step: roll out, reward, score with the gate, train, requantise, hand the new bytes to the rollout."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron.vllm_forward.rl.batch import Batch, by_trajectory, compare_rows, make_batch, with_old_logprobs
from megatron.vllm_forward.rl.grpo import clipped_objective
from megatron.vllm_forward.rl.layout import Layout
from megatron.vllm_forward.rl.metrics import ObjectiveSums, parity_record, sample_record, time_record
from megatron.vllm_forward.rl.settings import GrpoSettings
from megatron.vllm_forward.rl.trajectory import Row, Trajectory
from vllm_forward_bridge.config import GateSection
from vllm_forward_bridge.parity.gate import Gate
from vllm_forward_bridge.parity.metrics import ParityMetrics, merge
from vllm_forward_bridge.rollout.protocol import Rollout


@dataclass(frozen=True)
class Scores:
    """What the trainer's forward says about the labels of a row, on the device of the row that was given."""

    logprob_T: Tensor
    """float32."""
    entropy_T: Tensor
    """float32, of the distribution that the label was drawn from, top-p and top-k left aside."""


RowLoss = Callable[[Row, Tensor, Tensor], Tensor]
"""loss(row, logprob_T, entropy_T): sum over the row's sampled tokens, with gradient to the logprobs."""


class Policy(Protocol):
    """The trained model behind the loop. Every method but `version` is collective over the ranks."""

    @property
    def version(self) -> int:
        """Return the version of the deployment bytes."""
        ...

    def score(self, rows: Sequence[Row]) -> list[Scores]:
        """Run the forward without gradients; one Scores a row, none on ranks without the output layer."""
        ...

    def backward(self, rows: Sequence[Row], loss: RowLoss) -> list[Scores]:
        """Set the gradients to those of the mean loss of the sampled tokens of all ranks; scores as by `score`."""
        ...

    def update(self) -> dict[str, float]:
        """Step the optimizer and requantise; return numbers for the record."""
        ...

    def deployment(self) -> tuple[Iterable[tuple[str, Tensor]], str]:
        """Return the whole model's deployment bytes by name, and their digest."""
        ...


Collect = Callable[[int, Sequence[int]], list[Trajectory]]
"""collect(step, groups): sample and grade all members of these groups with the present weights, in any order."""


@dataclass(kw_only=True)
class GrpoLoop:
    """The parts of a run. `publish` once, then `step`; every rank calls both."""

    settings: GrpoSettings
    section: GateSection
    policy: Policy
    rollout: Rollout
    collect: Collect
    layout: Layout
    gate: Gate
    """Counts every sampled token of the run once; a certificate is written from it."""
    reference: Callable[[Row], Tensor] | None = None
    """Logprobs of a row's labels under the policy that the run started from; needed for a KL term."""

    def __post_init__(self) -> None:
        if self.settings.prompts_per_step % self.layout.data_size:
            raise ValueError(
                f"{self.settings.prompts_per_step} prompts a step on {self.layout.data_size} data-parallel ranks: a "
                "multiple is needed, each rank owns whole groups; change --grpo-prompts-per-step"
            )
        # The training forward is judged like the scoring one, but its tokens have been counted already.
        self._second_gate = Gate(on_difference=self.gate.on_difference, group=self.gate.group, device=self.gate.device)

    def publish(self) -> None:
        """Hand the deployment bytes to the rollout if it does not have them."""
        if self.rollout.version != self.policy.version:
            tensors, digest = self.policy.deployment()
            self.rollout.update_weights(tensors, version=self.policy.version, digest=digest)

    def step(self, step: int) -> dict[str, Any]:
        """Make one step and return its record, equal on every rank.

        Raises:
            ParityError: trainer and rollout differ and the gate stops on it; no weight has been changed then.
            RuntimeError: a trajectory was sampled with other weights than the trainer has.
        """
        clock = _Clock()
        with clock("rollout"):
            batch = self._batch(step)
        if self.section.old_logprob == "reuse":
            judged, rows = None, with_old_logprobs(batch.kept, None, self.section)
        else:
            with clock("gate"):
                judged, old = self._scored(batch, step)
            rows = with_old_logprobs(batch.kept, old, self.section)
        sums, report = ObjectiveSums(), {}
        for iteration in range(self.settings.iterations if rows else 0):
            with clock("train"):
                first = iteration == 0
                scores = self.policy.backward(rows, self._loss(sums if first else ObjectiveSums()))
                if first:
                    gate = self.gate if judged is None else self._second_gate
                    trained = self._judge(gate, rows, scores, step)
                    judged = judged or trained
            with clock("update"):
                report = self.policy.update()
        with clock("weights"):
            self.publish()
        metrics, entropies = judged or (merge([]), [])
        samples = sample_record(self.layout, batch.trajectories, batch.dropped_groups, entropies)
        times = time_record(clock.seconds, samples["tokens"])
        numbers = {**samples, **parity_record(metrics), **sums.over(self.layout), **report, **times}
        return {"step": step, "version": self.policy.version, **numbers}

    def _batch(self, step: int) -> Batch:
        own = self.layout.share(self.collect(step, self.layout.own_work(self.settings.prompts_per_step)))
        stale = sorted({t.weight_version for t in own} - {self.policy.version})
        if stale:
            raise RuntimeError(
                f"step {step}: trajectories were sampled with weights of version {stale}, the trainer has version "
                f"{self.policy.version}; equal versions are needed, or the comparison means nothing: publish the "
                "weights to the rollout before it samples"
            )
        return make_batch(own, self.settings, self.layout)

    def _scored(self, batch: Batch, step: int) -> tuple["_Judged", dict[tuple[int, int], Tensor]]:
        scores = self.policy.score(batch.rows)
        judged = self._judge(self.gate, batch.rows, scores, step)
        return judged, by_trajectory(batch.rows, [score.logprob_T for score in scores])

    def _judge(self, gate: Gate, rows: Sequence[Row], scores: Sequence[Scores], step: int) -> "_Judged":
        local = merge([])
        if self.layout.speaks:
            local = compare_rows(rows, [score.logprob_T for score in scores], self.settings.group_size)
        entropies = [
            (score.entropy_T[row.sampled_T].double().sum().item(), row.num_sampled)
            for row, score in zip(rows, scores, strict=False)
        ]
        return gate.check(local, step=step), entropies

    def _loss(self, sums: ObjectiveSums) -> RowLoss:
        """Build the loss of a row; it adds what it sees to `sums`."""
        rule = self.settings.rule

        def loss(row: Row, logprob_T: Tensor, entropy_T: Tensor) -> Tensor:
            # A baseline may give a sampled token no probability at all; there is no ratio then, and no gradient.
            counted_T = row.sampled_T & row.old_logprob_T.isfinite()
            reference_T = self.reference(row).to(logprob_T.device)[counted_T] if self.reference else None
            values = (logprob_T, row.old_logprob_T, row.advantage_T, row.weight_T, entropy_T)
            objective = clipped_objective(rule, *(value_T[counted_T] for value_T in values), reference_T)
            sums.add(objective, row.weight_T[counted_T])
            return objective.loss_T.sum()

        return loss


_Judged = tuple[ParityMetrics, list[tuple[float, int]]]


class _Clock:
    """Add up wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start
