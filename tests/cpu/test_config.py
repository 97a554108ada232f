# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from vllm_forward_bridge import config


def write(tmp_path, text):
    path = tmp_path / "bridge.toml"
    path.write_text(text)
    return path


def refusal(path):
    with pytest.raises(ValueError) as error:
        config.load(path)
    return str(error.value)


def test_config_minimal_file_takes_defaults(tmp_path):
    loaded = config.load(write(tmp_path, '[model]\nrepository = "hf"\n'))
    assert loaded.model.repository == str(tmp_path / "hf")
    assert loaded.forward.mode == "bridged"
    assert loaded.gate.on_difference == "stop"


def test_config_rejects_everything_wrong_at_once(tmp_path):
    text = """
[model]
four_over_six = 1
[forward]
mode = "fast"
attention_split_tokens = 0
[rollout]
engin = "vllm"
[gate]
correction = "tis"
router_replay = true
[extra]
"""
    message = refusal(write(tmp_path, text))
    for part in ("four_over_six is 1", "lacks repository", "engin is unknown", "[extra]", "mode is 'fast'"):
        assert part in message
    for part in ("attention_split_tokens is 0", "correction is 'tis'", "router_replay is on"):
        assert part in message


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("[model]\nrepository = 5\n", ["[model] repository is 5; str is needed"]),
        ("model = 5\n", ["model is 5; a table [model] is needed"]),
        (
            '[model]\nrepository = ""\n',
            ["[model] repository is ''; the folder with config.json is needed, which gives the geometry"],
        ),
        (
            '[model]\nrepository = "hf"\n[gate]\ncorrection_cap = nan\n',
            ["[gate] correction_cap is nan; at least 1.0 is needed, since a ratio of exactly one must pass"],
        ),
    ],
    ids=["type of the repository", "table", "empty repository", "nan"],
)
def test_config_says_a_fault_once(tmp_path, text, problems):
    assert refusal(write(tmp_path, text)).splitlines()[1:] == [f"  - {problem}" for problem in problems]


def test_config_names_a_file_that_cannot_be_read(tmp_path):
    missing = tmp_path / "none.toml"
    assert refusal(missing).startswith(f"{missing} cannot be read (No such file or directory); a TOML file with")
    assert refusal(tmp_path).startswith(f"{tmp_path} cannot be read (Is a directory)")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert refusal(binary).startswith(f"{binary} is not valid TOML: ")


def test_config_reuse_needs_a_certificate():
    with pytest.raises(ValueError, match="without certificate"):
        config.BridgeConfig(model=config.ModelSection(repository="x"), gate=config.GateSection(old_logprob="reuse"))


def test_config_digest_ignores_places_and_sees_bits(tmp_path):
    def build(repository, split):
        forward = config.ForwardSection(attention_split_tokens=split)
        return config.BridgeConfig(model=config.ModelSection(repository=repository), forward=forward)

    assert build("a", 64).digest == build("b", 64).digest
    assert build("a", 64).digest != build("a", 128).digest


def test_config_imports_no_torch():
    code = "import sys, vllm_forward_bridge.config, vllm_forward_bridge.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
