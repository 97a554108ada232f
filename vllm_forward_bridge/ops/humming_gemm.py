# SPDX-License-Identifier: Apache-2.0
"""NVFP4 GEMMs by Humming with one K tile: dense (shared expert, lm_head) and by expert.

The K tile decides the order of the sum, so it is pinned and nothing splits K (no split-K, no stream-K). The M and N
tiles change no bits and follow the batch. Humming's own batch-invariant schedule moves the K tile with M.
Weights are repacked once per version into the layout the kernel reads; the packed tensors are the op's arguments.
"""

# T = packed tokens, k = top-k slots, E = experts, N = out features, K = in features, F = expert width, H = expert input

import functools
import json
import threading

import torch
from torch import Tensor

from vllm_forward_bridge.ops.launch import kernel_form
from vllm_forward_bridge.ops.triton_combine import relu_squared
from vllm_forward_bridge.vllm_symbols import humming, symbol

TILE_K = 64
TILE_N = 128
_SMALL_TILE_M, _LARGE_TILE_M = 16, 64
_ROWS_PER_EXPERT_FOR_LARGE_TILE = 12
_MOST_ROWS = 1 << 30
BLOCK = 16
"""Values that share a block scale; packed codes have one row for as many in features."""


def packed_features(num_features: int) -> int:
    """Return N rounded up to whole N tiles: the rows of a packed weight."""
    return -(-num_features // TILE_N) * TILE_N


def pack_nvfp4(codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Lay NVFP4 bytes out as Humming reads them; N is padded with zero rows to whole tiles.

    Args:
        codes: uint8 [..., N, K/2], low nibble first, CUDA; a leading dim is the experts.
        block_scale: e4m3fn [..., N, K/16].

    Returns:
        (int32 [..., K/16, 2 * N'], e4m3fn [..., K/16, N']), N' = `packed_features(N)`.

    Raises:
        ValueError: K is not a multiple of the K tile.
        RuntimeError: called from another thread than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"weights were packed in thread {threading.current_thread().name!r}; only the main thread is accepted, "
            "since Humming's repacking kernels refuse any other: update weights from there"
        )
    K = codes.shape[-1] * 2
    if K % TILE_K:
        raise ValueError(
            f"an NVFP4 weight has K = {K}; the CUDA forward takes multiples of {TILE_K}, its fixed K tile, which no "
            "split may cut. Keep this layer in another format on the GPU"
        )
    dtypes = humming("dtypes:float4e2m1"), humming("dtypes:bfloat16")
    rows = packed_features(codes.shape[-2]) - codes.shape[-2]
    words = torch.nn.functional.pad(codes, (0, 0, 0, rows)).contiguous().view(torch.int32)
    scale = torch.nn.functional.pad(block_scale.view(torch.uint8), (0, 0, 0, rows))
    packed = symbol("prepare_humming_weight")(words, b_dtype=dtypes[0], a_dtype=dtypes[1], use_wgmma=True, packed=True)
    packed_scale = symbol("prepare_humming_weight_scale")(scale, to_apply_on_c=False)
    return packed, packed_scale.view(torch.float8_e4m3fn)


def is_packed(codes: Tensor) -> bool:
    """Tell packed weights from a checkpoint's plain bytes."""
    return codes.dtype == torch.int32


def nvfp4_linear(
    x_TK: Tensor, packed: Tensor, packed_scale: Tensor, global_scale: Tensor, weight_NK: Tensor | None = None,
    num_features: int = 0,
) -> Tensor:  # fmt: skip
    """Return bf16(sum_k x_k * (code * block_scale)_k * global_scale), fp32 accumulation over K tiles in order."""
    _require_packed("nvfp4_linear", packed)
    x_TK = kernel_form(x_TK)
    num_features = num_features or packed_scale.shape[-1]
    T, K = x_TK.shape
    if not T:
        return x_TK.new_empty(0, num_features)
    return _gemm(
        x_TK, packed, packed_scale, global_scale.reshape(1),
        layer=_layer(packed_scale.shape[-1], num_features, K, 0),
        compute=_compute("dense"),
        tuning=_tuning(_SMALL_TILE_M if T <= _SMALL_TILE_M else _LARGE_TILE_M),
    )  # fmt: skip


def _require_packed(op: str, *codes: Tensor) -> None:
    plain = [tensor for tensor in codes if not is_packed(tensor)]
    if plain:
        raise ValueError(
            f"{op} on CUDA was given codes of {plain[0].dtype} {tuple(plain[0].shape)}; packed int32 codes are "
            "accepted, the layout that the kernel reads: pass the result of operands.nvfp4_operands, once a version"
        )


def moe_experts(
    x_TH: Tensor, expert_ids_Tk: Tensor,
    fc1_packed: Tensor, fc1_packed_scale: Tensor, fc1_global_scale_E: Tensor,
    fc2_packed: Tensor, fc2_packed_scale: Tensor, fc2_global_scale_E: Tensor,
    fc1_weight_EFH: Tensor | None = None, fc2_weight_EHF: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return rows_TkH, each (token, slot) through its expert, and the first GEMM's rows TkF; zero where the id is -1.

    Args:
        x_TH: bf16.
        expert_ids_Tk: int64, -1 for a slot that is not computed here.
        fc1_packed: int32 [E, H/16, 2 F'].
        fc1_packed_scale: e4m3fn [E, H/16, F'].
        fc1_global_scale_E: fp32.
        fc2_packed: int32 [E, F/16, 2 H'].
        fc2_packed_scale: e4m3fn [E, F/16, H'].
        fc2_global_scale_E: fp32.
        fc1_weight_EFH: master; the forward never reads it.
        fc2_weight_EHF: master; the forward never reads it.
    """
    _require_packed("moe_experts", fc1_packed, fc2_packed)
    x_TH = kernel_form(x_TH)
    (T, H), top_k, E = x_TH.shape, expert_ids_Tk.shape[1], fc1_packed.shape[0]
    F = fc2_packed.shape[1] * BLOCK
    inner, rows = (torch.zeros(T * top_k, width, dtype=x_TH.dtype, device=x_TH.device) for width in (F, H))
    if not T:
        return rows.view(0, top_k, H), inner.view(0, top_k, F)
    tile = _SMALL_TILE_M if T * top_k <= _ROWS_PER_EXPERT_FOR_LARGE_TILE * E else _LARGE_TILE_M
    routing = _sorted_by_expert(expert_ids_Tk, tile, E)
    compute, tuning = _compute("indexed"), _tuning(tile)
    _gemm(
        x_TH, fc1_packed, fc1_packed_scale, fc1_global_scale_E,
        layer=_layer(fc1_packed_scale.shape[-1], F, H, E), compute=compute, tuning=tuning, outputs=inner, top_k=top_k,
        **routing,
    )  # fmt: skip
    _gemm(
        relu_squared(inner), fc2_packed, fc2_packed_scale, fc2_global_scale_E,
        layer=_layer(fc2_packed_scale.shape[-1], H, F, E), compute=compute, tuning=tuning, outputs=rows, **routing,
    )  # fmt: skip
    return rows.view(T, top_k, H), inner.view(T, top_k, F)


def _gemm(inputs, weight, weight_scale, global_scale, *, layer, compute, tuning, **rest) -> Tensor:
    return symbol("humming_gemm")(
        layer_config=layer, compute_config=compute, tuning_config=tuning,
        inputs=inputs, weight=weight, weight_scale=weight_scale, global_scale=global_scale, **rest,
    )  # fmt: skip


def _sorted_by_expert(expert_ids_Tk: Tensor, tile: int, num_experts: int) -> dict[str, Tensor]:
    """Group (token, slot) rows by expert in blocks of one M tile; the order inside an expert changes no bits."""
    ids = torch.where(expert_ids_Tk < 0, num_experts, expert_ids_Tk).int()
    most = ids.numel() + (num_experts + 1) * (tile - 1)
    new = functools.partial(torch.empty, dtype=torch.int32, device=ids.device)
    routing = {"sorted_ids": new(most), "expert_ids": new(-(-most // tile)), "num_tokens_padded": new(1)}
    symbol("moe_align_block_size")(
        ids, num_experts + 1, tile, *routing.values(), _local_experts(num_experts, ids.device)
    )
    return routing


@functools.cache
def _local_experts(num_experts: int, device: torch.device) -> Tensor:
    """Map expert ids to themselves, and the id after the last to "not here"."""
    table = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    table[num_experts] = -1
    return table


@functools.cache
def _layer(packed_rows: int, num_features: int, in_features: int, num_experts: int) -> str:
    return json.dumps({
        "shape_n": packed_rows, "pad_shape_n": packed_rows - num_features, "shape_k": in_features, "pad_shape_k": 0,
        "num_experts": num_experts, "a_dtype": "bfloat16", "b_dtype": "float4e2m1", "c_dtype": "bfloat16",
        "bs_dtype": "float8e4m3", "weight_scale_group_size": BLOCK, "weight_scale_type": "group_tensor",
        "mma_type": "wgmma",
    })  # fmt: skip


@functools.cache
def _compute(gemm_type: str) -> str:
    return json.dumps({"gemm_type": gemm_type, "use_f16_accum": False})


@functools.cache
def _tuning(tile_m: int) -> str:
    # bits: only the K tile and the absence of split-K and stream-K decide the order of the sum.
    tiles = {
        "block_shape": [tile_m, TILE_N, TILE_K], "warp_shape": [tile_m, 32, TILE_K],
        "use_stream_k": False, "num_stages": 4,
    }  # fmt: skip
    # A list of one candidate for every number of rows: given as a plain dict, Humming loads a kernel only if the
    # thread that meets it first is the main one, and fails in any other.
    return json.dumps([[0, _MOST_ROWS, tiles]])


def tiles() -> str:
    """Describe the tiles in use, for a run's record."""
    return f"Humming, K {TILE_K}, N {TILE_N}, M {_SMALL_TILE_M} or {_LARGE_TILE_M}, no split-K, no stream-K"
