# SPDX-License-Identifier: Apache-2.0
"""Values that no valid checkpoint holds: NaN codes, negative or missing scales, scales applied twice or not at all."""

from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

from vllm_forward_bridge.checkpoint.safetensors_file import TensorSpec
from vllm_forward_bridge.checkpoint.tensor_table import linears
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.quantization.fp8 import E4M3_MAX
from vllm_forward_bridge.quantization.nvfp4 import CODE_MAX

# The largest weight of a typical matrix lies far inside: released models have about 0.2.
_PLAUSIBLE_AMAX = (2.0**-10, 2.0**8)
_E4M3_NAN = 0x7F
_SCALAR_LEAVES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")


def scalar_problems(config: ModelConfig, table: Mapping[str, TensorSpec], fetch: Callable[[str], Tensor]) -> list[str]:
    """Check every scalar scale: finite and positive, and of a size that gives weights of a plausible size.

    Args:
        config: geometry and quantisation map.
        table: the tensors of the repository.
        fetch: returns the tensor of a name; called for scalars only.
    """
    problems, values = [], {}
    for name, spec in table.items():
        if spec.num_bytes == 4 and name.rpartition(".")[2] in _SCALAR_LEAVES:
            values[name] = fetch(name).item()
    for name, value in values.items():
        # An all-zero NVFP4 matrix has global scale 0.
        if not (0.0 < value < float("inf") or (value == 0.0 and name.endswith("weight_scale_2"))):
            problems.append(
                f"{table[name].shard}: {name} is {value}; a finite positive scale is expected: export it again"
            )
    return problems or _size_problems(config, values)


def _size_problems(config: ModelConfig, values: Mapping[str, float]) -> list[str]:
    sizes: dict[str, list[float]] = {}
    for linear in linears(config):
        if linear.weight_format == "FP8":
            sizes.setdefault("weight_scale", []).append(values[f"{linear.name}.weight_scale"] * E4M3_MAX)
        elif linear.weight_format != "BF16":
            largest = values[f"{linear.name}.weight_scale_2"] * E4M3_MAX * CODE_MAX
            sizes.setdefault("weight_scale_2", []).append(largest)
    low, high = _PLAUSIBLE_AMAX
    return [
        f"{leaf}: half of the {len(given)} matrices could hold weights up to {median(given):.2g} only or more; between "
        f"{low:.2g} and {high:.2g} is expected: the scale was applied twice, not at all, or is its reciprocal (it must "
        "multiply the codes): export the checkpoint with ModelOpt's convention"
        for leaf, given in sizes.items()
        if not low <= median(given) <= high
    ]


def check_codes(name: str, shard: str, raw: Tensor, *, is_scale: bool) -> None:
    """Raise if e4m3 bytes hold a NaN or, for block scales, a negative value.

    Args:
        name: of the tensor.
        shard: its file.
        raw: uint8, any shape.
        is_scale: block scales of NVFP4; else codes of an FP8 weight.
    """
    # One pass over good bytes: a valid scale is below 0x7F, which is NaN, and 0x80, the sign.
    if int((raw if is_scale else raw & _E4M3_NAN).max()) < _E4M3_NAN:
        return
    faults = (raw & _E4M3_NAN) == _E4M3_NAN
    if is_scale:
        faults |= raw > _E4M3_NAN
    values = raw[faults].view(torch.float8_e4m3fn).float()
    wanted = "finite, not negative block scales" if is_scale else "finite codes"
    raise ValueError(
        f"{shard}: {name} has {int(faults.sum())} e4m3 values like {values[0].item()}; {wanted} are expected: the "
        "file is damaged or the export failed, fetch or export it again"
    )
