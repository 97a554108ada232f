# SPDX-License-Identifier: Apache-2.0
"""The gate over two gloo processes: the same verdict, numbers and message on every rank."""

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from vllm_forward_bridge.parity.gate import Gate, ParityError
from vllm_forward_bridge.parity.metrics import compare_logprobs

pytestmark = pytest.mark.dist

ROLLOUT = [(-1.0, -2.0, -3.0)]
TRAINER = {
    "zero": ([(-1.0, -2.0, -3.0)], [(-1.0, -2.0, -3.0)]),
    "second rank worst": ([(-1.0, -2.5, -3.0)], [(-1.0, -2.25, float("nan"))]),
    "empty on one": ([], [(-1.0, -2.0, -3.0)]),
}


def check_on_rank(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gate = Gate(group=torch.distributed.group.WORLD)
    lines = []
    for step, (name, trainer) in enumerate(TRAINER.items()):
        rollout = ROLLOUT if trainer[rank] else []
        try:
            local = compare_logprobs(rollout, trainer[rank], phases=[("prefill", "decode", "decode")])
            metrics = gate.check(local, step=step)
            lines.append(f"{name}: passed {metrics.count} {metrics.mismatches} {metrics.max}")
        except ParityError as error:
            lines.append(f"{name}: {error}")
    (folder / f"rank{rank}").write_text("\n\n".join(lines))
    torch.distributed.destroy_process_group()


def test_gate_gives_every_rank_the_worst_ranks_first_difference(tmp_path):
    torch.multiprocessing.spawn(check_on_rank, args=(tmp_path,), nprocs=2)
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    assert first == second
    zero, different, empty = first.split("\n\n")
    assert zero == "zero: passed 6 0 0.0"
    assert empty == "empty on one: passed 3 0 0.0"
    assert "3 of 6 sampled tokens have another logprob" in different
    assert "(3 of them decoded, 1 missing or not finite)" in different
    assert "first difference, rank 1: sample 0, sampled token 1, phase decode: rollout -2.0, trainer -2.25" in different
