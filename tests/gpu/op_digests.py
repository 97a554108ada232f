# SPDX-License-Identifier: Apache-2.0
"""Print a digest of every op's output on seeded inputs: two fresh processes must print the same.

Example: python tests/gpu/op_digests.py
"""

import hashlib
import json

import torch
from row_cases import CASES
from test_sequences import attend, attention_inputs, cumulative, normal, scan_inputs

from vllm_forward_bridge import ops
from vllm_forward_bridge.parity.bits import integer_view


def digest(*tensors: torch.Tensor) -> str:
    """Hash the bytes of tensors."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(integer_view(tensor).cpu().numpy().tobytes())
    return hasher.hexdigest()[:16]


def digests() -> dict[str, str]:
    """Return op -> digest."""
    found = {case.name: digest(*case.call(case.weights(), case.rows(257))) for case in CASES}
    lengths = [5, 130, 300]
    x, dt, B, C = scan_inputs(435)
    A, D, bias = -normal(64, dtype=torch.float32).abs() - 0.1, normal(64, seed=6), normal(64, seed=7)
    found["ssd_scan"] = digest(*ops.ssd_scan(x, dt, A, B, C, D, bias, cumulative(lengths), 128, None))
    weights = normal(6144, 4, scale=0.5), normal(6144, seed=1)
    found["causal_conv1d"] = digest(ops.causal_conv1d(normal(435, 6144, seed=2), *weights, cumulative(lengths), None))
    found["attention"] = digest(attend(*attention_inputs(435), lengths, lengths))
    return found


if __name__ == "__main__":
    print(json.dumps(digests()))
