# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism that never sums in a forward: masters are Megatron's shards, bytes are whole on every rank.

With sequence parallelism a rank holds a run of token rows. It multiplies its own rows by the whole bytes of a matrix,
so that no row knows of the layout; only heads and groups (convolution, scan, gated norm, attention) are split, by an
exchange of rows for columns. The backward is Megatron's: each rank forms the gradient of its own shard.
"""

# Legend: t rank's own token rows, T rows of all ranks in order, K in features, N out features, k or n a rank's share.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.vllm_forward.collectives import exchange_rows, gathered_rows, sum_rows
from vllm_forward_bridge.ops.gradients import linear_gradients, wide
from vllm_forward_bridge.ops.gradients import product as multiply

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shard:
    """Which part of a whole tensor a rank's master is: an equal share of every section along `dim`."""

    group: dist.ProcessGroup
    dim: int
    """0: rows of a matrix, Megatron's column-parallel. -1: columns, row-parallel."""
    sections: tuple[int, ...] = ()
    """Sizes along `dim` of parts that are shared out one by one; empty for one part."""

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    def share(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """Return the part of a rank, own by default; packed columns divide as well as plain ones."""
        rank = self.group.rank() if rank is None else rank
        parts = whole.split(self.sections, dim=self.dim) if self.sections else (whole,)
        return torch.cat([part.chunk(self.size, dim=self.dim)[rank] for part in parts], dim=self.dim)

    def whole(self, own: Tensor) -> Tensor:
        """Return the whole tensor from every rank's part; a collective call."""
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return self.joined(parts)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor from the parts of all ranks, in rank order."""
        sections = [section // self.size for section in self.sections] or [parts[0].shape[self.dim]]
        by_section = zip(*(part.split(sections, dim=self.dim) for part in parts), strict=True)
        return torch.cat([shared for section in by_section for shared in section], dim=self.dim)


def rows_to_columns(rows_tN: Tensor, shard: Shard) -> Tensor:
    """Give every rank its columns of all rows: [t, N] -> [T, n]."""
    columns = Shard(shard.group, -1, shard.sections)
    sent = torch.cat([columns.share(rows_tN, rank) for rank in range(shard.size)])
    counts = [len(rows_tN)] * shard.size
    return exchange_rows(sent, counts, counts, shard.group)


def columns_to_rows(columns_Tn: Tensor, shard: Shard) -> Tensor:
    """Undo `rows_to_columns`: [T, n] -> [t, N]."""
    counts = [len(columns_Tn) // shard.size] * shard.size
    parts = exchange_rows(columns_Tn, counts, counts, shard.group).chunk(shard.size)
    return Shard(shard.group, -1, shard.sections).joined(parts)


def own_rows(rows_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's run of rows that all ranks have."""
    return rows_T.chunk(group.size())[group.rank()]


class _AllRows(torch.autograd.Function):
    """An autograd.Function because a custom op cannot take a process group."""

    @staticmethod
    def forward(ctx, rows_t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered_rows(rows_t, group)

    @staticmethod
    def backward(ctx, grad_T: Tensor) -> tuple:
        # Every rank continues with the same rows, so each has the whole gradient already.
        return own_rows(grad_T, ctx.group).contiguous(), None


def all_rows(rows_t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, for a computation that every rank then repeats (a loss)."""
    return _AllRows.apply(rows_t, group)


def shard_gradients(shard: Shard, grad_tN: Tensor, x_tK: Tensor, weight_nK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_x_tK, fp32 gradient of this rank's rows of W) of y = x W^T on a rank's own rows."""
    return column_gradients(shard, rows_to_columns(grad_tN, shard), x_tK, weight_nK)


def column_gradients(shard: Shard, grad_Tn: Tensor, x_tK: Tensor, weight_nK: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `shard_gradients` from gradients that are split by columns already."""
    grad_x_tK = sum_rows(multiply(grad_Tn, weight_nK, x_tK.dtype), shard.group)
    return grad_x_tK, wide(grad_Tn.t()) @ wide(gathered_rows(x_tK, shard.group))


def row_gradients(shard: Shard, grad_tN: Tensor, x_Tk: Tensor, weight_Nk: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_x_Tk, gradient of this rank's columns of W) from the gradients of own rows."""
    grad_TN = gathered_rows(grad_tN, shard.group)
    return linear_gradients(grad_TN, x_Tk, weight_Nk, needs_x=True, needs_weight=True)


class _Product(torch.autograd.Function):
    """An autograd.Function because a custom op cannot take a process group."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, product: Product, gradients: Callable[..., tuple]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradients = gradients
        return product(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = ctx.gradients(grad, x, weight)
        return grad_x, grad_weight.to(weight.dtype), None, None


def whole_rows_product(x_tK: Tensor, weight_nK: Tensor, shard: Shard, product: Product) -> Tensor:
    """[t, K] -> [t, N]: whole bytes on own rows; the master is a share of the rows of W."""
    return _Product.apply(x_tK, weight_nK, product, partial(shard_gradients, shard))


def column_product(x_tK: Tensor, weight_nK: Tensor, shard: Shard, product: Product) -> Tensor:
    """[t, K] -> [T, n]: whole bytes on own rows, then own columns of all rows."""
    return _Product.apply(
        x_tK, weight_nK, lambda rows: rows_to_columns(product(rows), shard), partial(column_gradients, shard)
    )


def row_product(x_Tk: Tensor, weight_Nk: Tensor, shard: Shard, product: Product) -> Tensor:
    """[T, k] -> [t, N]: own rows with all columns, then whole bytes on them."""
    return _Product.apply(
        x_Tk, weight_Nk, lambda columns: product(columns_to_rows(columns, shard)), partial(row_gradients, shard)
    )
