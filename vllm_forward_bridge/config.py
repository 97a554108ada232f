# SPDX-License-Identifier: Apache-2.0
"""The bridge's one configuration: frozen, validated as a whole, read from TOML. Imports no torch."""

import dataclasses
import hashlib
import json
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from vllm_forward_bridge import __version__


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Where the geometry, the quantisation map and the deployment bytes come from."""

    repository: str
    """Folder with config.json and hf_quant_config.json; the weights are needed only by a run that starts from them."""
    four_over_six: bool = True
    """NVFP4 rule for retrained blocks: True for the 256 rule with four-over-six, False for the 448 rule."""


@dataclass(frozen=True, kw_only=True)
class ForwardSection:
    """What the trainer's forward runs."""

    mode: str = "bridged"
    """`bridged`: the rollout's ops on its bytes. `baseline`: ordinary kernels on dequantised bf16 weights."""
    attention_split_tokens: int = 2048
    """Keys a split; part of the numeric contract, equal on both sides."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at once in the trainer; changes memory, never bits."""


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """The engine that samples."""

    engine: str = "embedded"
    own_process: bool = False
    """The engine lives in a process of its own; weights reach it through shared memory."""
    visible_devices: str = ""
    """`CUDA_VISIBLE_DEVICES` of that process; empty: the trainer's."""
    max_num_seqs: int = 64
    token_budget: int = 256
    """Tokens a step at most; a longer prompt is prefilled in chunks."""
    kv_page_tokens: int = 16
    num_kv_pages: int = 4096


@dataclass(frozen=True, kw_only=True)
class GateSection:
    """What happens when trainer and rollout differ, and how a baseline run is corrected."""

    on_difference: str = "stop"
    correction: str = "none"
    correction_cap: float = 2.0
    """Cap of the importance ratio (TIS), or the largest one kept (MIS)."""
    router_replay: bool = False
    """R3: the trainer's router takes the rollout's expert choice. Baseline only: it would hide router faults."""
    old_logprob: str = "recompute"
    """`reuse` takes the rollout's logprob as the old one; allowed only for a certified configuration."""
    certificate: str = ""
    """File written by a run whose every step was zero; needed by `old_logprob = "reuse"`."""


