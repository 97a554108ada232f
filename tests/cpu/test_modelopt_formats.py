# SPDX-License-Identifier: Apache-2.0
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    """Return what nvidia-modelopt makes of `weights()`."""
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
    want = modelopt[name][rule]
    got = nvfp4_quantize(weights()[name], four_over_six=rule == "256")
    assert_same_bits(got.global_scale, want["global_scale"].reshape(()), f"{rule} global scale of {name}")
    assert_same_bits(got.block_scale, want["block_scale"], f"{rule} block scales of {name}")
    assert_same_bits(got.codes, want["codes"], f"{rule} codes of {name}")


@pytest.mark.parametrize("name", sorted(weights()))
def test_nvfp4_values_close_to_modelopt(modelopt, name):
    want = modelopt[name]["448"]["value"]
    got = nvfp4_dequantize(nvfp4_quantize(weights()[name], four_over_six=False), torch.float32)
    # ModelOpt rounds block_scale * global_scale and then the product with the code; here only the last product rounds.
    assert ((got - want).abs() <= want.abs() * 2.0**-23).all()
    assert want.abs().sum() > 0


@pytest.mark.parametrize("name", sorted(weights()))
def test_fp8_bytes_equal_modelopt(modelopt, name):
    want = modelopt[name]["fp8"]
    scale = e4m3_scale(weights()[name].abs().amax())
    assert_same_bits(scale, want["weight_scale"].reshape(()), f"scale of {name}")
    assert_same_bits(fp8_quantize(weights()[name], scale), want["codes"], f"codes of {name}")
