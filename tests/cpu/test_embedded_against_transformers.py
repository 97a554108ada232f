# SPDX-License-Identifier: Apache-2.0
"""The engine's wiring against a model that nobody here wrote: transformers' nemotron_h on dequantised weights.

Trainer and rollout agree on the bits; this says that what they compute is nemotron_h. transformers computes in fp32
without the contract's roundings, so logprobs are close, never equal.
"""

import dataclasses
import math

import pytest
import torch
from embedded_engines import PLAIN, engine, library_product, prompt, tiny_repository

from vllm_forward_bridge.quantization import Nvfp4Bytes, fp8_dequantize, nvfp4_dequantize
from vllm_forward_bridge.rollout.embedded.weights import Linear

transformers = pytest.importorskip("transformers", reason="transformers comes with the vllm extra")

WORDS = {"M": "mamba", "*": "attention", "E": "moe"}


def reference_model(config, tensors):
    """Return transformers' model in fp32 with dequantised weights."""
    values = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    for ours in ("layer_types", "mtp_layer_types", "num_nextn_predict_layers", "quantization", "norm_eps"):
        del values[ours]
    words = [WORDS[letter] for letter in config.layer_types]
    hf_config = transformers.NemotronHConfig(
        layers_block_type=words, layer_norm_epsilon=config.norm_eps, expand=2, use_mamba_kernels=False, **values
    )
    model = transformers.NemotronHForCausalLM(hf_config).float().eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # The checkpoint has no lower bound of dt, vLLM applies none; transformers takes another field for it.
            module.time_step_limit = (0.0, math.inf)
    model.load_state_dict({key: stored_weight(config, tensors, key) for key in model.state_dict()})
    return model


def stored_weight(config, tensors, key):
    """Return one parameter of the reference model from the tensors of the repository."""
    name = key.replace("model.", "backbone.", 1)
    if name.endswith(("experts.up_proj", "experts.down_proj")):
        module, _, proj = name.rpartition(".")
        parts = [f"{module}.{expert}.{proj}" for expert in range(config.n_routed_experts)]
        return torch.stack([dequantised(config, tensors, part) for part in parts])
    module, _, leaf = name.rpartition(".")
    return dequantised(config, tensors, module) if leaf == "weight" else tensors[name].float()


def dequantised(config, tensors, module):
    weight, kind = tensors[f"{module}.weight"], config.quantization.format_of(module)
    if kind == "BF16":
        return weight.float()
    scale = tensors[f"{module}.weight_scale"]
    if kind == "FP8":
        return fp8_dequantize(weight, scale, torch.float32)
    return nvfp4_dequantize(Nvfp4Bytes(weight, scale, tensors[f"{module}.weight_scale_2"]), torch.float32)


def test_logprobs_are_close_to_those_of_transformers(monkeypatch):
    # Activations of the FP8 linears are left unquantised on both sides: their 3 bits would hide smaller faults.
    monkeypatch.setattr(Linear, "__call__", library_product)
    config, tensors = tiny_repository()
    tokens = prompt(50, 3)
    (got,) = engine(num_kv_pages=8, token_budget=20).score([tokens], PLAIN)
    with torch.no_grad():
        logits_TV = reference_model(config, tensors)(torch.tensor([tokens])).logits[0, :-1]
    want = logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert want.std() > 0.2, "the tokens are about equally likely: this would compare nothing"
    # Logits are rounded to bf16, so one step at the largest is the size of an honest difference. The median, because a
    # rounding may flip an expert and move a token by much more.
    step = 2.0 ** (math.floor(math.log2(logits_TV.abs().max())) - 7)
    assert (got - want).abs().median() < step
