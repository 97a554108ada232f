# SPDX-License-Identifier: Apache-2.0
"""The loop around a scripted policy: ids, masks, typed ends, 256 episodes at once, and what a killed run leaves."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from swe_workbench import (
    RENDERER,
    SMALL,
    SUBMIT,
    TOKENIZER,
    PretendHost,
    applying,
    bubblewrap,
    own_tasks,
    place_of,
    processes_with,
)

from examples.swe_bench_pro.agent.episode import EpisodeLimits
from examples.swe_bench_pro.agent.prompts import SHOWN_CHARACTERS, is_submission, observation
from examples.swe_bench_pro.agent.stream import TokenStream
from examples.swe_bench_pro.agent.tokens import encode_frame
from examples.swe_bench_pro.grade.patch import PatchTaker
from examples.swe_bench_pro.outcomes import RewardRule
from examples.swe_bench_pro.sandbox.protocol import Executed, SandboxError
from examples.swe_bench_pro.scripted import ScriptedEngine, call
from examples.swe_bench_pro.train.collect import AgentCollector, CollectSettings, KnownWeights
from examples.swe_bench_pro.train.journal import EpisodeJournal, Place
from examples.swe_bench_pro.train.lines import append_line, read_lines
from megatron.vllm_forward.rl.settings import GrpoSettings
from megatron.vllm_forward.rl.shared_engine import SharedEngine
from vllm_forward_bridge.rollout.protocol import Completion, Request, SamplingParams

BOMB = "bomb() { bomb | bomb & }; bomb; sleep 0.5"
LIMITS = EpisodeLimits(
    context_tokens=20000, turn_tokens=3000, turns=6, command_seconds=5, episode_seconds=60, grade_seconds=30
)


def collector(folder, script, host, tasks, *, members=2, prompts=1, limits=LIMITS, attempts=1, **options):
    settings = GrpoSettings(
        prompts_per_step=prompts, group_size=members, row_tokens=limits.context_tokens, sampling=SamplingParams(seed=3)
    )
    return AgentCollector(
        tasks=tasks,
        settings=settings,
        collect=CollectSettings(attempts=attempts, **options),
        rule=RewardRule(context_tokens=limits.context_tokens),
        engine=KnownWeights(ScriptedEngine(TOKENIZER, script), "digest-1"),
        journal=EpisodeJournal(folder / "episodes"),
        host=host,
        renderer=RENDERER,
        patches=PatchTaker(folder / "bases"),
        limits=limits,
    )


def script_of(*turns):
    """Return a script that says these turns to every member."""
    return lambda request: turns[place_of(request.request_id)[3] - 1]


def test_scripted_policy_through_everything(tmp_path):
    """Members of one group end in different ways; every id is accounted for."""
    task = own_tasks()["ledger"]
    mark = f"6{os.getpid()}"
    turns = {
        0: [call("cat ledger/split.py", "look first"), applying(task.patch), SUBMIT],
        1: [SUBMIT],
        2: [applying(task.patch.split("diff --git")[0] + "diff --git" + task.patch.split("diff --git")[1]), SUBMIT],
        3: ["no call", "still none</think>", "and again</think>x"],
        4: [call("ls")] * 6,
        5: [call(f"sleep {mark}"), call("yes | head -c 50000000"), call(BOMB), SUBMIT],
    }
    limits = EpisodeLimits(**{**vars(LIMITS), "command_seconds": 1.0})
    made = collector(
        tmp_path, lambda request: turns[place_of(request.request_id)[2]][place_of(request.request_id)[3] - 1],
        bubblewrap(tmp_path), [task], members=6, limits=limits,
    )  # fmt: skip
    trajectories = made(1, [0])
    episodes = {place.member: episode for _, place, episode in made.journal.every()}
    wanted = {0: "resolved", 1: "no_patch", 2: "unresolved", 3: "format", 4: "steps", 5: "no_patch"}
    assert {member: episode.outcome for member, episode in episodes.items()} == wanted
    assert [t.reward for t in trajectories] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert all(t.valid for t in trajectories)
    for trajectory, said in zip(trajectories, turns.values(), strict=True):
        drawn = [id_ for text in said for id_ in encode_frame(TOKENIZER, text + "<|im_end|>")]
        assert [id_ for id_, own in zip(trajectory.token_ids, trajectory.sampled, strict=True) if own] == drawn
        assert [not math.isnan(value) for value in trajectory.logprobs] == list(trajectory.sampled)
    assert "[ended after 1 s: it took too long]" in TOKENIZER.decode(episodes[5].stream.token_ids)
    assert "characters are left out" in TOKENIZER.decode(episodes[5].stream.token_ids)
    assert episodes[0].patch.count("diff --git") == 2
    assert processes_with(mark) == []
    assert not list((tmp_path / "sandboxes").iterdir())


def test_task_that_needs_several_turns(tmp_path):
    """What the layout is, only the program says: the second turn depends on the first one's output."""
    task = own_tasks()["wire"]
    seen = []

    def script(request):
        turn = place_of(request.request_id)[3]
        seen.append(TOKENIZER.decode(request.prompt_ids))
        return [call("python -m wire.describe item"), applying(task.patch), SUBMIT][turn - 1]

    made = collector(tmp_path, script, bubblewrap(tmp_path), [task])
    assert [t.reward for t in made(1, [0])] == [1.0, 1.0]
    assert all("width 11" not in text for text in seen if text.count("<tool_response>") == 0)
    assert any("width 11 right-aligned" in text for text in seen)


