"""What every wire of this room gives: a body to send, and a reader of the events that come back. Pure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Annotated, Protocol

import msgspec

from antiphon.contracts import Reply, ReplyDone, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.errors import RemoteError

# Bounds: the characters that one reply may have, those of calls with their names and ids; and its calls, as with
# OpenAI. A server that never ends is cut off.
MAX_REPLY_CHARS, MAX_CALLS = 1 << 20, 128
_OPENING, _CLOSING = "<think>", "</think>"
_SPACE = re.compile(r"\s*")
# Tokens, as a server counts them.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class ReplyReader(Protocol):
    """Reads the events of one streamed reply.

    `done`: the reply has ended as it should; a stream that ends before is cut off.
    """

    done: bool

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Yield what one event says. `data` is the event's, without its name. Raises RemoteError for an event that is
        none, or that tells of an error.
        """
        ...

    def end(self) -> Iterator[Reply]:
        """Yield what is left once the stream has ended well: calls that waited, and last one ReplyDone."""
        ...


class CallBuffer:
    """Puts calls in a row: of several that a server writes side by side, the later ones wait for the first to end.

    Arguments that are nothing or null, as servers write those of a function without any, are given out as `{}`.
    """

    def __init__(self) -> None:
        # By the server's number: the call's id, its name, and the arguments that were not given out yet. Those of the
        # open call are held while they may still be nothing or null, without white space around; then they are None.
        self._calls: dict[int, tuple[str, str, list[str] | None]] = {}
        self._open: int | None = None
        self._num_chars = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, number: int, call_id: str, name: str, arguments: str) -> Iterator[Reply]:
        """Add what an event says of a call. Of an event that goes on with one, `call_id` and `name` may be "".

        Raises RemoteError for arguments of no call, and for more than a reply may have.
        """
        self._num_chars += len(call_id) + len(name) + len(arguments)
        if number not in self._calls:
            if not name:
                raise RemoteError("the model's server sent arguments of a call that has no name")
            if len(self._calls) == MAX_CALLS:
                raise RemoteError(f"the model's server sent more than {MAX_CALLS} calls in one reply")
            self._calls[number] = (call_id or f"call_{secrets.token_hex(12)}", name, [])
        if self._num_chars > MAX_REPLY_CHARS:
            raise RemoteError("the model's server sent more of calls than a reply may have")
        if self._open is None:
            yield from self._begin(number)
        waiting = self._calls[number][2]
        if waiting is None:
            if arguments:
                yield ToolCallDelta(arguments)
            return
        waiting.append(arguments)
        if number == self._open:
            told = "".join(waiting).strip()
            if "null".startswith(told):
                waiting[:] = [told]
                return
            self._calls[number] = (*self._calls[number][:2], None)
            yield ToolCallDelta(told)

    def end(self) -> Iterator[Reply]:
        """Yield the calls that waited, in their order."""
        first = self._open
        for number, (_, _, waiting) in self._calls.items():
            if number != first:
                yield from self._begin(number)
            if waiting is not None:
                told = "".join(waiting)
                yield ToolCallDelta("{}" if told.strip() in ("", "null") else told)

    def _begin(self, number: int) -> Iterator[Reply]:
        self._open = number
        call_id, name, _ = self._calls[number]
        yield ToolCallStarted(call_id, name)


class ThoughtFilter:
    """Takes the thoughts off a reply's head, `<think>…</think>`, which models write that were trained to reason.

    They are not meant for the user, and would be spoken.
    """

    def __init__(self) -> None:
        self._held = ""
        # Whether the head was seen, and whether a thought is open, which is part of the head.
        self._decided = self._thinking = False
        self._num_chars = 0

    def feed(self, text: str) -> Iterator[TextDelta]:
        """Add text, and yield what of it is for the user. Raises RemoteError for more than a reply may have."""
        self._num_chars += len(text)
        if self._num_chars > MAX_REPLY_CHARS:
            raise RemoteError("the model's server sent more text than a reply may have")
        # Only a few characters are ever held, of a tag that may begin or end.
        text, at, self._held = self._held + text, 0, ""
        while not self._decided or self._thinking:
            if self._thinking:
                end = text.find(_CLOSING, at)
                if end < 0:
                    self._held = text[max(at, len(text) - len(_CLOSING) + 1) :]
                    return
                at, self._thinking = end + len(_CLOSING), False
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if text.startswith(_OPENING, at):
                at, self._thinking = at + len(_OPENING), True
            elif len(text) - at < len(_OPENING) and _OPENING.startswith(text[at:]):
                self._held = text[at:]
                return
            else:
                self._decided = True
        if at < len(text):
            yield TextDelta(text[at:])

    def end(self) -> Iterator[TextDelta]:
        """Yield what was held back for it might have opened a thought."""
        if not self._thinking and self._held:
            yield TextDelta(self._held)


def done(reason: str | None, num_calls: int, usage: tuple[int, int, int]) -> ReplyDone:
    """The end of a reply. `usage`: tokens of the prompt, of these the cached ones, and of the reply."""
    why = "length" if reason == "length" else "tool_calls" if num_calls else "stop"
    return ReplyDone(why, *usage)  # type: ignore[arg-type]
