# SPDX-License-Identifier: Apache-2.0
"""The layer spec: Megatron's stack, Mamba layer and transformer layer, filled with bridged parts."""

from functools import partial

from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.vllm_forward.attention import Attention
from megatron.vllm_forward.bridge import Bridge
from megatron.vllm_forward.mamba import MambaMixer
from megatron.vllm_forward.moe import MoeTransformerLayer
from megatron.vllm_forward.norm import RmsNorm
from megatron.vllm_forward.stack import BridgedStack, residual_add


def stack_spec(bridge: Bridge) -> ModuleSpec:
    """Return the spec that Megatron's builders take as `hybrid_stack_spec` or through `--spec`.

    Norms stay separate modules; the key maps give them the names of the fused ones, so that checkpoints can be
    exchanged.
    """
    norm = partial(RmsNorm, bridge=bridge)
    parts = {"bridge": bridge}
    mamba = MambaLayerSubmodules(
        norm=norm,
        mixer=ModuleSpec(module=MambaMixer, params=parts),
        mamba_bda=residual_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(module=Attention, params={**parts, "attn_mask_type": AttnMaskType.causal}),
        self_attn_bda=residual_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    )
    moe = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp_bda=residual_add)
    return ModuleSpec(
        module=BridgedStack,
        params=parts,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            moe_layer=ModuleSpec(module=MoeTransformerLayer, params=parts, submodules=moe),
        ),
    )


SPEC: ModuleSpec | None = None


def publish(bridge: Bridge) -> None:
    """Put a model's spec where Megatron's `--spec megatron.vllm_forward.spec SPEC` reads it: a module attribute."""
    global SPEC
    SPEC = stack_spec(bridge)
