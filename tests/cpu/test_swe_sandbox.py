# SPDX-License-Identifier: Apache-2.0
"""A bubblewrap sandbox isolates, limits, and leaves nothing running; without isolation nothing runs at all."""

import asyncio
import contextlib
import os
import shutil
import signal
import time

import pytest
from swe_workbench import SMALL, bubblewrap, own_tasks, processes_with

from examples.swe_bench_pro.sandbox import bubblewrap as module
from examples.swe_bench_pro.sandbox import cgroups, streams
from examples.swe_bench_pro.sandbox.choose import open_host
from examples.swe_bench_pro.sandbox.protocol import (
    IsolationUnavailable,
    SandboxError,
    hide_history,
    read_file,
)


def in_sandbox(tmp_path, work, name="ledger"):
    """Run `work(sandbox, task)` in a started sandbox and close it."""
    host, task = bubblewrap(tmp_path), own_tasks()[name]

    async def run():
        sandbox = host.sandbox(task, "one")
        try:
            await sandbox.start()
            return await work(sandbox, task)
        finally:
            await sandbox.close()

    result = asyncio.run(run())
    assert not list((tmp_path / "sandboxes").iterdir())
    return result


def test_sandbox_shows_only_its_own_files_and_no_network(tmp_path):
    async def work(sandbox, task):
        command = (
            "ls /; echo @; ls /root /srv /home /var 2>/dev/null; echo @; "
            "cat /proc/net/dev | tail -n +3 | cut -d: -f1; echo @; env"
        )
        return (await sandbox.execute(command, seconds=10)).text

    root, hidden, devices, environment = in_sandbox(tmp_path, work).split("@\n")
    assert set(root.split()) <= {
        "app",
        "bin",
        "dev",
        "etc",
        "home",
        "lib",
        "lib32",
        "lib64",
        "proc",
        "root",
        "sbin",
        "tmp",
        "usr",
        "workspace",
    }
    assert devices.split() == ["lo"]
    assert "main" not in hidden.split()
    assert {line.split("=")[0] for line in environment.split()} <= {
        "PATH", "HOME", "LANG", "TERM", "PAGER", "PYTHONDONTWRITEBYTECODE", "PWD", "SHLVL", "_",
    }  # fmt: skip


def test_system_files_cannot_be_written(tmp_path):
    async def work(sandbox, task):
        return await sandbox.execute(
            "touch /usr/x; touch /etc/x; echo > /etc/passwd; touch /app/x && echo app", seconds=10
        )

    done = in_sandbox(tmp_path, work)
    assert done.text.endswith("app\n")
    assert done.text.count("Read-only") >= 2


def test_agent_sees_one_commit_and_no_hidden_test(tmp_path):
    async def work(sandbox, task):
        await hide_history(sandbox, task)
        done = await sandbox.execute(
            f"git log --all --oneline | wc -l; git cat-file -t {task.fix_commit}; git status --short; cat tests/*.py",
            seconds=10,
        )
        return task, done.text

    task, text = in_sandbox(tmp_path, work)
    assert text.startswith("1\n")
    assert "could not get object info" in text
    assert "test_rest" not in text
    assert "test_even" in text


def test_time_limit_ends_what_was_left_in_the_background(tmp_path):
    mark = f"8{os.getpid()}"

    async def work(sandbox, task):
        late = await sandbox.execute(f"sleep {mark}.1 & setsid sleep {mark}.2 & sleep {mark}.3", seconds=0.8)
        early = await sandbox.execute(f"sleep {mark}.4 & setsid sleep {mark}.5 & echo started", seconds=10)
        return late, early

    late, early = in_sandbox(tmp_path, work)
    assert (late.end, late.returncode) == ("timeout", None)
    assert late.seconds < 3
    assert (early.end, early.text) == ("exit", "started\n")
    assert processes_with(mark) == []


def test_fork_bomb_is_bounded(tmp_path):
    async def work(sandbox, task):
        bomb = await sandbox.execute("bomb() { bomb | bomb & }; bomb; sleep 1; echo survived", seconds=4)
        after = await sandbox.execute("echo usable", seconds=10)
        return bomb, after

    bomb, after = in_sandbox(tmp_path, work)
    assert bomb.end in ("exit", "timeout")
    assert after.text == "usable\n"


def test_memory_is_bounded(tmp_path):
    async def work(sandbox, task):
        return await sandbox.execute("python -c 'bytearray(10**9)'; echo $?", seconds=20)

    done = in_sandbox(tmp_path, work)
    assert done.end == "memory" or "MemoryError" in done.text


def test_fifty_megabytes_of_output_are_read_and_not_kept(tmp_path):
    async def work(sandbox, task):
        return await sandbox.execute("echo first; yes | head -c 50000000; echo last", seconds=30)

    done = in_sandbox(tmp_path, work)
    assert done.output_bytes == 50000011
    assert len(done.output) <= SMALL.kept_bytes + 100
    assert done.text.startswith("first\n")
    assert done.text.endswith("last\n")
    assert "bytes are left out" in done.text


