# SPDX-License-Identifier: Apache-2.0
"""The points of Megatron-LM's RL script that are replaced: on a small package of the same shape, and on a checkout."""

import asyncio
import importlib.util
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from megatron.vllm_forward.rl.upstream import (
    AGENT_NAME,
    Served,
    chosen_logprob,
    contract_problems,
    find_upstream,
    installed,
    main,
    request_sampling,
)
from vllm_forward_bridge.ops.logprob import logprob
from vllm_forward_bridge.parity.bits import assert_same_bits
from vllm_forward_bridge.rollout.protocol import Completion, SamplingParams

SHAPE = {
    "rl_utils.py": """
        def get_inference_interface(args, loop, model):
            raise AssertionError("the hard-wired engine was asked for")
        def swap_model_weights(src_model, target_model, refit_method):
            raise AssertionError("the hard-wired push was made")
        def selective_log_softmax(logits, index):
            return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    """,
    "inference/inference_interface.py": """
        from pydantic import BaseModel
        class LLMChatMessage(BaseModel):
            role: str
            content: str
        class Arguments(BaseModel):
            temperature: float | None = None
            top_p: float | None = None
            top_k: int | None = None
            max_tokens: int | None = None
        class InferenceRequest(BaseModel):
            prompt: list[LLMChatMessage]
            generation_args: Arguments = Arguments()
            tools: list[dict] | None = None
        class InferenceResponse(BaseModel):
            response: LLMChatMessage
            raw_text: str | None = None
            token_ids: list[int] | None = None
            prompt_length: int | None = None
            logprobs: list[float] | None = None
            policy_epoch: list[tuple[int, int]]
            kv_cache_epoch: list[tuple[int, int]]
            num_evictions: int
        class InferenceInterface(BaseModel):
            async def agenerate(self, request):
                return await self.base_generate(request)
        class ReturnsRaw(InferenceInterface): ...
        class ReturnsTokens(InferenceInterface): ...
    """,
    "server/api.py": """
        from pydantic import BaseModel
        class InferenceServer(BaseModel):
            host: str
            port: int
    """,
    "agent/registry.py": "AGENT_REGISTRY = {'CountdownAgent': 'examples.rl.countdown:CountdownAgent'}",
}


@pytest.fixture
def shape(tmp_path, monkeypatch):
    """Put a package of upstream's shape beside the installed megatron."""
    pytest.importorskip("pydantic", reason="upstream's RL needs pydantic: pip install pydantic")
    for name, text in SHAPE.items():
        path = tmp_path / "megatron" / "rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    import megatron

    before = set(sys.modules)
    monkeypatch.setattr(megatron, "__path__", [*megatron.__path__, str(tmp_path / "megatron")])
    yield
    for name in set(sys.modules) - before:
        if name.startswith("megatron.rl"):
            del sys.modules[name]
    if hasattr(megatron, "rl"):
        del megatron.rl


class TwoTokenEngine:
    """Answers every request by two tokens."""

    def __init__(self):
        self.version, self.requests = 1, []

    def add(self, request):
        self.requests.append(request)

    def has_unfinished(self):
        return bool(self.requests)

    def step(self):
        done, self.requests = self.requests, []
        return [
            Completion(
                request_id=r.request_id, prompt_ids=r.prompt_ids, token_ids=(104, 105), logprobs=(-0.5, -0.25),
                phases=("prefill", "decode"), finish_reason="stop", weight_version=self.version,
            )
            for r in done
        ]  # fmt: skip


def served_for(engine, published):
    return Served(
        engine=engine,
        publish=lambda: published.append(engine.version),
        encode=lambda messages, tools: list("".join(m["content"] for m in messages).encode()),
        decode=lambda ids: bytes(ids).decode(),
        sampling=SamplingParams(temperature=0.5, seed=4),
        max_model_len=64,
    )


