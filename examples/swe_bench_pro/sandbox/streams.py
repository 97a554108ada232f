# SPDX-License-Identifier: Apache-2.0
"""Run one outer process with bounded time and bounded output. Knows nothing of what isolates."""

import asyncio
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.swe_bench_pro.sandbox.protocol import End

_CHUNK = 1 << 16
_WATCH_SECONDS = 0.25


class HeadAndTail:
    """Keep the first and the last half of what is allowed; count all."""

    def __init__(self, kept_bytes: int) -> None:
        self._half = max(1, kept_bytes // 2)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.total = 0

    def add(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.total += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room] if room > 0 else b""
        rest = chunk[max(room, 0) :]
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._half:
            self._tail_bytes -= len(self._tail.popleft())

    def content(self) -> bytes:
        """Return head, a line about what is missing if anything is, and tail."""
        tail = b"".join(self._tail)[-self._half :]
        missing = self.total - len(self._head) - len(tail)
        note = f"\n[{missing} bytes are left out]\n".encode() if missing else b""
        return bytes(self._head) + note + tail


@dataclass(frozen=True)
class Finished:
    """How the outer process ended."""

    returncode: int
    output: HeadAndTail
    end: End
    seconds: float


async def run(
    argv: Sequence[str],
    *,
    seconds: float,
    output_bytes: int,
    kept_bytes: int,
    stdin: bytes = b"",
    watch: Callable[[], End | None] = lambda: None,
    started: Callable[[asyncio.subprocess.Process], None] = lambda process: None,
) -> Finished:
    """Run `argv` to its end, or kill it when it passes its time or output, or when `watch` names a reason.

    Killing ends the outer process only; whoever calls makes sure that the inner ones die with it.
    """
    begin = time.monotonic()
    read_end, write_end = os.pipe()
    # Own pipe and file instead of asyncio's: its wait() also waits for pipes that a stray grandchild may hold open.
    reader, transport = await _reader(read_end)
    try:
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            process = await asyncio.create_subprocess_exec(*argv, stdin=given, stdout=write_end, stderr=write_end)
    finally:
        os.close(write_end)
    started(process)
    kept = HeadAndTail(kept_bytes)
    drain = asyncio.create_task(_drain(process, reader, kept, output_bytes))
    watcher = asyncio.create_task(_watch(watch))
    try:
        done, _ = await asyncio.wait({drain, watcher}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        end: End = "timeout" if not done else watcher.result() if watcher in done else drain.result()
    finally:
        drain.cancel()
        watcher.cancel()
        await asyncio.gather(drain, watcher, return_exceptions=True)
        transport.close()
        if process.returncode is None:
            process.kill()
        returncode = await process.wait()
    return Finished(returncode, kept, end, time.monotonic() - begin)


async def _reader(read_end: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read_end, "rb"))
    return reader, transport


async def _drain(
    process: asyncio.subprocess.Process, reader: asyncio.StreamReader, kept: HeadAndTail, output_bytes: int
) -> End:
    while chunk := await reader.read(_CHUNK):
        kept.add(chunk)
        if kept.total > output_bytes:
            return "output"
    await process.wait()
    return "exit"


async def _watch(watch: Callable[[], End | None]) -> End:
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        if (reason := watch()) is not None:
            return reason
