# SPDX-License-Identifier: Apache-2.0
"""Run Megatron-LM's own RL script on this rollout: the points that it hard-wires, replaced for the time of the program.

python -m megatron.vllm_forward.rl.upstream train_rl.py [its flags] --vllm-forward FILE.toml

Needs a Megatron-LM checkout on the path, since the wheel has no `megatron.rl`. Replaced are: (a) the inference
interface, (b) the weight push, (c) the registry of agents, which gets one more entry, and the log-softmax of chosen
tokens, without which the trainer's logprobs would not have the rollout's bits.
"""

import importlib
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.vllm_forward import versions, weights
from megatron.vllm_forward.arguments import given_file
from megatron.vllm_forward.launch import session
from megatron.vllm_forward.orphans import end_with_parent
from megatron.vllm_forward.patches import Patch, applied
from megatron.vllm_forward.rl.engines import open_rollout
from megatron.vllm_forward.rl.shared_engine import SharedEngine
from megatron.vllm_forward.rl.single_turn import request_seed
from vllm_forward_bridge.config import load
from vllm_forward_bridge.model_config import load_model_config
from vllm_forward_bridge.ops.logprob import logprob
from vllm_forward_bridge.rollout.protocol import Request, Rollout, SamplingParams

AGENT_NAME = "BridgedCodingAgent"
AGENT_TARGET = "examples.swe_bench_pro.upstream_agent:CodingAgent"
_UTILS = "megatron.rl.rl_utils"
_INTERFACE = "megatron.rl.inference.inference_interface"
_SERVER = "megatron.rl.server.api"
_REGISTRY = "megatron.rl.agent.registry"
_NEEDED_FIELDS = {"response", "token_ids", "prompt_length", "logprobs"}
_KNOWN_FIELDS = _NEEDED_FIELDS | {
    "raw_text", "finish_reason", "policy_epoch", "kv_cache_epoch", "num_evictions", "completion_id",
}  # fmt: skip


@dataclass(frozen=True)
class Upstream:
    """The parts of a Megatron-LM checkout that are touched."""

    utils: ModuleType
    interface: ModuleType
    server: ModuleType
    registry: ModuleType | None
    """None at the tag core_v0.19.0, whose environments name a class by its path."""


def find_upstream() -> Upstream:
    """Import the checkout's parts and check their contract.

    Raises:
        ModuleNotFoundError: there is no checkout on the path.
        RuntimeError: lists what is not as expected.
    """
    if importlib.util.find_spec("megatron.rl") is None:
        raise ModuleNotFoundError(
            "megatron.rl is not on the path: the megatron-core wheel does not ship it; put a Megatron-LM checkout at "
            "tag core_v0.19.0 on PYTHONPATH"
        )
    has_registry = importlib.util.find_spec(_REGISTRY) is not None
    upstream = Upstream(
        utils=importlib.import_module(_UTILS),
        interface=importlib.import_module(_INTERFACE),
        server=importlib.import_module(_SERVER),
        registry=importlib.import_module(_REGISTRY) if has_registry else None,
    )
    problems = contract_problems(upstream)
    if problems:
        raise RuntimeError("this Megatron-LM checkout is not one that is supported:\n  - " + "\n  - ".join(problems))
    return upstream


def contract_problems(upstream: Upstream) -> list[str]:
    """Return what the checkout lacks or has otherwise, in words."""
    problems = []
    for name, leading in (
        ("get_inference_interface", ("args", "loop", "model")),
        ("swap_model_weights", ()),
        ("selective_log_softmax", ("logits", "index")),
    ):
        found = getattr(upstream.utils, name, None)
        if found is None:
            problems.append(f"{_UTILS}.{name} does not exist")
        elif tuple(inspect.signature(found).parameters)[: len(leading)] != leading:
            problems.append(f"{_UTILS}.{name} takes {inspect.signature(found)}; {leading} first is expected")
    for module, names in (
        (
            upstream.interface,
            ("InferenceRequest", "InferenceResponse", "LLMChatMessage", "ReturnsRaw", "ReturnsTokens"),
        ),
        (upstream.server, ("InferenceServer",)),
    ):
        problems += [f"{module.__name__}.{name} does not exist" for name in names if not hasattr(module, name)]
    if upstream.registry is not None and not isinstance(getattr(upstream.registry, "AGENT_REGISTRY", None), dict):
        problems.append(f"{_REGISTRY}.AGENT_REGISTRY is not a dictionary of names")
    if hasattr(upstream.interface, "InferenceResponse"):
        fields = upstream.interface.InferenceResponse.model_fields
        problems += [f"InferenceResponse has no field {name}" for name in sorted(_NEEDED_FIELDS - set(fields))]
        unknown = {name for name, field in fields.items() if field.is_required()} - _KNOWN_FIELDS
        problems += [f"InferenceResponse needs {name}, which is not known here" for name in sorted(unknown)]
    return problems


