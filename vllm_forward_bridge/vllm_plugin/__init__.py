# SPDX-License-Identifier: Apache-2.0
"""vLLM classes of the contract."""
