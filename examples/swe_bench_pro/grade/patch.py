# SPDX-License-Identifier: Apache-2.0
"""Take the agent's patch from the files it left, on this machine, by our git: never from what the agent says.

The agent's tree is data. It is unpacked without anything named `.git`, so no configuration, hook or embedded
repository of the agent can reach our git, and links are made last, so nothing is written through one.
"""

import asyncio
import io
import os
import re
import subprocess
import tarfile
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from examples.swe_bench_pro.tasks.own import git_environment

PATCH_BYTES = 1 << 20
_DIFF = ("diff", "--cached", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")


class TreeRefused(ValueError):  # noqa: N818 - named for the verdict
    """The agent left files that no patch can describe."""


@dataclass(frozen=True)
class PatchTaker:
    """Keeps what each task looked like before the agent, and compares.

    Args:
        folder: for the base repositories, one a task.
    """

    folder: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def remember(self, instance_id: str, tree: bytes) -> None:
        """Keep the tree (tar of `/app`) that the agent starts from; a known task is left as it is."""
        if not (self.folder / instance_id).exists():
            await asyncio.to_thread(self._remember, instance_id, tree)

    async def take(self, instance_id: str, tree: bytes) -> str:
        """Return the difference between the remembered tree and this one, as text, binary parts left out.

        Raises:
            TreeRefused: the tree cannot be read, or its patch is too large.
        """
        return await asyncio.to_thread(self._take, instance_id, tree)

    def _remember(self, instance_id: str, tree: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # All members of a group come at once: one of them makes it.
        with self._lock, tempfile.TemporaryDirectory(dir=self.folder, prefix="making-") as made:
            if (self.folder / instance_id).exists():
                return
            repository, work = Path(made) / "repository", Path(made) / "work"
            _unpack(tree, work)
            _git(repository, work, "init", "-q", "--bare")
            _git(repository, work, "add", "-A")
            _git(repository, work, "commit", "-q", "--allow-empty", "-m", "base")
            repository.rename(self.folder / instance_id)

    def _take(self, instance_id: str, tree: bytes) -> str:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="taking-") as made:
            work, repository = Path(made) / "work", self.folder / instance_id
            _unpack(tree, work)
            index = {"GIT_INDEX_FILE": str(Path(made) / "index")}
            _git(repository, work, "read-tree", "HEAD", environment=index)
            _git(repository, work, "add", "-A", environment=index)
            patch = _git(repository, work, *_DIFF, environment=index)
        return checked(patch.decode("utf-8", errors="surrogateescape"))


def checked(patch: str) -> str:
    """Return the patch without its binary parts.

    Raises:
        TreeRefused: it is too large, or no UTF-8.
    """
    kept = without_binary_parts(patch)
    try:
        size = len(kept.encode())
    except UnicodeEncodeError as error:
        raise TreeRefused("the patch is not UTF-8") from error
    if size > PATCH_BYTES:
        raise TreeRefused(f"the patch has {size} bytes; {PATCH_BYTES} are accepted")
    return kept


def without_binary_parts(patch: str) -> str:
    """Drop the files of a git patch whose difference is binary."""
    parts = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    binary = re.compile(r"^(Binary files .* differ|GIT binary patch)$", re.MULTILINE)
    return "".join(part for part in parts if not binary.search(part))


def _git(repository: Path, work: Path, *arguments: str, environment: dict[str, str] | None = None) -> bytes:
    options = (
        "core.hooksPath=/dev/null",
        "core.excludesFile=/dev/null",
        "core.attributesFile=/dev/null",
        "core.autocrlf=false",
    )
    command = ["git", *(part for option in options for part in ("-c", option)), "--git-dir", str(repository)]
    if "init" not in arguments:
        command += ["--work-tree", str(work)]
    done = subprocess.run(
        [*command, *arguments], cwd=work, env=git_environment() | (environment or {}), capture_output=True, timeout=300
    )
    if done.returncode:
        raise TreeRefused(f"git {arguments[0]} refuses the tree: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout


def _unpack(tree: bytes, work: Path) -> None:
    work.mkdir()
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(tree)) as tar:
            for entry in tar:
                path = _place(entry.name, work)
                if path is None:
                    continue
                if entry.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif entry.isreg():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(tar.extractfile(entry).read())
                    path.chmod(0o755 if entry.mode & 0o100 else 0o644)
                elif entry.issym():
                    links.append((path, entry.linkname))
                elif entry.islnk():
                    _copy_of(entry, work, path)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise TreeRefused(f"the tree cannot be unpacked: {error}") from error
    for path, target in links:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            path.symlink_to(target)


def _place(name: str, work: Path) -> Path | None:
    """Return where an entry of the archive goes; its first part is the folder `app`."""
    parts = PurePosixPath(name).parts[1:]
    if ".." in parts or not parts or any(part.lower() == ".git" for part in parts):
        return None
    return work.joinpath(*parts)


def _copy_of(entry: tarfile.TarInfo, work: Path, path: Path) -> None:
    source = _place(entry.linkname, work)
    if source is not None and source.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())
        path.chmod(source.stat().st_mode & 0o777)
