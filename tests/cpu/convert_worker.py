# SPDX-License-Identifier: Apache-2.0
"""Convert slowly, so that a test can kill it: python convert_worker.py DIRECTION SOURCE TARGET SECONDS_A_BLOCK."""

import sys
import time

from vllm_forward_bridge.checkpoint import convert_to_hf, convert_to_megatron

direction, source, target, pause = sys.argv[1:]
convert = {"to-megatron": convert_to_megatron, "to-hf": convert_to_hf}[direction]
convert(source, target, workers=1, on_progress=lambda done, total: time.sleep(float(pause)))
