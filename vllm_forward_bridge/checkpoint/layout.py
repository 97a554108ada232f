# SPDX-License-Identifier: Apache-2.0
"""Whether a model can be laid out over TP, EP and PP ranks without cutting a head, a group or an NVFP4 block."""

from dataclasses import dataclass

from vllm_forward_bridge.checkpoint.tensor_table import linears
from vllm_forward_bridge.model_config import ModelConfig
from vllm_forward_bridge.quantization_map import NVFP4_GROUP_SIZE

# Modules whose columns Megatron splits over TP; all others are split by rows.
_COLUMN_SPLIT = ("out_proj", "o_proj", "down_proj")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of a trainer."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1


def parse_layout(text: str) -> Layout:
    """Read a layout such as `tp=2,ep=8,pp=4`.

    Raises:
        ValueError: an unknown or repeated part, or a degree that is not a positive number.
    """
    names = {"tp": "tensor", "ep": "expert", "pp": "pipeline"}
    degrees = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in names or names[name] in degrees or not value.isdecimal() or int(value) < 1:
            raise ValueError(f"layout is {text!r}; parts like tp=2,ep=8,pp=4 are accepted, each once: correct {part!r}")
        degrees[names[name]] = int(value)
    return Layout(**degrees)


def layout_problems(config: ModelConfig, layout: Layout) -> list[str]:
    """Return every reason why the layout is impossible."""
    tp = layout.tensor
    rules = (
        ("mamba_num_heads", "tp", tp, "a rank has whole Mamba heads"),
        ("n_groups", "tp", tp, "B and C are split by group, each section of in_proj on its own"),
        ("num_attention_heads", "tp", tp, "a rank has whole heads"),
        ("vocab_size", "tp", tp, "embedding and lm_head are split by rows"),
        ("moe_shared_expert_intermediate_size", "tp", tp, "the shared expert's rows are split"),
        ("n_routed_experts", "ep", layout.expert, "a rank has whole experts"),
    )
    problems = [
        f"{name} is {getattr(config, name)}, {degree} is {size}; a multiple is needed, because {why}: change {degree}"
        for name, degree, size, why in rules
        if getattr(config, name) % size
    ]
    kv_heads = config.num_key_value_heads
    if kv_heads % tp and tp % kv_heads:
        problems.append(
            f"num_key_value_heads is {kv_heads}, tp is {tp}; a multiple or a divisor is needed, because a KV head is "
            "whole on a rank or the same on several: choose another tp"
        )
    if layout.pipeline > len(config.layer_types):
        problems.append(
            f"pp is {layout.pipeline}, the model has {len(config.layer_types)} layers; each stage needs one: lower pp"
        )
    return problems + _block_problems(config, tp)


def _block_problems(config: ModelConfig, tp: int) -> list[str]:
    cut: dict[tuple[str, int], str] = {}
    for linear in linears(config):
        leaf = linear.name.rpartition(".")[2]
        # Routed experts are spread over EP and not split; MTP is carried whole.
        split = leaf in _COLUMN_SPLIT and ".experts." not in linear.name and not linear.name.startswith("mtp.")
        columns = linear.shape[1]
        if split and "NVFP4" in linear.weight_format and columns % (tp * NVFP4_GROUP_SIZE):
            cut.setdefault((leaf, columns), linear.name)
    return [
        f"{name}.weight has {columns} columns, tp is {tp}: {columns / tp:g} a rank; a multiple of {NVFP4_GROUP_SIZE} "
        "is needed, because the NVFP4 blocks run along the columns: choose another tp"
        for (_, columns), name in cut.items()
    ]
