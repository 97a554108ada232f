# SPDX-License-Identifier: Apache-2.0
"""Package lists only: `megatron` is a namespace shared with megatron-core, so it must never be listed itself."""

from setuptools import find_namespace_packages, find_packages, setup

setup(
    packages=find_packages(include=["vllm_forward_bridge", "vllm_forward_bridge.*"])
    + find_namespace_packages(include=["megatron.vllm_forward", "megatron.vllm_forward.*"])
)
