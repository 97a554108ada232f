# SPDX-License-Identifier: Apache-2.0
"""Exchanges of whole rows between ranks: nothing is summed in a forward, so no layout can change a bit."""

# Legend: R rows here, r ranks of the group; trailing dims are carried along.

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Do as `all_to_all_rows`, without autograd."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


def gathered_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Do as `gather_rows`, without autograd."""
    out = rows.new_empty(rows.shape[0] * group.size(), *rows.shape[1:])
    dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


def sum_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's run of the sum of all ranks' rows; for backwards, summed in fp32 in rank order."""
    counts = [rows.shape[0] // group.size()] * group.size()
    parts = exchange_rows(rows, counts, counts, group).unflatten(0, (group.size(), -1))
    return parts.float().sum(dim=0).to(rows.dtype)


class _AllToAllRows(torch.autograd.Function):
    """An autograd.Function because a custom op cannot take a process group."""

    @staticmethod
    def forward(ctx, rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = (receive, send, group)
        return exchange_rows(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return exchange_rows(grad, *ctx.way_back), None, None, None


class _GatherRows(torch.autograd.Function):
    """An autograd.Function because a custom op cannot take a process group."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered_rows(rows, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return sum_rows(grad, ctx.group), None


def all_to_all_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive runs of rows to the ranks of a group, and return what they sent, in rank order."""
    return _AllToAllRows.apply(rows, send, receive, group)


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks in rank order; every rank gives the same number. Backward sums in fp32."""
    return _GatherRows.apply(rows, group)
