# SPDX-License-Identifier: Apache-2.0
"""Parts that the tests of the coding-agent example share."""

import asyncio
import functools
import io
import os
import re
import tarfile
import tempfile
from pathlib import Path

import pytest

from examples.swe_bench_pro.agent.renderer import NemotronRenderer
from examples.swe_bench_pro.agent.tokens import PhraseTokenizer
from examples.swe_bench_pro.sandbox.bubblewrap import BubblewrapHost
from examples.swe_bench_pro.sandbox.protocol import Executed, IsolationUnavailable, Limits
from examples.swe_bench_pro.scripted import call
from examples.swe_bench_pro.tasks.own import OWN_TASKS, load_folder

SMALL = Limits(memory_bytes=192 << 20, processes=48, output_bytes=60 << 20, disk_bytes=64 << 20)
TOKENIZER = PhraseTokenizer(
    ["\n<function=bash>\n<parameter=command>\n", "\n</parameter>\n</function>\n", "parameter", "the "]
)
RENDERER = NemotronRenderer(TOKENIZER)
SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


_BUILT = tempfile.TemporaryDirectory(prefix="swe-own-tasks-")


@functools.cache
def own_tasks():
    """Return the tasks of the example by their short name; their repositories are built once a process."""
    return {task.repo.split("/")[1]: task for task in load_folder(OWN_TASKS, Path(_BUILT.name))}


def bubblewrap(folder: Path, limits: Limits = SMALL) -> BubblewrapHost:
    """Return a host, or skip with what is missing."""
    try:
        return BubblewrapHost(folder / "sandboxes", run_name=f"test{os.getpid()}", limits=limits)
    except IsolationUnavailable as missing:
        pytest.skip(str(missing))


def applying(patch: str) -> str:
    """Return a turn that applies a patch."""
    return call(f"git apply - <<'PATCH'\n{patch}PATCH")


def place_of(request_id: str) -> tuple[int, int, int, int]:
    """Read (slot, attempt, member, turn) from a request's id."""
    return tuple(map(int, re.fullmatch(r"s\d+-g(\d+)-a(\d+)-m(\d+)-t\d+/(\d+)", request_id).groups()))


def processes_with(mark: str) -> list[int]:
    """Return the processes of this machine whose command line has the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def tar_of(files: dict[str, bytes]) -> bytes:
    """Return a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


class PretendHost:
    """Sandboxes that run nothing and always answer the same: for tests of what is around them."""

    def __init__(self, output: bytes = b"fine\n") -> None:
        self.output = output
        self.open = 0
        self.most_open = 0

    def describe(self):
        return {"isolation": "none needed, nothing runs"}

    def sandbox(self, task, name):
        return _PretendSandbox(self)

    async def sweep(self):
        return 0


class _PretendSandbox:
    def __init__(self, host):
        self._host = host
        self._closed = False

    async def start(self):
        self._host.open += 1
        self._host.most_open = max(self._host.most_open, self._host.open)

    async def execute(self, command, *, seconds, cwd="/app", stdin=b""):
        await asyncio.sleep(0)
        return Executed(
            returncode=0, output=self._host.output, output_bytes=len(self._host.output), end="exit", seconds=0
        )

    async def put(self, files):
        pass

    async def get(self, path, *, max_bytes):
        return tar_of({"app/a.txt": b"a\n"})

    async def kill(self):
        pass

    async def close(self):
        self._host.open -= not self._closed
        self._closed = True
