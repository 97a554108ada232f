# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from edited_repository import edit_repository

from vllm_forward_bridge.checkpoint import make_tiny_checkpoint, open_repository

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def convert():
    return tool("convert_checkpoint").main


@pytest.fixture(scope="module")
def folder(tmp_path_factory, convert):
    path = tmp_path_factory.mktemp("cli")
    make_tiny_checkpoint(path / "hf")
    assert convert(["to-megatron", str(path / "hf"), str(path / "megatron"), "--layout", "tp=2,ep=8,pp=5"]) == 0
    assert convert(["to-hf", str(path / "megatron"), str(path / "back")]) == 0
    return path


def test_cli_verify_and_diff_of_a_round_trip_are_same(folder, convert, capsys):
    for command in (("verify", "hf", "back"), ("verify", "hf", "megatron"), ("diff", "megatron", "hf")):
        assert convert([command[0], *(str(folder / name) for name in command[1:])]) == 0
        assert capsys.readouterr().out == "same: 182 tensors, 4224604 bytes compared\n"


def test_cli_verify_says_what_differs(folder, convert, tmp_path, capsys):
    name = "backbone.norm_f.weight"
    norm = open_repository(folder / "hf").fetch(name).clone()
    norm[0] = 2.0
    other = str(edit_repository(folder / "hf", tmp_path / "other", tensors={name: norm}))
    assert convert(["verify", str(folder / "hf"), other]) == 1
    out = capsys.readouterr().out
    assert out.startswith("different: 182 tensors")
    assert f"bytes: {name}: 1 of 192 elements differ, most at [0]" in out
    assert convert(["verify", str(folder / "hf"), other, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["same"] is False
    assert name in [d["name"] for d in report["differences"]]
    assert convert(["diff", str(folder / "megatron"), other]) == 1


def test_cli_dry_run_writes_nothing(folder, convert, tmp_path, capsys):
    target = tmp_path / "new"
    assert convert(["to-megatron", str(folder / "hf"), str(target), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tensors": 135, "num_bytes": 8076892, "reused_bytes": 0}
    assert list(tmp_path.iterdir()) == []


def test_cli_misuse_is_two_with_the_reason(folder, convert, tmp_path, capsys):
    assert convert(["to-megatron", str(folder / "hf"), str(folder / "megatron")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert convert(["to-megatron", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 2
    assert "config.json" in capsys.readouterr().err
    assert convert(["to-megatron", str(folder / "hf"), str(tmp_path / "new"), "--layout", "tp=3,ep=5"]) == 2
    message = capsys.readouterr().err
    assert "n_groups is 2, tp is 3" in message
    assert "n_routed_experts is 8, ep is 5" in message
    assert convert(["verify", str(folder / "hf"), str(tmp_path)]) == 2
    for wrong in (["to-megatron"], ["frobnicate"], ["to-megatron", "a", "b", "--layout", "tp=0"]):
        with pytest.raises(SystemExit) as error:
            convert(wrong)
        assert error.value.code == 2


def test_cli_workers_must_be_at_least_one(convert, capsys):
    for text in ("0", "-1", "many"):
        with pytest.raises(SystemExit) as error:
            convert(["to-hf", "a", "b", f"--workers={text}"])
        assert error.value.code == 2
        assert f"argument --workers: '{text}' was given; a number of at least 1 is needed" in capsys.readouterr().err


def test_cli_help_has_a_real_example(convert, capsys):
    with pytest.raises(SystemExit) as error:
        convert(["--help"])
    assert error.value.code == 0
    out = capsys.readouterr().out
    assert "convert_checkpoint.py to-megatron NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4" in out
    assert "Exit status: 0 done" in out


@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_cli_inspect_describes_both_kinds(folder, convert, capsys, kind):
    assert convert(["inspect", str(folder / kind), "--json", "--scales"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layers"], report["mtp"], report["tensors"]) == ("MEM*E", {"depths": 1, "layers": "*E"}, 182)
    assert report["scale_rules"]["rules"] == {"FP8": {"calibrated": 4}, "W4A16_NVFP4": {"256 (four-over-six)": 37}}
    assert "backbone.layers.0.mixer.in_proj" in report["scale_rules"]["calibrated"]
    assert report["scalars"]["weight_scale_2"]["distinct"] == 37
    groups = {group["module"]: group for group in report["groups"]}
    experts = groups["backbone.layers.N.mixer.experts.E.up_proj"]
    assert (experts["format"], experts["tensors"]) == ("W4A16_NVFP4", 48)
    assert groups["backbone.layers.N.mixer.gate"]["format"] == "F32"
    assert groups["mtp.layers.N.eh_proj"]["leaves"] == {"weight BF16": [[192, 384]]}
    assert convert(["inspect", str(folder / kind)]) == 0
    assert "backbone.layers.N.mixer.experts.E.up_proj" in capsys.readouterr().out


def test_cli_inspect_tells_amax_derived_scales(convert, tmp_path, capsys):
    make_tiny_checkpoint(tmp_path / "nano", family="nano_nvfp4")
    make_tiny_checkpoint(tmp_path / "good")
    name = "backbone.layers.0.mixer.out_proj.weight"
    codes = open_repository(tmp_path / "good").fetch(name).view(torch.uint8).clone()
    codes[5, 5] = 0x7E
    edited = edit_repository(tmp_path / "good", tmp_path / "edited", tensors={name: codes.view(torch.float8_e4m3fn)})
    for path, want in (
        (tmp_path / "nano", {"NVFP4": {"448": 38}}),
        (edited, {"FP8": {"calibrated": 3, "amax / 448": 1}, "W4A16_NVFP4": {"256 (four-over-six)": 37}}),
    ):
        assert convert(["inspect", str(path), "--json", "--scales"]) == 0
        assert json.loads(capsys.readouterr().out)["scale_rules"]["rules"] == want


def test_make_tiny_checkpoint_tool(tmp_path, capsys):
    main = tool("make_tiny_checkpoint").main
    assert main([str(tmp_path / "tiny"), "--family", "nano_fp8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 150
    assert main([str(tmp_path / "tiny")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
