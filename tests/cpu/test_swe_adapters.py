# SPDX-License-Identifier: Apache-2.0
"""The adapters for images: command lines, ends of commands, refusals. No daemon and no account are needed."""

import asyncio
import importlib.util
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
from swe_workbench import SMALL, own_tasks

from examples.swe_bench_pro.sandbox.choose import open_host
from examples.swe_bench_pro.sandbox.container import ContainerHost, start_command
from examples.swe_bench_pro.sandbox.image import ImageSandbox, idle_command
from examples.swe_bench_pro.sandbox.modal_cloud import ModalHost
from examples.swe_bench_pro.sandbox.protocol import IsolationUnavailable, SandboxError, hide_history
from examples.swe_bench_pro.sandbox.streams import Finished, HeadAndTail


def image_task():
    return replace(own_tasks()["ledger"], origin=None, dockerhub_tag="own.ledger")


def finished(text=b"", code=0, end="exit", seconds=0.1):
    kept = HeadAndTail(1 << 20)
    kept.add(text)
    return Finished(code, kept, end, seconds)


class RecordedEngine:
    """Answers like an engine; what is asked of it is kept."""

    def __init__(self, *answers):
        self.calls, self.running, self.memory_kills = [], True, 0
        self._answers = list(answers)

    async def start(self, idle):
        self.calls.append(("start", tuple(idle)))

    async def run(self, argv, *, cwd, stdin, seconds, output_bytes, kept_bytes):
        self.calls.append(("run", tuple(argv), cwd, stdin[:3]))
        if argv[0] == "kill" or "mkdir" in argv:
            return finished()
        return self._answers.pop(0)

    async def is_running(self):
        return self.running

    async def killed_for_memory(self):
        return self.memory_kills

    async def end(self):
        self.calls.append(("end",))


def test_container_is_started_without_network_and_with_every_limit():
    line = start_command("docker", "image:tag", "run-s1", "run", SMALL, 1.5)
    text = " ".join(line)
    for part in (
        "--network none", f"--memory {SMALL.memory_bytes}", f"--memory-swap {SMALL.memory_bytes}", "--pids-limit 48",
        "--cpus 1.5", "--security-opt no-new-privileges", "--cap-drop ALL", "--entrypoint /bin/sh image:tag",
        "--label vllm-forward-bridge.run=run", f"--ulimit fsize={SMALL.disk_bytes}",
    ):  # fmt: skip
        assert part in text
    assert line[-1] == "image:tag"
    assert "-v" not in line, "nothing of this machine is mounted"


def test_first_process_of_a_container_ends_by_itself():
    shell, flag, loop = idle_command(7200)
    assert (shell, flag) == ("/bin/sh", "-c")
    assert "+ 7200" in loop


def test_every_command_has_its_limit_inside_and_a_second_one_ends_what_it_left():
    engine = RecordedEngine(finished(b"out"))

    async def run():
        sandbox = ImageSandbox(engine, "one", SMALL)
        await sandbox.start()
        done = await sandbox.execute("make test", seconds=7)
        await sandbox.close()
        return done

    done = asyncio.run(run())
    assert (done.text, done.end, done.returncode) == ("out", "exit", 0)
    runs = [call[1] for call in engine.calls if call[0] == "run"]
    assert runs[1] == ("timeout", "-s", "KILL", "7", "bash", "-c", "make test")
    assert runs[2] == ("kill", "-9", "-1")
    assert engine.calls[-1] == ("end",)


def ended(answer, *, running=True, memory=False):
    engine = RecordedEngine(answer)

    async def run():
        sandbox = ImageSandbox(engine, "one", SMALL)
        await sandbox.start()
        engine.running = running
        original = engine.run

        async def then_killed(argv, **options):
            result = await original(argv, **options)
            engine.memory_kills = int(memory)
            return result

        engine.run = then_killed
        return await sandbox.execute("x", seconds=3)

    return asyncio.run(run())


def test_ends_of_commands_are_told_apart():
    assert ended(finished(code=137, seconds=3.1)).end == "timeout"
    assert (ended(finished(code=137, seconds=0.5)).end, ended(finished(code=137, seconds=0.5)).returncode) == (
        "exit",
        137,
    )
    assert ended(finished(code=137, seconds=0.5), memory=True).end == "memory"
    assert ended(finished(code=-9, end="output")).end == "output"
    with pytest.raises(SandboxError, match="ended while a command ran"):
        ended(finished(code=1), running=False)


def test_history_that_cannot_be_hidden_stops_the_episode():
    engine = RecordedEngine(finished(b"fatal: bad object", code=128))

    async def run():
        sandbox = ImageSandbox(engine, "one", SMALL)
        await sandbox.start()
        await hide_history(sandbox, image_task())

    with pytest.raises(SandboxError, match="bad object"):
        asyncio.run(run())


