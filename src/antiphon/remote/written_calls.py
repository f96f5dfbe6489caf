"""Function calls that a server's model writes as JSON in its text, where the server made no calls of them. Pure."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from antiphon.contracts import Reply, ReplyDone, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.events.tools import ToolCall, written_call

log = logging.getLogger(__name__)
# How servers and models name a function and its arguments.
_NAMES = ("name", "function", "function_name", "tool", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
# Bound: the JSON values, or what is none, that are looked at in one reply.
_MAX_VALUES = 64
_decoder = json.JSONDecoder()


class WrittenCalls:
    """Turns JSON in a reply's prose that calls a tool of one of `names` into calls: it would be spoken.

    From where such JSON begins, prose is held until the end. `parallel` false: of several
    calls, those of the server's own included, only the first is made.
    Arguments are as the model wrote them: nothing holds them to the tool's schema.

    `makes` false: such JSON is dropped, and no call is made of it.

    `void`: the end of a reply that was nothing but a call of what is no tool, which is not yielded: it is for the
    caller to ask again without tools. None for any other.
    """

    void: ReplyDone | None = None

    def __init__(self, names: Collection[str], *, parallel: bool = True, makes: bool = True) -> None:
        self._names, self._parallel, self._makes = frozenset(names), parallel, makes
        self._pattern = written_call(names)
        self._held = self._before = ""
        self._written = self._told = self._is_known = False
        self._num_calls = 0

    def feed(self, reply: Reply) -> Iterator[Reply]:
        """Yield what a part of the reply adds to what is known of it."""
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
        self._held += text
        if self._written:
            return
        # What stands before it decides whether JSON begins there.
        found = self._pattern.search(self._before + self._held, len(self._before), partial=True)
        cut = found.start() - len(self._before) if found else len(self._held)
        self._written = bool(found and not found.partial)
        self._is_known = bool(found and found["name"])
        prose, self._held = self._held[:cut], self._held[cut:]
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
        # Behind a call that the server has made, JSON is what the model says of it.
        calls = calls_in(self._held, self._names) if self._makes and self._is_known and not self._num_calls else []
        if self._makes and not (self._is_known or self._num_calls or self._told):
            self.void = done
            return
        if not calls and not self._num_calls:
            log.warning("the model's server sent a call as JSON that cannot be read; nothing is made of it")
        for call in calls if self._parallel else calls[:1]:
            yield ToolCallStarted(call.id, call.name)
            yield ToolCallDelta(call.arguments)
        yield replace(done, reason="tool_calls") if calls else done


def calls_in(text: str, names: Collection[str]) -> list[ToolCall]:
    """Return the calls of tools of these names that stand as JSON in a text, in their order, each with a new id."""
    calls, at = list[ToolCall](), 0
    for _ in range(_MAX_VALUES):
        start = min((i for i in (text.find("{", at), text.find("[", at)) if i >= 0), default=-1)
        if start < 0:
            break
        try:
            value, at = _decoder.raw_decode(text, start)
            calls += list(_calls(value, names))
        except (ValueError, RecursionError):
            at = max(at, start + 1)
    return calls


def _calls(value: Any, names: Collection[str]) -> Iterator[ToolCall]:
    if isinstance(value, list):
        for inner in value:
            yield from _calls(inner, names)
    elif isinstance(value, dict):
        name = next((n for k in _NAMES if isinstance(n := value.get(k), str) and n in names), None)
        if name is None:
            yield from _calls(list(value.values()), names)
            return
        arguments: Any = next((value[k] for k in _ARGUMENTS if k in value), {})
        if isinstance(arguments, str):
            # OpenAI's form has them as JSON within JSON.
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return
        if isinstance(arguments, dict):
            yield ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False))
