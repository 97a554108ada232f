# SPDX-License-Identifier: Apache-2.0
"""Sandboxes by the docker or podman command line: one container an episode, no network, limits by the engine."""

import shutil
import subprocess
from collections.abc import Sequence

from examples.swe_bench_pro.sandbox import streams
from examples.swe_bench_pro.sandbox.image import ImageSandbox
from examples.swe_bench_pro.sandbox.protocol import IsolationUnavailable, Limits, Sandbox, SandboxError
from examples.swe_bench_pro.tasks.columns import Task

LABEL = "vllm-forward-bridge.run"
_KEPT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")


class ContainerHost:
    """Make containers of task images.

    Args:
        program: `docker` or `podman`.
        run_name: labels every container, so that a later start finds what was left.
        limits: of each container; disk is limited a file only, engines have no portable limit of a whole container.
        cpus: processor cores of each container.

    Raises:
        IsolationUnavailable: the program is missing, or its daemon does not answer.
    """

    def __init__(self, program: str, *, run_name: str, limits: Limits, cpus: float = 1.0) -> None:
        if shutil.which(program) is None:
            raise IsolationUnavailable(f"{program} is not installed; install it, or choose bubblewrap or modal")
        asked = subprocess.run([program, "info"], capture_output=True, text=True, timeout=60)
        if asked.returncode:
            raise IsolationUnavailable(
                f"`{program} info` fails, so no container can be started: {asked.stderr.strip()[-300:]}"
            )
        self._program = program
        self._run_name = run_name
        self._limits = limits
        self._cpus = cpus

    def describe(self) -> dict[str, str]:
        """Say what isolates and limits."""
        return {"isolation": self._program, "network": "none", "limits": "by the engine; disk a file only"}

    def sandbox(self, task: Task, name: str) -> Sandbox:
        """Return a container of the task's image.

        Raises:
            ValueError: the task has no image.
        """
        if task.origin is not None:
            raise ValueError(f"{task.instance_id} is a local repository without an image; choose bubblewrap")
        full_name = f"{self._run_name}-{name}"
        start = start_command(self._program, task.image, full_name, self._run_name, self._limits, self._cpus)
        return ImageSandbox(ContainerEngine(self._program, full_name, start), full_name, self._limits)

    async def sweep(self) -> int:
        """End and remove the containers that an earlier run of this name left."""
        listed = await _call([self._program, "ps", "-aq", "--filter", f"label={LABEL}={self._run_name}"])
        ids = listed.output.content().split()
        for container in ids:
            await _call([self._program, "rm", "-f", container.decode()])
        return len(ids)


def start_command(program: str, image: str, name: str, run_name: str, limits: Limits, cpus: float) -> list[str]:
    """Return the command line that starts a container, up to the arguments of its first process."""
    memory = str(limits.memory_bytes)
    capabilities = [part for kept in _KEPT_CAPABILITIES for part in ("--cap-add", kept)]
    # The images start bash by themselves: the entry point is replaced, not given another shell.
    return [
        program, "run", "-d", "--rm", "--name", name, "--label", f"{LABEL}={run_name}", "--network", "none",
        "--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes), "--cpus", f"{cpus:g}",
        "--ulimit", f"fsize={limits.disk_bytes}", "--ulimit", "core=0", "--security-opt", "no-new-privileges",
        "--cap-drop", "ALL", *capabilities, "--workdir", "/app", "--entrypoint", "/bin/sh", image,
    ]  # fmt: skip


class ContainerEngine:
    """One container by command line; see `image.Engine`."""

    def __init__(self, program: str, name: str, start: Sequence[str]) -> None:
        self._program = program
        self._name = name
        self._start = list(start)

    async def start(self, idle: Sequence[str]) -> None:
        """Start the container."""
        done = await _call([*self._start, *idle[1:]], seconds=900.0)
        if done.end != "exit" or done.returncode != 0:
            raise SandboxError(f"container {self._name} did not start ({done.end}): {done.output.content()[-500:]!r}")

    async def run(
        self, argv: Sequence[str], *, cwd: str, stdin: bytes, seconds: float, output_bytes: int, kept_bytes: int
    ) -> streams.Finished:
        """Run a command in it."""
        outer = [self._program, "exec", "-i", "-w", cwd, self._name, *argv]
        return await streams.run(outer, seconds=seconds, output_bytes=output_bytes, kept_bytes=kept_bytes, stdin=stdin)

    async def is_running(self) -> bool:
        """Ask the engine."""
        done = await _call([self._program, "inspect", "-f", "{{.State.Running}}", self._name])
        return done.output.content().strip() == b"true"

    async def killed_for_memory(self) -> int:
        """Ask the engine; it says yes or no, so a second time in one container is not seen."""
        done = await _call([self._program, "inspect", "-f", "{{.State.OOMKilled}}", self._name])
        return int(done.output.content().strip() == b"true")

    async def end(self) -> None:
        """Remove the container with everything in it."""
        await _call([self._program, "rm", "-f", self._name])


async def _call(argv: Sequence[str], *, seconds: float = 120.0) -> streams.Finished:
    try:
        return await streams.run(argv, seconds=seconds, output_bytes=1 << 20, kept_bytes=1 << 20)
    except OSError as error:
        raise SandboxError(f"`{' '.join(argv[:2])}` could not be run: {error}") from error