@pytest.mark.usefixtures("shape")
def test_upstream_points_are_replaced_and_put_back():
    from megatron.rl import rl_utils
    from megatron.rl.agent import registry
    from megatron.rl.inference import inference_interface as api

    old = (rl_utils.get_inference_interface, rl_utils.swap_model_weights, rl_utils.selective_log_softmax)
    published, engine = [], TwoTokenEngine()
    with installed(lambda args, model: served_for(engine, published)):
        interface = rl_utils.get_inference_interface("args", "loop", ["model"])
        assert rl_utils.get_inference_interface("args", "loop", ["model"]) is interface
        assert isinstance(interface, api.ReturnsTokens)
        assert isinstance(interface, api.ReturnsRaw)
        assert registry.AGENT_REGISTRY[AGENT_NAME].endswith(":CodingAgent")
        assert "CountdownAgent" in registry.AGENT_REGISTRY
        rl_utils.swap_model_weights(["src"], ["dst"], "nccl")
        response = asyncio.run(answered(interface, api))
    assert published == [1, 1], "once by the push, once by the resume"
    assert response.token_ids == [*b"say", 104, 105]
    assert (response.prompt_length, response.logprobs) == (3, [-0.5, -0.25])
    assert (response.response.content, response.raw_text) == ("hi", "sayhi")
    assert response.policy_epoch == [(0, 7)]
    assert (rl_utils.get_inference_interface, rl_utils.swap_model_weights, rl_utils.selective_log_softmax) == old
    assert AGENT_NAME not in registry.AGENT_REGISTRY


async def answered(interface, api):
    interface.set_generation_epoch(7)
    request = api.InferenceRequest(prompt=[api.LLMChatMessage(role="user", content="say")])
    with pytest.raises(RuntimeError, match="suspended"):
        await interface.base_generate(request)
    await interface.resume()
    response = await interface.agenerate(request)
    await interface.suspend()
    await interface.kill()
    return response


@pytest.mark.usefixtures("shape")
def test_other_shapes_are_refused_with_every_problem():
    found = find_upstream()
    assert contract_problems(found) == []
    from megatron.rl import rl_utils

    del rl_utils.swap_model_weights
    rl_utils.selective_log_softmax = lambda values, where: None
    found.interface.InferenceResponse = type(
        "InferenceResponse", (found.interface.BaseModel,), {"__annotations__": {"sauce": str}}
    )
    problems = "\n".join(contract_problems(found))
    for word in ("swap_model_weights does not exist", "('logits', 'index') first", "no field token_ids", "needs sauce"):
        assert word in problems


def test_absent_checkout_is_named():
    if importlib.util.find_spec("megatron.rl") is not None:
        pytest.skip("a Megatron-LM checkout is on the path")
    with pytest.raises(ModuleNotFoundError, match="core_v0.19.0"):
        find_upstream()
    with pytest.raises(SystemExit, match="train_rl.py"):
        main(["train_rl.py"])


def test_contract_of_a_checkout():
    if importlib.util.find_spec("megatron.rl") is None:
        pytest.skip(
            "no megatron.rl: put a Megatron-LM checkout at tag core_v0.19.0 on PYTHONPATH to run this contract test"
        )
    assert contract_problems(find_upstream()) == []


def test_chosen_logprob_has_the_bits_of_the_op():
    generator = torch.Generator().manual_seed(3)
    logits_BSV = torch.randn(2, 3, 1500, generator=generator).to(torch.bfloat16)
    index_BS = torch.randint(0, 1500, (2, 3), generator=generator)
    ones, off = torch.ones(6), torch.zeros(6, dtype=torch.int32)
    want = logprob(logits_BSV.reshape(6, 1500), index_BS.reshape(6), ones, ones, off).reshape(2, 3)
    assert_same_bits(chosen_logprob(logits_BSV, index_BS), want, "bf16 logits")
    assert_same_bits(chosen_logprob(logits_BSV.float(), index_BS), want, "fp32 logits that were bf16")
    with pytest.raises(ValueError, match="not bf16 values"):
        chosen_logprob(logits_BSV.float() / 3, index_BS)


def test_generation_arguments_of_upstream_are_read():
    served = served_for(TwoTokenEngine(), [])
    given = SimpleNamespace(temperature=None, top_p=0.0, top_k=-1, max_tokens=None)
    read = request_sampling(served, given, prompt_tokens=60)
    assert (read.temperature, read.top_p, read.top_k, read.max_new_tokens) == (0.5, 1.0, 0, 4)
    given = SimpleNamespace(temperature=0.7, top_p=0.95, top_k=5, max_tokens=2)
    read = request_sampling(served, given, prompt_tokens=3)
    assert (read.temperature, read.top_p, read.top_k, read.max_new_tokens) == (0.7, 0.95, 5, 2)
