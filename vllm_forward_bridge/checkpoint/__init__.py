# SPDX-License-Identifier: Apache-2.0
"""Hugging Face repositories of nemotron_h, tiny ones, and the way to and from Megatron's distributed checkpoints."""

from vllm_forward_bridge.checkpoint.repository import Repository, open_repository, write_repository
from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec
from vllm_forward_bridge.checkpoint.tensor_table import ExpectedTensor, tensor_table
from vllm_forward_bridge.checkpoint.tiny import make_tiny_checkpoint
from vllm_forward_bridge.checkpoint.to_hf import convert_to_hf
from vllm_forward_bridge.checkpoint.to_megatron import convert_to_megatron
from vllm_forward_bridge.checkpoint.transfer import Conversion

__all__ = [
    "Conversion",
    "ExpectedTensor",
    "Repository",
    "TensorSpec",
    "convert_to_hf",
    "convert_to_megatron",
    "make_tiny_checkpoint",
    "open_repository",
    "tensor_table",
    "write_repository",
]
