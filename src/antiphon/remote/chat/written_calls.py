"""Function calls that a model writes as JSON in its text, and that its server does not convert into calls. Pure."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from antiphon.contracts import Reply, ReplyDone, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.events.tools import ToolCall
from antiphon.remote.chat.replies import MAX_CALLS
from antiphon.text.written_calls import WrittenCallFinder

log = logging.getLogger(__name__)
# The names that servers and models use for a function and its arguments.
_NAMES = ("name", "function", "function_name", "tool", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
# Bounds for one reply: beginnings of JSON that are tried, JSON values that are searched for calls, and characters that
# are read. Real arguments are shorter.
_MAX_BEGINNINGS, _MAX_VALUES, _MAX_CHARS = 64, 10_000, 1 << 18
_BEGINNING = re.compile(r"[{\[]")
_decoder = json.JSONDecoder()


class WrittenCalls:
    """Finds JSON in a reply's text that calls a tool in `names`, and converts it into calls, so that it is not spoken.

    From the beginning of such JSON, the text is held back until the end of the reply. The arguments are passed on as
    the model wrote them, and are not checked against the tool's schema.

    - `parallel`: if False, only the first call of the reply is kept. Calls that the model's server found itself also
      count.
    - `makes`: if False, the JSON of a call is dropped and not converted.
    - `void`: the ReplyDone of a reply that contained only a call of an unknown tool; None for other replies. This
      ReplyDone is not yielded, because the caller repeats the request without tools.
    """

    void: ReplyDone | None = None

    def __init__(self, names: Collection[str], *, parallel: bool = True, makes: bool = True) -> None:
        self._names, self._parallel, self._makes = frozenset(names), parallel, makes
        self._finder = WrittenCallFinder(names)
        # Text that may turn out to be the beginning of a call, and the reply's text from the beginning of a call.
        self._held, self._text = "", list[str]()
        self._before = ""
        self._written = self._told = self._is_known = False
        self._num_calls = 0

    def feed(self, reply: Reply) -> Iterator[Reply]:
        """Take a part of the reply, and yield the content that is certain not to be a written call."""
        match reply:
            case TextDelta(text):
                yield from self._prose(text)
            case ReplyDone():
                yield from self._end(reply)
            case _:
                self._num_calls += isinstance(reply, ToolCallStarted)
                if self._parallel or self._num_calls == 1:
                    yield reply

    def _prose(self, text: str) -> Iterator[Reply]:
        if self._written:
            self._text.append(text)
            return
        self._held += text
        cut, name = self._finder.find(self._before, self._held)
        prose, self._held = self._held[:cut], self._held[cut:]
        if name is not None:
            self._written, self._is_known = True, bool(name)
            self._text.append(self._held)
        if prose:
            self._told = self._told or not prose.isspace()
            self._before = prose[-1]
            yield TextDelta(prose)

    def _end(self, done: ReplyDone) -> Iterator[Reply]:
        if not self._written:
            if self._held:
                yield TextDelta(self._held)
            yield done
            return
        # JSON after a call that the server made itself is the model's comment on the call.
        reads = self._makes and self._is_known and not self._num_calls
        calls = calls_in("".join(self._text), self._names) if reads else []
        if self._makes and not (self._is_known or self._num_calls or self._told):
            self.void = done
            return
        if not calls and not self._num_calls:
            log.warning("the model's server sent a call as JSON that cannot be read; it is dropped")
        for call in calls if self._parallel else calls[:1]:
            yield ToolCallStarted(call.id, call.name)
            yield ToolCallDelta(call.arguments)
        yield replace(done, reason="tool_calls") if calls else done


def calls_in(text: str, names: Collection[str]) -> list[ToolCall]:
    """Return the calls of tools with these names that a text contains as JSON, in their order, each with a new id.

    Returns the first MAX_CALLS calls in the first _MAX_CHARS characters. Skips invalid JSON, and stops after it has
    read twice the length of the text.
    """
    text = text[:_MAX_CHARS]
    calls, at, read = list[ToolCall](), 0, 0
    for _ in range(_MAX_BEGINNINGS):
        start = _BEGINNING.search(text, at)
        if start is None or read > 2 * len(text) or len(calls) == MAX_CALLS:
            break
        begin = start.start()
        try:
            value, at = _decoder.raw_decode(text, begin)
            read += at - begin
            calls += islice(_calls(value, names), MAX_CALLS - len(calls))
        except (ValueError, RecursionError) as error:
            # If the JSON is too deep or has too long a number, it is unknown how far it was read.
            read += getattr(error, "pos", len(text)) - begin
            at = max(at, begin + 1)
    return calls


def _calls(value: Any, names: Collection[str]) -> Iterator[ToolCall]:
    """Yield the calls in a JSON value in order, among its first _MAX_VALUES values."""
    waiting = [value]
    for _ in range(_MAX_VALUES):
        if not waiting:
            return
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value[:_MAX_VALUES])
        elif isinstance(value, dict):
            name = next((n for k in _NAMES if isinstance(n := value.get(k), str) and n in names), None)
            if name is None:
                waiting += reversed(list(islice(value.values(), _MAX_VALUES)))
            elif call := _call(name, next((value[k] for k in _ARGUMENTS if k in value), {})):
                yield call


def _call(name: str, arguments: Any) -> ToolCall | None:
    """Return the call of a tool with an object's arguments; None if they are invalid."""
    if isinstance(arguments, str):
        # In OpenAI's form, they are JSON within JSON.
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False))
