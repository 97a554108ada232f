# SPDX-License-Identifier: Apache-2.0
"""The kernels of the bridged forward: the contract's ops, the same functions that the rollout calls."""

from vllm_forward_bridge.ops.attention import attention as attention
from vllm_forward_bridge.ops.bf16_linear import bf16_linear as bf16_linear
from vllm_forward_bridge.ops.causal_conv1d import causal_conv1d as causal_conv1d
from vllm_forward_bridge.ops.fp8_linear import fp8_linear as fp8_linear
from vllm_forward_bridge.ops.gated_rms_norm import gated_rms_norm as gated_rms_norm
from vllm_forward_bridge.ops.logprob import logprob as logprob
from vllm_forward_bridge.ops.moe_combine import moe_combine as moe_combine
from vllm_forward_bridge.ops.moe_experts import moe_experts as moe_experts
from vllm_forward_bridge.ops.nvfp4_linear import nvfp4_linear as nvfp4_linear
from vllm_forward_bridge.ops.operands import nvfp4_operands as nvfp4_operands
from vllm_forward_bridge.ops.relu_squared import relu_squared as relu_squared
from vllm_forward_bridge.ops.rms_norm import rms_norm as rms_norm
from vllm_forward_bridge.ops.router import router as router
from vllm_forward_bridge.ops.ssd_decay import ssd_decay as ssd_decay
from vllm_forward_bridge.ops.ssd_scan import ssd_scan as ssd_scan
