# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on Megatron with a rollout of equal bits: GRPO, its gate, its record."""