def test_absent_program_and_dead_daemon_are_named(tmp_path, monkeypatch):
    with pytest.raises(IsolationUnavailable, match="podman-that-is-not-here is not installed"):
        ContainerHost("podman-that-is-not-here", run_name="x", limits=SMALL)
    broken = tmp_path / "docker"
    broken.write_text("#!/bin/sh\necho cannot connect to the daemon >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(IsolationUnavailable, match="cannot connect to the daemon"):
        open_host("docker", tmp_path, run_name="x", limits=SMALL)


PRETEND_DOCKER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  exec) while [ $# -gt 0 ]; do case "$1" in bash) shift 2; echo "ran: $1"; exit 0;; esac; shift; done;;
  inspect) case "$3" in *Running*) echo true;; *) echo false;; esac;;
  ps) echo c1; echo c2;;
esac
"""


def test_container_command_lines_by_a_pretend_program(tmp_path, monkeypatch):
    """The program only writes down what it is asked; nothing is run."""
    program = tmp_path / "docker"
    program.write_text(PRETEND_DOCKER.format(log=tmp_path / "log"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    host = open_host("docker", tmp_path, run_name="run", limits=SMALL)

    async def run():
        sandbox = host.sandbox(image_task(), "s1")
        await sandbox.start()
        done = await sandbox.execute("ls -l", seconds=5)
        await sandbox.close()
        return done, await host.sweep()

    done, swept = asyncio.run(run())
    log = (tmp_path / "log").read_text().splitlines()
    assert done.text == "ran: ls -l\n"
    assert swept == 2
    assert any(line.startswith("run -d --rm --name run-s1") and line.endswith("done") for line in log)
    assert "exec -i -w /app run-s1 timeout -s KILL 5 bash -c ls -l" in log
    assert "exec -i -w / run-s1 kill -9 -1" in log
    assert "rm -f run-s1" in log
    assert "rm -f c2" in log


def test_hosts_refuse_the_other_kind_of_task(tmp_path):
    modal = ModalHost(run_name="x", limits=SMALL, modal=SimpleNamespace())
    with pytest.raises(ValueError, match="choose bubblewrap"):
        modal.sandbox(own_tasks()["ledger"], "s")
    assert modal.describe()["network"] == "blocked"


def test_modal_without_its_package_is_refused(monkeypatch):
    if importlib.util.find_spec("modal"):
        pytest.skip("modal is installed here")
    with pytest.raises(IsolationUnavailable, match="pip install modal"):
        ModalHost(run_name="x", limits=SMALL)


class PretendModal:
    """The part of Modal's interface that is used, answering from memory."""

    def __init__(self):
        self.created, self.executed, self.terminated = [], [], 0
        outer = self

        def aio(function):
            return SimpleNamespace(aio=function)

        class Stdin:
            def write(self, content):
                outer.executed[-1]["stdin"] = content

            def write_eof(self):
                pass

            drain = aio(lambda: asyncio.sleep(0))

        class Process:
            stdin = Stdin()

            def __init__(self):
                self.stdout = self._chunks()
                self.wait = aio(self._wait)

            async def _chunks(self):
                yield b"from modal\n"

            async def _wait(self):
                return 0

        class Box:
            def __init__(self):
                self.exec, self.poll, self.terminate = aio(self._exec), aio(self._poll), aio(self._terminate)

            async def _exec(self, *argv, **options):
                outer.executed.append({"argv": argv, **options})
                return Process()

            async def _poll(self):
                return None

            async def _terminate(self):
                outer.terminated += 1

        async def create(*argv, **options):
            outer.created.append({"argv": argv, **options})
            return Box()

        async def lookup(name, create_if_missing):
            return name

        self.App = SimpleNamespace(lookup=aio(lookup))
        self.Image = SimpleNamespace(from_registry=lambda tag: SimpleNamespace(entrypoint=lambda line: (tag, line)))
        self.Sandbox = SimpleNamespace(create=aio(create))
        self.exception = SimpleNamespace(Error=type("Error", (Exception,), {}))


def test_modal_sandbox_blocks_the_network_and_ends():
    modal = PretendModal()
    host = ModalHost(run_name="run", limits=SMALL, modal=modal)

    async def run():
        sandbox = host.sandbox(image_task(), "s1")
        await sandbox.start()
        done = await sandbox.execute("ls", seconds=5)
        await sandbox.close()
        return done

    done = asyncio.run(run())
    made = modal.created[0]
    assert done.text == "from modal\n"
    assert made["block_network"] is True
    assert made["image"] == ("jefzda/sweap-images:own.ledger", [])
    assert made["memory"][1] == SMALL.memory_bytes >> 20
    assert made["timeout"] == int(SMALL.lifetime_seconds)
    assert modal.executed[1]["argv"][-3:] == ("bash", "-c", "ls")
    assert "2>&1" in modal.executed[1]["argv"][2]
    assert modal.terminated == 1


def test_modal_interface_is_what_is_used():
    modal = pytest.importorskip("modal", reason="the optional package is absent: pip install modal")
    wanted = {"app", "image", "cpu", "memory", "timeout", "block_network", "workdir", "tags"}
    assert wanted <= set(inspect.signature(modal.Sandbox.create).parameters)
    assert {"workdir", "text", "timeout"} <= set(inspect.signature(modal.Sandbox.exec).parameters)
    assert hasattr(modal.Image, "from_registry")
    assert hasattr(modal.Image, "entrypoint")
    assert hasattr(modal.exception, "Error")
