# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds: layers, formats, bytes, scalars, and which scales are calibrated instead of amax-derived."""

import re
from concurrent.futures import ThreadPoolExecutor

import torch

from vllm_forward_bridge.checkpoint.compare import Source
from vllm_forward_bridge.checkpoint.megatron_checkpoint import MegatronCheckpoint
from vllm_forward_bridge.checkpoint.safetensors_file import DTYPE_NAMES
from vllm_forward_bridge.checkpoint.tensor_table import Linear, linears
from vllm_forward_bridge.checkpoint.transfer import Progress
from vllm_forward_bridge.quantization.fp8 import E4M3_MAX
from vllm_forward_bridge.quantization.nvfp4 import BLOCK, CODE_MAX, code_values, scale_ceiling

_SCALARS = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")


def inspect_checkpoint(
    source: Source, *, scales: bool = False, workers: int = 2, on_progress: Progress | None = None
) -> dict:
    """Describe a repository or a Megatron checkpoint as plain data (JSON).

    Args:
        source: from `open_source`.
        scales: also read every quantised weight and tell which rule its scales follow.
        workers: matrices read at a time.
        on_progress: called as weights are read.
    """
    config, quantization = source.config, source.config.quantization
    report = {
        "kind": "megatron" if isinstance(source, MegatronCheckpoint) else "huggingface",
        "layers": config.layer_types,
        "mtp": {"depths": config.num_nextn_predict_layers, "layers": config.mtp_layer_types},
        "kv_cache": quantization.kv_cache,
        "tensors": len(source.table),
        "shards": len({spec.shard for spec in source.table.values()}),
        "bytes": sum(spec.num_bytes for spec in source.table.values()),
        "groups": _groups(source),
        "scalars": _scalars(source),
    }
    if scales:
        report["scale_rules"] = _scale_rules(source, workers, on_progress)
    return report


def _groups(source: Source) -> list[dict]:
    """Sum up tensors whose names differ in layer and expert only."""
    groups: dict[tuple[str, str], dict] = {}
    for spec in source.table.values():
        name = re.sub(r"experts\.\d+", "experts.E", re.sub(r"layers\.\d+", "layers.N", spec.name))
        module, _, leaf = name.rpartition(".")
        weight_format = source.config.quantization.format_of(spec.name.rpartition(".")[0])
        group = groups.setdefault((module, weight_format), {"module": module, "leaves": {}, "tensors": 0, "bytes": 0})
        group["leaves"].setdefault(f"{leaf} {DTYPE_NAMES[spec.dtype]}", set()).add(spec.shape)
        group["tensors"] += 1
        group["bytes"] += spec.num_bytes
    described = []
    for (_, weight_format), group in groups.items():
        dtypes = sorted({leaf.split()[1] for leaf in group["leaves"]})
        shown = weight_format if weight_format != "BF16" else ", ".join(dtypes)
        leaves = {leaf: sorted(map(list, shapes)) for leaf, shapes in group["leaves"].items()}
        described.append({**group, "format": shown, "leaves": leaves})
    return described


def _scalars(source: Source) -> dict[str, dict]:
    """Return count, range and number of distinct values of every kind of scalar scale."""
    values: dict[str, list[float]] = {}
    for name, spec in source.table.items():
        leaf = name.rpartition(".")[2]
        if leaf in _SCALARS and spec.num_bytes == 4:
            values.setdefault(leaf, []).append(source.fetch(name).item())
    return {
        leaf: {"count": len(given), "min": min(given), "max": max(given), "distinct": len(set(given))}
        for leaf, given in values.items()
    }


def _scale_rules(source: Source, workers: int, on_progress: Progress | None) -> dict[str, dict]:
    """Count matrices by the rule that their scales follow; `calibrated` lists those that are not amax-derived."""
    quantised = [linear for linear in linears(source.config) if linear.weight_format != "BF16"]

    total = sum(source.table[f"{linear.name}.weight"].num_bytes for linear in quantised)

    def one(linear: Linear) -> str:
        rule = _fp8_rule(source, linear) if linear.weight_format == "FP8" else _nvfp4_rule(source, linear)
        if on_progress:
            on_progress(source.table[f"{linear.name}.weight"].num_bytes, total)
        return rule

    with ThreadPoolExecutor(workers) as pool:
        rules = list(pool.map(one, quantised))
    counts: dict[str, dict[str, int]] = {}
    for linear, rule in zip(quantised, rules, strict=True):
        of_format = counts.setdefault(linear.weight_format, {})
        of_format[rule] = of_format.get(rule, 0) + 1
    calibrated = [linear.name for linear, rule in zip(quantised, rules, strict=True) if rule == "calibrated"]
    return {"rules": counts, "calibrated": calibrated}


def _fp8_rule(source: Source, linear: Linear) -> str:
    """Tell amax / 448 by its largest code, which is 448 then."""
    largest = 0.0
    for block in source.blocks(f"{linear.name}.weight"):
        codes = block.reshape(-1).view(torch.uint8).view(torch.float8_e4m3fn)
        largest = max(largest, codes.float().abs().max().item())
    return "amax / 448" if largest == E4M3_MAX else "calibrated"


def _nvfp4_rule(source: Source, linear: Linear) -> str:
    """Tell F of amax / (6 F): the largest value in units of the global scale is 6 F then, in some block exactly."""
    codes = source.fetch(f"{linear.name}.weight").unflatten(-1, (-1, BLOCK // 2))
    sizes = torch.maximum(
        code_values(codes.device)[(codes & 7).int()], code_values(codes.device)[(codes >> 4 & 7).int()]
    )
    # A zero block's scale byte says nothing; its largest code is 0.
    largest = sizes.amax(dim=-1) * source.fetch(f"{linear.name}.weight_scale").float()
    top = largest.max().item()
    for rule, ceiling in (("448", scale_ceiling(False)), ("256 (four-over-six)", scale_ceiling(True))):
        # Rounding a block scale up to e4m3 may lift another block above the largest one, by a sixteenth at most.
        if bool((largest == CODE_MAX * ceiling).any()) and top <= CODE_MAX * ceiling * (1 + 2**-4):
            return rule
    return "all zero" if top == 0 else "calibrated"
