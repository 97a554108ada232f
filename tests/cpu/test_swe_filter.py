# SPDX-License-Identifier: Apache-2.0
"""Configuration files, the filter of problems, and the sampling pass it needs."""

import asyncio
import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from swe_workbench import RENDERER, TOKENIZER, PretendHost, bubblewrap, own_tasks

from examples.swe_bench_pro import filter_tasks
from examples.swe_bench_pro.agent.episode import Episode
from examples.swe_bench_pro.agent.prompts import Prompts
from examples.swe_bench_pro.config import AgentConfig, load_agent_config
from examples.swe_bench_pro.filter_tasks import GoldJournal, kept, run_gold
from examples.swe_bench_pro.sample_tasks import sample_all
from examples.swe_bench_pro.scripted import ScriptedEngine
from examples.swe_bench_pro.train.assemble import assemble_collector, make_renderer, run_name
from examples.swe_bench_pro.train.collect import KnownWeights
from examples.swe_bench_pro.train.journal import EpisodeJournal, Place
from megatron.vllm_forward.rl.settings import GrpoSettings
from vllm_forward_bridge.rollout.protocol import SamplingParams

CONFIGS = Path(filter_tasks.__file__).parent / "configs"


def test_example_configurations_are_valid():
    small = load_agent_config(CONFIGS / "cpu.toml")
    published = load_agent_config(CONFIGS / "published.toml")
    assert small.sandbox.kind == "bubblewrap"
    assert (published.tasks.source, published.sandbox.kind) == ("public", "modal")
    assert published.agent.context_tokens == 131072
    assert published.rule().reward("resolved", 50000) == 1.0


