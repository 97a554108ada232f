# SPDX-License-Identifier: Apache-2.0
"""Put the agent's side of a run together: tasks, sandboxes, renderer, journal, collector."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from examples.swe_bench_pro.agent.phrases import phrase_tokenizer
from examples.swe_bench_pro.agent.prompts import Prompts
from examples.swe_bench_pro.agent.renderer import NemotronRenderer
from examples.swe_bench_pro.agent.tokens import FileTokenizer, Tokenizer
from examples.swe_bench_pro.config import AgentConfig
from examples.swe_bench_pro.grade.patch import PatchTaker
from examples.swe_bench_pro.sandbox.choose import open_host
from examples.swe_bench_pro.sandbox.protocol import SandboxHost
from examples.swe_bench_pro.tasks.columns import Task
from examples.swe_bench_pro.train.collect import AgentCollector, KnownWeights
from examples.swe_bench_pro.train.journal import EpisodeJournal, safe_name
from megatron.vllm_forward.rl.settings import GrpoSettings


def assemble_collector(
    config: AgentConfig,
    settings: GrpoSettings,
    engine: KnownWeights,
    *,
    folder: Path,
    repository: Path,
    vocab_size: int,
    rank: int = 0,
    prepare_thread: Callable[[], None] = lambda: None,
    host: SandboxHost | None = None,
) -> AgentCollector:
    """Build the collector of one rank, and end what an earlier start of this run left.

    Args:
        config: the agent's side.
        settings: the GRPO choices.
        engine: this rank's.
        folder: of the run: journal, repositories, sandboxes. It names the run: two runs need two folders.
        repository: of the model, for tokenizer and template.
        vocab_size: of the model.
        rank: of this process.
        prepare_thread: see `SharedEngine`.
        host: None opens the configured kind.

    Raises:
        ValueError: an episode cannot fit a row, or there are no tasks.
        IsolationUnavailable: commands cannot be isolated here.
    """
    if config.agent.context_tokens - 1 > settings.row_tokens:
        raise ValueError(
            f"[agent] context_tokens is {config.agent.context_tokens}, a row holds {settings.row_tokens}: every "
            "episode must fit one row of the trainer, raise --seq-length or lower context_tokens"
        )
    tasks = config.load_tasks(folder / "repositories" / f"rank_{rank}")
    if not tasks:
        raise ValueError("there are no tasks; [tasks] keep may name none of the folder")
    if host is None:
        host = open_host(
            config.sandbox.kind, folder / "sandboxes", run_name=run_name(folder, rank), limits=config.sandbox.limits
        )
    asyncio.run(host.sweep())
    return AgentCollector(
        tasks=tasks,
        settings=settings,
        collect=config.collect,
        rule=config.rule(),
        engine=engine,
        journal=EpisodeJournal(folder / "episodes", rank=rank),
        host=host,
        renderer=make_renderer(config, tasks, repository, vocab_size),
        patches=PatchTaker(folder / "bases" / f"rank_{rank}"),
        limits=config.agent,
        prepare_thread=prepare_thread,
    )


def run_name(folder: Path, rank: int) -> str:
    """Return a name that the same folder and rank always get, fit for control groups and containers."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return f"{safe_name(folder.name)[:20]}-{digest}-r{rank}"


def make_renderer(config: AgentConfig, tasks: list[Task], repository: Path, vocab_size: int) -> NemotronRenderer:
    """Return the renderer of the configured tokenizer.

    Raises:
        ValueError: the tokenizer has ids that the model does not.
    """
    section = config.tokenizer
    tokenizer: Tokenizer
    if section.kind == "phrases":
        tokenizer = phrase_tokenizer(tasks, Prompts(), vocab_size=vocab_size)
        return NemotronRenderer(tokenizer, thinking=section.thinking)
    tokenizer = FileTokenizer(repository / "tokenizer.json")
    largest = max(tokenizer.specials.values())
    if largest >= vocab_size:
        raise ValueError(
            f"{repository}/tokenizer.json has id {largest}, the model has {vocab_size}: they do not belong together"
        )
    template = (repository / "chat_template.jinja").read_text() if section.template else None
    return NemotronRenderer(tokenizer, thinking=section.thinking, template=template)
