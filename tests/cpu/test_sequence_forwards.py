# SPDX-License-Identifier: Apache-2.0
"""The CPU forwards of the sequence ops call nothing whose bits may follow shape, stride or threads.

A fault of this kind changes an fp32 bit here and there, which bf16 outputs hide from every test but one of a million.
"""

import pytest
import torch
from sequences import HEAD_DIM, K_SCALE, V_SCALE, attention_inputs, conv_inputs, cumulative, normal, scan_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_forward_bridge.ops import attention, cached_attention, causal_conv1d, quantize_kv, ssd_scan

PRODUCTS = {"mm", "bmm", "matmul", "addmm", "baddbmm", "dot", "mv", "addmv", "einsum"}
SUMS = {"sum", "mean", "cumsum", "prod", "norm", "linalg_vector_norm", "var", "std"}
FUNCTIONS = {"exp", "exp2", "expm1", "log", "log2", "log1p", "sigmoid", "silu", "softplus", "tanh", "rsqrt", "pow"}
FUSED = {"_softmax", "_log_softmax", "addcmul", "addcdiv", "lerp", "logsumexp"}


class Calls(TorchDispatchMode):
    """Collect the calls that are not order-free: floating-point products, sums and functions outside float64."""

    def __init__(self):
        super().__init__()
        self.names, self.wrong = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.removesuffix("_")
        floating = {arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()}
        self.names.add(name)
        if name in FUSED or (name in PRODUCTS | SUMS | FUNCTIONS and floating - {torch.float64}):
            self.wrong.add(f"{name} of {sorted(map(str, floating))}")
        return function(*args, **(kwargs or {}))


def paged_inputs():
    _, k, v = attention_inputs(64)
    pools = [quantize_kv(x, s).view(4, 16, 2, HEAD_DIM) for x, s in ((k, K_SCALE), (v, V_SCALE))]
    table, lengths = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([20, 30], dtype=torch.int32)
    return attention_inputs(8)[0], *pools, table, cumulative([1, 7]), lengths, K_SCALE, V_SCALE, HEAD_DIM**-0.5, 8


CASES = (
    (attention, (*attention_inputs(50), K_SCALE, V_SCALE, *[cumulative([20, 30])] * 2, HEAD_DIM**-0.5, 8)),
    (cached_attention, paged_inputs()),
    (ssd_scan, (*scan_inputs(50).values(), cumulative([17, 33]), 16, torch.ones(2, 4, 8, 16))),
    (causal_conv1d, (*conv_inputs(50), cumulative([17, 33]), normal(2, 3, 24, seed=4))),
)


@pytest.mark.parametrize(("op", "arguments"), CASES, ids=[op._name for op, _ in CASES])
def test_sequence_forwards_are_order_free(op, arguments):
    with Calls() as calls:
        # The op is one call to a dispatch mode; its CPU forward is the function that was decorated.
        op._init_fn(*arguments)
    assert calls.wrong == set()
    assert "exp2" in calls.names
    assert op is causal_conv1d or calls.names & PRODUCTS


def test_sequence_forwards_order_free_check_sees_fp32():
    x = torch.ones(2, 2)
    with Calls() as calls:
        torch.softmax(x @ x, -1) + torch.exp(x).sum() + torch.nn.functional.silu(x) + (x.double() @ x.double()).sum()
    assert calls.wrong == {f"{name} of ['torch.float32']" for name in ("mm", "exp", "sum", "silu", "_softmax")}
