# SPDX-License-Identifier: Apache-2.0
"""The example's programs around a run: picture, bench, scripted tool, and the files of the GPU run."""

import argparse
import asyncio
import json

import pytest
from swe_workbench import TOKENIZER, bubblewrap, own_tasks

from examples.swe_bench_pro import bench_sandbox, gpu_two_steps, report
from examples.swe_bench_pro.config import load_agent_config
from examples.swe_bench_pro.outcomes import OUTCOMES
from examples.swe_bench_pro.recorded import CountingRenderer, RecordedHost
from examples.swe_bench_pro.sandbox import bubblewrap as isolation
from examples.swe_bench_pro.train.collect import Collected
from examples.swe_bench_pro.train.numbers import LINE, agent_numbers
from megatron.vllm_forward.rl.layout import Layout
from vllm_forward_bridge.config import load
from vllm_forward_bridge.model_config import load_model_config


def record(step):
    base = {
        "step": step,
        "max": 0.0,
        "episodes": 8,
        "turns_mean": 3.0,
        "episode_tokens_mean": 400.0,
        "episode_tokens_max": 500,
    }
    return base | {f"outcome_{name}": int(name == "resolved") * 8 for name in OUTCOMES} | {"seconds_rollout": 1.0}


def test_every_outcome_has_a_place_in_the_picture(tmp_path):
    assert sorted(name for group in report.ALIKE.values() for name in group) == sorted(OUTCOMES)
    journal = tmp_path / "journal.jsonl"
    journal.write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2)))
    assert report.main([str(journal)]) == 0
    assert (tmp_path / "journal.png").read_bytes()[:4] == b"\x89PNG"
    journal.write_text("")
    assert report.main([str(journal)]) == 2


def test_numbers_of_a_step_without_episodes_are_finite():
    numbers = agent_numbers(Collected(), Layout())
    assert numbers["episodes"] == 0
    assert numbers["keep_rate"] == numbers["resolve_rate"] == 0.0
    filled = LINE.format(**numbers, step=1, mismatches=0, compared=0, tokens_per_s=0.0)
    assert filled.startswith("step 1: resolved 0.000 of 0 episodes")


def test_bench_measures_every_part(tmp_path, capsys):
    bubblewrap(tmp_path)
    assert bench_sandbox.main(["--at-once", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["median_ms"]) == {"start", "hide_history", "command", "read_project", "close", "grade"}
    assert min(found["median_ms"].values()) > 0


def test_scripted_tool_executes_nothing(tmp_path):
    touched = tmp_path / "touched"

    async def run():
        host = RecordedHost()
        sandbox = host.sandbox(own_tasks()["ledger"], "one")
        await sandbox.start()
        counted = await sandbox.execute("seq 1 3", seconds=1)
        other = await sandbox.execute(f"touch {touched}", seconds=1)
        await sandbox.close()
        return host.describe()["isolation"], counted.text, other.text, await host.sweep()

    isolation_text, counted, other, swept = asyncio.run(run())
    assert "no command is ever executed" in isolation_text
    assert (counted, other, swept) == ("1\n2\n3\n", "", 0)
    assert not touched.exists()
    renderer = CountingRenderer(TOKENIZER)
    renderer.longest = 50
    commands = {renderer.parse([token]).calls[0][1]["command"] for token in range(1000)}
    lengths = sorted(int(command.removeprefix("seq 1 ")) for command in commands)
    assert (lengths[0], lengths[-1]) == (20, 69)


def arguments(scale):
    return argparse.Namespace(
        scale=scale, problems=16, members=8, context=16384, turns=8, turn_tokens=512, row_tokens=32768, steps=2,
        kv_cache_gib=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("scale", "engine", "hidden"), [("wide", "vllm", 2688), ("tiny", "embedded", 192)])
def test_files_of_the_gpu_run_are_accepted(tmp_path, scale, engine, hidden):
    gpu_two_steps.write_files(tmp_path, arguments(scale))
    bridge, agent = load(tmp_path / "bridge.toml"), load_agent_config(tmp_path / "agent.toml")
    model = load_model_config(tmp_path / "model")
    assert bridge.rollout.engine == engine
    assert (model.hidden_size, model.layer_types) == (hidden, gpu_two_steps.LAYERS)
    assert agent.agent.context_tokens == 16384
    assert agent.rule().reward("steps", 10000) < 0, "lengths must give groups variance"


def test_gpu_run_falls_back_to_the_scripted_tool(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(isolation.shutil, "which", lambda program: None)
    host = gpu_two_steps.open_host(tmp_path)
    assert isinstance(host, RecordedHost)
    assert "no command is executed" in capsys.readouterr().err
