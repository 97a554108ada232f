# SPDX-License-Identifier: Apache-2.0
"""The three formats of a weight matrix on a Megatron module: BF16, FP8 and NVFP4 with bf16 activations.

A format keeps its bytes as buffers of the module, next to the master parameter `weight`. Float8 bytes are held as
uint8, so that neither a dtype cast nor a checkpoint can read them as numbers.
"""

# Legend: ... stacked leading dims (experts), N out features, K in features.

from collections.abc import Iterator
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from megatron.vllm_forward.deployed import Matrix, View, sum_reports
from vllm_forward_bridge.quantization import (
    Fp8Bytes,
    Nvfp4Bytes,
    RequantizeReport,
    fp8_dequantize,
    fp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    requantize_fp8,
    requantize_nvfp4,
)
from vllm_forward_bridge.quantization.fp8 import e4m3_scale

_E4M3 = torch.float8_e4m3fn
_EXPERTS_AT_ONCE = 8


class WeightFormat(Protocol):
    """What a linear or an expert stack asks of its format."""

    bytes_are_saved: bool
    """A Megatron checkpoint holds the bytes; otherwise they follow from the masters."""

    def register(self, module: Matrix) -> None:
        """Give the module its byte buffers."""

    def product(self, kernels: ModuleType, module: Matrix, x_TK: Tensor) -> Tensor:
        """Return y_TN of one matrix."""

    def views(self, module: Matrix, name: str) -> Iterator[View]:
        """Yield the deployment tensors of one matrix called `name`."""

    def quantize(self, module: Matrix) -> None:
        """Derive the bytes from the master alone."""

    def requantize(self, module: Matrix) -> RequantizeReport:
        """Bring the bytes up to date with the master."""

    def restore(self, module: Matrix) -> None:
        """Set the master to bf16(dequantised bytes)."""


class Bf16:
    """The parameter is the deployment tensor."""

    bytes_are_saved = False

    def register(self, module: Matrix) -> None:
        """Give a module whose master is a shard the whole matrix, bf16_whole."""
        if module.shard is not None:
            whole = torch.zeros(module.whole_shape, dtype=torch.bfloat16, device=module.weight.device)
            module.register_bytes("bf16_whole", whole, persistent=False)

    def product(self, kernels: ModuleType, module: Matrix, x_TK: Tensor) -> Tensor:
        """Multiply by the parameter."""
        return kernels.bf16_linear(x_TK, module.weight if module.shard is None else module.bf16_whole)

    def whole(self, module: Matrix) -> Tensor:
        """Return an alias of the whole matrix."""
        return module.weight.data if module.shard is None else module.bf16_whole

    def views(self, module: Matrix, name: str) -> Iterator[View]:
        """Yield the weight."""
        yield View(f"{name}.weight", self.whole(module), module.whole_shape)

    def quantize(self, module: Matrix) -> None:
        """Gather the whole matrix if the master is a shard."""
        self.requantize(module)

    def requantize(self, module: Matrix) -> RequantizeReport:
        """Gather the whole matrix if the master is a shard."""
        if module.shard is not None:
            module.bf16_whole.copy_(module.whole_master())
        return RequantizeReport(0, 0)

    def restore(self, module: Matrix) -> None:
        """Take the master from the whole matrix if it is a shard."""
        if module.shard is not None:
            module.set_master(module.bf16_whole)


class Fp8:
    """Codes [N, K], one weight scale, one static input scale."""

    bytes_are_saved = True

    def register(self, module: Matrix) -> None:
        """Give the module fp8_codes, fp8_weight_scale [] and fp8_input_scale [1], the ranks of released checkpoints."""
        weight = module.weight
        codes = torch.zeros(module.whole_shape, dtype=torch.uint8, device=weight.device)
        module.register_bytes("fp8_codes", codes)
        module.register_bytes("fp8_weight_scale", torch.ones((), dtype=torch.float32, device=weight.device))
        module.register_bytes("fp8_input_scale", torch.ones(1, dtype=torch.float32, device=weight.device))

    def product(self, kernels: ModuleType, module: Matrix, x_TK: Tensor) -> Tensor:
        """Quantise the input with the static scale and multiply codes."""
        codes = module.fp8_codes.view(_E4M3)
        scales = (module.fp8_weight_scale, module.fp8_input_scale)
        return kernels.fp8_linear(x_TK, codes, *scales, module.straight_through)

    def views(self, module: Matrix, name: str) -> Iterator[View]:
        """Yield codes and scales."""
        yield View(f"{name}.weight", module.fp8_codes.view(_E4M3), tuple(module.fp8_codes.shape))
        yield View(f"{name}.weight_scale", module.fp8_weight_scale, ())
        yield View(f"{name}.input_scale", module.fp8_input_scale, (1,))

    def quantize(self, module: Matrix) -> None:
        """Take amax / 448 as weight scale; the input scale stays what it is (1 in a model built from scratch)."""
        master = module.whole_master()
        module.fp8_weight_scale.copy_(e4m3_scale(master.abs().amax()))
        module.fp8_codes.copy_(fp8_quantize(master, module.fp8_weight_scale).view(torch.uint8))

    def requantize(self, module: Matrix) -> RequantizeReport:
        """Quantise changed elements with the fixed scale."""
        new, report = requantize_fp8(module.whole_master(), self._bytes(module))
        module.fp8_codes.copy_(new.codes.view(torch.uint8))
        return report

    def restore(self, module: Matrix) -> None:
        """Set the master to bf16(code * scale)."""
        stored = self._bytes(module)
        module.set_master(fp8_dequantize(stored.codes, stored.weight_scale))

    @staticmethod
    def _bytes(module: Matrix) -> Fp8Bytes:
        return Fp8Bytes(module.fp8_codes.view(_E4M3), module.fp8_weight_scale, module.fp8_input_scale)


