# SPDX-License-Identifier: Apache-2.0
"""Two recordings, one whole and one in pieces, are compared row by row, and the first differing op is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_forward_bridge import ops
from vllm_forward_bridge.parity.recorder import OpRecorder, compare_recordings

TOOL = Path(__file__).parents[2] / "tools" / "first_difference.py"
HIDDEN = 32


def two_layers(x_TH, *, flaw=0.0):
    """A model of three norms and two linears; the flaw touches the second layer's linear from position 4 on."""
    generator = torch.Generator().manual_seed(5)
    gain_H, *weights = (torch.randn(HIDDEN, HIDDEN, generator=generator).bfloat16() for _ in range(3))
    gain_H = gain_H[0].contiguous()
    y_TH = ops.rms_norm(x_TH, gain_H, 1e-5)
    residual_TH = x_TH
    for number, weight_HH in enumerate(weights):
        mixed_TH = ops.bf16_linear(y_TH, weight_HH + (flaw if number else 0.0))
        y_TH, residual_TH = ops.fused_add_rms_norm(mixed_TH, residual_TH, gain_H, 1e-5)
    return y_TH


def recordings(folder, *, flaw):
    """Record 2 samples of 6 rows: whole, and in pieces of 2 rows of both samples with a padding row."""
    x_RTH = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(6)).bfloat16()
    sample_RT = torch.arange(2)[:, None].expand(2, 6)
    position_RT = torch.arange(6).expand(2, 6)
    whole, pieces = OpRecorder(), OpRecorder()
    with whole.rows(sample_RT.flatten(), position_RT.flatten()):
        two_layers(x_RTH.flatten(0, 1))
    for start in range(0, 6, 2):
        cut = slice(start, start + 2)
        x_TH = torch.cat([x_RTH[:, cut].flatten(0, 1), torch.full((1, HIDDEN), float("nan")).bfloat16()])
        samples_T = torch.cat([sample_RT[:, cut].flatten(), torch.tensor([-1])])
        positions_T = torch.cat([position_RT[:, cut].flatten(), torch.tensor([0])])
        with pieces.rows(samples_T, positions_T):
            two_layers(x_TH, flaw=flaw if start == 4 else 0.0)
    whole.save(folder / "whole.safetensors")
    pieces.save(folder / "pieces.safetensors")
    return folder / "whole.safetensors", folder / "pieces.safetensors"


def run_tool(*arguments):
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


def test_pieces_and_whole_have_the_same_bits(tmp_path):
    points, lonely = compare_recordings(*recordings(tmp_path, flaw=0.0))
    names = [point.name for point in points]
    assert names == [
        "0.rms_norm.0", "0.bf16_linear.0", "1.fused_add_rms_norm.0.0", "1.fused_add_rms_norm.0.1",
        "1.bf16_linear.0", "2.fused_add_rms_norm.0.0", "2.fused_add_rms_norm.0.1",
    ]  # fmt: skip
    assert [point.common_rows for point in points] == [12] * 7
    assert [point.differing_rows for point in points] == [0] * 7
    assert lonely == []


def test_first_difference_names_layer_op_and_row(tmp_path):
    paths = recordings(tmp_path, flaw=1.0)
    points, _ = compare_recordings(*paths)
    first = next(point for point in points if point.differing_rows)
    assert (first.name, first.differing_rows, first.first) == ("1.bf16_linear.0", 4, (0, 4))
    told = run_tool(*paths)
    assert told.returncode == 1
    assert told.stdout.startswith("layer 1, bf16_linear, call 0: 4 of 12 rows")
    assert "sample 0, position 4" in told.stdout
    machine = run_tool(*paths, "--json")
    assert json.loads(machine.stdout)["first"]["name"] == "1.bf16_linear.0"


def test_first_difference_exit_status(tmp_path):
    whole, pieces = recordings(tmp_path, flaw=0.0)
    same = run_tool(whole, pieces)
    assert (same.returncode, same.stdout) == (0, "same bits at 7 points\n")
    assert run_tool(whole, tmp_path / "absent").returncode == 2


def test_recordings_without_a_common_row_are_refused(tmp_path):
    x_TH = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    for name, sample in (("left", 0), ("right", 1)):
        recorder = OpRecorder()
        with recorder.rows(torch.tensor([sample]), torch.tensor([0])):
            two_layers(x_TH)
        recorder.save(tmp_path / name)
    with pytest.raises(ValueError, match="share no row"):
        compare_recordings(tmp_path / "left", tmp_path / "right")
