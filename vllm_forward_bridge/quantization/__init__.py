# SPDX-License-Identifier: Apache-2.0
"""Exact ModelOpt formats: NVFP4, FP8, KV scales."""
