# SPDX-License-Identifier: Apache-2.0
"""Hugging Face and Megatron checkpoints of the nemotron_h family."""
