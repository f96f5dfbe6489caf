"""Function calls in a model's text: grammars that enforce their schema, and a reader that finds them.

A grammar is a text that constrains the tokens that an engine samples. The reader separates calls from prose while the
text streams. Pure: depends on neither a model nor a grammar library.

Calls have the Hermes format, on which Qwen and most small models were trained:

    <tool_call>
    {"name": NAME, "arguments": {...}}
    </tool_call>

Small models often write calls as JSON in other formats, bare or fenced. If such JSON names a tool, it counts as a call,
not as prose. The caller of this module then lets the model write the call again in the format above.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from antiphon.contracts import Reply, ReplyOptions, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.engine.api import Grammar
from antiphon.engine.schemas import json_grammar
from antiphon.events.tools import JsonSchema, Tool
from antiphon.modeling.tokens import held_back
from antiphon.text.written_calls import WrittenCallFinder

# The tags around a call.
CALL_OPENING, CALL_CLOSING = "<tool_call>", "</tool_call>"
# The keywords of a schema that does nothing but list arguments.
_LISTING = frozenset({"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"})
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')


def offered_tools(options: ReplyOptions) -> tuple[Tool, ...]:
    """Return the tools that a reply may call: all, the chosen one, or none."""
    if options.tool_choice in ("auto", "required"):
        return options.tools
    return tuple(t for t in options.tools if t.name == options.tool_choice)


def call_grammar(tools: Sequence[Tool], closing: int | None, *, begun: bool) -> Grammar:
    """Return the grammar of calls of any of `tools`: the text from the opening tag, exclusive, to the closing tag.

    `closing`: the token of the closing tag, if the tokenizer has one. `begun`: the prompt ends in an opening tag, and
    the reply must be exactly one call; without this limit, small models continue with more calls. Otherwise the reply
    is prose, and each call in it must match the grammar. The engine checks the tools' schemas, which are enforced as in
    `json_grammar`.
    """
    end = f'"{CALL_CLOSING}"' if closing is None else f"<[{closing}]>"
    calls = [f"call_{i}" for i in range(len(tools))]
    lines = [f'start: "\\n{{" ({" | ".join(calls)}) "}}\\n" {end}']
    # Each tool's schema is a separate document, because its references point into itself.
    for call, tool in zip(calls, tools, strict=True):
        head = f'"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        lines += [
            f"{call}: {json.dumps(head, ensure_ascii=False)} {call}_arguments",
            f"{call}_arguments: %json {arguments_grammar(tool).text}",
        ]
    return Grammar("lark", "\n".join(lines) + "\n", trigger="" if begun else CALL_OPENING)


def arguments_grammar(tool: Tool) -> Grammar:
    """Return the grammar of a tool's arguments."""
    return json_grammar(_arguments(tool))


def _arguments(tool: Tool) -> JsonSchema:
    """The schema of a tool's arguments.

    A schema that only lists arguments is closed, so that a model cannot add others.
    """
    listed, required = tool.parameters.get("properties"), tool.parameters.get("required") or []
    is_list = isinstance(listed, Mapping) and isinstance(required, list) and all(name in listed for name in required)
    if is_list and set(tool.parameters) <= _LISTING:
        return {"additionalProperties": False, **tool.parameters}
    return tool.parameters or {"type": "object"}


def prose_grammar(*, begun: bool = False) -> Grammar:
    """Return the grammar of a reply without calls, which begins with a word and has no brackets, tags or fences.

    `begun`: the text continues earlier prose.
    """
    space = r"\s*" if begun else ""
    return Grammar("lark", rf"start: /{space}[\p{{L}}\p{{N}}'\x22][^{{}}\[\]<>`]*/" + "\n")


class ProseReader:
    """Replaces a CallReader for a reply that may not contain calls."""

    calls = 0
    called = False
    written: str | None = None
    prose = ""

    def feed(self, text: str) -> Iterator[Reply]:
        """Yield the text unchanged, as one TextDelta."""
        if text:
            yield TextDelta(text)

    def flush(self) -> Iterator[Reply]:
        """Yield nothing: no text is held back."""
        return iter(())


