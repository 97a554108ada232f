# SPDX-License-Identifier: Apache-2.0
"""The agent: how it is spoken to, what it may call, and the loop around it."""
