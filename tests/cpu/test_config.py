# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from vllm_forward_bridge import config


def write(tmp_path, text):
    path = tmp_path / "bridge.toml"
    path.write_text(text)
    return path


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
    with pytest.raises(ValueError) as error:
        config.load(write(tmp_path, text))
    message = str(error.value)
    for part in ("four_over_six is 1", "lacks repository", "engin is unknown", "[extra]"):
        assert part in message
    forward, gate = text.index("[forward]"), text.index("[gate]")
    values = '[model]\nrepository = "x"\n' + text[forward : text.index("[rollout]")]
    values += text[gate : text.index("[extra]")]
    with pytest.raises(ValueError) as error:
        config.load(write(tmp_path, values))
    for part in ("mode is 'fast'", "attention_split_tokens is 0", "correction is 'tis'", "router_replay is on"):
        assert part in str(error.value)


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
