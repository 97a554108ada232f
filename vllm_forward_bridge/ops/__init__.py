# SPDX-License-Identifier: Apache-2.0
"""The contract's ops: one forward, called by the rollout engine and by the trainer."""
