# SPDX-License-Identifier: Apache-2.0
"""The loop's policy on Megatron: its schedules, its gradient reduction and loss scaling, its optimizer."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.training import (
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from torch import Tensor

from megatron.vllm_forward import optimizer_hook, versions, weights
from megatron.vllm_forward.output import Sampling
from megatron.vllm_forward.rl.layout import Layout
from megatron.vllm_forward.rl.loop import RowLoss, Scores
from megatron.vllm_forward.rl.trajectory import Row
from vllm_forward_bridge.rollout.protocol import SamplingParams


def megatron_layout(device: torch.device) -> Layout:
    """Read this rank's place from Megatron's parallel state; collective, every rank must call it."""
    data_rank = parallel_state.get_data_parallel_rank()
    data_size = parallel_state.get_data_parallel_world_size()
    data_ranks: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(data_ranks, data_rank)
    members = [[rank for rank, owner in enumerate(data_ranks) if owner == data] for data in range(data_size)]
    group, _ = torch.distributed.new_subgroups_by_enumeration(members)
    return Layout(
        data_rank=data_rank,
        data_size=data_size,
        replica_rank=members[data_rank].index(torch.distributed.get_rank()),
        replica_size=len(members[data_rank]),
        replica_group=group,
        row_multiple=parallel_state.get_tensor_model_parallel_world_size(),
        speaks=parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0,
        device=device,
    )


@dataclass
class MegatronPolicy:
    """A model that `setup_model_and_optimizer` built, as the loop sees it."""

    model: list[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    args: argparse.Namespace
    sampling: SamplingParams
    device: torch.device
    router_replay: bool = False
    """R3: the routers take the rollout's expert choice."""

    def __post_init__(self) -> None:
        problems = _unsupported(self.args)
        if problems:
            raise ValueError("the GRPO loop cannot train with these arguments:\n  - " + "\n  - ".join(problems))
        config = get_model_config(self.model[0])
        config.grad_scale_func = self.optimizer.scale_loss
        if config.finalize_model_grads_func is None:
            config.finalize_model_grads_func = finalize_model_grads
        for chunk in self.model:
            # The scoring forward stays in training mode too: some Megatron modules take another path in eval.
            chunk.train()

    @property
    def version(self) -> int:
        """Return the version of the deployment bytes."""
        return versions.deployment_version(self.model)

    def score(self, rows: Sequence[Row]) -> list[Scores]:
        """Run the forward without gradients."""
        with torch.no_grad():
            self._run(rows, _no_loss, forward_only=True)
        return self._scores

    def backward(self, rows: Sequence[Row], loss: RowLoss) -> list[Scores]:
        """Set the gradients to those of the mean loss of the sampled tokens of all ranks."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(rows, loss, forward_only=False)
        return self._scores

    def update(self) -> dict[str, float]:
        """Step optimizer and learning rate; the hook on the optimizer requantises.

        Raises:
            RuntimeError: the optimizer skipped the step; its gradients were not finite.
        """
        success, grad_norm, _ = self.optimizer.step()
        if not logical_and_across_model_parallel_group(success):
            raise RuntimeError(
                "the optimizer skipped this step because a gradient is not finite; a finite loss is needed: look at "
                "reward, ratio and entropy of the last steps in the journal, and lower the learning rate"
            )
        rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=self.args.global_batch_size)
        self.args.consumed_train_samples += self.args.global_batch_size
        report = optimizer_hook.last_report(self.optimizer)
        return {
            "grad_norm": float(reduce_max_stat_across_model_parallel_group(grad_norm)),
            "learning_rate": float(rate),
            "requantised_blocks": report.changed_blocks,
            "overflowed_blocks": report.overflowed_blocks,
        }

    def deployment(self) -> tuple[Iterable[tuple[str, Tensor]], str]:
        """Return the whole model's deployment bytes by name, and their digest."""
        return weights.deployment_tensors(self.model), weights.deployment_digest(self.model)

    def _run(self, rows: Sequence[Row], loss: RowLoss, *, forward_only: bool) -> None:
        self._scores: list[Scores] = []
        # Each chunk of a virtual pipeline reads all rows, in order.
        iterators = [iter(rows) for _ in self.model]
        get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=iterators if len(self.model) > 1 else iterators[0],
            model=self.model,
            num_microbatches=len(rows),
            seq_length=len(rows[0].tokens_T),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward_step(self, loss: RowLoss, rows: Iterator[Row], model: torch.nn.Module) -> tuple[Any, Callable]:
        row = next(rows).to(self.device)
        output = model(
            row.tokens_T[None],
            row.positions_T[None],
            None,
            labels=row.labels_T[None],
            packed_seq_params=_packed(row),
            sampling=self._sampling(row),
            with_entropy=True,
            **({"expert_ids": _expert_ids(row)} if self.router_replay else {}),
        )
        return output, partial(self._row_loss, loss, row)

    def _row_loss(self, loss: RowLoss, row: Row, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict]:
        """Give Megatron the sum and the token count: with per-token loss it divides by the count of all ranks."""
        negative_BS, entropy_BS = output
        logprob_T = -negative_BS[0]
        self._scores.append(Scores(logprob_T.detach().cpu(), entropy_BS[0].detach().cpu()))
        tokens = torch.tensor(row.num_sampled, dtype=torch.int, device=logprob_T.device)
        return loss(row, logprob_T, entropy_BS[0]), tokens, {}

    def _sampling(self, row: Row) -> Sampling:
        ones_BS = torch.ones_like(row.tokens_T[None], dtype=torch.float32)
        return Sampling(
            temperature=ones_BS * self.sampling.temperature,
            top_p=ones_BS * self.sampling.top_p,
            top_k=torch.full_like(row.tokens_T[None], self.sampling.top_k, dtype=torch.int32),
        )


def _no_loss(row: Row, logprob_T: Tensor, entropy_T: Tensor) -> Tensor:
    return logprob_T.sum()


def _packed(row: Row) -> PackedSeqParams:
    longest = int((row.cu_seqlens_S1[1:] - row.cu_seqlens_S1[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=row.cu_seqlens_S1,
        cu_seqlens_kv=row.cu_seqlens_S1,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _expert_ids(row: Row) -> Tensor:
    if row.expert_ids_TLk is None:
        raise ValueError(
            "router_replay is on, but trajectories came without expert_ids; every one must carry the experts that the "
            "rollout chose: use an engine that records them"
        )
    return row.expert_ids_TLk[None]


def _unsupported(args: argparse.Namespace) -> list[str]:
    problems = []
    if not args.calculate_per_token_loss:
        problems.append("--calculate-per-token-loss is off; rows hold unequal counts of tokens, which must weigh alike")
    if args.micro_batch_size != 1:
        problems.append(f"--micro-batch-size is {args.micro_batch_size}; 1 is needed, a row is a microbatch")
    if args.context_parallel_size != 1:
        problems.append(f"--context-parallel-size is {args.context_parallel_size}; the loop does not cut rows: use 1")
    if args.rerun_mode != "disabled":
        problems.append(f"--rerun-mode is {args.rerun_mode!r}; 'disabled' is needed, the gate is the check")
    overlap = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(args, name)]
    if overlap:
        flags = ", ".join("--" + name.replace("_", "-") for name in overlap)
        problems.append(f"{flags}: the loop scores between updates, when no gather may be in flight; leave it off")
    return problems
