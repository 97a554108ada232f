# SPDX-License-Identifier: Apache-2.0
"""Whether a model can be laid out over TP, EP and PP ranks without cutting a head, a group or an expert.

An NVFP4 block is never cut: the trainer's tensor parallelism splits masters, every rank has the whole bytes.
"""

from dataclasses import dataclass

from vllm_forward_bridge.model_config import ModelConfig


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
        ("num_key_value_heads", "tp", tp, "a rank has whole key/value heads, each with its query heads"),
        ("vocab_size", "tp", tp, "embedding and lm_head are split by rows"),
        ("moe_shared_expert_intermediate_size", "tp", tp, "the shared expert's channels are split"),
        ("n_routed_experts", "ep", layout.expert, "a rank has whole experts"),
    )
    problems = [
        f"{name} is {getattr(config, name)}, {degree} is {size}; a multiple is needed, because {why}: change {degree}"
        for name, degree, size, why in rules
        if getattr(config, name) % size
    ]
    if layout.pipeline > len(config.layer_types):
        problems.append(
            f"pp is {layout.pipeline}, the model has {len(config.layer_types)} layers; each stage needs one: lower pp"
        )
    return problems