class Gathering(ScriptedEngine):
    """Holds back the first turn until 256 requests are there, so that fewer at one time would show."""

    deadline = math.inf

    def step(self):
        self.most_at_once = max(self.most_at_once, len(self._waiting))
        if self.most_at_once < 256 and time.monotonic() < self.deadline:
            time.sleep(0.001)
            return []
        return super().step()


def test_256_episodes_at_once(tmp_path):
    host = PretendHost()
    script = script_of(*[call("true", f"thought {n}") for n in range(6)])
    made = collector(tmp_path, script, host, list(own_tasks().values()), members=8, prompts=32)
    engine = Gathering(TOKENIZER, script)
    engine.deadline = time.monotonic() + 90
    made.engine = KnownWeights(engine, "digest-1")
    trajectories = made(1, list(range(32)))
    assert [episode.outcome for _, _, episode in made.journal.every()] == ["steps"] * 256
    assert len(trajectories) == 256
    assert host.most_open == 256
    assert host.open == 0
    assert engine.most_at_once == 256
    assert {sum(t.sampled) for t in trajectories} == {sum(trajectories[0].sampled)}


def test_number_of_episodes_at_once_is_bounded(tmp_path):
    host = PretendHost()
    made = collector(
        tmp_path, script_of(*[call("true")] * 6), host, list(own_tasks().values()), members=8, prompts=2, episodes=3
    )
    made(1, [0, 1])
    assert host.most_open == 3


def test_context_limit_ends_an_episode_and_is_never_passed(tmp_path):
    host = PretendHost(output=b"x" * 3000)
    limits = EpisodeLimits(**{**vars(LIMITS), "context_tokens": 4500, "turns": 50})
    made = collector(tmp_path, lambda _: call("cat x"), host, [own_tasks()["ledger"]], limits=limits)
    trajectories = made(1, [0])
    assert {episode.outcome for _, _, episode in made.journal.every()} == {"context"}
    assert all(len(t.token_ids) <= 4500 for t in trajectories)
    assert all(t.sampled[-1] for t in trajectories), "what nobody samples behind is not scored"


def test_wall_clock_limit_of_an_episode(tmp_path):
    class Slow(PretendHost):
        def sandbox(self, task, name):
            sandbox = super().sandbox(task, name)
            quick, calls = sandbox.execute, []

            async def execute(command, **options):
                calls.append(command)
                await asyncio.sleep(0 if len(calls) == 1 else 30)
                return await quick(command, **options)

            sandbox.execute = execute
            return sandbox

    limits = EpisodeLimits(**{**vars(LIMITS), "episode_seconds": 0.3})
    host = Slow()
    made = collector(tmp_path, lambda _: call("cat x"), host, [own_tasks()["ledger"]], limits=limits)
    begin = time.monotonic()
    assert all(t.valid and t.reward == 0 for t in made(1, [0]))
    assert time.monotonic() - begin < 10
    assert {episode.outcome for _, _, episode in made.journal.every()} == {"agent_timeout"}
    assert host.open == 0


