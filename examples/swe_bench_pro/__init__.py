# SPDX-License-Identifier: Apache-2.0
"""GRPO over coding-agent episodes in sandboxes, on tasks in the SWE-bench Pro contract."""
