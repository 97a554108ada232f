# SPDX-License-Identifier: Apache-2.0
"""What every module of one model is built from: the configuration, the geometry, the source's tensors, the kernels."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from megatron.vllm_forward import baseline, bridged
from vllm_forward_bridge.checkpoint.repository import open_repository
from vllm_forward_bridge.checkpoint.safetensors_file import DTYPE_NAMES
from vllm_forward_bridge.checkpoint.tensor_table import tensor_table
from vllm_forward_bridge.checkpoint.to_megatron import TENSORS_FILE
from vllm_forward_bridge.config import BridgeConfig
from vllm_forward_bridge.model_config import ModelConfig, load_model_config

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class DeployedTensor:
    """Dtype and shape that a deployment tensor has in its source, and must have again when it leaves."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bridge:
    """Passed down through the layer spec; nothing looks it up."""

    config: BridgeConfig
    model: ModelConfig
    kernels: ModuleType
    """`bridged` or `baseline`: the same names and signatures, other arithmetic."""
    tensors: Mapping[str, DeployedTensor] = field(repr=False)
    """Every deployment tensor by name: ranks of scalars, router dtype and KV scales differ between releases."""

    def format_of(self, layer_number: int, projection: str) -> str:
        """Return the weight format of a projection of a mixer, by Megatron's layer number (the first layer is 1)."""
        return self.model.quantization.format_of(f"{layer_name(layer_number)}.mixer.{projection}")

    def router_is_f32(self, layer_number: int) -> bool:
        """Tell whether the source holds this layer's gate in F32."""
        return self.tensors[f"{layer_name(layer_number)}.mixer.gate.weight"].dtype == torch.float32

    @property
    def four_over_six(self) -> bool:
        """NVFP4 rule of retrained blocks."""
        return self.config.model.four_over_six


def layer_name(layer_number: int) -> str:
    """Return the deployment name of a layer, by Megatron's layer number (the first layer is 1)."""
    return f"backbone.layers.{layer_number - 1}"


def make_bridge(config: BridgeConfig) -> Bridge:
    """Read the geometry and the tensor headers of the repository that a configuration names.

    Raises:
        FileNotFoundError: the folder has no config.json.
        ValueError: lists what is not supported in it.
    """
    folder = Path(config.model.repository)
    model = load_model_config(folder)
    kernels = {"bridged": bridged, "baseline": baseline}[config.forward.mode]
    return Bridge(config, model, kernels, _source_tensors(folder, model))


def _source_tensors(folder: Path, model: ModelConfig) -> dict[str, DeployedTensor]:
    # Beside a converted checkpoint lies the list of its source's tensors instead of the tensors.
    listed = folder / TENSORS_FILE
    if any(folder.glob("*.safetensors")):
        table = open_repository(folder).table
        return {name: DeployedTensor(spec.dtype, tuple(spec.shape)) for name, spec in table.items()}
    if listed.exists():
        entries = json.loads(listed.read_text())["tensors"]
        return {e["name"]: DeployedTensor(_DTYPES[e["dtype"]], tuple(e["shape"])) for e in entries}
    # Configuration alone, for training from scratch: the first form that the family knows.
    return {entry.name: DeployedTensor(entry.dtypes[0], entry.shapes[0]) for entry in tensor_table(model)}