def test_lost_sandbox_is_tried_again_and_then_leaves_the_group(tmp_path):
    class Flaky(PretendHost):
        started = 0

        def sandbox(self, task, name):
            sandbox = super().sandbox(task, name)
            if "-m0-" in name or "-m1-t0" in name:

                async def execute(command, **options):
                    raise SandboxError("machine lost")

                sandbox.execute = execute
            return sandbox

    host = Flaky()
    made = collector(tmp_path, script_of(*[call("true")] * 6), host, [own_tasks()["ledger"]], members=3)
    trajectories = made(1, [0])
    assert [t.valid for t in trajectories] == [False, True, True]
    outcomes = {place.member: episode.outcome for _, place, episode in made.journal.every()}
    assert outcomes == {0: "sandbox_error", 1: "steps", 2: "steps"}
    assert host.open == 0


def test_groups_without_variance_take_the_next_problem(tmp_path):
    host = bubblewrap(tmp_path)
    tasks = [own_tasks()["ledger"], own_tasks()["patterns"]]

    def script(request):
        _, attempt, member, turn = place_of(request.request_id)
        right = attempt == 1 and member == 0 and turn == 1
        return applying(made.problem(1, 0, attempt).patch) if right else SUBMIT

    made = collector(tmp_path, script, host, tasks, attempts=3)
    trajectories = made(1, [0])
    assert [t.reward for t in trajectories] == [1.0, 0.0]
    assert (made.last.groups, made.last.kept_groups) == (2, 1)
    attempts = {place.attempt: episode.instance_id for _, place, episode in made.journal.every()}
    assert set(attempts) == {0, 1}
    assert attempts[0] != attempts[1]


def test_stream_checks_what_the_engine_saw():
    stream = TokenStream()
    stream.append_context([5, 6], turn=0)
    done = {"request_id": "r", "token_ids": (7,), "logprobs": (-0.5,), "phases": ("prefill",), "finish_reason": "stop"}
    with pytest.raises(RuntimeError, match="ids must be the same"):
        stream.append_completion(Completion(prompt_ids=(5, 9), weight_version=1, **done), turn=1)
    stream.append_completion(Completion(prompt_ids=(5, 6), weight_version=4, **done), turn=1)
    stream.append_context([8, 9], turn=1)
    assert (stream.versions, stream.turns, stream.num_sampled) == ([-1, -1, 4, -1, -1], [0, 0, 1, 1, 1], 1)
    trajectory = stream.trajectory(group=0, member=0, reward=0.0, valid=True, weight_version=9)
    assert trajectory.token_ids == (5, 6, 7)
    assert trajectory.weight_version == 9
    again = TokenStream.from_record(json.loads(json.dumps(stream.to_record())))
    assert again.to_record() == stream.to_record()
    assert again.phases == ["", "", "prefill", "", ""]


class Dying(ScriptedEngine):
    """Fails in its first step, and has ended from then on."""

    dead = False

    def has_unfinished(self):
        if self.dead:
            raise RuntimeError("has_unfinished was called, but the rollout process has ended")
        return super().has_unfinished()

    def step(self):
        self.dead = True
        raise FloatingPointError("bad kernel")


class Stuck(ScriptedEngine):
    """Fails in its first step; its later ones do nothing, while it stays unfinished."""

    steps = 0

    def step(self):
        self.steps += 1
        if self.steps == 1:
            raise FloatingPointError("bad kernel")
        assert self.steps < 9, "an engine that failed was stepped again and again"
        return []


@pytest.mark.parametrize("failing", [Dying, Stuck])
def test_engine_that_fails_fails_every_waiting_episode(failing):
    async def run(answers):
        async with SharedEngine(failing(TOKENIZER, lambda _: "x")) as engine:
            requests = [Request(request_id=str(n), prompt_ids=(1,)) for n in range(3)]
            answers += await asyncio.gather(*map(engine.sample, requests), return_exceptions=True)

    answers = []
    with pytest.raises(FloatingPointError, match="bad kernel"):  # also where the episodes swallow it
        asyncio.run(run(answers))
    assert [str(answer) for answer in answers] == ["the engine failed: bad kernel"] * 3
    assert all(isinstance(answer.__cause__, FloatingPointError) for answer in answers)


def test_engine_that_fails_ends_its_thread_and_hides_no_error_of_the_episodes():
    shared = SharedEngine(Dying(TOKENIZER, lambda _: "x"))

    async def run():
        async with shared as engine:
            await engine.sample(Request(request_id="a", prompt_ids=(1,)))

    with pytest.raises(RuntimeError, match="the engine failed: bad kernel"):
        asyncio.run(run())
    with pytest.raises(RuntimeError, match="after shutdown"):
        shared._thread.submit(int)


