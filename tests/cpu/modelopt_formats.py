# SPDX-License-Identifier: Apache-2.0
"""Ask nvidia-modelopt for bytes of some weights and for its names; a program of its own, as the import takes long.

Usage: python modelopt_formats.py WEIGHTS.pt RESULTS.pt
"""

import sys
from types import SimpleNamespace

import torch

# modelopt imports a plugin for each of these that it finds; none is needed here.
for name in ("vllm", "transformers", "megatron", "diffusers", "accelerate", "peft"):
    sys.modules[name] = None

from modelopt.torch.export.plugins.mcore_nemotron import nemotron_h_causal_lm_export  # noqa: E402
from modelopt.torch.quantization.calib.mse import MseCalibrator  # noqa: E402
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor  # noqa: E402


def four_over_six(weight, choose):
    """Return bytes of ModelOpt's static path with the block maxima that its MSE calibrator chooses."""
    blocks = weight.float().view(-1, 16)
    amax, global_amax = blocks.abs().amax(dim=1, keepdim=True), weight.float().abs().amax()
    calibrator = MseCalibrator(
        amax, axis=0, step_size=0.5, start_multiplier=1.0, stop_multiplier=1.5,
        quant_func=lambda x, block_amax: choose(x, block_amax, global_amax),
    )  # fmt: skip
    calibrator.collect(blocks)
    quantizer = SimpleNamespace(
        block_sizes={-1: 16, "four_over_six": True}, _amax=calibrator.compute_amax(), global_amax=global_amax
    )
    scale, scale_2 = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, weight)
    stored, _, _ = NVFP4QTensor.quantize(weight.clone(), 16, scale, scale_2)
    return {"codes": stored._quantized_data, "block_scale": scale, "global_scale": scale_2}


def rounded(x, block_amax, global_amax):
    """Return what NVFP4 keeps of blocks with these maxima: ModelOpt's own scale cast, quantise and dequantise."""
    size = block_amax.float() / 6.0
    size[size == 0] = 1.0
    scale = NVFP4QTensor._cast_per_block_scale_to_fp8(size, global_amax / 6.0, 256.0)
    stored, _, _ = NVFP4QTensor.quantize(x.clone(), 16, scale, global_amax / 1536.0)
    return stored.dequantize(torch.float32, scale=scale, double_scale=global_amax / 1536.0, block_sizes={-1: 16})


weights = torch.load(sys.argv[1])
results = {}
for name, weight in weights.items():
    stored, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
    value = stored.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    fp8, fp8_scale = FP8QTensor.quantize(weight.float())
    results[name] = {
        "448": {"codes": stored._quantized_data, "block_scale": scale, "global_scale": scale_2, "value": value},
        "256": four_over_six(weight, rounded),
        "fp8": {"codes": fp8._quantized_data, "weight_scale": fp8_scale},
    }
names = {rule: mapping.target_name_or_prefix for rule, mapping in nemotron_h_causal_lm_export.items()}
torch.save({"weights": results, "names": names}, sys.argv[2])