def test_configuration_lists_every_problem(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[sandbox]\nkind = "none"\nmemory_mib = "4"\n[agent]\nturn = 3\n[extra]\n')
    with pytest.raises(ValueError) as error:
        load_agent_config(path)
    for word in ("[extra] is not a table", "memory_mib is '4'", "turn is unknown"):
        assert word in str(error.value)
    path.write_text('[tasks]\nsource = "public"\n[sandbox]\nkind = "bubblewrap"\n[agent]\nturns = 0\n')
    with pytest.raises(ValueError) as error:
        load_agent_config(path)
    for word in ("scripts is empty", "live in images", "turns is 0", "folder is that of the own tasks"):
        assert word in str(error.value)


def test_small_vocabulary_covers_every_task():
    tasks = list(own_tasks().values())
    renderer = make_renderer(load_agent_config(CONFIGS / "cpu.toml"), tasks, Path(), 1280)
    for task in tasks:
        ids = renderer.prompt(Prompts().system, Prompts().task.format(statement=task.statement()))
        assert max(ids) < 1280
        assert len(ids) < 400


def test_gold_pass_goes_on_where_it_was_killed(tmp_path):
    host, tasks, config = bubblewrap(tmp_path), [own_tasks()["ledger"], own_tasks()["cache"]], AgentConfig()
    journal = GoldJournal(tmp_path / "gold.jsonl")
    asyncio.run(run_gold(tasks[:1], journal, host, config, times=1))
    journal.append(tasks[1].instance_id, 0, "sandbox_error", 1.0, "lost")
    with journal.path.open("a") as out:
        out.write('{"id": "torn')
    before = journal.outcomes()
    asyncio.run(run_gold(tasks, GoldJournal(journal.path), host, config, times=1))
    rows = [line for line in journal.path.read_text().splitlines() if '"resolved"' in line]
    assert before[tasks[0].instance_id] == {0: "resolved"}
    assert len(rows) == 2, "the finished run was not made again"
    assert journal.outcomes()[tasks[1].instance_id] == {0: "resolved"}


def test_keep_names_a_reason_for_every_problem(tmp_path):
    tasks = list(own_tasks().values())[:6]
    journal = GoldJournal(tmp_path / "gold.jsonl")
    gold = {
        0: ["resolved"] * 2,
        1: ["resolved", "unresolved"],
        2: ["unresolved"] * 2,
        3: ["resolved"] * 2,
        4: ["resolved"] * 2,
    }
    for number, outcomes in gold.items():
        for run, outcome in enumerate(outcomes):
            journal.append(tasks[number].instance_id, run, outcome, 1.0, "")
    base = {0: "RRUU", 1: "RRUU", 2: "RRUU", 3: "RRRR", 4: "UUUU", 5: "RRUU"}
    samples = sampled(tmp_path, tasks, base)
    result = kept(tasks, journal, samples, AgentConfig(), times=2, least=4)
    reasons = [result["problems"][task.instance_id]["reason"] for task in tasks]
    assert reasons == ["kept", "gold flickers", "gold fails", "always solved", "never solved", "gold runs missing"]
    assert result["ids"] == [tasks[0].instance_id]
    assert result["counts"]["kept"] == 1
    assert len(result["revisions"]["tasks_digest"]) == 16
    assert kept(tasks, journal, samples, AgentConfig(), times=2, least=5)["counts"]["samples missing"] >= 1


def sampled(folder, tasks, letters):
    """Write base episodes: R resolved, U unresolved."""
    journal = EpisodeJournal(folder / "episodes")
    for slot, ends in letters.items():
        for member, letter in enumerate(ends):
            outcome = {"R": "resolved", "U": "unresolved"}[letter]
            episode = Episode(name="x", instance_id=tasks[slot].instance_id, outcome=outcome)
            journal.append(1, Place(slot, 0, member), "base", episode)
    return EpisodeJournal(folder / "episodes")


def test_sampling_pass_meets_every_problem_once_and_resumes(tmp_path):
    tasks = list(own_tasks().values())
    limits = load_agent_config(CONFIGS / "cpu.toml")

    def made():
        settings = GrpoSettings(prompts_per_step=3, group_size=2, row_tokens=4096, sampling=SamplingParams(seed=1))
        return assemble_collector(
            limits, settings, KnownWeights(ScriptedEngine(TOKENIZER, lambda _: "no call"), "base"), folder=tmp_path,
            repository=Path(), vocab_size=1280, host=PretendHost(),
        )  # fmt: skip

    first = made()
    first.renderer = RENDERER
    first.collect = type(first.collect)(attempts=1)
    sample_all(first)
    counts = Counter(episode.instance_id for _, _, episode in first.journal.every())
    assert counts == {task.instance_id: 2 for task in tasks}
    again = made()
    again.renderer = RENDERER
    again.collect = first.collect
    sample_all(again)
    assert sum(1 for _ in again.journal.every()) == 16, "nothing was sampled twice"


def test_filter_tool_from_gold_to_kept_file(tmp_path):
    bubblewrap(tmp_path)
    source = (
        Path(filter_tasks.OWN) if hasattr(filter_tasks, "OWN") else Path(filter_tasks.__file__).parent / "own_tasks"
    )
    few = tmp_path / "tasks"
    few.mkdir()
    for name in ("run_script.sh", "parser.py", "ledger_split"):
        subprocess.run(["cp", "-r", str(source / name), str(few / name)], check=True)
    config = tmp_path / "run.toml"
    config.write_text(f'[tasks]\nfolder = "{few}"\n[sandbox]\nmemory_mib = 192\nprocesses = 48\n')
    folder = tmp_path / "filter"
    arguments = ["--swe-config", str(config), "--folder", str(folder)]
    assert filter_tasks.main(["gold", *arguments, "--times", "1"]) == 0
    sampled(tmp_path / "base", [own_tasks()["ledger"]], {0: "RU"})
    assert (
        filter_tasks.main(
            ["keep", *arguments, "--times", "1", "--samples", str(tmp_path / "base"), "--least-samples", "2"]
        )
        == 0
    )
    result = json.loads((folder / "kept.json").read_text())
    assert result["ids"] == [own_tasks()["ledger"].instance_id]
    config.write_text(config.read_text().replace("[sandbox]", f'keep = "{folder / "kept.json"}"\n[sandbox]'))
    assert [t.instance_id for t in load_agent_config(config).load_tasks(tmp_path / "again")] == result["ids"]
    assert filter_tasks.main(["keep", "--swe-config", str(tmp_path / "none.toml"), "--folder", str(folder)]) == 2


def test_run_name_is_of_the_folder(tmp_path):
    assert run_name(tmp_path / "a", 0) == run_name(tmp_path / "a", 0)
    assert run_name(tmp_path / "a", 0) != run_name(tmp_path / "b" / "a", 0)
    assert run_name(tmp_path / "run with spaces/", 1).startswith("run-with-spaces-")


def test_episode_must_fit_a_row(tmp_path):
    settings = GrpoSettings(prompts_per_step=1, group_size=2, row_tokens=512, sampling=SamplingParams())
    engine = KnownWeights(ScriptedEngine(TOKENIZER, lambda _: "x"), "base")
    with pytest.raises(ValueError, match="every episode must fit one row"):
        assemble_collector(
            AgentConfig(), settings, engine, folder=tmp_path, repository=Path(), vocab_size=1280, host=PretendHost()
        )
