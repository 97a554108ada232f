# SPDX-License-Identifier: Apache-2.0
"""What is outside the contract is refused at build time, all of it in one error, before anything is allocated."""

import argparse
import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vllm_forward import arguments, baseline, bridged, launch
from megatron.vllm_forward.__main__ import main
from megatron.vllm_forward.bridge import make_bridge
from megatron.vllm_forward.limits import check_build
from megatron.vllm_forward.patches import Patch, applied
from vllm_forward_bridge.checkpoint.tiny import make_tiny_checkpoint
from vllm_forward_bridge.config import BridgeConfig, ModelSection
from vllm_forward_bridge.model_config import QuantizationMap


@pytest.fixture(scope="module")
def bridge(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "repository"
    make_tiny_checkpoint(path)
    return make_bridge(BridgeConfig(model=ModelSection(repository=str(path))))


def settings(model, **changes):
    """Return what a TransformerConfig of this geometry holds, with some fields changed."""
    values = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    geometry = {
        "hidden_size": model.hidden_size, "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads, "kv_channels": model.head_dim,
        "num_moe_experts": model.n_routed_experts, "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size, "layernorm_epsilon": model.norm_eps,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "params_dtype": torch.bfloat16, "hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False,
        "gradient_accumulation_fusion": False, "moe_aux_loss_coeff": 0.0, "cuda_graph_impl": "none", "fp8": None,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **geometry, **changes})


def test_a_build_inside_the_contract_passes(bridge):
    check_build(bridge, settings(bridge.model), 1280, {"hybrid_layer_pattern": "ME|M*E"})


def test_every_violation_is_listed_at_once(bridge):
    wrong = settings(
        bridge.model, params_dtype=torch.float32, hidden_dropout=0.1, tensor_model_parallel_size=3, fp8="e4m3",
        expert_tensor_parallel_size=3,
        moe_permute_fusion=True, expert_model_parallel_size=3, context_parallel_size=4, hidden_size=256,
        recompute_granularity="selective", recompute_modules=["moe", "layernorm"],
    )  # fmt: skip
    keywords = {"hybrid_layer_pattern": "MEM-E/ME", "position_embedding_type": "rope"}
    with pytest.raises(ValueError, match="outside the contract") as raised:
        check_build(bridge, wrong, 1408, keywords)
    expected = (
        "params_dtype is torch.float32", "hidden_dropout is 0.1", "expert_tensor_parallel_size is 3", "fp8 is 'e4m3'",
        "moe_permute_fusion is True", "'layernorm'", "hidden_size is 256", "vocab_size is 1408", "'MEM-E/ME'", "'rope'",
        "8 experts do not divide by expert_model_parallel_size 3", "sequence_parallel is False",
        "tensor_model_parallel_size is 3 and context_parallel_size 4", "16 mamba heads do not divide by 12 ranks",
        "2 mamba groups do not divide by 12 ranks",
        "2 KV heads do not divide by 3 ranks", "1280 rows of the vocabulary do", "256 shared-expert channels do not",
    )  # fmt: skip
    assert [part for part in expected if part not in str(raised.value)] == []
    assert str(raised.value).count("\n  - ") == len(expected)


def test_a_format_without_a_kernel_is_named_with_its_module(bridge):
    formats = {**bridge.model.quantization.formats, "backbone.layers.3.mixer.q_proj": "FP8", "lm_head": "NVFP4"}
    formats["backbone.layers.1.mixer.experts.5.up_proj"] = "FP8"
    quantization = QuantizationMap(formats=formats, kv_cache=None)
    model = dataclasses.replace(bridge.model, quantization=quantization)
    with pytest.raises(ValueError, match="outside the contract") as raised:
        check_build(dataclasses.replace(bridge, model=model), settings(model), 1280, {"hybrid_layer_pattern": "MEM*E"})
    for part in ("layers.3.mixer.q_proj has format FP8", "lm_head has format NVFP4", "experts.5.up_proj", "KV cache"):
        assert part in str(raised.value)


def test_a_spec_that_is_not_ours_says_how_to_start(bridge):
    with pytest.raises(ValueError, match=r"python -m megatron.vllm_forward SCRIPT --vllm-forward"):
        check_build(None, settings(bridge.model), 1280, {})


def test_patches_check_first_and_put_everything_back():
    owner = SimpleNamespace
    good = Patch("argparse", "Namespace", lambda found: owner)
    bad = [Patch("argparse", "NoSuchName", lambda found: None), Patch("shutil", "copy", lambda found: None, ("a", "b"))]
    before = argparse.Namespace
    refused = applied([good, *bad])
    with pytest.raises(RuntimeError, match=r"NoSuchName does not exist\n.*shutil.copy takes \(src, dst, ...\)"):
        refused.__enter__()
    assert argparse.Namespace is before
    with applied([good]):
        assert argparse.Namespace is owner
    assert argparse.Namespace is before


def test_another_megatron_is_refused(monkeypatch):
    launch.check_version()
    monkeypatch.setattr("megatron.core.__version__", "0.20.0")
    with pytest.raises(RuntimeError, match=r"0.20.0 was imported from .*pip install megatron-core==0.19.2"):
        launch.check_version()


def test_baseline_has_the_names_and_arguments_of_the_contract():
    ops = {name: op for name, op in vars(bridged).items() if not name.startswith("_")}
    assert len(ops) >= 14
    for name, op in ops.items():
        theirs = inspect.signature(getattr(baseline, name)).parameters
        # A custom op shows the signature of the function behind it.
        ours = inspect.signature(getattr(op, "_init_fn", op)).parameters
        required = [p.name for p in ours.values() if p.default is inspect.Parameter.empty]
        assert len(required) <= len(theirs) <= len(ours), name


@pytest.mark.parametrize("given", [[], ["--lr", "1"], ["script.py", "--lr", "1"]])
def test_without_script_or_flag_the_launcher_says_how_it_is_used(given):
    with pytest.raises(SystemExit, match="needed: python -m megatron.vllm_forward SCRIPT"):
        main(given)


def test_a_file_that_cannot_be_used_ends_the_launcher_with_the_reason(tmp_path):
    with pytest.raises(SystemExit, match=r"none.toml cannot be read \(No such file or directory\)"):
        main(["script.py", "--vllm-forward", str(tmp_path / "none.toml")])


def test_flags_of_the_geometry_are_found_whatever_else_is_given(bridge):
    flags = arguments.model_arguments(bridge.model)
    assert flags[flags.index("--hybrid-layer-pattern") + 1] == "MEM*E"
    assert flags[flags.index("--padded-vocab-size") + 1] == "1280"
    assert arguments.given_file(["--lr", "1", "--vllm-forward", "run.toml", "--bf16"]) == "run.toml"
    assert arguments.given_file(["--vllm-forward-like", "x"]) is None
