# SPDX-License-Identifier: Apache-2.0
"""The gate fails closed, and a certificate holds only for the configuration that earned it."""

import dataclasses
import json
import re

import pytest

from vllm_forward_bridge.config import BridgeConfig, ForwardSection, GateSection, ModelSection
from vllm_forward_bridge.model_config import ModelConfig, QuantizationMap
from vllm_forward_bridge.parity.certificate import check_certificate, run_identity, write_certificate
from vllm_forward_bridge.parity.gate import Gate, ParityError
from vllm_forward_bridge.parity.metrics import compare_logprobs
from vllm_forward_bridge.rollout.protocol import SamplingParams

ZERO = compare_logprobs([(-1.0, -2.0)], [(-1.0, -2.0)])
DIFFERENT = compare_logprobs([(-1.0, -2.0)], [(-1.0, -2.5)], phases=[("prefill", "decode")])

SAMPLING = SamplingParams(seed=1)
BRIDGE = BridgeConfig(model=ModelSection(repository="somewhere"))
MODEL = ModelConfig(
    layer_types="M*E", hidden_size=64, vocab_size=128, norm_eps=1e-5, mamba_num_heads=4, mamba_head_dim=16, n_groups=2,
    ssm_state_size=16, conv_kernel=4, chunk_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
    routed_scaling_factor=2.5, quantization=QuantizationMap({"lm_head": "W4A16_NVFP4"}, "FP8"),
)  # fmt: skip


def identity(bridge=BRIDGE, model=MODEL, kernels=None, layout=None, sampling=SAMPLING):
    kernels, layout = kernels or {"rms_norm": "cpu"}, layout or {"data": 1}
    return run_identity(bridge, model, kernels=kernels, layout=layout, sampling=sampling)


def certified(path):
    gate = Gate()
    gate.check(ZERO, step=1)
    write_certificate(path, gate, identity())


def test_gate_stops_by_default_with_table_and_first_difference():
    gate = Gate()
    assert gate.check(ZERO, step=1).is_zero
    with pytest.raises(ParityError) as error:
        gate.check(DIFFERENT, step=2)
    message = str(error.value)
    assert "step 2: 1 of 2 sampled tokens" in message
    assert re.search(r"all +2 +1 +0 +5\.000e-01", message)
    assert "sample 0, sampled token 1, phase decode: rollout -2.0, trainer -2.5" in message
    assert error.value.metrics.mismatches == 1


def test_gate_goes_on_when_told_to_correct():
    gate = Gate(on_difference="correct")
    assert gate.check(DIFFERENT, step=1).mismatches == 1
    assert gate.check(ZERO, step=2).is_zero
    assert (gate.steps, gate.total.count, gate.total.mismatches) == (2, 4, 1)


@pytest.mark.parametrize("mode", ["stop", "correct"])
def test_gate_refuses_an_empty_comparison(mode):
    with pytest.raises(ParityError, match="no sampled token was compared"):
        Gate(on_difference=mode).check(compare_logprobs([], []), step=1)


def test_gate_rejects_other_modes():
    with pytest.raises(ValueError, match="on_difference is 'warn'"):
        Gate(on_difference="warn")


def test_certificate_lets_the_same_configuration_reuse(tmp_path):
    path = tmp_path / "runs" / "certificate.json"
    certified(path)
    reuse = dataclasses.replace(BRIDGE, gate=GateSection(old_logprob="reuse", certificate=str(path)))
    moved = dataclasses.replace(reuse, model=ModelSection(repository="elsewhere"))
    assert check_certificate(path, identity(reuse)) == 2
    assert check_certificate(path, identity(moved)) == 2
    assert check_certificate(path, identity(sampling=dataclasses.replace(SAMPLING, seed=2, max_new_tokens=99))) == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["certificate.json"]


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"bridge": dataclasses.replace(BRIDGE, forward=ForwardSection(attention_split_tokens=64))}, "config: "),
        ({"model": dataclasses.replace(MODEL, layer_types="M*EM")}, "geometry: certified"),
        ({"model": dataclasses.replace(MODEL, quantization=QuantizationMap())}, "geometry: certified"),
        ({"kernels": {"rms_norm": "other"}}, "kernels.rms_norm: certified 'cpu', this run 'other'"),
        ({"sampling": SamplingParams(top_p=0.9)}, "sampling.top_p: certified 1.0, this run 0.9"),
        ({"sampling": SamplingParams(top_k=20)}, "sampling.top_k: certified 0, this run 20"),
        ({"sampling": SamplingParams(temperature=0.5)}, "sampling.temperature: certified 1.0, this run 0.5"),
        ({"layout": {"data": 2}}, "layout.data: certified 1, this run 2"),
    ],
)
def test_certificate_is_refused_for_another_configuration(tmp_path, changed, part):
    path = tmp_path / "certificate.json"
    certified(path)
    with pytest.raises(ValueError, match=re.escape(part)):
        check_certificate(path, identity(**changed))


def test_certificate_is_refused_for_other_versions_and_lists_all(tmp_path):
    path = tmp_path / "certificate.json"
    certified(path)
    content = json.loads(path.read_text())
    content["versions"] |= {"torch": "1.0", "device": "abacus"}
    path.write_text(json.dumps(content | {"tokens": 0}))
    with pytest.raises(ValueError) as error:
        check_certificate(path, identity())
    parts = ("versions.torch: certified '1.0'", "versions.device: certified 'abacus'", "tokens is 0")
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(("text", "part"), [(None, "does not exist"), ("{", "not a JSON"), ("[1]", "not a JSON")])
def test_certificate_must_be_readable(tmp_path, text, part):
    path = tmp_path / "certificate.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=part):
        check_certificate(path, identity())


@pytest.mark.parametrize("steps", [(), (ZERO, DIFFERENT)])
def test_certificate_needs_steps_without_difference(tmp_path, steps):
    gate = Gate(on_difference="correct")
    for number, metrics in enumerate(steps):
        gate.check(metrics, step=number)
    with pytest.raises(RuntimeError, match="a certificate needs"):
        write_certificate(tmp_path / "certificate.json", gate, identity())
    assert list(tmp_path.iterdir()) == []
