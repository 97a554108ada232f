# SPDX-License-Identifier: Apache-2.0
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_forward_bridge.checkpoint import make_tiny_checkpoint, open_repository
from vllm_forward_bridge.checkpoint.megatron_keys import CARRIED, chunk_units
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.quantization import e4m3_scale, fp8_quantize, nvfp4_dequantize, nvfp4_quantize

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="nvidia-modelopt is not installed: pip install -e '.[modelopt]'",
)


def weights():
    g = torch.Generator().manual_seed(7)
    plain = torch.randn(24, 64, generator=g)
    holes = torch.randn(8, 128, generator=g) * 0.02
    holes[0, :16] = 0.0
    holes[1, 0] = -1e-7
    holes[2, 16:32] *= 2.0**-14
    return {"plain": plain.bfloat16(), "holes": holes.bfloat16(), "fp32": torch.randn(8, 32, generator=g) * 30}


@pytest.fixture(scope="module")
def modelopt(tmp_path_factory):
    """Return what nvidia-modelopt makes of `weights()`, and the names that its exporter gives to Megatron's modules."""
    folder = tmp_path_factory.mktemp("modelopt")
    torch.save(weights(), folder / "weights.pt")
    program = Path(__file__).parent / "modelopt_formats.py"
    command = [sys.executable, str(program), str(folder / "weights.pt"), str(folder / "results.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("rule", ["448", "256"])
@pytest.mark.parametrize("name", sorted(weights()))
def test_nvfp4_bytes_equal_modelopt(modelopt, name, rule):
    want = modelopt["weights"][name][rule]
    got = nvfp4_quantize(weights()[name], four_over_six=rule == "256")
    assert_same_bits(got.global_scale, want["global_scale"].reshape(()), f"{rule} global scale of {name}")
    assert_same_bits(got.block_scale, want["block_scale"], f"{rule} block scales of {name}")
    assert_same_bits(got.codes, want["codes"], f"{rule} codes of {name}")


@pytest.mark.parametrize("name", sorted(weights()))
def test_nvfp4_values_close_to_modelopt(modelopt, name):
    want = modelopt["weights"][name]["448"]["value"]
    got = nvfp4_dequantize(nvfp4_quantize(weights()[name], four_over_six=False), torch.float32)
    # ModelOpt rounds block_scale * global_scale and then the product with the code; here only the last product rounds.
    assert ((got - want).abs() <= want.abs() * 2.0**-23).all()
    assert want.abs().sum() > 0


@pytest.mark.parametrize("name", sorted(weights()))
def test_fp8_bytes_equal_modelopt(modelopt, name):
    want = modelopt["weights"][name]["fp8"]
    scale = e4m3_scale(weights()[name].abs().amax())
    assert_same_bits(scale, want["weight_scale"].reshape(()), f"scale of {name}")
    assert_same_bits(fp8_quantize(weights()[name], scale), want["codes"], f"codes of {name}")


# Where a Megatron module stands in a key, and the rule of ModelOpt's exporter for it; the layer's number is left out.
MODELOPT_RULES = {
    "embedding.word_embeddings": "word_embeddings", "decoder.final_norm": "final_norm", "output_layer": "output_layer",
    "mixer.in_proj.layer_norm": "fused_norm", "mixer.in_proj": "in_proj", "mixer.out_proj": "out_proj",
    "mixer.conv1d": "conv1d", "mixer.norm": "mixer_norm", "mixer.A_log": "A_log", "mixer.D": "D",
    "mixer.dt_bias": "dt_bias", "self_attention.linear_qkv.layer_norm": "fused_norm",
    "self_attention.linear_qkv": "linear_qkv", "self_attention.linear_proj": "linear_proj",
    "self_attention.core_attention": "core_attention", "pre_mlp_layernorm": "pre_mlp_layernorm", "mlp.router": "router",
    "mlp.experts.experts.linear_fc1": "experts.linear_fc1", "mlp.experts.experts.linear_fc2": "experts.linear_fc2",
    "mlp.shared_experts.linear_fc1": "shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2": "shared_experts.linear_fc2",
    "mlp.fc1_latent_proj": "fc1_latent_proj", "mlp.fc2_latent_proj": "fc2_latent_proj",
}  # fmt: skip


@pytest.mark.parametrize("family", ["lightning_bf16", "lightning", "super_nvfp4"])
def test_hugging_face_names_of_megatron_modules_are_modelopts(modelopt, tmp_path, family):
    make_tiny_checkpoint(tmp_path / "hf", family=family)
    repository = open_repository(tmp_path / "hf")
    used = set()
    for chunks in chunk_units(repository.config, repository.table).values():
        for chunk in (chunk for chunk in chunks if not chunk.key.startswith(CARRIED)):
            place = next(place for place in MODELOPT_RULES if place in chunk.key)
            used.add(MODELOPT_RULES[place])
            pattern = (
                re.escape(modelopt["names"][MODELOPT_RULES[place]])
                .replace(r"\{\{\}\}", r"\d+")
                .replace(r"\{\}", r"\d+")
            )
            for run in chunk.runs:
                assert re.match(pattern, run.name), (chunk.key, run.name)
                layers = [re.search(r"layers\.(\d+)", name) for name in (chunk.key, run.name)]
                assert [m and m[1] for m in layers][0] == [m and m[1] for m in layers][1], (chunk.key, run.name)
    missing = set(MODELOPT_RULES.values()) - used
    assert missing <= {"fc1_latent_proj", "fc2_latent_proj", "core_attention"}
