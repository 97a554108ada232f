# SPDX-License-Identifier: Apache-2.0
"""Memory and process limits of one sandbox by a Linux control group, version 1 or 2, where this user may make one."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_PREFIX = "vfb-"


class ControlGroup:
    """A group of its own for one sandbox, removed with everything in it.

    Args:
        folders: one folder (version 2), or one for each of memory and pids (version 1).
        memory_bytes: resident memory of all its processes, swap included.
        processes: tasks of all its processes.
    """

    def __init__(self, folders: dict[str, Path], *, memory_bytes: int, processes: int) -> None:
        self._folders = folders
        for folder in set(folders.values()):
            folder.mkdir()
        memory, pids = folders["memory"], folders["pids"]
        if (memory / "memory.max").exists():
            (memory / "memory.max").write_text(str(memory_bytes))
            if (memory / "memory.swap.max").exists():
                (memory / "memory.swap.max").write_text("0")
        else:
            (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
            if (memory / "memory.memsw.limit_in_bytes").exists():
                (memory / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
        (pids / "pids.max").write_text(str(processes))

    @property
    def entries(self) -> list[Path]:
        """Return the files into which a process writes its id to join."""
        return [folder / "cgroup.procs" for folder in sorted(set(self._folders.values()))]

    def memory_kills(self) -> int:
        """Count the processes that the kernel ended for memory."""
        memory = self._folders["memory"]
        file = memory / "memory.events" if (memory / "memory.events").exists() else memory / "memory.oom_control"
        counts = dict(line.split() for line in file.read_text().splitlines())
        return int(counts.get("oom_kill", 0))

    def remove(self, *, seconds: float = 10.0) -> None:
        """End every process of the group and remove it.

        Raises:
            RuntimeError: a process could not be ended in this time.
        """
        deadline = time.monotonic() + seconds
        while any(folder.exists() for folder in self._folders.values()):
            for entry in self.entries:
                _end_members(entry)
            for folder in set(self._folders.values()):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:  # a dead process leaves its group a moment later
                    time.sleep(0.005)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"control group {self._folders} still has processes after {seconds} s; end them by hand"
                )


class ControlGroups:
    """Where control groups can be made: asked once, tried once."""

    def __init__(self, parents: dict[str, Path], version: int) -> None:
        self._parents = parents
        self.version = version

    def create(self, name: str, *, memory_bytes: int, processes: int) -> ControlGroup:
        """Make a group; a left-over of the same name is removed first."""
        folders = {kind: parent / f"{_PREFIX}{name}" for kind, parent in self._parents.items()}
        if any(folder.exists() for folder in folders.values()):
            _existing(folders).remove()
        return ControlGroup(folders, memory_bytes=memory_bytes, processes=processes)

    def sweep(self, prefix: str) -> int:
        """Remove the groups whose name begins with `prefix`, with their processes."""
        names = {
            path.name
            for parent in self._parents.values()
            for path in parent.glob(f"{_PREFIX}{prefix}*")
            if path.is_dir()
        }
        for name in names:
            _existing({kind: parent / name for kind, parent in self._parents.items()}).remove()
        return len(names)


def find() -> ControlGroups | None:
    """Return where groups with memory and process limits can be made, or None."""
    for groups in _candidates():
        try:
            groups.create(f"probe-{os.getpid()}", memory_bytes=1 << 24, processes=4).remove()
        except OSError:
            groups.sweep(f"probe-{os.getpid()}")
            continue
        return groups
    return None


def _candidates() -> Iterator[ControlGroups]:
    controllers = ROOT / "cgroup.controllers"
    if controllers.exists() and {"memory", "pids"} <= set(controllers.read_text().split()):
        yield ControlGroups({"memory": ROOT, "pids": ROOT}, 2)
    if (ROOT / "memory" / "memory.limit_in_bytes").exists() and (ROOT / "pids" / "cgroup.procs").exists():
        yield ControlGroups({"memory": ROOT / "memory", "pids": ROOT / "pids"}, 1)


def _existing(folders: dict[str, Path]) -> ControlGroup:
    group = ControlGroup.__new__(ControlGroup)
    group._folders = folders
    return group


def _end_members(entry: Path) -> None:
    try:
        members = entry.read_text().split()
    except OSError:
        return  # removed meanwhile
    for member in members:
        try:
            os.kill(int(member), signal.SIGKILL)
        except ProcessLookupError:
            continue
