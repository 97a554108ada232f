# SPDX-License-Identifier: Apache-2.0
"""The agent's side of a run, from one TOML file; Megatron's own flags and the bridge's file stay what they are."""

import json
import tomllib
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from examples.swe_bench_pro.agent.episode import EpisodeLimits
from examples.swe_bench_pro.outcomes import MASKS, RewardRule
from examples.swe_bench_pro.sandbox.choose import KINDS
from examples.swe_bench_pro.sandbox.protocol import Limits
from examples.swe_bench_pro.tasks.columns import Task
from examples.swe_bench_pro.tasks.own import OWN_TASKS, load_folder
from examples.swe_bench_pro.tasks.public import public_tasks, read_offline, read_revision
from examples.swe_bench_pro.train.collect import CollectSettings


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """Where the problems come from."""

    source: str = "own"
    """`own`: the folder of small tasks; `public`: SWE-bench Pro."""
    folder: str = str(OWN_TASKS)
    """For `own`: the folder of tasks. For `public`: an offline folder of rows, or empty to download `revision`."""
    revision: str = ""
    """For `public` without a folder: the data set's commit."""
    scripts: str = ""
    """For `public`: a checkout of the benchmark's repository."""
    keep: str = ""
    """File of the filter tool; empty keeps all."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """How text becomes ids."""

    kind: str = "repository"
    """`repository`: tokenizer.json of the model's repository; `phrases`: a small vocabulary for small models."""
    template: bool = True
    """Render the first prompt by the repository's chat_template.jinja; False takes our own wording."""
    thinking: bool = True


@dataclass(frozen=True, kw_only=True)
class SandboxSection:
    """What isolates; the limits are those of `sandbox.protocol.Limits`, in whole MiB."""

    kind: str = "bubblewrap"
    memory_mib: int = 4096
    processes: int = 256
    output_mib: int = 32
    disk_mib: int = 4096
    lifetime_seconds: float = 7200.0

    @property
    def limits(self) -> Limits:
        """Return the limits in bytes."""
        return Limits(
            memory_bytes=self.memory_mib << 20,
            processes=self.processes,
            output_bytes=self.output_mib << 20,
            disk_bytes=self.disk_mib << 20,
            lifetime_seconds=self.lifetime_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """What an outcome is worth; see `outcomes.RewardRule`."""

    masked: str = "infrastructure"
    """Name of a list in `outcomes.MASKS`."""
    overlong_tokens: int = 0
    overlong_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """All choices of the agent's side. Build it with `load_agent_config`."""

    tasks: TaskSection = field(default_factory=TaskSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    agent: EpisodeLimits = field(default_factory=EpisodeLimits)
    collect: CollectSettings = field(default_factory=CollectSettings)
    reward: RewardSection = field(default_factory=RewardSection)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("the agent's configuration cannot be used:\n  - " + "\n  - ".join(problems))

    def rule(self) -> RewardRule:
        """Return the reward rule."""
        reward = self.reward
        return RewardRule(
            context_tokens=self.agent.context_tokens,
            overlong_tokens=reward.overlong_tokens,
            overlong_penalty=reward.overlong_penalty,
            masked=MASKS[reward.masked],
        )

    def load_tasks(self, folder: Path) -> list[Task]:
        """Return the problems in the run's order; repositories of own tasks are built under `folder`."""
        section = self.tasks
        kept = None
        if section.keep:
            kept = set(json.loads(Path(section.keep).read_text())["ids"])
        if section.source == "own":
            tasks = load_folder(Path(section.folder), folder)
            return [task for task in tasks if kept is None or task.instance_id in kept]
        rows = read_offline(Path(section.folder)) if section.folder else read_revision(section.revision)
        return public_tasks(rows, Path(section.scripts), only=kept)


def load_agent_config(path: str | Path) -> AgentConfig:
    """Read the TOML file.

    Raises:
        ValueError: lists every unknown table and key, wrong type and forbidden value.
    """
    tables = tomllib.loads(Path(path).read_text())
    problems: list[str] = []
    hints = get_type_hints(AgentConfig)
    problems += [
        f"[{name}] is not a table of this file; tables are {', '.join(hints)}" for name in tables if name not in hints
    ]
    sections = {name: _section(name, kind, tables.get(name, {}), problems) for name, kind in hints.items()}
    if problems:
        raise ValueError(f"{path}: the agent's configuration cannot be used:\n  - " + "\n  - ".join(problems))
    return AgentConfig(**sections)


def _section(name: str, kind: type, table: dict[str, Any], problems: list[str]) -> Any:
    hints = get_type_hints(kind)
    known = {entry.name for entry in fields(kind) if entry.default is not MISSING}
    values = {}
    for key, value in table.items():
        wanted = hints.get(key)
        if key not in known:
            problems.append(f"[{name}] {key} is unknown; keys are {', '.join(sorted(known))}")
        elif type(value) is not wanted and not (wanted is float and type(value) is int):
            problems.append(f"[{name}] {key} is {value!r}; {wanted.__name__} is needed")
        else:
            values[key] = value
    return kind(**values)


def _problems(config: AgentConfig) -> list[str]:
    problems = []
    choices = (
        ("tasks", "source", ("own", "public")),
        ("tokenizer", "kind", ("repository", "phrases")),
        ("sandbox", "kind", KINDS),
        ("reward", "masked", tuple(MASKS)),
    )
    for section, key, accepted in choices:
        value = getattr(getattr(config, section), key)
        if value not in accepted:
            problems.append(f"[{section}] {key} is {value!r}; accepted are {', '.join(accepted)}")
    for section in ("sandbox", "agent", "collect"):
        for name, value in vars(getattr(config, section)).items():
            if isinstance(value, int | float) and value < (0 if name == "retries" else 1):
                problems.append(f"[{section}] {name} is {value}; at least 1 is needed")
    if config.tasks.source == "public":
        if not config.tasks.scripts:
            problems.append(
                "[tasks] scripts is empty; name a checkout of the benchmark's repository, rows have no scripts"
            )
        if config.sandbox.kind == "bubblewrap":
            problems.append(
                "[sandbox] kind is bubblewrap with public tasks, which live in images; choose docker, podman or modal"
            )
    elif config.sandbox.kind != "bubblewrap":
        problems.append(
            f"[sandbox] kind is {config.sandbox.kind!r} with own tasks, which have no image; choose bubblewrap"
        )
    if config.tasks.source == "public" and config.tasks.folder == str(OWN_TASKS):
        problems.append(
            "[tasks] folder is that of the own tasks; name a folder of rows, or set it empty and give revision"
        )
    return problems