@dataclass(frozen=True, kw_only=True)
class BridgeConfig:
    """All choices of one run. Build it with `load` or from the sections."""

    model: ModelSection
    forward: ForwardSection = field(default_factory=ForwardSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    gate: GateSection = field(default_factory=GateSection)

    def __post_init__(self) -> None:
        problems = _value_problems(self)
        if problems:
            raise ValueError("the bridge configuration is outside the contract:\n  - " + "\n  - ".join(problems))

    @property
    def digest(self) -> str:
        """Identify what may change bits: this package's version and every field but file locations."""
        content = dataclasses.asdict(self)
        del content["model"]["repository"], content["gate"]["certificate"]
        text = json.dumps({"version": __version__, **content}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(path: str | Path) -> BridgeConfig:
    """Read a TOML file into a BridgeConfig; relative folders in it are relative to the file.

    Raises:
        ValueError: the file cannot be read; or lists every unknown key, wrong type and forbidden value at once.
    """
    path = Path(path)
    tables = _read_tables(path)
    problems: list[str] = []
    sections = {}
    types = get_type_hints(BridgeConfig)
    for unknown in sorted(set(tables) - set(types)):
        tables_known = ", ".join(f"[{name}]" for name in types)
        problems.append(f"[{unknown}] is not a table of this file; tables are {tables_known}")
    for name, section in types.items():
        values = _checked_table(name, section, tables.get(name, {}), problems)
        for key in ("repository", "certificate"):
            if values.get(key) and not Path(values[key]).is_absolute():
                values[key] = str(path.parent / values[key])
        missing = [f.name for f in fields(section) if f.name not in values and _is_required(f)]
        # The stand-in never leaves this function; with it the other values are checked too.
        sections[name] = section(**values, **dict.fromkeys(missing, "missing"))
    problems += _value_problems(_Unchecked(**sections))
    if problems:
        raise ValueError(f"{path}: the bridge configuration is outside the contract:\n  - " + "\n  - ".join(problems))
    return BridgeConfig(**sections)


@dataclass(frozen=True, kw_only=True)
class _Unchecked:
    model: ModelSection
    forward: ForwardSection
    rollout: RolloutSection
    gate: GateSection


def _read_tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); a TOML file with at least [model] repository is needed: "
            "correct the path"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _is_required(entry: dataclasses.Field) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


def _checked_table(name: str, section: type, table: Any, problems: list[str]) -> dict[str, Any]:
    if not isinstance(table, dict):
        problems.append(f"{name} is {table!r}; a table [{name}] is needed")
        return {}
    hints = get_type_hints(section)
    good = {}
    for key, value in table.items():
        wanted = hints.get(key)
        if wanted is float and type(value) is int:
            value = float(value)
        if wanted is None:
            problems.append(f"[{name}] {key} is unknown; keys are {', '.join(hints)}")
        elif type(value) is not wanted:
            problems.append(f"[{name}] {key} is {value!r}; {wanted.__name__} is needed")
        else:
            good[key] = value
    lacking = [f.name for f in fields(section) if f.name not in table and _is_required(f)]
    problems += [f"[{name}] lacks {key}; it has no default" for key in lacking]
    return good


_CHOICES = {
    ("forward", "mode"): ("bridged", "baseline"),
    ("rollout", "engine"): ("embedded", "vllm"),
    ("gate", "on_difference"): ("stop", "correct"),
    ("gate", "correction"): ("none", "tis", "mis"),
    ("gate", "old_logprob"): ("recompute", "reuse"),
}
_POSITIVE = (
    ("forward", "attention_split_tokens"), ("forward", "logprob_chunk_tokens"), ("rollout", "max_num_seqs"),
    ("rollout", "token_budget"), ("rollout", "kv_page_tokens"), ("rollout", "num_kv_pages"),
)  # fmt: skip


def _value_problems(config: Any) -> list[str]:
    problems = []
    if not config.model.repository:
        problems.append("[model] repository is ''; the folder with config.json is needed, which gives the geometry")
    for (section, key), choices in _CHOICES.items():
        value = getattr(getattr(config, section), key)
        if value not in choices:
            problems.append(f"[{section}] {key} is {value!r}; accepted are {', '.join(map(repr, choices))}")
    for section, key in _POSITIVE:
        value = getattr(getattr(config, section), key)
        if value < 1:
            problems.append(f"[{section}] {key} is {value}; it must be at least 1")
    if config.rollout.visible_devices and not config.rollout.own_process:
        problems.append(
            f"[rollout] visible_devices is {config.rollout.visible_devices!r} without own_process; the trainer's "
            "process sees the trainer's GPUs: set own_process = true"
        )
    return problems + _gate_problems(config.gate, config.forward.mode == "baseline")


def _gate_problems(gate: GateSection, baseline: bool) -> list[str]:
    rules = (
        (
            # Not `< 1.0`, which nan would pass.
            not gate.correction_cap >= 1.0,
            f"correction_cap is {gate.correction_cap}; at least 1.0 is needed, since a ratio of exactly one must pass",
        ),
        (
            gate.router_replay and not baseline,
            "router_replay is on with mode 'bridged'; it would hide router faults: use it with mode 'baseline'",
        ),
        (
            gate.correction != "none" and gate.on_difference == "stop",
            f"correction is {gate.correction!r} but on_difference is 'stop'; set on_difference = 'correct'",
        ),
        (
            gate.old_logprob == "reuse" and not gate.certificate,
            "old_logprob is 'reuse' without certificate; run once with 'recompute' and name the file it wrote",
        ),
        (
            gate.old_logprob == "reuse" and baseline,
            "old_logprob is 'reuse' with mode 'baseline'; only the bridged forward can be certified",
        ),
    )
    return [f"[gate] {text}" for broken, text in rules if broken]
