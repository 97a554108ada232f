# SPDX-License-Identifier: Apache-2.0
"""Sequence-contiguous tokens: what a layer knows about its rows, with or without context parallelism."""

# Legend: T tokens of this rank, A tokens of all context-parallel ranks, S sequences, L keys of this rank's attention.

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.vllm_forward.sharding import own_rows


@dataclass
class PackedTokens(PackedSeqParams):
    """Megatron's packed-sequence parameters for rows that the ops can take as they are.

    Under context parallelism every sequence is cut into twice as many equal chunks as there are ranks, and rank r holds
    chunks r and 2 ranks - 1 - r of each: Megatron's load-balanced order.
    """

    context_group: dist.ProcessGroup | None = None
    """None without context parallelism."""
    expert_ids_TLk: Tensor | None = None
    """Experts to use instead of the router's choice, by MoE layer of the whole model (router replay)."""

    @property
    def cu_seqlens_S1(self) -> Tensor:
        """Starts of whole sequences among the tokens of all context-parallel ranks."""
        return self.cu_seqlens_q

    @cached_property
    def order_A(self) -> Tensor:
        """Index, among rows gathered in rank order, of each token of the whole sequences."""
        held = torch.cat([self._held(rank) for rank in range(self.context_group.size())])
        return torch.argsort(held)

    @cached_property
    def queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (cu_seqlens of query runs, cu_seqlens of their keys, index of each key in the whole sequences).

        A run of queries is the last part of its keys; with context parallelism each chunk is a run of its own.
        """
        ranks, rank = self.context_group.size(), self.context_group.rank()
        query_ends, key_ends, keys = [0], [0], []
        for start, chunk in self._chunks():
            for place in (rank, 2 * ranks - 1 - rank):
                query_ends.append(query_ends[-1] + chunk)
                key_ends.append(key_ends[-1] + (place + 1) * chunk)
                keys.append(torch.arange(start, start + (place + 1) * chunk))
        device = self.cu_seqlens_q.device
        as_lengths = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in (query_ends, key_ends)]
        return *as_lengths, torch.cat(keys).to(device)

    def _held(self, rank: int) -> Tensor:
        ranks = self.context_group.size()
        places = (rank, 2 * ranks - 1 - rank)
        starts = [start + place * chunk for start, chunk in self._chunks() for place in places]
        sizes = [chunk for _, chunk in self._chunks() for _ in places]
        runs = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return torch.cat(runs).to(self.cu_seqlens_q.device)

    def _chunks(self) -> list[tuple[int, int]]:
        ends = self.cu_seqlens_q.tolist()
        pieces = 2 * self.context_group.size()
        wrong = [b - a for a, b in zip(ends, ends[1:], strict=False) if (b - a) % pieces]
        if wrong:
            raise ValueError(
                f"sequences of {wrong} tokens cannot be cut into {pieces} equal chunks; with context-parallel size "
                f"{pieces // 2} pad every sequence to a multiple of {pieces} (cu_seqlens_q_padded)"
            )
        return [(a, (b - a) // pieces) for a, b in zip(ends, ends[1:], strict=False)]


def packed_tokens(
    hidden_sbH: Tensor,
    packed_seq_params: PackedSeqParams | None,
    groups: ProcessGroupCollection,
    expert_ids_TLk: Tensor | None = None,
) -> PackedTokens:
    """Describe the rows of `[s, b, h]` activations after they were made sequence-contiguous.

    Raises:
        ValueError: the layout does not take this batch; or packed parameters are not thd, come with a batch dim other
            than 1, or cut a sample as a whole.
    """
    num_tokens, batch = hidden_sbH.shape[:2]
    context_size, tensor_size = groups.cp.size(), groups.tp.size()
    if tensor_size > 1 and batch != 1:
        raise ValueError(
            f"the batch dim is {batch} with tensor-parallel size {tensor_size}; only 1 is accepted, because "
            "ranks share out runs of one packed row of tokens: pass --micro-batch-size 1"
        )
    if packed_seq_params is None:
        length = num_tokens * context_size * tensor_size
        ends = torch.arange(batch + 1, dtype=torch.int32, device=hidden_sbH.device) * length
    elif packed_seq_params.qkv_format != "thd" or batch != 1:
        raise ValueError(
            f"packed_seq_params has format {packed_seq_params.qkv_format!r} and the batch dim is {batch}; "
            "only 'thd' with batch 1 is accepted, because rows are packed by cu_seqlens alone"
        )
    elif context_size > 1 and packed_seq_params.tokens_per_sample is not None:
        raise ValueError(
            f"documents of a sample of {packed_seq_params.tokens_per_sample} tokens are packed with context-parallel "
            f"size {context_size}; only sequences that are cut one by one are accepted, because a rank must know "
            "which rows it holds: leave out --dataloader-inter-document-masking"
        )
    else:
        padded = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if padded is None else padded).to(torch.int32).contiguous()
    return PackedTokens(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        context_group=groups.cp if context_size > 1 else None,
        expert_ids_TLk=None if expert_ids_TLk is None else own_rows(expert_ids_TLk, groups.tp),
    )


def to_packed(hidden_sbH: Tensor) -> Tensor:
    """Turn `[s, b, h]` into sequence-contiguous rows `[b * s, 1, h]`."""
    return hidden_sbH.transpose(0, 1).reshape(-1, 1, hidden_sbH.shape[2])


def from_packed(rows_T1H: Tensor, batch: int) -> Tensor:
    """Undo `to_packed`."""
    return rows_T1H.view(batch, -1, rows_T1H.shape[2]).transpose(0, 1).contiguous()