@dataclass
class Served:
    """The engine behind the interface, and what it needs to answer chat requests."""

    engine: Rollout
    publish: Callable[[], None]
    """Hands newer weights to the engine; collective over the ranks."""
    encode: Callable[[list[dict[str, str]], list[dict] | None], list[int]]
    """Chat messages and tools to prompt ids."""
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    max_model_len: int
    epoch: int = 0
    requests: int = 0
    shared: SharedEngine | None = None
    """Between resume and suspend."""


def make_interface(upstream: Upstream, served: Served) -> Any:
    """Return an object of a class that upstream's agents accept, over an engine of ours."""
    api = upstream.interface

    class BridgedInterface(upstream.server.InferenceServer, api.ReturnsTokens, api.ReturnsRaw):
        """Upstream's interface over the bridged rollout."""

        @property
        def served(self) -> Served:
            """Return the engine's side, for an agent that keeps ids itself."""
            return served

        async def base_generate(self, request: Any) -> Any:
            return await _answer(api, served, request)

        @classmethod
        async def launch(cls, *_: Any, **__: Any) -> "BridgedInterface":
            return cls(**_server_fields(cls))

        async def resume(self) -> None:
            served.publish()
            served.shared = await SharedEngine(served.engine, _same_device()).__aenter__()

        async def suspend(self) -> None:
            if served.shared is not None:
                shared, served.shared = served.shared, None
                await shared.__aexit__(None, None, None)

        async def kill(self) -> None:
            await self.suspend()

        def set_generation_epoch(self, generation_epoch: int) -> None:
            served.epoch = generation_epoch

        def merge_global_request_ledgers(self, *_: Any, **__: Any) -> None:
            """Do nothing: one engine a rank keeps its own requests."""

    return BridgedInterface(**_server_fields(BridgedInterface))


def _server_fields(kind: Any) -> dict[str, Any]:
    """Return values for what upstream's server declares; nothing listens, so address and port are empty."""
    known = {"host": "", "port": 0, "env_server_host_port": ""}
    return {name: known[name] for name, field in kind.model_fields.items() if field.is_required() and name in known}


