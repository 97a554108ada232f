# SPDX-License-Identifier: Apache-2.0
"""What a sandbox is: six methods, limits, and typed ends of a command. Starts nothing."""

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from examples.swe_bench_pro.tasks.columns import Task

End = Literal["exit", "timeout", "memory", "output", "disk"]


class SandboxError(RuntimeError):
    """The sandbox failed, not what ran in it: the episode says nothing about the policy."""


class IsolationUnavailable(RuntimeError):  # noqa: N818 - it states a condition of the machine
    """This machine cannot isolate commands; nothing is run without isolation."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one sandbox. Every one is enforced, or the sandbox refuses to start."""

    memory_bytes: int = 4 << 30
    processes: int = 256
    output_bytes: int = 32 << 20
    """Output of one command; a command that writes more is killed."""
    kept_bytes: int = 128 << 10
    """Output that is kept: half from its head, half from its tail."""
    disk_bytes: int = 4 << 30
    """Size of the writable files, and of any one of them."""
    lifetime_seconds: float = 7200.0
    """A sandbox that outlives its owner ends by itself after this time, where a daemon holds it."""


@dataclass(frozen=True, kw_only=True)
class Executed:
    """How a command ended."""

    returncode: int | None
    """None unless `end` is `exit`."""
    output: bytes
    """Standard output and error in one stream; the middle is dropped when there was more than is kept."""
    output_bytes: int
    """How much it wrote."""
    end: End
    seconds: float

    @property
    def text(self) -> str:
        """Return the output as text; bytes that are no UTF-8 are replaced."""
        return self.output.decode("utf-8", errors="replace")


class Sandbox(Protocol):
    """One isolated machine with a project at `/app` and an empty folder at `/workspace`."""

    async def start(self) -> None:
        """Make it ready.

        Raises:
            SandboxError: it cannot be started.
        """
        ...

    async def execute(self, command: str, *, seconds: float, cwd: str = "/app", stdin: bytes = b"") -> Executed:
        """Run one shell command; nothing that it started is left running when this returns.

        Raises:
            SandboxError: the sandbox is gone or was killed.
        """
        ...

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files by absolute path."""
        ...

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Read one file or folder as a tar archive; None if it is absent or larger than `max_bytes`."""
        ...

    async def kill(self) -> None:
        """End every process of it, now."""
        ...

    async def close(self) -> None:
        """Kill, and remove what it wrote. May be called twice."""
        ...


class SandboxHost(Protocol):
    """Hands out sandboxes for tasks."""

    def describe(self) -> dict[str, str]:
        """Say what isolates and limits: recorded with the run."""
        ...

    def sandbox(self, task: Task, name: str) -> Sandbox:
        """Return a sandbox, not started, whose `/app` is the task's repository as the grader needs it."""
        ...

    async def sweep(self) -> int:
        """End and remove what earlier runs of the same name left behind; return how many."""
        ...


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of files by absolute path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


async def read_file(sandbox: Sandbox, path: str, *, max_bytes: int) -> bytes | None:
    """Return one regular file's bytes, or None if there is no such file."""
    content = await sandbox.get(path, max_bytes=max_bytes)
    if content is None:
        return None
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            files = [entry for entry in tar if entry.isreg()]
            return tar.extractfile(files[0]).read() if len(files) == 1 else None
    except tarfile.TarError:
        return None


_AGENT_VIEW = """cd /app && git reset -q --hard {base} && git clean -qfd && rm -rf .git && git init -q -b main &&
git add -A && git -c user.name=task -c user.email=task@example.invalid commit -q -m base &&
git config user.name agent && git config user.email agent@example.invalid"""


async def hide_history(sandbox: Sandbox, task: Task, *, seconds: float = 300.0) -> None:
    """Make `/app` what the agent may see: the base commit as the only one, no fix commit, no hidden test.

    Raises:
        SandboxError: it did not work; the agent must not start.
    """
    done = await sandbox.execute(_AGENT_VIEW.format(base=task.base_commit), seconds=seconds)
    if done.end != "exit" or done.returncode != 0:
        status = f"{done.end}, {done.returncode}"
        raise SandboxError(f"{task.instance_id}: the agent's copy could not be made ({status}): {done.text[-500:]}")
