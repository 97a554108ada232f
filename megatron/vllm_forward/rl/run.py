# SPDX-License-Identifier: Apache-2.0
"""A whole GRPO run: steps with a journal line each, checkpoints at an interval, a certificate at the end."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed

from megatron.vllm_forward.rl.journal import Journal
from megatron.vllm_forward.rl.loop import GrpoLoop
from vllm_forward_bridge.parity.certificate import RunIdentity, write_certificate

Observe = Callable[[dict[str, Any]], None]


def run_grpo(
    loop: GrpoLoop,
    *,
    first_step: int,
    last_step: int,
    journal_path: str | Path,
    save: Callable[[int], None],
    save_interval: int | None,
    observers: tuple[Observe, ...] = (),
) -> None:
    """Make steps `first_step` to `last_step`. Every rank calls it; the first one keeps the journal.

    A checkpoint is written after the journal has its step, so a resumed run finds every step before it.

    Args:
        loop: the parts of the run.
        first_step: 1, or the step after the checkpoint that was loaded.
        last_step: the last one; nothing is done if it is before `first_step`.
        journal_path: file of the journal.
        save: writes a checkpoint of the given step; collective.
        save_interval: steps between checkpoints; the last step gets one too. None writes none.
        observers: called with each record, on every rank.
    """
    writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    # Held until the last checkpoint is written: its folder belongs to the run that has the journal.
    with Journal(journal_path, resume_after=first_step - 1) if writes else nullcontext() as journal:
        loop.publish()
        for step in range(first_step, last_step + 1):
            record = loop.step(step)
            if journal is not None:
                journal.append(record)
            for observe in observers:
                observe(record)
            if save_interval and (step % save_interval == 0 or step == last_step):
                save(step)


def certify(loop: GrpoLoop, path: str | Path, identity: RunIdentity) -> bool:
    """Write the certificate of a run whose every token was equal; return whether there was such a run."""
    if loop.section.old_logprob == "reuse" or not loop.gate.total.is_zero:
        return False
    write_certificate(path, loop.gate, identity)
    return True


def tensorboard_observer(writer: Any) -> tuple[Observe, ...]:
    """Return what writes each number of a record to TensorBoard; nothing where this rank has no writer."""
    if writer is None:
        return ()

    def observe(record: dict[str, Any]) -> None:
        for name, value in record.items():
            if value is not None and name != "step":
                writer.add_scalar(f"grpo/{name}", value, record["step"])

    return (observe,)
