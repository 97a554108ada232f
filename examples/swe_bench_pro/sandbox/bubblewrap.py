# SPDX-License-Identifier: Apache-2.0
"""Sandboxes by bubblewrap: every command in new namespaces over one folder an episode. No daemon, no image.

A command gets the machine's `/usr` and this Python read-only, its episode's `/app`, `/workspace`, `/tmp` and `/home`,
an empty environment, no network but its own loopback, and a control group (or process limits) of its own. The
namespaces end with the command: what it left in the background dies with it.
"""

import asyncio
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from examples.swe_bench_pro.sandbox import cgroups, streams
from examples.swe_bench_pro.sandbox.protocol import (
    End,
    Executed,
    IsolationUnavailable,
    Limits,
    Sandbox,
    SandboxError,
    archive,
)
from examples.swe_bench_pro.tasks.columns import Task

INSTALL = "apt-get install bubblewrap"
_WRITABLE = ("app", "workspace", "tmp", "home")
_GRACE_SECONDS = 2.0
_JOIN = 'for entry in $1; do echo $$ > "$entry" || exit 125; done; shift; exec "$@"'


class BubblewrapHost:
    """Make sandboxes of tasks that have a local repository.

    Args:
        folder: holds the episodes' files.
        run_name: begins the name of every folder and control group, so that a later start finds what was left.
        limits: of each sandbox.

    Raises:
        IsolationUnavailable: lists everything that is missing.
    """

    def __init__(self, folder: Path, *, run_name: str, limits: Limits) -> None:
        self._groups = cgroups.find()
        problems = _problems(self._groups)
        if problems:
            raise IsolationUnavailable("bubblewrap cannot isolate here:\n  - " + "\n  - ".join(problems))
        self._folder = folder.resolve()
        self._run_name = run_name
        self._limits = limits
        self._folder.mkdir(parents=True, exist_ok=True)

    def describe(self) -> dict[str, str]:
        """Say what isolates and limits."""
        limits = (
            f"control groups version {self._groups.version}" if self._groups else "process limits (memory a process)"
        )
        return {"isolation": "bubblewrap", "network": "none", "limits": limits}

    def sandbox(self, task: Task, name: str) -> Sandbox:
        """Return a sandbox over a copy of the task's repository.

        Raises:
            ValueError: the task's repository is in an image, which bubblewrap cannot run.
        """
        if task.origin is None:
            raise ValueError(
                f"{task.instance_id} lives in image {task.image}; bubblewrap runs local tasks: choose docker or modal"
            )
        full_name = f"{self._run_name}-{name}"
        return BubblewrapSandbox(self._folder / full_name, task.origin, full_name, self._limits, self._groups)

    async def sweep(self) -> int:
        """End and remove what earlier runs of the same name left behind."""
        groups = self._groups.sweep(f"{self._run_name}-") if self._groups else 0
        folders = list(self._folder.glob(f"{self._run_name}-*"))
        for folder in folders:
            await asyncio.to_thread(_remove, folder)
        return max(groups, len(folders))


