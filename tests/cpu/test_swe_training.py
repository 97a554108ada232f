# SPDX-License-Identifier: Apache-2.0
"""Two whole steps on multi-turn episodes with the gate at zero, killed in the middle and resumed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from swe_workbench import bubblewrap, processes_with

from examples.swe_bench_pro.agent.stream import NOT_SAMPLED
from examples.swe_bench_pro.sandbox import cgroups
from examples.swe_bench_pro.train.assemble import run_name
from examples.swe_bench_pro.train.journal import EpisodeJournal, Place
from megatron.vllm_forward.rl.journal import read_journal

ROOT = Path(__file__).parents[2]


def start(folder, steps):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    log = (folder / "log.txt").open("a")
    worker = str(Path(__file__).parent / "swe_training_worker.py")
    return subprocess.Popen(
        [sys.executable, worker, str(folder), str(port), str(steps)], cwd=ROOT, env=environment, stdout=log, stderr=log
    )


def wait_until_no_child_is_left(folder):
    """Megatron's checkpoint writer must not outlive its trainer; it may still be importing when that ends."""
    limit = time.monotonic() + 300
    while left := children_of_a_dead_run(folder):
        assert time.monotonic() < limit, f"{left} outlive their trainer"
        time.sleep(0.1)


def children_of_a_dead_run(folder):
    """Return processes that still have this test's log open; their command lines do not name the run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            output = os.readlink(entry / "fd" / "1")
        except OSError:
            continue
        if output == str(folder / "log.txt"):
            found.append(int(entry.name))
    return found


def finished_places(folder, step):
    return [place for at, place, _ in EpisodeJournal(folder / "run" / "episodes").every() if at == step]


def test_two_steps_killed_in_the_second_and_resumed(tmp_path):
    bubblewrap(tmp_path)
    worker = start(tmp_path, 2)
    deadline = time.monotonic() + 900
    while not finished_places(tmp_path, 2):
        assert worker.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, "the first step did not end"
        time.sleep(0.02)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    wait_until_no_child_is_left(tmp_path)
    assert [record["step"] for record in read_journal(tmp_path / "journal.jsonl")] == [1]
    before = finished_places(tmp_path, 2)

    again = start(tmp_path, 2)
    assert again.wait(timeout=900) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    records = read_journal(tmp_path / "journal.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    assert records[1]["episodes_reused"] >= len(before) >= 1
    for record in records:
        assert record["mismatches"] == 0
        assert record["max"] == 0.0
        assert record["outcome_resolved"] == 1, "the scripted member solves the task in every step"
        assert record["trained_tokens"] > 0
        assert record["requantised_blocks"] > 0
        # The gate saw every sampled token of every turn, by decode and by prefill.
        episodes = {p: e for at, p, e in EpisodeJournal(tmp_path / "run" / "episodes").every() if at == record["step"]}
        assert set(episodes) == {Place(0, 0, member) for member in range(3)}
        assert record["compared"] == sum(episode.stream.num_sampled for episode in episodes.values())
        assert record["sampled_by_decode"] > 0
        assert all(episode.turns >= 2 for episode in episodes.values())
        versions = {version for episode in episodes.values() for version in episode.stream.versions}
        # A resumed run counts versions anew; that it has the same weights is told by their digest.
        assert len(versions - {NOT_SAMPLED}) <= record["step"]
    assert list((tmp_path / "run" / "sandboxes").iterdir()) == []
    assert processes_with(str(tmp_path)) == []
    wait_until_no_child_is_left(tmp_path)
    groups = cgroups.find()
    assert groups is None or groups.sweep(run_name(tmp_path / "run", 0)) == 0
