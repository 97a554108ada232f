# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids and back, in the Nemotron-3.5 chat format, with ids that never change once they are there.

The first prompt is rendered as a whole. After that nothing is rendered again: a turn's sampled ids stay as they came,
and only what closes the turn, the tool's output and the opening of the next turn are appended.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.swe_bench_pro.agent.tokens import Tokenizer, encode_frame, encode_plain

END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
_OPEN_TURN = "<|im_start|>assistant\n<think>\n"
_EMPTY_THOUGHT = "<|im_start|>assistant\n<think></think>"


@dataclass(frozen=True)
class Tool:
    """One function that the model may call; all its parameters are text."""

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]
    """(name, description); every one is required."""


BASH = Tool(
    "bash", "Run a shell command in a fresh shell and read what it prints.", (("command", "The command line."),)
)


@dataclass(frozen=True)
class Turn:
    """What the model said in one turn."""

    thought: str
    content: str
    calls: tuple[tuple[str, dict[str, str]], ...]
    """(function, arguments) of every complete call."""
    problem: str = ""
    """Why it is no usable turn, in words for the model; empty if it is one."""


class Renderer(Protocol):
    """The four things the loop needs."""

    def prompt(self, system: str, user: str) -> list[int]:
        """Return the first prompt, open for the model's turn."""
        ...

    def parse(self, token_ids: Sequence[int]) -> Turn:
        """Read one turn from the ids that were sampled."""
        ...

    def extension(self, token_ids: Sequence[int], *, tool_output: str | None, user: str | None) -> list[int] | None:
        """Return the ids to append after a sampled turn, up to the opening of the next; None if there is no exact way.

        Args:
            token_ids: what was sampled in the turn, the stop token included if it was.
            tool_output: answers a call.
            user: a message instead.
        """
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a turn."""
        ...


class NemotronRenderer:
    """The format of Nemotron-3.5: ChatML frame, thinking kept in the history, one XML tool call a turn.

    Args:
        tokenizer: of the model; it must have the frame's tokens.
        tools: what may be called.
        thinking: False opens each turn behind an empty thought.
        template: the checkpoint's `chat_template.jinja`, for the first prompt; None takes our own wording.

    Raises:
        ValueError: the tokenizer lacks a token of the frame, or the template cannot be used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool] = (BASH,),
        *,
        thinking: bool = True,
        template: str | None = None,
    ) -> None:
        needed = ("<|im_start|>", END)
        lacking = [text for text in needed if text not in tokenizer.specials]
        if lacking:
            raise ValueError(f"the tokenizer has no token {', '.join(lacking)}; a Nemotron-3 tokenizer is needed")
        self.tokenizer = tokenizer
        self._tools = tuple(tools)
        self._open = _OPEN_TURN if thinking else _EMPTY_THOUGHT
        self._thinking = thinking
        self._pieces = (
            own_pieces(self._tools, thinking=thinking)
            if template is None
            else checkpoint_pieces(template, self._tools, thinking=thinking)
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the ids of the end of a turn and, if there is one, of the text."""
        specials = self.tokenizer.specials
        return tuple(specials[text] for text in (END, END_OF_TEXT) if text in specials)

    def prompt(self, system: str, user: str) -> list[int]:
        """Return system block with the tools, user message, and the opening of the model's turn."""
        before, between, after = self._pieces
        ids = [*self._frame(before), *self._plain(system), *self._frame(between)]
        return [*ids, *self._plain(user), *self._frame(after)]

    def parse(self, token_ids: Sequence[int]) -> Turn:
        """Read thought, content and calls; a cut or malformed turn says what is wrong with it."""
        text = self.tokenizer.decode(token_ids)
        for end in (END, END_OF_TEXT):
            text = text.removesuffix(end)
        thought, closed, rest = text.partition("</think>")
        if not self._thinking or (not closed and "<tool_call>" in thought):
            thought, rest = ("", text) if not closed else (thought, rest)
            closed = "</think>"
        if not closed:
            return Turn(thought.strip("\n"), "", (), "the thought did not end")
        content, calls, problem = parse_calls(rest, self._tools)
        return Turn(thought.strip("\n"), content.strip("\n"), calls, problem)

    def extension(self, token_ids: Sequence[int], *, tool_output: str | None, user: str | None) -> list[int] | None:
        """Close the turn if it did not close itself, and append the answer."""
        if (tool_output is None) == (user is None):
            raise ValueError("an extension has either a tool output or a user message: give one of them")
        ids = self._closing(token_ids)
        if user is not None:
            return [*ids, *self._frame("<|im_start|>user\n"), *self._plain(user), *self._frame(f"{END}\n{self._open}")]
        before, after = "<|im_start|>user\n<tool_response>\n", f"\n</tool_response>\n{END}\n{self._open}"
        return [*ids, *self._frame(before), *self._plain(tool_output), *self._frame(after)]

    def _closing(self, token_ids: Sequence[int]) -> list[int]:
        if token_ids and token_ids[-1] == self.tokenizer.specials[END]:
            return self._frame("\n")
        # A turn that was cut by length, or ended the text, is closed for it: these ids were not sampled.
        text = self.tokenizer.decode(token_ids)
        unfinished = self._thinking and "</think>" not in text and "<tool_call>" not in text
        return self._frame(f"</think>{END}\n" if unfinished else f"{END}\n")

    def _frame(self, text: str) -> list[int]:
        return encode_frame(self.tokenizer, text)

    def _plain(self, text: str) -> list[int]:
        return encode_plain(self.tokenizer, text)


def _declaration(tool: Tool) -> str:
    parameters = "\n".join(
        f"<parameter>\n<name>{name}</name>\n<type>string</type>\n<description>{description}</description>\n</parameter>"
        for name, description in tool.parameters
    )
    required = ", ".join(f'"{name}"' for name, _ in tool.parameters)
    return (
        f"<function>\n<name>{tool.name}</name>\n<description>{tool.description}</description>\n"
        f"<parameters>\n{parameters}\n<required>[{required}]</required>\n</parameters>\n</function>"
    )


_FORMAT = """
</tools>

A turn ends with one call of a function in this form, and nothing behind it:

<tool_call>
<function=NAME>
<parameter=PARAMETER>
value, one or more lines
</parameter>
</function>
</tool_call>

Every required parameter must be given. Reasoning stands before the call."""


def checkpoint_pieces(template: str, tools: Sequence[Tool], *, thinking: bool) -> tuple[str, str, str]:
    """Render the first prompt by a checkpoint's own chat template, cut where system text and user message go.

    The template sees marks instead of the texts, so that what an outsider wrote is never read as a part of the frame.

    Raises:
        ValueError: the template changes or drops the marks.
    """
    system, user = "@@SYSTEM-TEXT@@", "@@USER-MESSAGE@@"
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(template).render(
        messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
        tools=[schema(tool) for tool in tools],
        add_generation_prompt=True,
        enable_thinking=thinking,
        truncate_history_thinking=False,
    )
    if text.count(system) != 1 or text.count(user) != 1 or text.index(system) > text.index(user):
        raise ValueError("the chat template must keep the system text and the user message once each, in this order")
    before, _, rest = text.partition(system)
    between, _, after = rest.partition(user)
    return before, between, after


def own_pieces(tools: Sequence[Tool], *, thinking: bool) -> tuple[str, str, str]:
    """Return the same cut of our own wording of the format, for models that have no template."""
    declared = "\n\n# Tools\n\n<tools>\n" + "\n".join(map(_declaration, tools)) + _FORMAT
    return (
        "<|im_start|>system\n",
        f"{declared}{END}\n<|im_start|>user\n",
        f"{END}\n{_OPEN_TURN if thinking else _EMPTY_THOUGHT}",
    )


def schema(tool: Tool) -> dict:
    """Return the tool as JSON schema, the form that chat templates read."""
    properties = {name: {"type": "string", "description": description} for name, description in tool.parameters}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse_calls(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[tuple[str, dict[str, str]], ...], str]:
    """Return (content before the first call, complete calls, what is wrong in words)."""
    content = text.partition("<tool_call>")[0]
    opened = text.count("<tool_call>")
    calls = tuple((name.strip(), dict(_PARAMETER.findall(body))) for name, body in _CALL.findall(text))
    if not opened:
        return content, (), "there is no function call"
    if len(calls) < opened:
        return content, calls, "a function call is not complete"
    known = {tool.name: {name for name, _ in tool.parameters} for tool in tools}
    for name, arguments in calls:
        if name not in known:
            return content, calls, f"there is no function {name}"
        if set(arguments) != known[name]:
            return content, calls, f"{name} needs exactly {', '.join(sorted(known[name]))}"
    return content, calls, ""
