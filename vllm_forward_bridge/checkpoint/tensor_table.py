# SPDX-License-Identifier: Apache-2.0
"""Which tensors a nemotron_h repository holds: names, dtypes, shapes, derived from its configuration alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from vllm_forward_bridge.checkpoint.safetensors_file import DTYPE_NAMES, TensorSpec
from vllm_forward_bridge.model_config import NVFP4_GROUP_SIZE, ModelConfig

_BF16 = (torch.bfloat16,)
_F32 = (torch.float32,)
# Lightning and Nano store the router in F32, Super and every MTP block in BF16.
_ROUTER = (torch.float32, torch.bfloat16)
# ModelOpt's exporters write a scale with rank 0 or with shape [1], differing by tensor and release.
_SCALAR = ((), (1,))


@dataclass(frozen=True)
class ExpectedTensor:
    """What a tensor may look like."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True

    def accepts(self, spec: TensorSpec) -> bool:
        """Tell whether a stored tensor fits."""
        return spec.dtype in self.dtypes and spec.shape in self.shapes

    @property
    def text(self) -> str:
        """Dtypes and shapes as people write them."""
        dtypes = " or ".join(DTYPE_NAMES[dtype] for dtype in self.dtypes)
        return f"{dtypes} {' or '.join(str(list(shape)) for shape in self.shapes)}"


@dataclass(frozen=True)
class Linear:
    """A matrix that may be quantised."""

    name: str
    """Hugging Face name without `.weight`."""
    shape: tuple[int, int]
    weight_format: str
    """One of `model_config.WEIGHT_FORMATS`."""


def tensor_table(config: ModelConfig) -> tuple[ExpectedTensor, ...]:
    """Return every tensor a repository with this configuration holds, in model order."""
    table = [ExpectedTensor("backbone.embeddings.weight", _BF16, ((config.vocab_size, config.hidden_size),))]
    for layer, letter in enumerate(config.layer_types):
        table += _layer(config, f"backbone.layers.{layer}", letter)
    table.append(ExpectedTensor("backbone.norm_f.weight", _BF16, ((config.hidden_size,),)))
    table += _linear(config, "lm_head", (config.vocab_size, config.hidden_size))
    table += _mtp(config)
    return tuple(table)


def linears(config: ModelConfig) -> Iterator[Linear]:
    """Yield every matrix that may be quantised, in model order, MTP included."""
    for expected in tensor_table(config):
        module, _, leaf = expected.name.rpartition(".")
        if leaf == "weight" and (module.endswith("_proj") or module == "lm_head"):
            rows, columns = expected.shapes[0]
            weight_format = config.quantization.format_of(module)
            packed = 2 if "NVFP4" in weight_format else 1
            yield Linear(module, (rows, columns * packed), weight_format)


def table_problems(config: ModelConfig, stored: Mapping[str, TensorSpec]) -> list[str]:
    """Compare stored tensors with the table; return one line a fault: file, tensor, what is expected, what to do."""
    problems = []
    expected = {entry.name: entry for entry in tensor_table(config)}
    for name, entry in expected.items():
        spec = stored.get(name)
        if spec is None:
            if entry.required:
                problems.append(f"{name}: missing; {entry.text} is expected{_missing_hint(name, stored)}")
        elif not entry.accepts(spec):
            problems.append(
                f"{spec.shard}: {name} is {spec.text}; {entry.text} is expected{_mismatch_hint(config, entry, spec)}"
            )
    for name, spec in stored.items():
        if name not in expected:
            problems.append(f"{spec.shard}: {name} ({spec.text}) is not expected{_unexpected_hint(config, name)}")
    return problems


