"""The common part of both wires in this folder: the protocol of readers, function calls, thoughts, and ends of replies.

Pure.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Annotated, Protocol

import msgspec

from antiphon.contracts import Reply, ReplyDone, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.errors import RemoteError

# Bounds: characters of one reply, characters of its calls with their names and ids, and the number of its calls
# (OpenAI's limit). An endless stream is cut off.
MAX_REPLY_CHARS, MAX_CALLS = 1 << 20, 128
_OPENING, _CLOSING = "<think>", "</think>"
_SPACE = re.compile(r"\s*")
# A server's token count.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class ReplyReader(Protocol):
    """Reads the events of one streamed reply.

    `done`: True after the reply has ended properly. A stream that ends before that was cut off.
    """

    done: bool

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Yield the content of one event's data. Raises RemoteError if the event is invalid or reports an error."""
        ...

    def end(self) -> Iterator[Reply]:
        """Yield the remaining content after the stream has ended properly: calls that waited, and a ReplyDone last."""
        ...


class CallBuffer:
    """Serializes calls: if a server sends several calls interleaved, the later ones wait for the end of the first.

    Arguments that are empty or null, as servers send them for a function without parameters, are returned as `{}`.
    """

    def __init__(self) -> None:
        # By the server's number: the call's id, its name, and the arguments that were not yielded yet. The arguments of
        # the open call are held, without surrounding white space, while they may still be empty or null. After that
        # they are None.
        self._calls: dict[int, tuple[str, str, list[str] | None]] = {}
        self._open: int | None = None
        self._num_chars = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, number: int, call_id: str, name: str, arguments: str) -> Iterator[Reply]:
        """Add the part of a call that an event contains. If the event continues a call, `call_id` and `name` may be "".

        Raises RemoteError for arguments of an unknown call, and if the reply exceeds a bound.
        """
        self._num_chars += len(call_id) + len(name) + len(arguments)
        if number not in self._calls:
            if not name:
                raise RemoteError("the model's server sent arguments of a call that has no name")
            if len(self._calls) == MAX_CALLS:
                raise RemoteError(f"the model's server sent more than {MAX_CALLS} calls in one reply")
            self._calls[number] = (call_id or f"call_{secrets.token_hex(12)}", name, [])
        if self._num_chars > MAX_REPLY_CHARS:
            raise RemoteError("the model's server sent larger calls than a reply may have")
        if self._open is None:
            yield from self._begin(number)
        waiting = self._calls[number][2]
        if waiting is None:
            if arguments:
                yield ToolCallDelta(arguments)
            return
        waiting.append(arguments)
        if number == self._open:
            text = "".join(waiting).strip()
            if "null".startswith(text):
                waiting[:] = [text]
                return
            self._calls[number] = (*self._calls[number][:2], None)
            yield ToolCallDelta(text)

    def end(self) -> Iterator[Reply]:
        """Yield the calls that waited, in their order."""
        first = self._open
        for number, (_, _, waiting) in self._calls.items():
            if number != first:
                yield from self._begin(number)
            if waiting is not None:
                text = "".join(waiting)
                yield ToolCallDelta("{}" if text.strip() in ("", "null") else text)

    def _begin(self, number: int) -> Iterator[Reply]:
        self._open = number
        call_id, name, _ = self._calls[number]
        yield ToolCallStarted(call_id, name)


class ThoughtFilter:
    """Removes the thoughts, `<think>…</think>`, from the head of a reply of a reasoning model.

    They are not meant for the user, and would be spoken.
    """

    def __init__(self) -> None:
        self._held = ""
        # Whether the head of the reply, which includes its thoughts, is complete, and whether a thought is open.
        self._decided = self._thinking = False
        self._num_chars = 0

    def feed(self, text: str) -> Iterator[TextDelta]:
        """Add text, and yield the part for the user. Raises RemoteError above MAX_REPLY_CHARS."""
        self._num_chars += len(text)
        if self._num_chars > MAX_REPLY_CHARS:
            raise RemoteError("the model's server sent more text than a reply may have")
        # At most a few characters are held, which may be part of a tag.
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
        """Yield the text that was held because it might have opened a thought."""
        if not self._thinking and self._held:
            yield TextDelta(self._held)


def done(reason: str | None, num_calls: int, usage: tuple[int, int, int]) -> ReplyDone:
    """Return the end of a reply. `usage`: tokens of the prompt, cached tokens among them, and tokens of the reply."""
    why = "length" if reason == "length" else "tool_calls" if num_calls else "stop"
    return ReplyDone(why, *usage)  # type: ignore[arg-type]
