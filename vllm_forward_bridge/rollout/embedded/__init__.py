# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: vLLM's scheduling rules over the contract's ops, on any machine."""
