# SPDX-License-Identifier: Apache-2.0
"""The numeric contract: one forward per op, shared by the rollout engine and the trainer."""

__version__ = "0.1.0"