class Nvfp4:
    """Codes [..., N, K/2], block scales [..., N, K/16], one global scale a matrix; activations stay bf16."""

    bytes_are_saved = True

    def __init__(self, four_over_six: bool) -> None:
        self.four_over_six = four_over_six

    def register(self, module: Matrix) -> None:
        """Give the module nvfp4_codes, nvfp4_block_scale and nvfp4_global_scale."""
        *stack, rows, columns = module.whole_shape
        device = module.weight.device
        module.register_bytes("nvfp4_codes", torch.zeros(*stack, rows, columns // 2, dtype=torch.uint8, device=device))
        scales = torch.zeros(*stack, rows, columns // 16, dtype=torch.uint8, device=device)
        module.register_bytes("nvfp4_block_scale", scales)
        module.register_bytes("nvfp4_global_scale", torch.ones(stack, dtype=torch.float32, device=device))

    def product(self, kernels: ModuleType, module: Matrix, x_TK: Tensor) -> Tensor:
        """Multiply by the dequantised weight."""
        codes, block_scale, global_scale = self.operands(kernels, module)
        rows = module.whole_shape[0]
        return kernels.nvfp4_linear(x_TK, codes, block_scale, global_scale, module.straight_through, rows)

    def operands(self, kernels: ModuleType, module: Matrix) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bytes as the kernels read them; on a GPU that is a packed copy, made once a version."""
        codes, block_scale, global_scale = self.tensors(module)
        made = module.operands_of_version(lambda: kernels.nvfp4_operands(codes, block_scale))
        return *made, global_scale

    def tensors(self, module: Matrix) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, block scales as e4m3, and global scales."""
        return module.nvfp4_codes, module.nvfp4_block_scale.view(_E4M3), module.nvfp4_global_scale

    def views(self, module: Matrix, name: str) -> Iterator[View]:
        """Yield codes and scales of one matrix; `name` may have a place for the index of a stacked one."""
        tensors = self.tensors(module)
        names = ("weight", "weight_scale", "weight_scale_2")
        if module.weight.dim() == 2:
            yield from (View(f"{name}.{n}", t, tuple(t.shape)) for n, t in zip(names, tensors, strict=True))
            return
        for index in range(module.weight.shape[0]):
            for n, stacked in zip(names, tensors, strict=True):
                yield View(f"{name.format(index)}.{n}", stacked[index], tuple(stacked.shape[1:]))

    def quantize(self, module: Matrix) -> None:
        """Derive every scale from the master."""
        for master, stored in self._parts(module):
            _store(stored, nvfp4_quantize(master.detach(), four_over_six=self.four_over_six))

    def requantize(self, module: Matrix) -> RequantizeReport:
        """Quantise changed blocks; the global scale stays unless a block would overflow it."""
        reports = []
        for master, stored in self._parts(module):
            new, report = requantize_nvfp4(master.detach(), stored, four_over_six=self.four_over_six)
            _store(stored, new)
            reports.append(report)
        return sum_reports(iter(reports))

    def restore(self, module: Matrix) -> None:
        """Set the master to bf16(dequantised)."""
        if module.weight.dim() == 2:
            module.set_master(nvfp4_dequantize(Nvfp4Bytes(*self.tensors(module))))
            return
        for master, stored in self._parts(module):
            master.copy_(nvfp4_dequantize(stored))

    def _parts(self, module: Matrix) -> Iterator[tuple[Tensor, Nvfp4Bytes]]:
        """Yield the master and aliases of bytes, some experts at a time: fp32 work needs 30 bytes an element."""
        tensors = (module.whole_master(), *self.tensors(module))
        if module.weight.dim() == 2:
            yield tensors[0], Nvfp4Bytes(*tensors[1:])
            return
        for master, *stored in zip(*(tensor.split(_EXPERTS_AT_ONCE) for tensor in tensors), strict=True):
            yield master, Nvfp4Bytes(*stored)


def _store(stored: Nvfp4Bytes, new: Nvfp4Bytes) -> None:
    stored.codes.copy_(new.codes)
    # Not every device copies float8; bytes are what is copied.
    stored.block_scale.view(torch.uint8).copy_(new.block_scale.view(torch.uint8))
    stored.global_scale.copy_(new.global_scale)


def weight_format(name: str, *, four_over_six: bool) -> WeightFormat:
    """Return the format called `name` in a quantisation map."""
    return {"BF16": Bf16(), "FP8": Fp8(), "W4A16_NVFP4": Nvfp4(four_over_six)}[name]
