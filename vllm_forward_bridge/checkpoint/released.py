# SPDX-License-Identifier: Apache-2.0
"""Configurations of released nemotron_h repositories at their true sizes, for checks of sizes and for measurements."""

from dataclasses import replace

from vllm_forward_bridge.checkpoint.tensor_table import tensor_table
from vllm_forward_bridge.checkpoint.tiny_config import FAMILIES, Family, model_json, quantization_json
from vllm_forward_bridge.model_config import parse_model_config

_NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER_PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_NANO_SIZES = {
    "hidden_size": 2688, "vocab_size": 131072, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "num_attention_heads": 32, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "max_position_embeddings": 262144,
}  # fmt: skip
_SUPER_SIZES = {
    **_NANO_SIZES, "hidden_size": 4096, "mamba_num_heads": 128, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688, "intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
    "routed_scaling_factor": 5.0,
}  # fmt: skip
# In Nano the Mamba layers right before an attention layer stay BF16.
_NANO_BF16_LAYERS = (4, 11, 18, 25, 32, 41)
_NANO_EXCLUDE = (
    *(f"backbone.layers.{layer}.mixer.{leaf}_proj" for layer in _NANO_BF16_LAYERS for leaf in ("in", "out")),
    "backbone.layers.*.mixer.[qkvo]_proj", "lm_head", "*.conv1d",
)  # fmt: skip
_KINDS: dict[str, tuple[Family, str, dict]] = {
    "lightning_nvfp4": (FAMILIES["lightning"], _NANO_PATTERN, {**_NANO_SIZES, "max_position_embeddings": 1048576}),
    "lightning_bf16": (FAMILIES["lightning_bf16"], _NANO_PATTERN, _NANO_SIZES),
    "nano_bf16": (replace(FAMILIES["lightning_bf16"], mtp=False, legacy_keys=True), _NANO_PATTERN, _NANO_SIZES),
    "nano_nvfp4": (replace(FAMILIES["nano_nvfp4"], exclude=_NANO_EXCLUDE), _NANO_PATTERN, _NANO_SIZES),
    # Its exact list of exceptions is not public; this is the rule without them.
    "super_nvfp4": (replace(FAMILIES["super_nvfp4"], latent_size=1024), _SUPER_PATTERN, _SUPER_SIZES),
}
RELEASED = tuple(_KINDS)


def released_config(name: str, layers: int | None = None) -> tuple[dict, dict | None]:
    """Return (config.json, hf_quant_config.json or None) of a released repository.

    Args:
        name: one of `RELEASED`.
        layers: keep only the first ones, for a measurement on a small disk.

    Raises:
        ValueError: unknown name.
    """
    if name not in _KINDS:
        raise ValueError(f"released repository {name!r} is unknown; known are {', '.join(RELEASED)}: choose one")
    family, pattern, sizes = _KINDS[name]
    config = {**model_json(family, 128, pattern[:layers]), **sizes}
    modules = [
        e.name.removesuffix(".weight")
        for e in tensor_table(parse_model_config(config, None))
        if e.name.endswith(".weight")
    ]
    return config, quantization_json(family, modules)
