# SPDX-License-Identifier: Apache-2.0
"""A sandbox whose project is in a container image, over any engine that can start, run in, and end a container."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from examples.swe_bench_pro.sandbox.protocol import Executed, Limits, SandboxError, archive
from examples.swe_bench_pro.sandbox.streams import Finished

KILL_CODE = 137
_GRACE_SECONDS = 20.0


class Engine(Protocol):
    """One container."""

    async def start(self, idle: Sequence[str]) -> None:
        """Start it on the command that keeps it alive.

        Raises:
            SandboxError: it did not start.
        """
        ...

    async def run(
        self, argv: Sequence[str], *, cwd: str, stdin: bytes, seconds: float, output_bytes: int, kept_bytes: int
    ) -> Finished:
        """Run a command in it."""
        ...

    async def is_running(self) -> bool:
        """Tell whether it still runs."""
        ...

    async def killed_for_memory(self) -> int:
        """Count the processes that were ended for memory, as far as the engine says."""
        ...

    async def end(self) -> None:
        """End and remove it; no error if it is gone."""
        ...


def idle_command(lifetime_seconds: float) -> list[str]:
    """Return a first process that reaps orphans, survives `kill -1`, and ends by itself after the lifetime."""
    loop = f"end=$(( $(date +%s) + {int(lifetime_seconds)} )); while [ $(date +%s) -lt $end ]; do sleep 5 & wait; done"
    return ["/bin/sh", "-c", loop]


class ImageSandbox:
    """See `protocol.Sandbox`. Engines give no namespaces a command, so what a command left is ended by a second one."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self._engine = engine
        self._name = name
        self._limits = limits
        self._open = False

    async def start(self) -> None:
        """Start the container."""
        await self._engine.start(idle_command(self._limits.lifetime_seconds))
        self._open = True
        made = await self._run(["mkdir", "-p", "/workspace"], seconds=60.0, cwd="/")
        if made.returncode != 0:
            raise SandboxError(f"sandbox {self._name}: /workspace could not be made: {made.text}")

    async def execute(self, command: str, *, seconds: float, cwd: str = "/app", stdin: bytes = b"") -> Executed:
        """Run one shell command, then end whatever it left running."""
        done = await self._run(["bash", "-c", command], seconds=seconds, cwd=cwd, stdin=stdin)
        # An engine's own time limit leaves the tree running, and so does a command that forks into the background.
        await self._engine.run(
            ["kill", "-9", "-1"], cwd="/", stdin=b"", seconds=60.0, output_bytes=4096, kept_bytes=4096
        )
        return done

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Unpack files in the container."""
        done = await self._run(["tar", "-x", "-C", "/"], seconds=120.0, cwd="/", stdin=archive(files))
        if done.returncode != 0:
            raise SandboxError(f"sandbox {self._name}: files could not be written: {done.text}")

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Pack a path in the container."""
        argv = ["tar", "-c", "-C", str(Path(path).parent), "--", Path(path).name]
        done = await self._run(argv, seconds=300.0, cwd="/", output_bytes=max_bytes, kept_bytes=2 * max_bytes)
        return done.output if done.end == "exit" and done.returncode == 0 else None

    async def kill(self) -> None:
        """End the container."""
        self._open = False
        await self._engine.end()

    async def close(self) -> None:
        """End and remove the container."""
        await self.kill()

    async def _run(
        self,
        argv: Sequence[str],
        *,
        seconds: float,
        cwd: str,
        stdin: bytes = b"",
        output_bytes: int | None = None,
        kept_bytes: int | None = None,
    ) -> Executed:
        if not self._open:
            raise SandboxError(f"sandbox {self._name} is gone")
        kills = await self._engine.killed_for_memory()
        done = await self._engine.run(
            ["timeout", "-s", "KILL", f"{seconds:g}", *argv],
            cwd=cwd,
            stdin=stdin,
            seconds=seconds + _GRACE_SECONDS,
            output_bytes=output_bytes or self._limits.output_bytes,
            kept_bytes=kept_bytes or self._limits.kept_bytes,
        )
        if not await self._engine.is_running():
            raise SandboxError(
                f"sandbox {self._name} ended while a command ran ({done.returncode}): {done.output.content()[-500:]!r}"
            )
        end = done.end
        if await self._engine.killed_for_memory() > kills:
            end = "memory"
        elif end == "exit" and done.returncode == KILL_CODE and done.seconds >= seconds:
            end = "timeout"
        code = done.returncode if end == "exit" else None
        return Executed(
            returncode=code, output=done.output.content(), output_bytes=done.output.total, end=end, seconds=done.seconds
        )
