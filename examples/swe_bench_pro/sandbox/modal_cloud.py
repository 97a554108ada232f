# SPDX-License-Identifier: Apache-2.0
"""Sandboxes at Modal: the task's image, the network blocked. Needs the package `modal` and an account."""

import asyncio
import time
from collections.abc import Sequence
from types import ModuleType

from examples.swe_bench_pro.optional import require
from examples.swe_bench_pro.sandbox.image import ImageSandbox
from examples.swe_bench_pro.sandbox.protocol import End, IsolationUnavailable, Limits, Sandbox, SandboxError
from examples.swe_bench_pro.sandbox.streams import Finished, HeadAndTail
from examples.swe_bench_pro.tasks.columns import Task

_MIB = 1 << 20


class ModalHost:
    """Make Modal sandboxes of task images.

    Args:
        run_name: tags every sandbox, so that a later start finds what was left.
        limits: memory, lifetime and output are enforced; Modal limits neither processes nor disk of a sandbox, so
            those two are passed on to the shell that runs a command.
        cpus: processor cores, requested and at most.
        modal: the package; None imports it.

    Raises:
        IsolationUnavailable: the package is not installed.
    """

    def __init__(
        self,
        *,
        run_name: str,
        limits: Limits,
        cpus: tuple[float, float] = (1.0, 4.0),
        modal: ModuleType | None = None,
    ) -> None:
        self._modal = modal or _import_modal()
        self._run_name = run_name
        self._limits = limits
        self._cpus = cpus

    def describe(self) -> dict[str, str]:
        """Say what isolates and limits."""
        return {
            "isolation": "modal",
            "network": "blocked",
            "limits": "memory by Modal; processes and files by the shell",
        }

    def sandbox(self, task: Task, name: str) -> Sandbox:
        """Return a sandbox of the task's image.

        Raises:
            ValueError: the task has no image.
        """
        if task.origin is not None:
            raise ValueError(f"{task.instance_id} is a local repository without an image; choose bubblewrap")
        options = {
            "cpu": self._cpus,
            "memory": (self._limits.memory_bytes // _MIB // 4, self._limits.memory_bytes // _MIB),
            "timeout": int(self._limits.lifetime_seconds),
            "block_network": True,
            "workdir": "/app",
            "tags": {"run": self._run_name},
        }
        engine = ModalEngine(self._modal, task.image, self._run_name, options, self._limits)
        return ImageSandbox(engine, f"{self._run_name}-{name}", self._limits)

    async def sweep(self) -> int:
        """End the sandboxes that an earlier run of this name left."""
        ended = 0
        async for sandbox in self._modal.Sandbox.list.aio(tags={"run": self._run_name}):
            await sandbox.terminate.aio()
            ended += 1
        return ended


class ModalEngine:
    """One Modal sandbox; see `image.Engine`."""

    def __init__(self, modal: ModuleType, image: str, app: str, options: dict, limits: Limits) -> None:
        self._modal = modal
        self._image = image
        self._app = app
        self._options = options
        self._shell_limits = f"ulimit -u {limits.processes}; ulimit -f {limits.disk_bytes // 1024}; ulimit -c 0; "
        self._sandbox = None

    async def start(self, idle: Sequence[str]) -> None:
        """Pull the image and start the sandbox."""
        try:
            app = await self._modal.App.lookup.aio(self._app, create_if_missing=True)
            # The images have an entry point of their own that must not see our first process.
            image = self._modal.Image.from_registry(self._image).entrypoint([])
            self._sandbox = await self._modal.Sandbox.create.aio(*idle, app=app, image=image, **self._options)
        except self._modal.exception.Error as error:
            raise SandboxError(f"Modal did not start {self._image}: {error}") from error

    async def run(
        self, argv: Sequence[str], *, cwd: str, stdin: bytes, seconds: float, output_bytes: int, kept_bytes: int
    ) -> Finished:
        """Run a command in it, standard error joined to standard output."""
        begin = time.monotonic()
        kept = HeadAndTail(kept_bytes)
        command = ["bash", "-c", self._shell_limits + 'exec "$@" 2>&1', "bash", *argv]
        try:
            process = await self._sandbox.exec.aio(*command, workdir=cwd, text=False, timeout=int(seconds) + 1)
            process.stdin.write(stdin)
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            end = await asyncio.wait_for(_drain(process, kept, output_bytes), timeout=seconds)
            code = await process.wait.aio() if end == "exit" else -1
        except TimeoutError:
            end, code = "timeout", -1
        except self._modal.exception.Error as error:
            raise SandboxError(f"Modal lost the command: {error}") from error
        return Finished(code, kept, end, time.monotonic() - begin)

    async def is_running(self) -> bool:
        """Ask Modal."""
        return await self._sandbox.poll.aio() is None

    async def killed_for_memory(self) -> int:
        """Return 0: Modal ends the whole sandbox for memory, which shows as a lost sandbox."""
        return 0

    async def end(self) -> None:
        """Terminate the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.terminate.aio()


async def _drain(process, kept: HeadAndTail, output_bytes: int) -> End:
    async for chunk in process.stdout:
        kept.add(chunk)
        if kept.total > output_bytes:
            return "output"
    return "exit"


def _import_modal() -> ModuleType:
    try:
        return require("modal", "run sandboxes there; afterwards run `modal setup` once")
    except ModuleNotFoundError as missing:
        raise IsolationUnavailable(str(missing)) from missing
