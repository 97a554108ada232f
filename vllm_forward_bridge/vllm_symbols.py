# SPDX-License-Identifier: Apache-2.0
"""The only door to vLLM's kernels: one getter a symbol, one pinned version, signatures checked at first use.

The kernel is taken, not the layer above it: a layer may compile, dispatch or fuse as it likes.
"""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PINNED_VERSION = "0.26.0"
_OPS = "vllm.model_executor.layers.mamba.ops"


@dataclass(frozen=True)
class Symbol:
    """A function of vLLM (or of a package vLLM brings) and the parameters this package relies on, in order."""

    module: str
    name: str
    parameters: tuple[str, ...]


SYMBOLS = {
    "scaled_fp8_quant": Symbol("vllm._custom_ops", "scaled_fp8_quant", ("input", "scale")),
    "cutlass_scaled_mm": Symbol(
        "vllm._custom_ops", "cutlass_scaled_mm", ("a", "b", "scale_a", "scale_b", "out_dtype", "bias")
    ),
    "matmul_persistent": Symbol("vllm.model_executor.layers.batch_invariant", "matmul_persistent", ("a", "b", "bias")),
    "moe_align_block_size": Symbol(
        "vllm._custom_ops",
        "moe_align_block_size",
        (
            "topk_ids",
            "num_experts",
            "block_size",
            "sorted_token_ids",
            "experts_ids",
            "num_tokens_post_pad",
            "expert_map",
        ),
    ),
    "causal_conv1d_fn": Symbol(
        f"{_OPS}.causal_conv1d",
        "causal_conv1d_fn",
        ("x", "weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state", "activation"),
    ),
    "causal_conv1d_update": Symbol(
        f"{_OPS}.causal_conv1d",
        "causal_conv1d_update",
        ("x", "conv_state", "weight", "bias", "activation", "conv_state_indices"),
    ),
    "mamba_chunk_scan_combined_varlen": Symbol(
        f"{_OPS}.ssd_combined",
        "mamba_chunk_scan_combined_varlen",
        ("x", "dt", "A", "B", "C", "chunk_size", "cu_seqlens", "cu_chunk_seqlens", "last_chunk_indices", "seq_idx",
         "out", "D", "z", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_intermediate_states",
         "state_dtype"),
    ),
    "flash_attn_varlen_func": Symbol(
        "vllm.vllm_flash_attn",
        "flash_attn_varlen_func",
        ("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k"),
    ),
    "humming_gemm": Symbol(
        "humming.ops",
        "humming_gemm",
        (),
    ),
    "prepare_humming_weight": Symbol(
        "humming.utils.weight", "prepare_humming_weight", ("weight", "b_dtype", "a_dtype")
    ),
    "prepare_humming_weight_scale": Symbol(
        "humming.utils.weight", "prepare_humming_weight_scale", ("weight_scale", "to_apply_on_c")
    ),
}  # fmt: skip

SSD_KERNELS = {
    "bmm_chunk": (f"{_OPS}.ssd_bmm", "_bmm_chunk_fwd_kernel"),
    "chunk_cumsum": (f"{_OPS}.ssd_chunk_state", "_chunk_cumsum_fwd_kernel"),
    "chunk_state": (f"{_OPS}.ssd_chunk_state", "_chunk_state_fwd_kernel"),
    "chunk_scan": (f"{_OPS}.ssd_chunk_scan", "_chunk_scan_fwd_kernel"),
    "state_passing": (f"{_OPS}.ssd_state_passing", "_state_passing_fwd_kernel"),
}
"""The five autotuned kernels behind `mamba_chunk_scan_combined_varlen`."""


def symbol(name: str) -> Callable[..., Any]:
    """Return the function of `SYMBOLS[name]` after checking version and signature.

    Raises:
        RuntimeError: vLLM is absent, has another version, or the function's parameters changed.
    """
    return _checked(name)


@functools.cache
def _checked(name: str) -> Callable[..., Any]:
    check_version()
    wanted = SYMBOLS[name]
    function = _attribute(wanted.module, wanted.name)
    problem = signature_problem(function, wanted)
    if problem:
        raise RuntimeError(problem)
    return function


@functools.cache
def ssd_kernel(name: str) -> Any:
    """Return one of the five autotuned SSD kernels (a Triton `Autotuner`)."""
    check_version()
    return _attribute(*SSD_KERNELS[name])


def humming(path: str) -> Any:
    """Return `humming.<module>:<attribute>` given as "module:attribute"; vLLM brings and pins Humming."""
    check_version()
    module, attribute = path.split(":")
    return _attribute(f"humming.{module}", attribute)


@functools.cache
def check_version() -> None:
    """Raise unless exactly the pinned vLLM is installed: kernels of another version may round elsewhere."""
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as missing:
        raise RuntimeError(
            f"vLLM is not installed; the CUDA forwards call vLLM {PINNED_VERSION}'s kernels: "
            "pip install 'vllm-forward-bridge[vllm]'"
        ) from missing
    if found != PINNED_VERSION:
        raise RuntimeError(
            f"vLLM {found} is installed; this package is pinned to {PINNED_VERSION}, because another version's kernels "
            "may round elsewhere. Install the pinned version, or move the pin with the claims of docs/parity.md"
        )


def signature_problem(function: Callable[..., Any], wanted: Symbol) -> str:
    """Return why `function` no longer fits `wanted`, or an empty string."""
    if not wanted.parameters:
        return ""
    found = tuple(inspect.signature(function).parameters)
    missing = [parameter for parameter in wanted.parameters if parameter not in found]
    if not missing:
        return ""
    return (
        f"{wanted.module}.{wanted.name} has parameters {', '.join(found)}; {', '.join(missing)} went missing. "
        "Its calls here must be rewritten for the vLLM that is installed"
    )


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as missing:
        raise RuntimeError(
            f"{module}.{name} does not exist in the installed vLLM; this package needs it at version {PINNED_VERSION}"
        ) from missing
