# SPDX-License-Identifier: Apache-2.0
"""Who does what among the ranks: data ranks own problems, replicas of a data rank share its rollout work."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This rank's place. Ranks that differ only in pipeline, tensor or context place hold the same data."""

    data_rank: int = 0
    data_size: int = 1
    replica_rank: int = 0
    replica_size: int = 1
    replica_group: torch.distributed.ProcessGroup | None = None
    row_multiple: int = 1
    """Rows are lengthened to a multiple of it: sequence parallel cuts each into that many equal parts."""
    speaks: bool = True
    """Whether this rank's logprobs count: last pipeline stage, first tensor and context rank. One a replica set."""
    device: torch.device = torch.device("cpu")

    def own_groups(self, num_groups: int) -> list[int]:
        """Return the problems whose trajectories this rank trains on."""
        return list(range(self.data_rank, num_groups, self.data_size))

    def own_work(self, num_groups: int) -> list[int]:
        """Return the problems that this rank's engine samples, a share of `own_groups`."""
        return self.own_groups(num_groups)[self.replica_rank :: self.replica_size]

    def share(self, items: Sequence) -> list:
        """Collect the items of all replicas of this data rank; their order is the caller's to fix."""
        if self.replica_size == 1:
            return list(items)
        parts: list = [None] * self.replica_size
        torch.distributed.all_gather_object(parts, list(items), group=self.replica_group)
        return [item for part in parts for item in part]

    def total(self, values: Sequence[float]) -> list[float]:
        """Add numbers over all ranks."""
        return self._reduce(values, torch.distributed.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Take the maximum of each number over all ranks."""
        return self._reduce(values, torch.distributed.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], how: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        if self.data_size * self.replica_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(tensor, op=how)
        return tensor.tolist()
