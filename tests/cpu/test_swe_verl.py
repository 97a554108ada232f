# SPDX-License-Identifier: Apache-2.0
"""The verl recipe's hooks against an installed verl; skipped by name where it is absent. No Ray cluster is started."""

import importlib.util
import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_forward_bridge.ops.logprob import logprob
from vllm_forward_bridge.parity.bits import assert_same_bits

RECIPE = Path(__file__).parents[2] / "examples" / "swe_bench_pro" / "verl_recipe"


def need_verl():
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is absent: pip install verl==0.9.1 in an environment of its own to run its smoke test")


def test_job_keeps_what_the_contract_needs():
    yaml = pytest.importorskip("yaml", reason="PyYAML is absent: pip install pyyaml")
    job = yaml.safe_load((RECIPE / "job.yaml").read_text())
    rollout = job["actor_rollout_ref"]["rollout"]
    assert job["actor_rollout_ref"]["actor"]["strategy"] == "megatron_bridged"
    assert (rollout["temperature"], rollout["top_p"], rollout["top_k"]) == (1.0, 1.0, -1)
    assert rollout["logprobs_mode"] == "processed_logprobs"
    assert rollout["calculate_log_probs"] is True
    assert rollout["tensor_model_parallel_size"] == 1
    assert (job["data"]["train_batch_size"], rollout["n"]) == (32, 8)
    assert job["data"]["max_prompt_length"] + job["data"]["max_response_length"] == 131072


def test_hooks_override_what_verl_has():
    need_verl()
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from examples.swe_bench_pro.verl_recipe.engine import STRATEGY, BridgedMegatronEngine

    assert EngineRegistry._engines["language_model"][STRATEGY]
    for name in ("_build_megatron_module", "_build_optimizer", "_build_lr_scheduler", "_lm_head_logits_processor"):
        ours, theirs = (
            inspect.signature(getattr(kind, name)) for kind in (BridgedMegatronEngine, MegatronEngineWithLMHead)
        )
        assert list(ours.parameters) == list(theirs.parameters), name
    assert "base_sync_done" in inspect.signature(MegatronEngineWithLMHead.get_per_tensor_param).parameters


def test_logprobs_of_the_actor_are_the_op():
    need_verl()
    from examples.swe_bench_pro.verl_recipe.engine import token_numbers

    logits_BSV = torch.randn(1, 4, 1100, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    label = torch.tensor([[3, 1000, 7, 0]])
    temperature = torch.tensor([[1.0, 0.7, 1.0, 0.0]])
    found = token_numbers(logits_BSV, label, temperature, with_entropy=True)
    ones, off = torch.ones(4), torch.zeros(4, dtype=torch.int32)
    want = logprob(logits_BSV[0], label[0], temperature[0], ones, off)
    assert_same_bits(found["log_probs"][0], want, "verl's logprobs")
    assert found["entropy"].shape == (1, 4)


def test_episode_in_verls_form():
    need_verl()
    from examples.swe_bench_pro.agent.episode import Episode
    from examples.swe_bench_pro.agent.stream import TokenStream
    from examples.swe_bench_pro.verl_recipe.agent_loop import as_output, completion_of
    from vllm_forward_bridge.rollout.protocol import Request, SamplingParams

    request = Request(request_id="a", prompt_ids=(1, 2, 3), sampling=SamplingParams(stop_token_ids=(9,)))
    stream = TokenStream()
    stream.append_context([1, 2, 3], turn=0)
    stream.append_completion(completion_of(request, [5, 9], [-0.5, -0.25]), turn=1)
    stream.append_context([7], turn=1)
    output = as_output(Episode(name="a", instance_id="i", outcome="resolved", stream=stream, turns=1), 1.0)
    assert (output.prompt_ids, output.response_ids, output.response_mask) == ([1, 2, 3], [5, 9, 7], [1, 1, 0])
    assert output.response_logprobs == [-0.5, -0.25, 0.0]
    assert not any(math.isnan(value) for value in output.response_logprobs)
    with pytest.raises(RuntimeError, match="calculate_log_probs"):
        completion_of(request, [5], None)


def test_megatron_flags_of_a_job():
    need_verl()
    from examples.swe_bench_pro.verl_recipe.engine import megatron_flags

    engine = SimpleNamespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=1, expert_model_parallel_size=4,
        context_parallel_size=1, use_distributed_optimizer=True, override_transformer_config={},
    )  # fmt: skip
    flags = megatron_flags(engine, SimpleNamespace(lr=1e-6, weight_decay=0.0, clip_grad=1.0))
    assert flags[flags.index("--expert-model-parallel-size") + 1] == "4"
    assert flags[flags.index("--expert-tensor-parallel-size") + 1] == "1"
    assert "--sequence-parallel" in flags
    assert "--use-distributed-optimizer" in flags
