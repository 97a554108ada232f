# SPDX-License-Identifier: Apache-2.0
"""nemotron_h for vLLM over the contract's ops, on deployment bytes.

The wiring is vLLM's: embedding, then for each layer a mixer and a fused add + norm, the last one with the final gain.
Weights are the tensors that the ops take, packed once a version and updated in place, so that their addresses last.
"""

# T = tokens of a step, H = hidden, V = vocabulary

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

from vllm_forward_bridge import ops
from vllm_forward_bridge.checkpoint.tensor_table import ZeroTensors
from vllm_forward_bridge.model_config import ModelConfig, load_model_config
from vllm_forward_bridge.ops import conv_cuda, fa3, humming_gemm, ssd_cuda
from vllm_forward_bridge.quantization import bytes_digest
from vllm_forward_bridge.rollout.embedded.kernel_record import kernel_record
from vllm_forward_bridge.rollout.embedded.weights import ExpertWeights, ModelWeights, build_weights
from vllm_forward_bridge.rollout.protocol import NO_WEIGHTS
from vllm_forward_bridge.vllm_plugin.attention import BridgeAttention
from vllm_forward_bridge.vllm_plugin.mamba import STATE_DTYPES, BridgeMamba, state_shapes


class BridgeExperts(nn.Module):
    """A mixture of experts: router, routed rows, shared expert, slot-order combine."""

    def __init__(self, vllm_config: VllmConfig, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.config = config
        self.weights: ExpertWeights | None = None

    def forward(self, y_TH: Tensor) -> Tensor:
        """Return the mixer's rows."""
        config, weights = self.config, self.weights
        weights_Tk, ids_Tk = ops.router(
            y_TH, weights.router_weight_EH, weights.expert_bias_E, config.num_experts_per_tok
        )
        rows_TkH = ops.moe_experts(y_TH, ids_Tk, *weights.experts)
        shared_TH = weights.shared_down(ops.relu_squared(weights.shared_up(y_TH)))
        return ops.moe_combine(rows_TkH, weights_Tk, config.routed_scaling_factor, shared_TH)


_MIXERS = {"M": BridgeMamba, "*": BridgeAttention, "E": BridgeExperts}


class BridgedNemotronH(nn.Module, HasInnerState, IsHybrid):
    """The model class of a bridged engine.

    Args:
        vllm_config: the engine's configuration; its model folder holds config.json and hf_quant_config.json.
        prefix: vLLM's name prefix.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.geometry = load_model_config(vllm_config.model_config.model)
        self.device = torch.device(vllm_config.device_config.device)
        self.mixers = nn.ModuleList(
            _MIXERS[letter](vllm_config, self.geometry, f"{prefix or 'backbone'}.layers.{number}.mixer")
            for number, letter in enumerate(self.geometry.layer_types)
        )
        self._weights: ModelWeights | None = None
        self._version: int | None = None
        self._announced: tuple[int, str] | None = None
        if vllm_config.load_config.load_format == "dummy":
            self._install(build_weights(self.geometry, ZeroTensors(self.geometry), self.device))
            self._version = NO_WEIGHTS

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one sequence's Mamba state, so that vLLM's memory accounting is right."""
        return state_shapes(load_model_config(vllm_config.model_config.model))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Return their dtypes."""
        return STATE_DTYPES

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """Refuse: states are copied only for prefix caching, which is refused."""
        raise RuntimeError("a bridged engine does not copy Mamba states; prefix caching is outside the contract")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embedding's rows."""
        return nn.functional.embedding(input_ids, self._weights.embedding_VH)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return hidden_TH after the final norm."""
        weights, eps = self._weights, self.geometry.norm_eps
        residual_TH = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        gains = [*(layer.norm_gain_H for layer in weights.layers[1:]), weights.final_gain_H]
        y_TH = ops.rms_norm(residual_TH, weights.layers[0].norm_gain_H, eps)
        for mixer, gain_H in zip(self.mixers, gains, strict=True):
            y_TH, residual_TH = ops.fused_add_rms_norm(mixer(y_TH), residual_TH, gain_H, eps)
        return y_TH

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return bf16 logits."""
        return self._weights.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Build the first version from a checkpoint's tensors, or replace it by the announced one.

        Raises:
            ValueError: a reload that nobody announced; its bytes could not be checked.
        """
        if self._weights is None:
            self._install(build_weights(self.geometry, dict(weights), self.device))
            self._version = 0
        elif self._announced is None:
            raise ValueError(
                "vLLM's reload was called without version and digest, so the bytes could not be checked; call the "
                "worker's bridge_update, which announces both and then reloads"
            )
        else:
            version, digest = self._announced
            self.update_weights(dict(weights), version=version, digest=digest)

    @contextmanager
    def announced(self, *, version: int, digest: str) -> Iterator[None]:
        """Let one reload replace the weights, if its tensors have this digest."""
        self._announced = (version, digest)
        try:
            yield
        finally:
            self._announced = None

    def update_weights(self, tensors: Mapping[str, Tensor], *, version: int, digest: str) -> None:
        """Copy a new version over the old one, in place.

        Everything is checked and packed before the first byte is overwritten. While bytes are being overwritten there
        is no version: an update that is interrupted leaves an engine that refuses to run.

        Args:
            tensors: the whole model by Hugging Face name, in deployment bytes.
            version: greater than the present one.
            digest: `quantization.bytes_digest` of the tensors that were sent.

        Raises:
            ValueError: digest, version or a tensor is wrong; nothing was changed.
        """
        present = self.weights_version()
        problems = []
        if version <= present:
            problems.append(f"version is {version}; more than the present {present} is needed")
        found = bytes_digest(tensors.items())
        if found != digest:
            problems.append(
                f"the tensors' digest is {found}, the sender's {digest}; bytes were lost or changed on the way"
            )
        if problems:
            raise ValueError("this weight update is refused:\n  - " + "\n  - ".join(problems))
        new = list(_tensors_of(build_weights(self.geometry, tensors, self.device)))
        self._version = None
        for target, source in zip(_tensors_of(self._weights), new, strict=True):
            target.copy_(source)
        self._install(self._weights)
        torch.cuda.synchronize(self.device)
        self._version = version

    def weights_version(self) -> int:
        """Return the version of the weights.

        Raises:
            RuntimeError: there are none, or an update was interrupted.
        """
        if self._version is None:
            raise RuntimeError(
                "the engine's weights are incomplete: they were never loaded, or an update was interrupted. Send a "
                "whole version to a new engine"
            )
        return self._version

    def kernel_record(self) -> dict[str, str]:
        """Name the kernel behind each op, as this process has it."""
        paged = f"{fa3.paged_attention.__module__}.{fa3.paged_attention.__qualname__}"
        return {
            **kernel_record(self.device),
            "cached_attention": f"{paged} [cuda]",
            "causal_conv1d": f"{conv_cuda.conv.__module__}.{conv_cuda.conv.__qualname__} [cuda]",
            "ssd_scan": f"{ssd_cuda.scan.__module__}.{ssd_cuda.scan.__qualname__} [cuda]",
            **{f"ssd_scan.{name}": config for name, config in ssd_cuda.kernel_configs().items()},
            "nvfp4 tiles": humming_gemm.tiles(),
        }

    def _install(self, weights: ModelWeights) -> None:
        self._weights = weights
        for mixer, layer in zip(self.mixers, weights.layers, strict=True):
            if isinstance(mixer, BridgeAttention):
                mixer.install(layer.mixer)
            else:
                mixer.weights = layer.mixer


def _tensors_of(part: Any) -> Iterator[Tensor]:
    """Yield every tensor inside nested dataclasses and tuples, in a fixed order."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors_of(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors_of(getattr(part, field.name))
