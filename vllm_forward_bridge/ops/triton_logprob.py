# SPDX-License-Identifier: Apache-2.0
"""Log-normaliser of a row of logits in Triton: blocks of 1,024 columns summed in fixed point, merged in order."""

# T = rows, V = vocabulary, b = blocks of columns

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_forward_bridge.ops.launch import NO_FUSION, kernel_form, require_dtype
from vllm_forward_bridge.ops.survivors import Cut, find_cut, masses, scaled_logits

BLOCK_COLUMNS = 1024
_SUM_UNITS = tl.constexpr(2.0**43)


@triton.jit
def _scaled_survivors(logits_ptr, temperature_ptr, key_ptr, id_ptr, row, columns, V: tl.constexpr):
    """Load logits / temperature; -inf behind the cut and outside the vocabulary."""
    live = columns < V
    logits = tl.load(logits_ptr + row * V + columns, mask=live, other=0.0)
    temperature = tl.load(temperature_ptr + row)
    values = logits.to(tl.float32)
    scaled = tl.div_rn(values, tl.where(temperature == 0.0, 1.0, temperature))
    bits = tl.where(values == 0.0, 0, logits.to(tl.int16, bitcast=True).to(tl.int32))
    keys = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    cut_key = tl.load(key_ptr + row).to(tl.int32)
    alive = live & ((keys > cut_key) | ((keys == cut_key) & (columns <= tl.load(id_ptr + row))))
    return tl.where(alive, scaled, float("-inf"))


@triton.jit
def _block_sums_kernel(
    logits_ptr, temperature_ptr, key_ptr, id_ptr, largest_ptr, sum_ptr,
    V: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    z = _scaled_survivors(logits_ptr, temperature_ptr, key_ptr, id_ptr, row, columns, V)
    largest = tl.max(z, axis=0)
    powers = tl.exp(z - tl.where(largest == float("-inf"), 0.0, largest))
    # bits: whole numbers, so no layout and no order of adding can change the sum.
    total = tl.sum((powers.to(tl.float64) * UNITS).to(tl.int64), axis=0)
    tl.store(largest_ptr + row * NUM_BLOCKS + block, largest)
    tl.store(sum_ptr + row * NUM_BLOCKS + block, (total.to(tl.float64) / UNITS).to(tl.float32))


@triton.jit
def _merge_kernel(
    logits_ptr, temperature_ptr, key_ptr, id_ptr, largest_ptr, sum_ptr, token_ptr, logprob_ptr, top_ptr, log_sum_ptr,
    V: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(largest_ptr + row * NUM_BLOCKS)
    total = tl.load(sum_ptr + row * NUM_BLOCKS)
    for block in range(1, NUM_BLOCKS):
        block_largest = tl.load(largest_ptr + row * NUM_BLOCKS + block)
        merged = tl.maximum(largest, block_largest)
        base = tl.where(merged == float("-inf"), 0.0, merged)
        # bits: each product is rounded before the sum.
        total = tl.exp(largest - base) * total + tl.exp(block_largest - base) * tl.load(
            sum_ptr + row * NUM_BLOCKS + block
        )
        largest = merged
    log_sum = tl.log(total)
    token = tl.load(token_ptr + row)
    chosen = _scaled_survivors(logits_ptr, temperature_ptr, key_ptr, id_ptr, row, token, V)
    tl.store(logprob_ptr + row, (chosen - largest) - log_sum)
    tl.store(top_ptr + row, largest)
    tl.store(log_sum_ptr + row, log_sum)


def normalised(
    logits_TV: Tensor, token_ids_T: Tensor, temperature_T: Tensor, cut: Cut
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 (logprob of the token, largest scaled logit, ln of the sum of e^(z - largest)) of each row."""
    require_dtype(logits_TV, torch.bfloat16, "logits", "logprob")
    logits_TV = kernel_form(logits_TV)
    T, V = logits_TV.shape
    num_blocks = triton.cdiv(V, BLOCK_COLUMNS)
    new = {"dtype": torch.float32, "device": logits_TV.device}
    largest_Tb, sum_Tb = torch.empty(T, num_blocks, **new), torch.empty(T, num_blocks, **new)
    logprob_T, largest_T, log_sum_T = torch.empty(T, **new), torch.empty(T, **new), torch.empty(T, **new)
    if T:
        row = tuple(kernel_form(values) for values in (temperature_T, cut.key_T, cut.id_T))
        _block_sums_kernel[(T, num_blocks)](
            logits_TV, *row, largest_Tb, sum_Tb,
            V=V, NUM_BLOCKS=num_blocks, BLOCK=BLOCK_COLUMNS, UNITS=_SUM_UNITS, num_warps=4, **NO_FUSION,
        )  # fmt: skip
        _merge_kernel[(T,)](
            logits_TV, *row, largest_Tb, sum_Tb, kernel_form(token_ids_T), logprob_T, largest_T, log_sum_T,
            V=V, NUM_BLOCKS=num_blocks, num_warps=1, **NO_FUSION,
        )  # fmt: skip
    return logprob_T, largest_T, log_sum_T


def logprob(
    logits_TV: Tensor, token_ids_T: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the logprob, ln sum e^z, and the cut; see `ops.logprob` for the formula."""
    cut = find_cut(logits_TV, scaled_logits(logits_TV, temperature_T), top_p_T, top_k_T)
    logprob_T, largest_T, log_sum_T = normalised(logits_TV, token_ids_T, temperature_T, cut)
    return logprob_T, largest_T + log_sum_T, cut.key_T, cut.id_T


def sample(logits_TV: Tensor, temperature_T: Tensor, top_p_T: Tensor, top_k_T: Tensor, uniform_T: Tensor) -> Tensor:
    """Draw a token a row; see `ops.sample`. Whole numbers decide, so torch's own kernels serve."""
    z_TV = scaled_logits(logits_TV, temperature_T)
    cut = find_cut(logits_TV, z_TV, top_p_T, torch.where(temperature_T == 0, 1, top_k_T))
    cumulative_TV = cut.drop(masses(z_TV), logits_TV, 0.0).cumsum(-1)
    total_T = cumulative_TV[:, -1]
    threshold_T = torch.minimum((uniform_T * total_T).floor(), total_T - 1)
    return (cumulative_TV <= threshold_T.unsqueeze(-1)).sum(-1)