class ZeroTensors(Mapping[str, torch.Tensor]):
    """A model's tensors without the MTP block, all zero, made when asked for: what an engine is allocated by."""

    def __init__(self, config: ModelConfig) -> None:
        self.table = {entry.name: entry for entry in tensor_table(config) if not entry.name.startswith("mtp.")}

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.table[name]
        return torch.zeros(entry.shapes[0], dtype=entry.dtypes[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


def _layer(config: ModelConfig, layer: str, letter: str) -> Iterator[ExpectedTensor]:
    yield ExpectedTensor(f"{layer}.norm.weight", _BF16, ((config.hidden_size,),))
    yield from {"M": _mamba, "*": _attention, "E": _moe}[letter](config, f"{layer}.mixer")


def _mamba(config: ModelConfig, mixer: str) -> Iterator[ExpectedTensor]:
    heads, channels = config.mamba_num_heads, sum(config.conv_sections.values())
    yield from (ExpectedTensor(f"{mixer}.{leaf}", _BF16, ((heads,),)) for leaf in ("A_log", "D", "dt_bias"))
    yield ExpectedTensor(f"{mixer}.conv1d.weight", _BF16, ((channels, 1, config.conv_kernel),))
    yield ExpectedTensor(f"{mixer}.conv1d.bias", _BF16, ((channels,),))
    yield ExpectedTensor(f"{mixer}.norm.weight", _BF16, ((config.mamba_inner_size,),))
    yield from _linear(config, f"{mixer}.in_proj", (sum(config.mamba_sections.values()), config.hidden_size))
    yield from _linear(config, f"{mixer}.out_proj", (config.hidden_size, config.mamba_inner_size))


def _attention(config: ModelConfig, mixer: str) -> Iterator[ExpectedTensor]:
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield from _linear(config, f"{mixer}.q_proj", (queries, config.hidden_size))
    yield from _linear(config, f"{mixer}.k_proj", (keys, config.hidden_size))
    yield from _linear(config, f"{mixer}.v_proj", (keys, config.hidden_size))
    yield from _linear(config, f"{mixer}.o_proj", (config.hidden_size, queries))
    if config.quantization.kv_cache and mixer.startswith("backbone."):
        # Nano declares an FP8 KV cache and stores no scales; they are 1 then.
        for letter in "kv":
            yield ExpectedTensor(f"{mixer}.{letter}_proj.{letter}_scale", _F32, _SCALAR, required=False)


def _moe(config: ModelConfig, mixer: str) -> Iterator[ExpectedTensor]:
    hidden, width, shared = config.hidden_size, config.expert_input_size, config.moe_shared_expert_intermediate_size
    yield ExpectedTensor(f"{mixer}.gate.weight", _ROUTER, ((config.n_routed_experts, hidden),))
    yield ExpectedTensor(f"{mixer}.gate.e_score_correction_bias", _F32, ((config.n_routed_experts,),))
    if config.moe_latent_size:
        yield from _linear(config, f"{mixer}.fc1_latent_proj", (width, hidden))
        yield from _linear(config, f"{mixer}.fc2_latent_proj", (hidden, width))
    for expert in range(config.n_routed_experts):
        yield from _linear(config, f"{mixer}.experts.{expert}.up_proj", (config.moe_intermediate_size, width))
        yield from _linear(config, f"{mixer}.experts.{expert}.down_proj", (width, config.moe_intermediate_size))
    yield from _linear(config, f"{mixer}.shared_experts.up_proj", (shared, hidden))
    yield from _linear(config, f"{mixer}.shared_experts.down_proj", (hidden, shared))


def _mtp(config: ModelConfig) -> Iterator[ExpectedTensor]:
    inner, hidden = len(config.mtp_layer_types), config.hidden_size
    for depth in range(config.num_nextn_predict_layers):
        first, last = f"mtp.layers.{depth * inner}", f"mtp.layers.{depth * inner + inner - 1}"
        yield from _linear(config, f"{first}.eh_proj", (hidden, 2 * hidden))
        yield from (ExpectedTensor(f"{first}.{leaf}.weight", _BF16, ((hidden,),)) for leaf in ("enorm", "hnorm"))
        for place, letter in enumerate(config.mtp_layer_types):
            yield from _layer(config, f"mtp.layers.{depth * inner + place}", letter)
        yield ExpectedTensor(f"{last}.final_layernorm.weight", _BF16, ((hidden,),))


def _linear(config: ModelConfig, module: str, shape: tuple[int, int]) -> Iterator[ExpectedTensor]:
    rows, columns = shape
    weight_format = config.quantization.format_of(module)
    if weight_format == "BF16":
        yield ExpectedTensor(f"{module}.weight", _BF16, (shape,))
        return
    if weight_format == "FP8":
        yield ExpectedTensor(f"{module}.weight", (torch.float8_e4m3fn,), (shape,))
        yield ExpectedTensor(f"{module}.weight_scale", _F32, _SCALAR)
    else:
        yield ExpectedTensor(f"{module}.weight", (torch.uint8,), ((rows, columns // 2),))
        yield ExpectedTensor(f"{module}.weight_scale", (torch.float8_e4m3fn,), ((rows, columns // NVFP4_GROUP_SIZE),))
        yield ExpectedTensor(f"{module}.weight_scale_2", _F32, _SCALAR)
    if weight_format != "W4A16_NVFP4":
        yield ExpectedTensor(f"{module}.input_scale", _F32, _SCALAR)


def _missing_hint(name: str, stored: Mapping[str, TensorSpec]) -> str:
    module, _, leaf = name.rpartition(".")
    if leaf in ("weight_scale", "weight_scale_2", "input_scale") and f"{module}.weight" in stored:
        return f": the quantisation map says {module} is quantised; export its scale or correct the map"
    if name.startswith("mtp."):
        return ": config.json announces MTP layers; fetch their shard or set num_nextn_predict_layers to 0"
    return ": fetch the shard that has it"


def _mismatch_hint(config: ModelConfig, entry: ExpectedTensor, spec: TensorSpec) -> str:
    module = entry.name.rpartition(".")[0]
    if entry.name.endswith("e_score_correction_bias"):
        return ": narrower than F32 the biases of a layer become equal; export it again in F32"
    if spec.dtype in (torch.uint8, torch.float8_e4m3fn) and config.quantization.format_of(module) == "BF16":
        excluded = config.quantization.excluding_pattern(module)
        why = f"exclude_modules has {excluded!r}" if excluded else "no entry names it"
        return f": the bytes are quantised but the quantisation map says BF16 ({why}); correct hf_quant_config.json"
    if spec.dtype == torch.bfloat16 and torch.bfloat16 not in entry.dtypes:
        return f": the quantisation map says {config.quantization.format_of(module)}; exclude {module} or quantise it"
    if ".mixer.in_proj" in entry.name or ".mixer.out_proj" in entry.name or ".conv1d" in entry.name:
        inner = config.mamba_inner_size
        return (
            f": the scan has mamba_num_heads x mamba_head_dim = {inner} channels, not expand x hidden_size; correct it"
        )
    return "; correct config.json or export the tensor again"


def _unexpected_hint(config: ModelConfig, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if leaf in ("weight_scale", "weight_scale_2", "input_scale"):
        pattern = config.quantization.excluding_pattern(module)
        why = (
            f"exclude_modules has {pattern!r}" if pattern else f"its format is {config.quantization.format_of(module)}"
        )
        return f": {module} has no such scale, because {why}; correct hf_quant_config.json or drop the tensor"
    if leaf in ("k_scale", "v_scale"):
        return ": kv_cache_quant_algo is not FP8; set it in hf_quant_config.json or drop the tensor"
    if name.startswith("mtp."):
        return ": config.json announces no such MTP layer; correct num_nextn_predict_layers and the MTP layer list"
    return ": no layer of the configuration has it; correct config.json or drop the tensor"