def test_engine_runs_in_one_prepared_thread_and_forgets_cancelled_requests():
    threads = set()

    class Watched(ScriptedEngine):
        def step(self):
            threads.add(threading.current_thread().name)
            return super().step()

    inner = Watched(TOKENIZER, lambda _: "x", steps_a_turn=10_000_000)

    async def run():
        async with SharedEngine(inner, lambda: threads.add("prepared")) as engine:
            waiting = asyncio.create_task(engine.sample(Request(request_id="a", prompt_ids=(1,))))
            await asyncio.sleep(0.1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.sleep(0.1)
            return inner.has_unfinished()

    assert asyncio.run(run()) is False
    assert threads == {"prepared", "engine_0"}


def test_observation_and_submission():
    def ended(text, **fields):
        values = {"returncode": 0, "end": "exit", "seconds": 2.0} | fields
        return Executed(output=text.encode(), output_bytes=len(text), **values)

    long = observation(ended("a" * SHOWN_CHARACTERS + "b" * 7 + "c" * SHOWN_CHARACTERS))
    assert "[7 characters are left out]" in long
    assert "b" not in long.replace("bytes", "")
    assert observation(ended("x", returncode=3)) == "[exit status 3]\nx"
    assert is_submission(ended("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\nrest"))
    assert not is_submission(ended("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", returncode=1))
    assert not is_submission(ended("so: COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    assert observation(Executed(returncode=0, output=b"\xff\xfe", output_bytes=2, end="exit", seconds=0)).endswith("��")


def test_journal_gives_back_whole_episodes_of_the_same_weights_only(tmp_path):
    made = collector(tmp_path, script_of(*[call("true")] * 6), PretendHost(), [own_tasks()["ledger"]], members=4)
    first = made(1, [0])
    path = next((tmp_path / "episodes").iterdir())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][: len(lines[2]) // 2])
    again = collector(tmp_path, script_of(*[call("true")] * 6), PretendHost(), [own_tasks()["ledger"]], members=4)
    second = again(1, [0])
    assert again.last.reused == 2
    assert [t.token_ids for t in second] == [t.token_ids for t in first]
    assert len(EpisodeJournal(tmp_path / "episodes").read(1, "digest-1")) == 4
    assert EpisodeJournal(tmp_path / "episodes").read(1, "other weights") == {}


def test_lines_of_many_writers_are_all_whole(tmp_path):
    path, record = tmp_path / "lines.jsonl", {"text": "x" * 100_000}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: append_line(path, {"number": number, **record}), range(200)))
    assert sorted(line["number"] for line in read_lines(path)) == list(range(200))
    assert path.read_text().count("\n") == 200


WORKER = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_swe_agent as tests
from swe_workbench import BubblewrapHost, SMALL, own_tasks
from examples.swe_bench_pro.scripted import call
folder = Path({folder!r})
host = BubblewrapHost(folder / "sandboxes", run_name="killed", limits=SMALL)
script = lambda request: tests.SUBMIT if tests.place_of(request.request_id)[2] < 2 else call("sleep {mark}")
tests.collector(folder, script, host, [own_tasks()["ledger"]], members=4)(1, [0])
"""


def test_run_killed_at_any_point_keeps_finished_episodes_and_leaves_no_process(tmp_path):
    bubblewrap(tmp_path)
    mark = f"5{os.getpid()}"
    code = WORKER.format(tests=str(Path(__file__).parent), folder=str(tmp_path), mark=mark)
    root = str(Path(__file__).parents[2])
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=os.environ | {"PYTHONPATH": root})
    deadline = time.monotonic() + 120
    journal = EpisodeJournal(tmp_path / "episodes")
    while len(journal.read(1, "digest-1")) < 2 or len(processes_with(mark)) < 2:
        assert worker.poll() is None, "the worker ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    limit = time.monotonic() + 5
    while processes_with(mark) and time.monotonic() < limit:
        time.sleep(0.05)
    assert processes_with(mark) == []
    # The next start sweeps what is left, takes the two finished episodes, and runs the other two.
    host = type(bubblewrap(tmp_path))(tmp_path / "sandboxes", run_name="killed", limits=SMALL)
    assert asyncio.run(host.sweep()) >= 2
    again = collector(tmp_path, script_of(SUBMIT), host, [own_tasks()["ledger"]], members=4)
    assert len(again(1, [0])) == 4
    assert again.last.reused == 2
    assert set(journal.read(1, "digest-1")) == {Place(0, 0, member) for member in range(4)}
    assert not list((tmp_path / "sandboxes").iterdir())
