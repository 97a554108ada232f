# SPDX-License-Identifier: Apache-2.0
"""What stands between the agent and the GRPO loop: groups of episodes, their journal, their numbers."""
