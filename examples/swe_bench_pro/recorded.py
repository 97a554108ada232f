# SPDX-License-Identifier: Apache-2.0
"""Answers of a tool without a sandbox: for machines that cannot isolate. Nothing is ever executed.

It serves measurements of the training path only. Each turn of the model, whatever it says, counts as a call of one
command, and the answer is text of a length that follows from the command. There is no project and no grade.
"""

from collections.abc import Mapping, Sequence

from examples.swe_bench_pro.agent.renderer import NemotronRenderer, Turn
from examples.swe_bench_pro.sandbox.protocol import Executed, Sandbox, archive
from examples.swe_bench_pro.tasks.columns import Task


class CountingRenderer(NemotronRenderer):
    """Reads every turn as `seq 1 N`, N from the turn's ids, so that most answers are short and few are very long.

    Set `longest` before the first turn.
    """

    longest: int = 800

    def parse(self, token_ids: Sequence[int]) -> Turn:
        """Return one call, whatever was said."""
        share = (sum(token_ids) % 1000) / 1000
        number = 20 + int(self.longest * share**12)
        return Turn("", "", (("bash", {"command": f"seq 1 {number}"}),))


class RecordedHost:
    """Hands out answers instead of sandboxes."""

    def describe(self) -> dict[str, str]:
        """Say that nothing is executed."""
        return {
            "isolation": "none: a scripted tool server, no command is ever executed",
            "network": "none",
            "limits": "none",
        }

    def sandbox(self, task: Task, name: str) -> Sandbox:
        """Return a scripted tool."""
        return RecordedSandbox()

    async def sweep(self) -> int:
        """Return 0: nothing is left behind."""
        return 0


class RecordedSandbox:
    """Answers `seq 1 N` with its output, and anything else with nothing."""

    async def start(self) -> None:
        """Do nothing."""

    async def execute(self, command: str, *, seconds: float, cwd: str = "/app", stdin: bytes = b"") -> Executed:
        """Write what the command would have printed."""
        words = command.split()
        last = int(words[2]) if words[:2] == ["seq", "1"] else 0
        output = "".join(f"{number}\n" for number in range(1, last + 1)).encode()
        return Executed(returncode=0, output=output, output_bytes=len(output), end="exit", seconds=0.0)

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Drop the files."""

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return an empty project."""
        return archive({"app/empty": b""})

    async def kill(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
