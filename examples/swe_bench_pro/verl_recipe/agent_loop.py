# SPDX-License-Identifier: Apache-2.0
"""Our episode as verl's agent loop: verl's servers sample, everything else is the example's own."""

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from examples.swe_bench_pro.agent.episode import Episode, Workshop, run_episode
from examples.swe_bench_pro.agent.prompts import Prompts
from examples.swe_bench_pro.config import load_agent_config
from examples.swe_bench_pro.grade.patch import PatchTaker
from examples.swe_bench_pro.sandbox.choose import open_host
from examples.swe_bench_pro.train.assemble import make_renderer, run_name
from megatron.vllm_forward.rl.single_turn import request_seed
from vllm_forward_bridge.rollout.protocol import Completion, Request, SamplingParams
from vllm_forward_bridge.vllm_plugin.switch import SEED

NAME = "swe_bench_pro"
CONFIG_VARIABLE = "SWE_CONFIG_TOML"
FOLDER_VARIABLE = "SWE_FOLDER"
_numbers = itertools.count()


@register(NAME)
class SweAgentLoop(AgentLoopBase):
    """One episode; the data set's rows carry the instance id in `extra_info`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run the episode and return its flat ids, mask, logprobs and reward."""
        config, tasks, shop = self._opened()
        task = tasks[kwargs["extra_info"]["instance_id"]]
        number = next(_numbers)

        def sampling(turn: int, max_new_tokens: int) -> SamplingParams:
            return SamplingParams(
                temperature=sampling_params.get("temperature", 1.0),
                top_p=sampling_params.get("top_p", 1.0),
                top_k=max(sampling_params.get("top_k", 0), 0),
                seed=request_seed(os.getpid(), number, turn),
                max_new_tokens=max_new_tokens,
                stop_token_ids=shop.renderer.stop_token_ids,
            )

        episode = await run_episode(shop, task, f"v{os.getpid()}-{number}", self._sample, sampling)
        return as_output(episode, config.rule().reward(episode.outcome, len(episode.stream)))

    async def _sample(self, request: Request) -> Completion:
        sampling = request.sampling
        given = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
            "max_tokens": sampling.max_new_tokens, "stop_token_ids": list(sampling.stop_token_ids), "ignore_eos": True,
            # verl reads this as a switch, and passes the rest on to vLLM.
            "logprobs": True,
            # Of the bridged sampler; vLLM's own seed would make a generator with a state.
            "extra_args": {SEED: sampling.seed},
        }  # fmt: skip
        done = await self.server_manager.generate(
            request.request_id, prompt_ids=list(request.prompt_ids), sampling_params=given
        )
        return completion_of(request, done.token_ids, done.log_probs)

    def _opened(self) -> tuple:
        if not hasattr(self, "_parts"):
            config, folder = load_agent_config(os.environ[CONFIG_VARIABLE]), Path(os.environ[FOLDER_VARIABLE])
            folder = folder / f"worker_{os.getpid()}"
            tasks = config.load_tasks(folder / "repositories")
            host = open_host(
                config.sandbox.kind, folder / "sandboxes", run_name=run_name(folder, 0), limits=config.sandbox.limits
            )
            repository = Path(self.config.actor_rollout_ref.model.path)
            shop = Workshop(
                host=host,
                renderer=make_renderer(config, tasks, repository, len(self.tokenizer)),
                patches=PatchTaker(folder / "bases"),
                limits=config.agent,
                prompts=Prompts(),
                graders=asyncio.Semaphore(config.collect.gradings),
            )
            self._parts = (config, {task.instance_id: task for task in tasks}, shop)
        return self._parts


def completion_of(request: Request, token_ids: list[int], log_probs: list[float] | None) -> Completion:
    """Return verl's output as a completion.

    Raises:
        RuntimeError: there are no logprobs; `calculate_log_probs` must be on.
    """
    if log_probs is None or len(log_probs) != len(token_ids):
        raise RuntimeError(
            "verl returned no logprob for each token; set actor_rollout_ref.rollout.calculate_log_probs=True, the "
            "parity check needs them"
        )
    # verl does not say what computed a token; a turn's first one comes from a prefill.
    phases = tuple("prefill" if at == 0 else "decode" for at in range(len(token_ids)))
    stopped = bool(token_ids) and token_ids[-1] in request.sampling.stop_token_ids
    return Completion(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        token_ids=tuple(token_ids),
        logprobs=tuple(log_probs),
        phases=phases,
        finish_reason="stop" if stopped else "length",
        weight_version=0,
    )


def as_output(episode: Episode, reward: float) -> AgentLoopOutput:
    """Return an episode in verl's form: everything after the first prompt is the response."""
    stream = episode.stream
    start = stream.turns.index(1) if 1 in stream.turns else len(stream)
    mask = [int(own) for own in stream.sampled[start:]]
    return AgentLoopOutput(
        prompt_ids=stream.token_ids[:start],
        response_ids=stream.token_ids[start:],
        response_mask=mask,
        response_logprobs=[value if own else 0.0 for value, own in zip(stream.logprobs[start:], mask, strict=True)],
        reward_score=reward,
        num_turns=episode.turns,
        metrics=AgentLoopMetrics(tool_calls=episode.sandbox_seconds),
        extra_fields={"outcome": episode.outcome, "instance_id": episode.instance_id},
    )
