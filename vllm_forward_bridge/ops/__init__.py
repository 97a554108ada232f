# SPDX-License-Identifier: Apache-2.0
"""The contract's ops: one forward, called by the rollout engine and by the trainer."""

from vllm_forward_bridge.ops.attention import attention as attention
from vllm_forward_bridge.ops.attention import quantize_kv as quantize_kv
from vllm_forward_bridge.ops.bf16_linear import bf16_linear as bf16_linear
from vllm_forward_bridge.ops.cached_attention import cached_attention as cached_attention
from vllm_forward_bridge.ops.causal_conv1d import causal_conv1d as causal_conv1d
from vllm_forward_bridge.ops.fp8_linear import fp8_linear as fp8_linear
from vllm_forward_bridge.ops.fused_add_rms_norm import fused_add_rms_norm as fused_add_rms_norm
from vllm_forward_bridge.ops.gated_rms_norm import gated_rms_norm as gated_rms_norm
from vllm_forward_bridge.ops.logprob import logprob as logprob
from vllm_forward_bridge.ops.logprob import sample as sample
from vllm_forward_bridge.ops.moe_combine import moe_combine as moe_combine
from vllm_forward_bridge.ops.moe_experts import moe_experts as moe_experts
from vllm_forward_bridge.ops.nvfp4_linear import nvfp4_linear as nvfp4_linear
from vllm_forward_bridge.ops.relu_squared import relu_squared as relu_squared
from vllm_forward_bridge.ops.rms_norm import rms_norm as rms_norm
from vllm_forward_bridge.ops.router import router as router
from vllm_forward_bridge.ops.ssd_decay import ssd_decay as ssd_decay
from vllm_forward_bridge.ops.ssd_scan import ssd_scan as ssd_scan
