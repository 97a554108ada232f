# SPDX-License-Identifier: Apache-2.0
"""The contract's ops: one forward, called by the rollout engine and by the trainer."""

from vllm_forward_bridge.ops.bf16_linear import bf16_linear as bf16_linear
from vllm_forward_bridge.ops.fp8_linear import fp8_linear as fp8_linear
from vllm_forward_bridge.ops.fused_add_rms_norm import fused_add_rms_norm as fused_add_rms_norm
from vllm_forward_bridge.ops.gated_rms_norm import gated_rms_norm as gated_rms_norm
from vllm_forward_bridge.ops.nvfp4_linear import nvfp4_linear as nvfp4_linear
from vllm_forward_bridge.ops.rms_norm import rms_norm as rms_norm
