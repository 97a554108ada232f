# SPDX-License-Identifier: Apache-2.0
"""The optional package `renderers` behind our renderer protocol. Needs the extra `swe`.

The package reads special tokens in tool output as special, so their texts are broken up with an invisible character
before they reach it; our own renderer leaves the text as it is.
"""

from collections.abc import Sequence
from typing import Any

from examples.swe_bench_pro.agent.renderer import BASH, Tool, Turn, schema

_BREAK = "\u200b"


class PackageRenderer:
    """One renderer of the package, as the loop sees it.

    Args:
        inner: a renderer object of the package whose history is prefix-stable, for example
            `Nemotron35Renderer(tokenizer, Nemotron35RendererConfig(truncate_history_thinking=False))`.
        specials: texts of the tokenizer's special tokens.
        tool: the one function that may be called.
    """

    def __init__(self, inner: Any, specials: Sequence[str], tool: Tool = BASH) -> None:
        self._inner = inner
        self._specials = sorted(specials, key=len, reverse=True)
        self._tool = tool
        self._tools = [schema(tool)]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a turn."""
        return tuple(self._inner.get_stop_token_ids())

    def prompt(self, system: str, user: str) -> list[int]:
        """Return the first prompt, open for the model's turn."""
        messages = [
            {"role": "system", "content": self._broken(system)},
            {"role": "user", "content": self._broken(user)},
        ]
        return list(self._inner.render_ids(messages, tools=self._tools, add_generation_prompt=True))

    def parse(self, token_ids: Sequence[int]) -> Turn:
        """Read one turn from the ids that were sampled."""
        opening = self.prompt("", "")
        said = self._inner.parse_response(list(token_ids), prompt_ids=opening, tools=self._tools)
        calls = tuple(
            (call.name, dict(call.arguments)) for call in said.tool_calls if call.name and call.arguments is not None
        )
        wanted = {name for name, _ in self._tool.parameters}
        problem = "" if said.tool_calls else "there is no function call"
        if len(calls) < len(said.tool_calls):
            problem = "a function call is not complete"
        elif any(name != self._tool.name or set(arguments) != wanted for name, arguments in calls):
            problem = f"{self._tool.name} needs exactly {', '.join(sorted(wanted))}"
        return Turn(said.reasoning_content or "", said.content or "", calls, problem)

    def extension(self, token_ids: Sequence[int], *, tool_output: str | None, user: str | None) -> list[int] | None:
        """Return what the package's bridge appends, or None if it has no exact way."""
        role, text = ("tool", tool_output) if user is None else ("user", user)
        opening = self.prompt("", "")
        bridged = self._inner.bridge_to_next_turn(
            opening, list(token_ids), [{"role": role, "content": self._broken(text)}], tools=self._tools
        )
        if bridged is None:
            return None
        ids = list(getattr(bridged, "token_ids", bridged))
        start = [*opening, *token_ids]
        return ids[len(start) :] if ids[: len(start)] == start else None

    def _broken(self, text: str) -> str:
        for special in self._specials:
            text = text.replace(special, special[0] + _BREAK + special[1:])
        return text
