# SPDX-License-Identifier: Apache-2.0
"""Walk a built model and name every module that is not bridged: a slot left at its default would run other kernels."""

from collections.abc import Iterator, Sequence

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.vllm_forward.attention import Attention, CoreAttention
from megatron.vllm_forward.carried import CarriedTensors
from megatron.vllm_forward.linear import Linear, QkvLinear
from megatron.vllm_forward.mamba import MambaMixer
from megatron.vllm_forward.moe import Experts, ExpertWeight, MoeLayer, MoeTransformerLayer, Router, SharedExpert
from megatron.vllm_forward.norm import GatedRmsNorm, RmsNorm
from megatron.vllm_forward.output import OutputLayer
from megatron.vllm_forward.stack import BridgedStack, residual_add

# Exact types: a subclass may compute something else.
_BRIDGED = {
    Attention, BridgedStack, CarriedTensors, CoreAttention, Experts, ExpertWeight, GatedRmsNorm, Linear, MambaMixer,
    MoeLayer, MoeTransformerLayer, OutputLayer, QkvLinear, RmsNorm, Router, SharedExpert,
}  # fmt: skip
# Megatron's own: an exact gather, and containers without arithmetic but the residual add that they are given.
_EXACT = {
    LanguageModelEmbedding, VocabParallelEmbedding, MambaLayer, TransformerLayer, IdentityOp, IdentityFuncOp,
    nn.ModuleList,
}  # fmt: skip

# Letter -> type of the layer, name of its residual add, types of its parts.
_LAYER_PARTS = {
    "M": (MambaLayer, "mamba_bda", {"norm": RmsNorm, "mixer": MambaMixer}),
    "*": (
        TransformerLayer,
        "self_attn_bda",
        {"input_layernorm": RmsNorm, "self_attention": Attention, "mlp": IdentityOp},
    ),
    "E": (
        MoeTransformerLayer,
        "mlp_bda",
        {"self_attention": IdentityOp, "pre_mlp_layernorm": RmsNorm, "mlp": MoeLayer},
    ),
}


def check_coverage(model_chunks: Sequence[nn.Module]) -> None:
    """Raise unless every module of the chunks is bridged or exact, and every layer is what its letter says.

    Raises:
        RuntimeError: lists each module that is not, by path and type.
    """
    problems = [problem for chunk in model_chunks for problem in _problems(_model(chunk))]
    if problems:
        raise RuntimeError(
            "these modules would not run the rollout's kernels; build with the spec of megatron.vllm_forward:\n  - "
            + "\n  - ".join(problems)
        )


def _model(chunk: nn.Module) -> nn.Module:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _problems(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        kind = type(module)
        if kind is nn.Dropout and module.p == 0:
            continue
        if path and kind not in _BRIDGED | _EXACT:
            yield f"{path}: {kind.__module__}.{kind.__qualname__}"
    decoder = getattr(model, "decoder", None)
    if type(decoder) is not BridgedStack:
        yield f"decoder: {type(decoder).__qualname__} in place of BridgedStack"
        return
    for layer, letter in zip(decoder.layers, decoder.layer_type_list, strict=True):
        yield from _layer_problems(layer, letter)


def _layer_problems(layer: nn.Module, letter: str) -> Iterator[str]:
    where = f"layer {layer.layer_number} ({letter})"
    wanted, add, parts = _LAYER_PARTS[letter]
    if type(layer) is not wanted:
        yield f"{where}: {type(layer).__qualname__} in place of {wanted.__qualname__}"
        return
    for name, kind in parts.items():
        if type(getattr(layer, name)) is not kind:
            yield f"{where}.{name}: {type(getattr(layer, name)).__qualname__} in place of {kind.__qualname__}"
    if getattr(layer, add) is not residual_add:
        yield f"{where}.{add}: {getattr(layer, add)!r} in place of residual_add"
