# SPDX-License-Identifier: Apache-2.0
"""Index maps of packed sequences: several sequences lie one after the other in one tensor, `cu_seqlens` marks where.

Everything here is integer arithmetic, so nothing here can change a float's bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge.ops.arguments import Form


def cu_seqlens_problems(name: str, cu_seqlens_S1: Tensor, num_rows: int) -> list[str]:
    """List what is wrong with `cu_seqlens`; rows past its last entry are padding and allowed."""
    if cu_seqlens_S1.dtype != torch.int32 or cu_seqlens_S1.dim() != 1 or len(cu_seqlens_S1) < 2:
        return [
            f"{name} is {cu_seqlens_S1.dtype} of shape {tuple(cu_seqlens_S1.shape)}; int32 [sequences + 1] is "
            "accepted, the kernels read no other: list the start of every sequence and the end of the last"
        ]
    starts = cu_seqlens_S1.tolist()
    if starts[0] != 0 or starts != sorted(starts):
        return [f"{name} is {starts}; 0 first and no fall is accepted, no sequence ends before it starts: rebuild it"]
    if starts[-1] > num_rows:
        return [f"{name} ends at {starts[-1]}; up to {num_rows}, the number of rows, is accepted: rebuild it"]
    return []


def ends_form(name: str, cu_seqlens_S1: Tensor) -> dict[str, Form]:
    """Return the entry of `arguments.check` that ties the number of sequences to the letter S."""
    return {f"{name}[1:]": (cu_seqlens_S1.reshape(-1)[1:], torch.int32, "S")}


def sequence_of_rows(cu_seqlens_S1: Tensor) -> Tensor:
    """Return for each packed row, padding excluded, the number of its sequence."""
    lengths_S = cu_seqlens_S1.diff().long()
    return torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)


def offset_of_rows(cu_seqlens_S1: Tensor) -> Tensor:
    """Return for each packed row, padding excluded, its offset from the start of its sequence."""
    row_T = torch.arange(int(cu_seqlens_S1[-1]), device=cu_seqlens_S1.device)
    return row_T - cu_seqlens_S1.long()[sequence_of_rows(cu_seqlens_S1)]


@dataclass(frozen=True)
class ChunkGrid:
    """Packed rows laid out chunk by chunk: first the first chunk of every sequence, then every second one, and so on.

    Sequences stand in order of falling length, so the ones that reach chunk c are the first `reaching[c]` and the ones
    that complete it the first `completing[c]`.
    """

    order_S: Tensor
    """Sequence number at each place of the order."""
    reaching: tuple[int, ...]
    completing: tuple[int, ...]
    slot_T: Tensor
    """Row of each packed row in the chunk-by-chunk layout."""
    chunk_size: int

    @property
    def num_slots(self) -> int:
        """Rows of the chunk-by-chunk layout."""
        return sum(self.reaching) * self.chunk_size

    def spread(self, rows: Tensor) -> Tensor:
        """Return `rows` [T, ...] in the layout, as [chunks, chunk_size, ...]; slots without a row are zero."""
        spread = rows.new_zeros(self.num_slots, *rows.shape[1:])
        spread.index_copy_(0, self.slot_T, rows[: len(self.slot_T)])
        return spread.view(-1, self.chunk_size, *rows.shape[1:])

    def gather(self, chunks: Tensor, num_rows: int) -> Tensor:
        """Return the packed rows of [chunks, chunk_size, ...]; padding rows are zero."""
        rows = chunks.new_zeros(num_rows, *chunks.shape[2:])
        torch.index_select(chunks.flatten(0, 1), 0, self.slot_T, out=rows[: len(self.slot_T)])
        return rows


def chunk_grid(cu_seqlens_S1: Tensor, chunk_size: int) -> ChunkGrid:
    """Lay packed sequences out by chunks; every sequence starts on its own chunk boundary."""
    lengths_S = cu_seqlens_S1.diff().long()
    order_S = torch.argsort(lengths_S, descending=True, stable=True)
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(len(order_S))
    num_chunks = -(-int(lengths_S.max()) // chunk_size)
    last_row_C = torch.arange(num_chunks)[:, None] * chunk_size
    reaching_C = (lengths_S > last_row_C).sum(1)
    completing_C = (lengths_S >= last_row_C + chunk_size).sum(1)
    first_chunk_C = reaching_C.cumsum(0) - reaching_C
    offset_T = offset_of_rows(cu_seqlens_S1)
    chunk_T = offset_T // chunk_size
    slot_T = (first_chunk_C[chunk_T] + place_S[sequence_of_rows(cu_seqlens_S1)]) * chunk_size + offset_T % chunk_size
    return ChunkGrid(order_S, tuple(reaching_C.tolist()), tuple(completing_C.tolist()), slot_T, chunk_size)