class CallReader:
    """Splits a reply's text into prose and calls as it streams.

    `ids`: yields the id of each call. `begun`: the text begins after an opening tag. `calls`: the number of calls that
    have begun. A call's name is yielded as soon as it is known, and its arguments as they arrive, without the brace
    that closes the call. If the text after an opening tag is not a call, it is dropped.

    `names`: the names of the tools. If JSON in the prose begins a call of one of these tools, `written` is the tool's
    name, and neither the JSON nor the text after it is yielded. If the JSON calls an unknown tool, `written` is "".
    `prose` is all text before the JSON.

    `is_meant`: a function that gets the name and arguments of a complete call. No part of the call is yielded before.
    If it returns False, the call is dropped, and `written` is "".
    """

    def __init__(
        self,
        ids: Iterator[str],
        *,
        begun: bool = False,
        names: Sequence[str] = (),
        is_meant: Callable[[str, str], bool] | None = None,
    ) -> None:
        self._ids, self._is_meant = ids, is_meant
        self._finder = WrittenCallFinder(names) if names else None
        self.written: str | None = None
        self.prose = self._text = ""
        self._inside = begun
        self._open = False
        self._fresh = False
        self._sent = 0
        self.calls = 0

    def feed(self, text: str) -> Iterator[Reply]:
        """Feed the next part of the text. Yields its content: prose, starts of calls, and parts of their arguments."""
        self._text += text
        while self.written is None:
            if self._inside:
                body, end, rest = self._text.partition(CALL_CLOSING)
                yield from self._call(
                    body if end else body[: len(body) - held_back(body, (CALL_CLOSING,))], done=bool(end)
                )
                if not end:
                    return
                self._inside, self._open, self._text, self._fresh = False, False, rest, True
            else:
                if self._fresh:
                    # The line break after a call is part of the format.
                    self._text = self._text.lstrip("\n")
                    self._fresh = not self._text
                prose, start, rest = self._text.partition(CALL_OPENING)
                if start:
                    # The line break before a call is part of the format.
                    prose = prose.rstrip()
                    self._inside, self._sent, self._text = True, 0, rest
                else:
                    settled = prose[: len(prose) - max(held_back(prose, (CALL_OPENING,)), self._written(prose))]
                    cut = len(settled.rstrip("\n") if self.written is None else settled.rstrip())
                    prose, self._text = prose[:cut], prose[cut:]
                if prose:
                    self.prose += prose
                    yield TextDelta(prose)
                if not start:
                    return

    def flush(self) -> Iterator[Reply]:
        """Yield the text that was held back: prose, or the rest of a call that was not closed.

        Called after the last `feed`.
        """
        if self._inside:
            yield from self._call(self._text, done=True)
        elif self._text and self.written is None:
            yield TextDelta(self._text)
        self._text = ""

    @property
    def called(self) -> bool:
        """Whether a call is complete and no other call has begun."""
        return self.calls > 0 and not self._open

    def _written(self, prose: str) -> int:
        """Return the length of the suffix of the prose that is, or may become, the start of a JSON call."""
        # After a call in the Hermes format, JSON is part of the model's prose about the call.
        if not self._finder or self.calls:
            return 0
        start, self.written = self._finder.find(self.prose[-1:], prose)
        return len(prose) - start

    def _call(self, body: str, *, done: bool) -> Iterator[Reply]:
        head = _HEAD.match(body)
        if not head or (self._is_meant and not done):
            return
        if self._is_meant and not self._is_meant(json.loads(head[1]), body[head.end() :].rstrip().removesuffix("}")):
            self.written = ""
            return
        if not self._open:
            self._open = True
            self.calls += 1
            yield ToolCallStarted(next(self._ids), json.loads(head[1]))
        arguments = body[head.end() :].rstrip()
        # Only the brace before the closing tag closes the call. Until the tag arrives, the last brace may belong to the
        # arguments.
        ready = arguments.removesuffix("}").rstrip()
        if len(ready) > self._sent:
            yield ToolCallDelta(ready[self._sent :])
            self._sent = len(ready)
