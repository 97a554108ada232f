# SPDX-License-Identifier: Apache-2.0
"""What a bridged engine refuses: everything that no test has proven, all violations in one error."""

from collections.abc import Iterator
from typing import Any

from vllm_forward_bridge.vllm_plugin.switch import ARCHITECTURE, ARGUMENTS, KEY, is_on, package_digest

_MULTIPLE_OF = 128


def refuse_unproven(vllm_config: Any) -> None:
    """Raise unless this engine runs exactly what the proofs cover.

    Raises:
        ValueError: lists every violation.
    """
    problems = [*_switch_problems(vllm_config), *_value_problems(vllm_config)]
    if problems:
        raise ValueError("this vLLM engine is outside the bridge's contract:\n  - " + "\n  - ".join(problems))


def _switch_problems(vllm_config: Any) -> Iterator[str]:
    if not is_on(vllm_config.additional_config):
        yield f"additional_config lacks {KEY!r}; the bridged worker runs only in an engine that was switched on"
        return
    given = vllm_config.additional_config[KEY].get("digest")
    if given != package_digest():
        yield (
            f"the engine was configured by code with digest {given!r}, this process runs {package_digest()!r}; one "
            "code in every process is needed: install the same package everywhere"
        )


def _value_problems(vllm_config: Any) -> Iterator[str]:
    for name, found, accepted, why in _facts(vllm_config):
        if found not in accepted:
            wanted = " or ".join(map(repr, accepted))
            yield f"{name} is {found!r}; accepted is {wanted}, because {why}"


def _facts(vllm_config: Any) -> Iterator[tuple[str, Any, tuple, str]]:
    """Yield (what, value found, values accepted, why)."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    compilation = vllm_config.compilation_config
    yield "architecture", model.architecture, (ARCHITECTURE,), "only its forward is bridged"
    yield "dtype", str(model.dtype), ("torch.bfloat16",), "every op is defined on bf16"
    yield "runner_type", model.runner_type, ("generate",), "pooling has no proof"
    for name in ("tensor", "pipeline", "data", "prefill_context", "decode_context"):
        size = getattr(parallel, f"{name}_parallel_size")
        yield f"{name}_parallel_size", size, (1,), "the rollout's layout is part of the contract and only 1 is proven"
    yield "enable_expert_parallel", parallel.enable_expert_parallel, (False,), "its combine adds per rank, not by slot"
    yield "enable_eplb", parallel.enable_eplb, (False,), "physical expert ids would reach the router"
    yield "enable_dbo", parallel.enable_dbo, (False,), "micro-batches are not proven"
    yield "worker_cls", parallel.worker_cls, (ARGUMENTS["worker_cls"],), "another worker has another sampler"
    yield "speculative_config", vllm_config.speculative_config, (None,), "rejected tokens would have to be unwound"
    yield "lora_config", vllm_config.lora_config, (None,), "adapters are outside the deployment bytes"
    yield "kv_transfer_config", vllm_config.kv_transfer_config, (None,), "moved caches are not proven"
    yield "use_v2_model_runner", vllm_config.use_v2_model_runner, (False,), "it has its own sampler and logprob kernel"
    yield "async_scheduling", scheduler.async_scheduling, (False,), "positions of sampled tokens are read on the host"
    yield "enable_prefix_caching", cache.enable_prefix_caching, (False,), "a hit inside a chunk has no boundary state"
    yield "mamba_cache_mode", cache.mamba_cache_mode, ("none",), "states are kept for one position only"
    yield "kv cache dtype", cache.cache_dtype, ("bfloat16",), "pages hold e4m3 code values as bf16"
    yield "calculate_kv_scales", cache.calculate_kv_scales, (False,), "the checkpoint's scales are the contract"
    yield "logprobs_mode", model.logprobs_mode, ("processed_logprobs",), "tokens are scored as they were drawn"
    yield "max_logprobs", model.max_logprobs, (0,), "only the sampled token's logprob is computed"
    processors = [str(p) for p in model.logits_processors or ()]
    yield "logits_processors", processors, (ARGUMENTS["logits_processors"],), "others would change the distribution"
    yield "enforce_eager", model.enforce_eager, (True,), "captured graphs are not proven yet"
    yield (
        "compilation mode",
        getattr(compilation.mode, "name", compilation.mode),
        ("NONE",),
        "fused kernels round elsewhere",
    )


def page_problem(page_tokens: int) -> str:
    """Say why pages of this size are refused, or return an empty string."""
    if page_tokens % _MULTIPLE_OF == 0:
        return ""
    return (
        f"attention pages hold {page_tokens} tokens; multiples of {_MULTIPLE_OF}, the key tile of the attention "
        "kernel, are accepted. Leave block_size at its default"
    )
