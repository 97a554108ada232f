# SPDX-License-Identifier: Apache-2.0
"""Deployment weights in and out of a built model, whatever its layout: names and bytes of the source repository."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron.vllm_forward.bridge import layer_name
from megatron.vllm_forward.deployed import Deployed, View
from megatron.vllm_forward.norm import RmsNorm
from megatron.vllm_forward.sharding import Shard
from megatron.vllm_forward.versions import deployed_modules, mark_bytes_current, mark_masters_changed, unwrapped
from vllm_forward_bridge.checkpoint.repository import Repository
from vllm_forward_bridge.quantization import bytes_digest

# Where a layer keeps the norm before its mixer.
_LAYER_NORMS = ("norm", "input_layernorm", "pre_mlp_layernorm")


def load_deployment(
    model_chunks: Sequence[nn.Module],
    source: Repository | Mapping[str, Tensor],
    optimizer: MegatronOptimizer | None = None,
) -> None:
    """Take every weight of this rank from deployment tensors: bytes as they are, masters = bf16(dequantised).

    Args:
        model_chunks: all chunks of this rank.
        source: a repository, or a mapping of whole-model names to tensors.
        optimizer: its fp32 masters are set too; without it an optimizer made before would undo the load.

    Raises:
        ValueError: lists every missing tensor and every one with another dtype or shape; nothing is changed then.
    """
    views = _local_views(model_chunks)
    read = source.read if isinstance(source, Repository) else source.__getitem__
    names = set(source.names() if isinstance(source, Repository) else source)
    tensors, problems = {}, []
    for view in views.values():
        if view.name not in names:
            problems.append(f"{view.name}: missing; {view.tensor.dtype} {list(view.shape)} is needed")
            continue
        tensors[view.name] = read(view.name)
        problems += view.problems(tensors[view.name])
    if problems:
        raise ValueError(
            "these deployment tensors do not fit the model; give those it was built for:\n  - "
            + "\n  - ".join(problems)
        )
    mark_masters_changed(model_chunks)
    with torch.no_grad():
        for name, view in views.items():
            view.write(tensors[name])
        for module in deployed_modules(model_chunks):
            module.restore_masters()
    mark_bytes_current(model_chunks)
    if optimizer is not None:
        optimizer.reload_model_params()


def deployment_tensors(model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the whole model in the order of its source, on every rank; a collective call.

    A tensor may alias the model: copy it before the next step if it is kept. Ranks that hold other layers or experts
    send theirs one tensor at a time, so at most one is in memory beside the model.
    """
    views = _local_views(model_chunks)
    tensors = unwrapped(model_chunks[0]).bridge.tensors
    group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    held: list[set[str]] = [set() for _ in range(group.size())]
    dist.all_gather_object(held, set(views), group=group)
    device = next(iter(views.values())).tensor.device
    for name, spec in tensors.items():
        owners = [rank for rank, names in enumerate(held) if name in names]
        if not owners:
            raise RuntimeError(f"no rank holds {name}; the model was built for another repository: build it again")
        # Every holder reads: a tensor-parallel shard is gathered among them.
        tensor = views[name].read() if name in views else torch.empty(spec.shape, dtype=spec.dtype, device=device)
        yield name, tensor if len(owners) == group.size() else _broadcast(tensor, owners[0], device, group)


def deployment_digest(model_chunks: Sequence[nn.Module]) -> str:
    """Return one digest over every deployment tensor, the same on every rank; a collective call."""
    return bytes_digest(deployment_tensors(model_chunks))


def _broadcast(tensor: Tensor, owner: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    # Float8 has no collective; bytes do.
    raw = tensor.reshape(-1).view(torch.uint8).to(device)
    dist.broadcast(raw, dist.get_global_rank(group, owner), group=group)
    return raw.view(tensor.dtype).reshape(tensor.shape)


def _local_views(model_chunks: Sequence[nn.Module]) -> dict[str, View]:
    """Return the views of this rank by whole deployment name; shapes are those of the source."""
    views = {}
    for chunk in model_chunks:
        model = unwrapped(chunk)
        for view in _model_views(model):
            spec = model.bridge.tensors.get(view.name)
            if spec is not None:  # A source without KV scales means 1, and gets none back.
                views[view.name] = replace(view, shape=spec.shape)
    return views


def _model_views(model: nn.Module) -> Iterator[View]:
    if model.pre_process:
        weight = model.embedding.word_embeddings.weight.data
        tp_group = model.pg_collection.tp
        shard = Shard(tp_group, 0) if tp_group.size() > 1 else None
        yield View("backbone.embeddings.weight", weight, tuple(weight.shape), shard)
    for layer in model.decoder.layers:
        yield from _layer_views(layer)
    if model.post_process:
        yield from _prefixed("backbone.norm_f.", model.decoder.final_norm.deployment_views())
        yield from model.output_layer.deployment_views()
        yield from model.carried.views()


def _layer_views(layer: nn.Module) -> Iterator[View]:
    prefix = layer_name(layer.layer_number)
    before_mixer = [norm for name in _LAYER_NORMS if isinstance(norm := getattr(layer, name, None), RmsNorm)]
    yield from _prefixed(f"{prefix}.norm.", before_mixer[0].deployment_views())
    for path, module in layer.named_modules():
        if isinstance(module, Deployed) and module is not before_mixer[0]:
            inner = "norm." if path == "mixer.norm" else ""
            yield from _prefixed(f"{prefix}.mixer.{inner}", module.deployment_views())


def _prefixed(prefix: str, views: Iterator[View]) -> Iterator[View]:
    return (replace(view, name=prefix + view.name) for view in views)
