# SPDX-License-Identifier: Apache-2.0
"""Sizes the GPU proofs run at: those of Nemotron-3.5-Lightning-30B-A3B, and half of each N."""

HIDDEN = 2688
VOCAB = 131072
EPS = 1e-5
INNER = 4096
GROUP_SIZE = 512
IN_PROJ = 10304
MAMBA_HEADS, MAMBA_HEAD_DIM, GROUPS, STATE, CHUNK, CONV_CHANNELS, CONV_WIDTH = 64, 64, 8, 128, 128, 6144, 4
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 2, 128
EXPERTS, TOP_K, EXPERT_WIDTH, SHARED_WIDTH, FACTOR = 128, 6, 1856, 3712, 2.5

ROWS = 8192
"""Rows of the large call that every smaller call is compared with."""
BATCHES = (1, 2, 8, 16, 17, 33, 64, 65, 255, 256, 257, 1024, 4096)