async def _answer(api: ModuleType, served: Served, request: Any) -> Any:
    if served.shared is None:
        raise RuntimeError("a request came while the engine is suspended; upstream resumes it before it collects")
    messages = [{"role": message.role, "content": message.content} for message in request.prompt]
    prompt = served.encode(messages, getattr(request, "tools", None))
    served.requests += 1
    sampling = request_sampling(served, request.generation_args, len(prompt))
    completion = await served.shared.sample(
        Request(request_id=f"upstream/{served.requests}", prompt_ids=tuple(prompt), sampling=sampling)
    )
    text = served.decode(completion.token_ids)
    values = {
        "response": api.LLMChatMessage(role="assistant", content=text),
        "raw_text": served.decode(prompt) + text,
        "token_ids": [*prompt, *completion.token_ids],
        "prompt_length": len(prompt),
        "logprobs": list(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "policy_epoch": [(0, served.epoch)],
        "kv_cache_epoch": [(0, served.epoch)],
        "num_evictions": 0,
        "completion_id": completion.request_id,
    }
    known = api.InferenceResponse.model_fields
    return api.InferenceResponse(**{name: value for name, value in values.items() if name in known})


def request_sampling(served: Served, given: Any, prompt_tokens: int) -> SamplingParams:
    """Read upstream's generation arguments; its top_p 0 and top_k -1 or 0 mean off."""
    room = served.max_model_len - prompt_tokens
    wanted = getattr(given, "max_tokens", None) or room
    top_k = getattr(given, "top_k", None) or 0
    return SamplingParams(
        temperature=served.sampling.temperature if given.temperature is None else given.temperature,
        top_p=getattr(given, "top_p", None) or 1.0,
        top_k=max(top_k, 0),
        seed=request_seed(served.sampling.seed, served.epoch, served.requests),
        max_new_tokens=max(1, min(wanted, room)),
        stop_token_ids=served.sampling.stop_token_ids,
    )


def _same_device() -> Callable[[], None]:
    if not torch.cuda.is_available():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


def chosen_logprob(logits: Tensor, index: Tensor) -> Tensor:
    """Return log-probabilities of chosen tokens by the rollout's own op, at temperature 1 without truncation.

    Args:
        logits: [..., V]; bf16, or fp32 that was bf16 and is given back without loss.
        index: int64 [...].
    """
    flat_TV = logits.reshape(-1, logits.shape[-1])
    bf16_TV = flat_TV.to(torch.bfloat16)
    if not torch.equal(bf16_TV.to(flat_TV.dtype), flat_TV):
        raise ValueError(
            "logits are not bf16 values; the output layer rounds to bf16, as the rollout's does: something behind it "
            "changed them, look for a logits processor or a softmax scale"
        )
    ones_T = torch.ones(len(flat_TV), dtype=torch.float32, device=logits.device)
    top_k_T = torch.zeros(len(flat_TV), dtype=torch.int32, device=logits.device)
    return logprob(bf16_TV.contiguous(), index.reshape(-1), ones_T, ones_T, top_k_T).reshape(index.shape)


@contextmanager
def installed(make_served: Callable[[Any, list[torch.nn.Module]], Served]) -> Iterator[None]:
    """Replace upstream's points until exit.

    Args:
        make_served: builds the engine from (args, model) at upstream's first rollout.
    """
    upstream = find_upstream()
    built: dict[str, Any] = {}

    def interface(found: Callable) -> Callable:
        def get_inference_interface(args: Any, loop: Any, model: Any) -> Any:
            if "interface" not in built:
                built["served"] = make_served(args, model)
                built["interface"] = make_interface(upstream, built["served"])
            return built["interface"]

        return get_inference_interface

    def push(found: Callable) -> Callable:
        def swap_model_weights(*_: Any, **__: Any) -> None:
            if "served" in built:
                built["served"].publish()

        return swap_model_weights

    patches = [
        Patch(_UTILS, "get_inference_interface", interface, ("args", "loop", "model")),
        Patch(_UTILS, "swap_model_weights", push),
        Patch(_UTILS, "selective_log_softmax", lambda found: chosen_logprob, ("logits", "index")),
    ]
    if upstream.registry is not None:
        patches.append(Patch(_REGISTRY, "AGENT_REGISTRY", lambda found: {**found, AGENT_NAME: AGENT_TARGET}))
    with applied(patches):
        yield


def serve_from_arguments(args: Any, model: list[torch.nn.Module]) -> Served:
    """Build what upstream's script needs from Megatron's arguments and the bridge's file."""
    bridge = load(args.vllm_forward)
    device = next(model[0].parameters()).device
    engine = open_rollout(
        model,
        bridge,
        load_model_config(bridge.model.repository),
        device,
        max_model_len=args.inference_max_seq_length,
        kv_cache_gib=getattr(args, "inference_dynamic_batching_buffer_size_gb", None) or 20.0,
    )

    def publish() -> None:
        version = versions.deployment_version(model)
        if engine.version != version:
            digest = weights.deployment_digest(model)
            engine.update_weights(weights.deployment_tensors(model), version=version, digest=digest)

    tokenizer = importlib.import_module("megatron.training.global_vars").get_tokenizer()
    stop = tuple(token for token in (getattr(tokenizer, "eod", None),) if token is not None)
    sampling = SamplingParams(temperature=args.rl_default_temperature, seed=args.seed, stop_token_ids=stop)
    return Served(
        engine=engine,
        publish=publish,
        encode=lambda messages, tools: list(
            tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        ),
        decode=tokenizer.detokenize,
        sampling=sampling,
        max_model_len=args.inference_max_seq_length,
    )


def main(argv: list[str]) -> None:
    """Run upstream's script with its own arguments, as if python had been given its path.

    Raises:
        SystemExit: no script or no `--vllm-forward` was given.
    """
    if not argv or argv[0].startswith("-") or given_file(argv[1:]) is None:
        raise SystemExit(
            f"given: {' '.join(argv) or 'nothing'}\n"
            "needed: python -m megatron.vllm_forward.rl.upstream train_rl.py [its flags] --vllm-forward FILE.toml"
        )
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    with applied([Patch("sys", "argv", lambda found: argv)]), session(), installed(serve_from_arguments):
        runpy.run_path(argv[0], run_name="__main__")


end_with_parent(__name__)

# The guard matters: Megatron's checkpoint writer starts a process that imports this file again.
if __name__ == "__main__":
    main(sys.argv[1:])
