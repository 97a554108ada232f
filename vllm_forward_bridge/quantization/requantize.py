# SPDX-License-Identifier: Apache-2.0
"""Bring deployment bytes up to date with their bf16 masters without touching what training did not touch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_forward_bridge.parity.bits import integer_view
from vllm_forward_bridge.quantization.fp8 import Fp8Bytes, exceeds_e4m3, fp8_dequantize, fp8_quantize
from vllm_forward_bridge.quantization.nvfp4 import (
    BLOCK,
    CODE_MAX,
    SCALE_OVERFLOW,
    Nvfp4Bytes,
    nvfp4_dequantize,
    nvfp4_quantize,
    scale_ceiling,
)

GROUP_ELEMENTS = 1 << 27
"""Elements of a stack that are requantised at a time; bounds the memory, never changes a bit."""


@dataclass(frozen=True)
class RequantizeReport:
    """What a requantisation did; for FP8 a block is one element."""

    changed_blocks: int
    """Blocks whose master no longer equals the value of the stored bytes."""
    overflowed_blocks: int
    """Blocks too large for the fixed scale. NVFP4: their matrix got a new global scale. FP8: they are clipped."""


def requantize_nvfp4(
    master: Tensor, old: Nvfp4Bytes, *, four_over_six: bool, amax: Tensor | None = None
) -> tuple[Nvfp4Bytes, RequantizeReport]:
    """Quantise what changed in a master and keep the bytes of the rest.

    A 16-block whose master equals bf16(dequantised old bytes) keeps its bytes. The global scale stays, because the
    checkpoint's is calibrated, unless a block scale would exceed what rounds to 448: then that matrix gets
    amax / (6 F) and all its blocks are quantised again. Calling it twice with the same master changes nothing.

    Args:
        master: bf16 [..., N, K].
        old: bytes of the same matrix or stack.
        four_over_six: the rule of the checkpoint.
        amax: fp32 [...], largest magnitude of each whole matrix when `master` is a shard; None takes it from `master`.

    Returns:
        New bytes (input_scale unchanged) and the report.

    Raises:
        ValueError: shapes do not fit, or the master has a NaN or an infinity.
    """
    shape = (*old.codes.shape[:-1], 2 * old.codes.shape[-1])
    if master.dtype != torch.bfloat16 or master.shape != shape:
        raise ValueError(
            f"master is {master.dtype} {tuple(master.shape)} for codes {tuple(old.codes.shape)}; bfloat16 {shape} is "
            "needed, since each byte holds two elements: pass the master of the same module"
        )
    group = GROUP_ELEMENTS // max(1, master[0].numel()) or 1
    if master.dim() > 2 and group < len(master):
        return _in_groups(master, old, four_over_six, amax, group)
    own_blocks = master.detach().float().abs().unflatten(-1, (-1, BLOCK)).amax(dim=-1)
    amax = own_blocks.amax(dim=(-2, -1)) if amax is None else amax.float()
    limit = old.global_scale * (CODE_MAX * SCALE_OVERFLOW)
    overflows = amax > limit
    fresh_scale = amax / (CODE_MAX * scale_ceiling(four_over_six))
    global_scale = torch.where(overflows, fresh_scale, old.global_scale)
    fresh = nvfp4_quantize(master.detach(), global_scale=global_scale, four_over_six=four_over_six)
    touched = master != nvfp4_dequantize(old)
    touched = touched.unflatten(-1, (-1, BLOCK)).any(dim=-1)
    replace = touched | overflows[..., None, None]
    block_scale = torch.where(replace, integer_view(fresh.block_scale), integer_view(old.block_scale))
    codes = torch.where(replace.repeat_interleave(BLOCK // 2, dim=-1), fresh.codes, old.codes)
    overflowed = int((own_blocks > limit[..., None, None]).sum())
    new = Nvfp4Bytes(codes, block_scale.view(torch.float8_e4m3fn), global_scale, old.input_scale)
    return new, RequantizeReport(int(touched.sum()), overflowed)


def _in_groups(
    master: Tensor, old: Nvfp4Bytes, four_over_six: bool, amax: Tensor | None, group: int
) -> tuple[Nvfp4Bytes, RequantizeReport]:
    """Requantise a stack a few matrices at a time: it needs about twenty bytes an element while it runs."""
    parts, changed, overflowed = [], 0, 0
    for start in range(0, len(master), group):
        rows = slice(start, start + group)
        part, report = requantize_nvfp4(
            master[rows],
            old.map(lambda tensor, rows=rows: tensor[rows]),
            four_over_six=four_over_six,
            amax=None if amax is None else amax[rows],
        )
        parts.append(part)
        changed, overflowed = changed + report.changed_blocks, overflowed + report.overflowed_blocks
    codes, block_scale, global_scale = (
        torch.cat([integer_view(getattr(part, name)) for part in parts])
        for name in ("codes", "block_scale", "global_scale")
    )
    block_scale, global_scale = block_scale.view(torch.float8_e4m3fn), global_scale.view(torch.float32)
    return Nvfp4Bytes(codes, block_scale, global_scale, old.input_scale), RequantizeReport(changed, overflowed)


def requantize_fp8(master: Tensor, old: Fp8Bytes) -> tuple[Fp8Bytes, RequantizeReport]:
    """Quantise the elements that changed with the fixed scale and keep the codes of the rest.

    Args:
        master: bf16 [..., N, K].
        old: bytes of the same matrix.

    Returns:
        New bytes with the old scales, and the report.

    Raises:
        ValueError: the master has a NaN or an infinity.
    """
    fresh = fp8_quantize(master.detach(), old.weight_scale)
    # bits: as numbers, because an optimizer step of size 0 turns some -0.0 into 0.0, which is no change.
    touched = master != fp8_dequantize(old.codes, old.weight_scale)
    codes = torch.where(touched, integer_view(fresh), integer_view(old.codes)).view(torch.float8_e4m3fn)
    clipped = touched & exceeds_e4m3(master.detach(), old.weight_scale)
    return Fp8Bytes(codes, old.weight_scale, old.input_scale), RequantizeReport(int(touched.sum()), int(clipped.sum()))


def requantize_f32(master: Tensor, old: Tensor) -> Tensor:
    """Return fp32 values for a bf16 master: the old value where it rounds to the master, else f32(master)."""
    kept = old.to(torch.bfloat16) == master
    return torch.where(kept, old, master.detach().float())
