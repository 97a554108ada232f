# SPDX-License-Identifier: Apache-2.0
"""vLLM's varlen chunk scan with every meta-parameter pinned, and the chunk plan it needs.

The five kernels autotune by timing, so two processes may pick differently; one candidate each leaves no choice.
"""

# T = packed tokens, S = sequences, C = chunks, h = heads, P = head dim, G = groups, n = state size

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from vllm_forward_bridge.ops.launch import kernel_form
from vllm_forward_bridge.vllm_symbols import ssd_kernel, symbol

PINNED_CONFIGS = {
    "bmm_chunk": triton.Config(
        {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32}, num_warps=4, num_stages=4
    ),
    "chunk_cumsum": triton.Config({"BLOCK_SIZE_H": 8}, num_warps=4, num_stages=3),
    "chunk_state": triton.Config(
        {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32}, num_warps=4, num_stages=4
    ),
    "chunk_scan": triton.Config(
        {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}, num_warps=4, num_stages=3
    ),
    "state_passing": triton.Config({"BLOCK_SIZE": 1024}, num_warps=4, num_stages=3),
}
"""One configuration a kernel. num_warps is part of it: it decides the kind of matrix instruction."""


@dataclass(frozen=True)
class ChunkPlan:
    """Where chunks lie in packed rows; every sequence starts on its own chunk grid. int32 tensors on the device."""

    cu_seqlens_S1: Tensor
    cu_chunks_C1: Tensor
    sequence_C: Tensor
    last_chunk_S: Tensor
    boundary_chunk_S: Tensor
    """Last complete chunk of each sequence, -1 if none completed here."""


def plan_chunks(lengths: Sequence[int], chunk_size: int, device: torch.device) -> ChunkPlan:
    """Cut sequences of these lengths into chunks, on the host, and send the plan in one copy."""
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    cu_chunks, sequence, last, boundary = [0], [], [], []
    for index, (start, length) in enumerate(zip(cu_seqlens[:-1], lengths, strict=True)):
        first = len(sequence)
        ends = [*range(start + chunk_size, start + length, chunk_size), start + length] if length else []
        cu_chunks += ends
        sequence += [index] * len(ends)
        last.append(len(sequence) - 1)
        complete = length // chunk_size
        boundary.append(first + complete - 1 if complete else -1)
    parts = [cu_seqlens, cu_chunks, sequence, last, boundary]
    sent = torch.tensor(list(itertools.chain.from_iterable(parts)), dtype=torch.int32).to(device, non_blocking=True)
    # Each part is copied out, so that every tensor is aligned in the same way for every batch.
    return ChunkPlan(*(part.clone() for part in sent.split([len(part) for part in parts])))


def pin_kernels() -> None:
    """Leave each SSD kernel its one pinned configuration, so that nothing is timed; repeat calls change nothing."""
    for name, wanted in PINNED_CONFIGS.items():
        kernel = ssd_kernel(name)
        if _described(kernel.configs) != _described([wanted]):
            kernel.configs = [wanted]
            kernel.cache.clear()


def kernel_configs() -> dict[str, str]:
    """Read back what each SSD kernel runs in this process.

    Raises:
        RuntimeError: a kernel has another configuration than the pinned one.
    """
    found = {name: _described(ssd_kernel(name).configs) for name in PINNED_CONFIGS}
    wanted = {name: _described([config]) for name, config in PINNED_CONFIGS.items()}
    drifted = [f"{name} has {found[name]}, pinned is {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if drifted:
        raise RuntimeError(
            "SSD kernels are not pinned in this process:\n  - " + "\n  - ".join(drifted) + "\n"
            "Call pin_kernels() before the first scan, and let nothing else set their configurations"
        )
    return found


def _described(configs: Sequence[triton.Config]) -> str:
    return "; ".join(map(str, configs))


def scan(
    x_ThP: Tensor, dt_Th: Tensor, A_h: Tensor, B_TGn: Tensor, C_TGn: Tensor, D_h: Tensor, dt_bias_h: Tensor,
    plan: ChunkPlan, chunk_size: int, boundary_state_ShPn: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (y_ThP, boundary_state_ShPn) of `ops.ssd_scan`; rows past the plan's last sequence are zero."""
    pin_kernels()
    y_ThP = torch.zeros_like(x_ThP)
    # bits: initial states are always passed, zeros included: without them another binary would be compiled.
    initial = kernel_form(boundary_state_ShPn)
    if not len(plan.sequence_C):
        return y_ThP, initial.clone()
    states_ChPn = symbol("mamba_chunk_scan_combined_varlen")(
        kernel_form(x_ThP), kernel_form(dt_Th), A_h, kernel_form(B_TGn), kernel_form(C_TGn),
        chunk_size=chunk_size,
        cu_seqlens=plan.cu_seqlens_S1,
        cu_chunk_seqlens=plan.cu_chunks_C1,
        last_chunk_indices=plan.last_chunk_S,
        seq_idx=plan.sequence_C,
        out=y_ThP, D=D_h, z=None, dt_bias=dt_bias_h,
        initial_states=initial,
        dt_softplus=True, dt_limit=(0.0, float("inf")),
        return_intermediate_states=True, state_dtype=torch.float32,
    )  # fmt: skip
    completed = (plan.boundary_chunk_S >= 0)[:, None, None, None]
    last_complete = states_ChPn[plan.boundary_chunk_S.clamp(min=0).long()]
    return y_ThP, torch.where(completed, last_complete, initial)


def ssd_scan(
    x_ThP: Tensor, dt_Th: Tensor, A_h: Tensor, B_TGn: Tensor, C_TGn: Tensor, D_h: Tensor, dt_bias_h: Tensor,
    cu_seqlens_S1: Tensor, chunk_size: int, boundary_state_ShPn: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Plan the chunks from `cu_seqlens` (reads it back to the host) and scan."""
    lengths = cu_seqlens_S1.diff().tolist()
    if boundary_state_ShPn is None:
        shape = (len(lengths), *x_ThP.shape[1:], B_TGn.shape[2])
        boundary_state_ShPn = torch.zeros(shape, dtype=torch.float32, device=x_ThP.device)
    plan = plan_chunks(lengths, chunk_size, x_ThP.device)
    return scan(x_ThP, dt_Th, A_h, B_TGn, C_TGn, D_h, dt_bias_h, plan, chunk_size, boundary_state_ShPn)