class BubblewrapSandbox:
    """One episode's folder; see `BubblewrapHost`."""

    def __init__(
        self, folder: Path, origin: Path, name: str, limits: Limits, groups: cgroups.ControlGroups | None
    ) -> None:
        self._folder = folder
        self._origin = origin
        self._name = name
        self._limits = limits
        self._groups = groups
        self._group: cgroups.ControlGroup | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self._seconds_since_measured = 0

    async def start(self) -> None:
        """Copy the repository and make the control group."""
        try:
            await asyncio.to_thread(self._make)
        except OSError as error:
            raise SandboxError(f"sandbox {self._name} could not be made: {error}") from error

    def _make(self) -> None:
        if self._folder.exists():
            _remove(self._folder)
        self._folder.mkdir(parents=True)
        shutil.copytree(self._origin, self._folder / "app", symlinks=True)
        for part in _WRITABLE[1:]:
            (self._folder / part).mkdir()
        if self._groups is not None:
            limits = self._limits
            self._group = self._groups.create(self._name, memory_bytes=limits.memory_bytes, processes=limits.processes)

    async def execute(self, command: str, *, seconds: float, cwd: str = "/app", stdin: bytes = b"") -> Executed:
        """Run one shell command in new namespaces."""
        return await self._run(
            ["bash", "-c", command], seconds=seconds, cwd=cwd, stdin=stdin, kept_bytes=self._limits.kept_bytes
        )

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Unpack files inside the namespaces, where a link that the agent planted leads nowhere."""
        done = await self._run(["tar", "-x", "-C", "/"], seconds=120.0, cwd="/", stdin=archive(files), kept_bytes=4096)
        if done.returncode != 0:
            raise SandboxError(f"sandbox {self._name}: files could not be written: {done.text}")

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Pack a path inside the namespaces."""
        argv = ["tar", "-c", "-C", str(Path(path).parent), "--", Path(path).name]
        done = await self._run(argv, seconds=120.0, cwd="/", kept_bytes=2 * max_bytes, output_bytes=max_bytes)
        return done.output if done.end == "exit" and done.returncode == 0 else None

    async def kill(self) -> None:
        """End every process of it, now."""
        self._killed = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def close(self) -> None:
        """Kill, and remove folder and control group.

        Raises:
            SandboxError: a process cannot be ended; the next start's sweep tries again.
        """
        await self.kill()
        if self._group is not None:
            try:
                await asyncio.to_thread(self._group.remove)
            except RuntimeError as error:
                raise SandboxError(f"sandbox {self._name} cannot be ended: {error}") from error
            self._group = None
        await asyncio.to_thread(_remove, self._folder)

    async def _run(
        self,
        argv: list[str],
        *,
        seconds: float,
        cwd: str,
        stdin: bytes = b"",
        kept_bytes: int,
        output_bytes: int | None = None,
    ) -> Executed:
        if self._killed or not self._folder.exists():
            raise SandboxError(f"sandbox {self._name} is gone")
        kills = self._group.memory_kills() if self._group else 0
        limits = self._limits
        done = await streams.run(
            self._outer(argv, cwd),
            seconds=seconds + _GRACE_SECONDS if stdin else seconds,
            output_bytes=output_bytes or limits.output_bytes,
            kept_bytes=kept_bytes,
            stdin=stdin,
            watch=self._disk_reason,
            started=self._remember,
        )
        end: End = done.end
        if self._group and self._group.memory_kills() > kills:
            end = "memory"
        elif end == "exit" and (done.returncode < 0 or self._killed):
            # The outer process was ended by someone else: a signal of a command inside shows as 128 + number.
            raise SandboxError(f"sandbox {self._name} was killed from outside ({done.returncode})")
        code = done.returncode if end == "exit" else None
        return Executed(
            returncode=code, output=done.output.content(), output_bytes=done.output.total, end=end, seconds=done.seconds
        )

    def _remember(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def _outer(self, argv: list[str], cwd: str) -> list[str]:
        entries = " ".join(map(str, self._group.entries)) if self._group else ""
        join = ["sh", "-c", _JOIN, "sh", entries]
        return [
            *join,
            *namespaces(self._folder, cwd),
            *_process_limits(self._limits, grouped=self._group is not None),
            *argv,
        ]

    def _disk_reason(self) -> End | None:
        return "disk" if _size(self._folder) > self._limits.disk_bytes else None


def namespaces(folder: Path, cwd: str) -> list[str]:
    """Return the bubblewrap command line, without the command."""
    argv = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    for system in ("/usr", sys.base_prefix):
        argv += ["--ro-bind", system, system]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if Path(name).is_symlink():
            argv += ["--symlink", os.readlink(name), name]
        elif Path(name).exists():
            argv += ["--ro-bind", name, name]
    for name in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/passwd", "/etc/group"):
        if Path(name).exists():
            argv += ["--ro-bind", name, name]
    for part in _WRITABLE:
        argv += ["--bind", str(folder / part), f"/{part}"]
    environment = {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/home", "LANG": "C.UTF-8",
        "TERM": "dumb", "PAGER": "cat", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    for name, value in environment.items():
        argv += ["--setenv", name, value]
    return [*argv, "--proc", "/proc", "--dev", "/dev", "--chdir", cwd, "--"]


def _process_limits(limits: Limits, *, grouped: bool) -> list[str]:
    argv = ["prlimit", "--core=0", f"--fsize={limits.disk_bytes}", "--nofile=1024"]
    if not grouped:
        argv += [f"--nproc={limits.processes}", f"--as={limits.memory_bytes}"]
    return [*argv, "--"]


def _problems(groups: cgroups.ControlGroups | None) -> list[str]:
    problems = []
    for program, install in (
        ("bwrap", INSTALL),
        ("prlimit", "apt-get install util-linux"),
        ("git", "apt-get install git"),
    ):
        if shutil.which(program) is None:
            problems.append(f"{program} is not installed: {install}")
    if groups is None and os.geteuid() == 0:
        problems.append(
            "no control group with memory and pids can be made, and the kernel ignores process limits of root: run as "
            "another user, or give this one a writable control group"
        )
    return problems or _trial_problems()


def _trial_problems() -> list[str]:
    trial = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"]
    status = os.spawnvp(os.P_WAIT, trial[0], trial)
    return (
        [f"`{' '.join(trial)}` ended with {status}: this kernel or container forbids user namespaces"] if status else []
    )


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:  # files come and go while the command runs
                continue
    return total


def _remove(folder: Path) -> None:
    def open_and_retry(function, path, _error) -> None:
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        os.chmod(path, stat.S_IRWXU, follow_symlinks=False) if not os.path.islink(path) else None
        function(path)

    if folder.exists():
        shutil.rmtree(folder, onexc=open_and_retry)