def test_endless_output_and_full_disk_are_ended(tmp_path):
    async def work(sandbox, task):
        printed = await sandbox.execute("yes", seconds=30)
        wrote = await sandbox.execute(
            "for n in 1 2 3; do head -c 30000000 /dev/zero > /tmp/$n; done; sleep 20", seconds=30
        )
        return printed, wrote

    printed, wrote = in_sandbox(tmp_path, work)
    assert (printed.end, wrote.end) == ("output", "disk")


def test_links_of_the_agent_lead_nowhere_outside(tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("untouched")

    async def work(sandbox, task):
        await sandbox.execute(
            f"rm -rf /workspace/patch.diff; ln -s {outside} /workspace/patch.diff; ln -s {outside} /app/link",
            seconds=10,
        )
        await sandbox.put({"/workspace/patch.diff": b"forged"})
        return await read_file(sandbox, "/app/link", max_bytes=1 << 20), await read_file(
            sandbox, "/workspace/patch.diff", max_bytes=1 << 20
        )

    read, written = in_sandbox(tmp_path, work)
    assert read is None
    assert written == b"forged"
    assert outside.read_text() == "untouched"


def test_sandbox_killed_from_outside_is_an_error_of_the_sandbox(tmp_path):
    mark = f"7{os.getpid()}"

    async def work(sandbox, task):
        running = asyncio.create_task(sandbox.execute(f"sleep {mark}", seconds=30))
        while not processes_with(mark):
            await asyncio.sleep(0.05)
        for pid in processes_with(mark):
            # Killing the first process takes the others along; one may be gone before it is looked at.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if b"bwrap" in open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")[0]:
                    os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="killed from outside"):
            await running
        await sandbox.kill()
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.execute("true", seconds=5)

    in_sandbox(tmp_path, work)
    assert processes_with(mark) == []


def test_sweep_removes_what_a_dead_run_left(tmp_path):
    host, task = bubblewrap(tmp_path), own_tasks()["ledger"]

    async def run():
        sandbox = host.sandbox(task, "left")
        await sandbox.start()  # and never closed, as after kill -9
        return await host.sweep(), await host.sweep()

    assert asyncio.run(run()) == (1, 0)
    assert not list((tmp_path / "sandboxes").iterdir())


def test_start_costs_less_than_a_second(tmp_path):
    async def work(sandbox, task):
        begin = time.monotonic()
        await sandbox.execute("true", seconds=10)
        return time.monotonic() - begin

    assert in_sandbox(tmp_path, work) < 1.0


def test_refuses_without_isolation(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda program: None)
    with pytest.raises(IsolationUnavailable) as error:
        open_host("bubblewrap", tmp_path, run_name="x", limits=SMALL)
    assert "apt-get install bubblewrap" in str(error.value)
    with pytest.raises(ValueError, match="never run without isolation"):
        open_host("local", tmp_path, run_name="x", limits=SMALL)


def test_refuses_root_without_control_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(module.cgroups, "find", lambda: None)
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    with pytest.raises(IsolationUnavailable, match="the kernel ignores process limits of root"):
        open_host("bubblewrap", tmp_path, run_name="x", limits=SMALL)


def test_process_limits_hold_where_there_are_no_control_groups(tmp_path, monkeypatch):
    """As for another user; this one may be root, whose number of processes the kernel never limits."""
    bubblewrap(tmp_path)
    monkeypatch.setattr(module.cgroups, "find", lambda: None)
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)

    async def work(sandbox, task):
        return await sandbox.execute("ulimit -u; ulimit -v; python -c 'bytearray(10**9)'", seconds=20)

    done = in_sandbox(tmp_path, work)
    assert done.text.splitlines()[:2] == [str(SMALL.processes), str(SMALL.memory_bytes // 1024)]
    assert "MemoryError" in done.text


def test_sandbox_that_cannot_be_ended_is_an_error_of_the_sandbox(tmp_path):
    async def work(sandbox, task):
        class Stuck:
            entries = []

            def remove(self):
                raise RuntimeError("still has processes")

        group, sandbox._group = sandbox._group, Stuck()
        with pytest.raises(SandboxError, match="cannot be ended"):
            await sandbox.close()
        sandbox._group = group

    in_sandbox(tmp_path, work)


def test_head_and_tail_keep_both_ends():
    kept = streams.HeadAndTail(10)
    for chunk in (b"abc", b"defgh", b"ij", b"klmno"):
        kept.add(chunk)
    assert kept.total == 15
    assert kept.content() == b"abcde\n[5 bytes are left out]\nklmno"
    short = streams.HeadAndTail(10)
    short.add(b"abcdefghij")
    assert short.content() == b"abcdefghij"


def test_control_group_counts_and_ends_its_processes(tmp_path):
    groups = cgroups.find()
    if groups is None:
        pytest.skip("no control group can be made by this user")
    sleeper = shutil.which("sleep")
    group = groups.create(f"test-{os.getpid()}", memory_bytes=1 << 26, processes=8)
    pid = os.spawnl(os.P_NOWAIT, sleeper, "sleep", "60")
    for entry in group.entries:
        entry.write_text(str(pid))
    assert group.memory_kills() == 0
    group.remove()
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
