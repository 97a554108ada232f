# SPDX-License-Identifier: Apache-2.0
"""Every sentence that the agent reads, and how a command's result is shown to it."""

from dataclasses import dataclass

from examples.swe_bench_pro.sandbox.protocol import Executed

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""A command whose first line of output is this ends the episode; mini-swe-agent uses the same word."""

SHOWN_CHARACTERS = 5000
"""Of a long output, this many from its head and as many from its tail are shown."""


@dataclass(frozen=True)
class Prompts:
    """Texts around the task's own; a run may replace them."""

    system: str = "You are a programmer who repairs a project by shell commands."
    task: str = (
        "The project is in /app. Change its files so that the following holds.\n\n{statement}\n\n"
        "Each command runs in a fresh shell in /app, without a network. Do not change existing tests: others will be "
        f"run. When you are done, run: echo {SUBMIT}"
    )
    no_call: str = "No command was run: {problem}. Call the function bash with one command."


def observation(done: Executed) -> str:
    """Return what the agent reads after a command."""
    status = f"exit status {done.returncode}" if done.end == "exit" else _ENDS[done.end].format(seconds=done.seconds)
    return f"[{status}]\n{shorten(done.text)}"


_ENDS = {
    "timeout": "ended after {seconds:.0f} s: it took too long",
    "memory": "ended: it used too much memory",
    "output": "ended: it printed too much",
    "disk": "ended: it wrote too much",
}


def shorten(text: str) -> str:
    """Keep head and tail of a long text and say how much is left out."""
    left_out = len(text) - 2 * SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:SHOWN_CHARACTERS]}\n[{left_out} characters are left out]\n{text[-SHOWN_CHARACTERS:]}"


def is_submission(done: Executed) -> bool:
    """Tell whether a command's output ends the episode."""
    return done.end == "exit" and done.returncode == 0 and done.text.lstrip().split("\n", 1)[0].strip() == SUBMIT
