# SPDX-License-Identifier: Apache-2.0
"""One of two processes: trains the tiny model in each layout and leaves what it saw for the tests to compare.

Arguments: repository, folder of the results, backend (gloo on CPUs, nccl on two GPUs).
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.vllm_forward import launch

REPOSITORY, OUT, BACKEND = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if BACKEND == "nccl" else torch.device("cpu")
# The longest crosses a chunk boundary of its repository: 16 rows on a CPU, 128 on a GPU.
LENGTHS = tuple(length * (8 if BACKEND == "nccl" else 1) for length in (40, 16, 24))
SEQUENCE = str(sum(LENGTHS))
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1".split()
EXPERT_PARALLEL = ["--expert-model-parallel-size", "2"]
RELOAD = ["--load", str(OUT / "saved"), "--no-load-optim", "--no-load-rng"]
LAYOUTS = {
    "dp": [],
    "overlap": ["--overlap-grad-reduce", "--overlap-param-gather"],
    "tp": [*TENSOR_PARALLEL, "--save", str(OUT / "saved"), "--save-interval", "1"],
    "reload": RELOAD,
    "reload in place": [*TENSOR_PARALLEL, *RELOAD],
    "ep": EXPERT_PARALLEL,
    "tp and ep": [*TENSOR_PARALLEL, *EXPERT_PARALLEL],
    "pp": ["--pipeline-model-parallel-size", "2", "--hybrid-layer-pattern", "ME|M*E"],
    "cp": ["--context-parallel-size", "2"],
}
FLAGS = [
    "--distributed-backend", BACKEND, "--seq-length", SEQUENCE, "--max-position-embeddings", SEQUENCE,
    "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "4", "--lr", "1e-3",
    "--lr-decay-style", "constant", "--weight-decay", "0.0", "--use-distributed-optimizer", "--clip-grad", "1.0",
    "--calculate-per-token-loss",
]  # fmt: skip


def batch(rank):
    """Return tokens, labels and cu_seqlens: other tokens on each data rank."""
    generator = torch.Generator().manual_seed(7 + rank)
    tokens = torch.randint(0, 1280, (1, sum(LENGTHS)), generator=generator)
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return tuple(part.to(DEVICE) for part in (tokens, tokens.roll(-1, 1), ends))


def forward_step(records, data_iterator, model):
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, labels, ends, kept = next(data_iterator)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    output = model(tokens, torch.zeros_like(tokens), None, labels=labels, packed_seq_params=packed)
    return output, partial(total_loss, records, kept)


def total_loss(records, kept, loss_BS):
    records.append((kept.cpu(), loss_BS.detach().cpu()))
    return loss_BS.sum(), torch.tensor(loss_BS.numel(), dtype=torch.int, device=DEVICE), {}


def context_rows(ends, rank, size):
    """Return the places of a context-parallel rank, written down independently of the package."""
    rows = []
    for start, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        chunk = (end - start) // (2 * size)
        rows += [start + place * chunk + i for place in (rank, 2 * size - 1 - rank) for i in range(chunk)]
    return torch.tensor(rows, device=ends.device)


def run(trainer, data_rank):
    """Run one forward and backward through Megatron's schedule; return (places, losses) and reduced gradients."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    config = get_model_config(trainer.model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = trainer.optimizer.scale_loss
    tokens, labels, ends = batch(data_rank)
    size = parallel_state.get_context_parallel_world_size()
    rows = context_rows(ends, parallel_state.get_context_parallel_rank(), size)
    for chunk in trainer.model:
        chunk.train()
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    records = []
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, records), num_microbatches=1, seq_length=sum(LENGTHS), micro_batch_size=1,
        data_iterator=iter([(tokens[:, rows], labels[:, rows], ends, rows)]), model=trainer.model, forward_only=False,
        force_all_reduce=True,
    )  # fmt: skip
    return records, gradients(trainer.model)


def gradients(model):
    """Return the reduced fp32 gradient of each parameter by the name of its layer in the whole model."""
    from megatron.vllm_forward.versions import unwrapped

    found = {}
    for name, parameter in unwrapped(model[0]).named_parameters():
        if ".layers." in name:
            local = int(name.split(".")[2])
            number = unwrapped(model[0]).decoder.layers[local].layer_number - 1
            name = name.replace(f".layers.{local}.", f".layers.{number}.", 1)
        # A copy: the next run adds to the same buffer.
        found[name] = parameter.main_grad.to("cpu", copy=True)
    return found


def step(trainer, learning_rate):
    """Step with a learning rate and return the digest of the whole model's bytes."""
    from megatron.vllm_forward import weights

    for group in trainer.optimizer.param_groups:
        group["lr"] = learning_rate
    assert trainer.optimizer.step()[0]
    return weights.deployment_digest(trainer.model)


def main():
    from megatron.core import parallel_state
    from megatron.training.checkpointing import save_checkpoint
    from megatron.training.training import destroy_global_state

    from megatron.vllm_forward import build, optimizer_hook, versions, weights
    from vllm_forward_bridge.checkpoint.repository import open_repository
    from vllm_forward_bridge.config import BridgeConfig, ModelSection

    config = BridgeConfig(model=ModelSection(repository=str(REPOSITORY)))
    source = open_repository(REPOSITORY)
    found = {}
    for layout, flags in LAYOUTS.items():
        trainer = build.build(config, [*FLAGS, *flags])
        if layout.startswith("reload"):
            # A checkpoint of two tensor-parallel ranks, in a data-parallel model and in one of its own kind.
            found[layout] = {"loaded": weights.deployment_digest(trainer.model)}
            destroy_global_state()
            continue
        weights.load_deployment(trainer.model, source, trainer.optimizer)
        seen = {"loaded": weights.deployment_digest(trainer.model)}
        if layout == "dp":
            # The same batch on both ranks: what one process alone would see.
            _, seen["alone"] = run(trainer, 0)
        seen["records"], seen["gradients"] = run(trainer, parallel_state.get_data_parallel_rank())
        version = versions.deployment_version(trainer.model)
        seen["idle_step"] = step(trainer, 0.0)
        seen["stepped"] = step(trainer, 1e-3)
        seen["changed_blocks"] = optimizer_hook.last_report(trainer.optimizer).changed_blocks
        seen["versions"] = versions.deployment_version(trainer.model) - version
        if layout == "tp":
            save_checkpoint(1, trainer.model, trainer.optimizer, trainer.scheduler, 0)
        found[layout] = seen
        destroy_global_state()
    torch.save(found, OUT / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with launch.session():
        main()
