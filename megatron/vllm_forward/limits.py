# SPDX-License-Identifier: Apache-2.0
"""What a build may ask for: every other wish is refused before the first step, all of them in one error."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vllm_forward.bridge import Bridge, layer_name
from vllm_forward_bridge.model_config import ModelConfig

# field of TransformerConfig -> (accepted values, why). A field's Megatron flag has the same name with dashes.
_FIXED: dict[str, tuple[tuple, str]] = {
    "params_dtype": ((torch.bfloat16,), "deployment tensors and masters are bf16: pass --bf16"),
    "hidden_dropout": ((0, 0.0), "a dropped element has no counterpart in the rollout"),
    "attention_dropout": ((0, 0.0), "a dropped element has no counterpart in the rollout"),
    "fp32_residual_connection": ((False,), "one bf16 tensor crosses a layer"),
    "add_bias_linear": ((False,), "the linears have no bias: pass --disable-bias-linear"),
    "add_qkv_bias": ((False,), "the linears have no bias"),
    "fp8": ((None,), "formats come from the deployment's quantisation map, not from Megatron's arguments"),
    "fp4": ((None,), "formats come from the deployment's quantisation map, not from Megatron's arguments"),
    "expert_tensor_parallel_size": ((None, 1), "an expert is whole on its rank: pass --expert-tensor-parallel-size 1"),
    "virtual_pipeline_model_parallel_size": ((None, 1), "interleaved pipelines are not part of this version"),
    "moe_permute_fusion": ((False,), "rows keep their (token, slot) place instead of being permuted"),
    "moe_shared_expert_overlap": ((False,), "the shared expert is added after the combine"),
    "moe_shared_expert_gate": ((False,), "the shared expert has no gate"),
    "moe_aux_loss_coeff": ((0, 0.0), "the router has no auxiliary loss"),
    "moe_z_loss_coeff": ((None, 0, 0.0), "the router has no auxiliary loss"),
    "moe_input_jitter_eps": ((None,), "the router adds no noise"),
    "moe_expert_capacity_factor": ((None,), "no token is dropped"),
    "moe_latent_size": ((None,), "latent projections are not part of this version"),
    "moe_router_force_load_balancing": ((False,), "the router chooses by its scores"),
    "moe_enable_routing_replay": ((False,), "a replayed choice would hide a fault of the router"),
    "multi_latent_attention": ((False,), "attention has plain keys and values"),
    "qk_layernorm": ((False,), "queries and keys are not normalised"),
    "attention_output_gate": ((False,), "attention has no output gate"),
    "softmax_scale": ((None,), "the scale is head_dim ** -0.5"),
    "window_size": ((None,), "attention sees the whole prefix"),
    "cuda_graph_impl": (("none",), "captured graphs are not part of this version"),
    "fine_grained_activation_offloading": ((False,), "not part of this version"),
    "overlap_moe_expert_parallel_comm": ((False,), "rows travel in one exchange"),
    "delay_wgrad_compute": ((False,), "backward is one pass"),
    "gradient_accumulation_fusion": ((False,), "linears have an own backward: pass --no-gradient-accumulation-fusion"),
    "use_mup": ((False,), "logits and embeddings are not scaled"),
    "batch_invariant_mode": ((False,), "it swaps in Megatron's own kernels"),
    "mtp_num_layers": ((None, 0), "multi-token prediction is carried, not trained"),
    "init_model_with_meta_device": ((False,), "bytes are derived from the masters at build time"),
}  # fmt: skip
_RECOMPUTE_MODULES = {"core_attn", "moe"}


def check_build(bridge: Bridge | None, config: TransformerConfig, vocab_size: int, keywords: Mapping[str, Any]) -> None:
    """Raise unless a HybridModel with these arguments is inside the contract.

    Raises:
        ValueError: lists every violation: what was given, what is accepted and why.
    """
    if bridge is None:
        raise ValueError(
            "the layer spec is not that of megatron.vllm_forward; a bridged model needs it, because only its modules "
            "run the rollout's kernels: start with `python -m megatron.vllm_forward SCRIPT --vllm-forward FILE.toml`"
        )
    problems = [*_fixed_problems(config), *_geometry_problems(bridge.model, config, vocab_size, keywords)]
    problems += [*_format_problems(bridge), *_layout_problems(bridge.model, config)]
    if problems:
        raise ValueError("this run is outside the contract of the bridged forward:\n  - " + "\n  - ".join(problems))


def _fixed_problems(config: TransformerConfig) -> Iterator[str]:
    for name, (accepted, why) in _FIXED.items():
        given = getattr(config, name)
        if given not in accepted:
            yield f"{name} is {given!r}; accepted is {' or '.join(map(repr, accepted))}: {why}"
    if config.recompute_granularity == "selective":
        for module in sorted(set(config.recompute_modules) - _RECOMPUTE_MODULES):
            accepted = ", ".join(sorted(_RECOMPUTE_MODULES))
            yield f"recompute_modules has {module!r}; accepted are {accepted}: others need Transformer Engine"


def _geometry_problems(
    model: ModelConfig, config: TransformerConfig, vocab_size: int, keywords: Mapping[str, Any]
) -> Iterator[str]:
    wanted = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "num_moe_experts": model.n_routed_experts,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "layernorm_epsilon": model.norm_eps,
    }
    given = {name: getattr(config, name) for name in wanted}
    wanted["vocab_size"], given["vocab_size"] = model.vocab_size, vocab_size
    pattern = keywords.get("hybrid_layer_pattern") or keywords.get("hybrid_override_pattern") or ""
    wanted["hybrid_layer_pattern"], given["hybrid_layer_pattern"] = model.layer_types, pattern.replace("|", "")
    for name, value in wanted.items():
        if given[name] != value:
            yield f"{name} is {given[name]!r}; the repository has {value!r}: leave the flag out"
    if keywords.get("share_embeddings_and_output_weights", False):
        yield "output weights are tied; the output layer has its own bytes: pass --untie-embeddings-and-output-weights"
    position = keywords.get("position_embedding_type", "none")
    if position != "none":
        yield f"position_embedding_type is {position!r}; accepted is 'none': attention has no position embedding"


def _format_problems(bridge: Bridge) -> Iterator[str]:
    model = bridge.model
    linear = ("BF16", "FP8", "W4A16_NVFP4")
    if model.quantization.kv_cache != "FP8":
        yield f"the KV cache format is {model.quantization.kv_cache!r}; accepted is 'FP8': attention reads e4m3 codes"
    if model.moe_latent_size is not None:
        yield f"moe_latent_size is {model.moe_latent_size}; latent projections are not part of this version"
    accepted = {
        "M": {"in_proj": linear, "out_proj": linear},
        "*": {"q_proj": ("BF16",), "k_proj": ("BF16",), "v_proj": ("BF16",), "o_proj": linear},
        "E": {"shared_experts.up_proj": linear, "shared_experts.down_proj": linear},
    }
    experts = {
        f"experts.{e}.{p}": ("W4A16_NVFP4",) for e in range(model.n_routed_experts) for p in ("up_proj", "down_proj")
    }
    accepted["E"] |= experts
    names = [
        (f"{layer_name(number)}.mixer.{part}", formats)
        for number, letter in enumerate(model.layer_types, start=1)
        for part, formats in accepted[letter].items()
    ]
    for name, formats in [*names, ("lm_head", linear)]:
        given = model.quantization.format_of(name)
        if given not in formats:
            yield f"{name} has format {given}; accepted is {' or '.join(formats)}: there is no kernel for it"


def _layout_problems(model: ModelConfig, config: TransformerConfig) -> Iterator[str]:
    experts, context = config.expert_model_parallel_size, config.context_parallel_size
    tensor = config.tensor_model_parallel_size
    if config.sequence_parallel != (tensor > 1):
        yield (
            f"sequence_parallel is {config.sequence_parallel} with tensor_model_parallel_size {tensor}; a rank "
            "multiplies its own token rows: pass --sequence-parallel with tensor parallelism, and only then"
        )
    if tensor > 1 and context > 1:
        yield (
            f"tensor_model_parallel_size is {tensor} and context_parallel_size {context}; each is proven alone, both "
            "together are not: set one of them to 1"
        )
    if model.n_routed_experts % experts:
        yield f"{model.n_routed_experts} experts do not divide by expert_model_parallel_size {experts}"
    for name, count, size in (
        ("mamba heads", model.mamba_num_heads, tensor * context),
        ("mamba groups", model.n_groups, tensor * context),
        ("KV heads", model.num_key_value_heads, tensor),
        ("rows of the vocabulary", model.vocab_size, tensor),
        ("shared-expert channels", model.moe_shared_expert_intermediate_size, tensor),
    ):
        if count % size:
            yield f"{count} {name} do not divide by {size} ranks of tensor and context parallelism"
