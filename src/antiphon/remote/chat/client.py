"""Sends requests to a model's servers and yields the replies.

A second attempt starts if the first one fails before its first word, or if its first word is late (`remote/pool.py`).
After a word was yielded, the request is never repeated, because the user may have heard it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import httpx

from antiphon.contracts import Reply, ReplyDone
from antiphon.errors import AntiphonError, RemoteError, RemoteProtocolError
from antiphon.remote.chat.replies import ReplyReader
from antiphon.remote.http import chunks, read_failure, reason, without_key
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.sse import events


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the requests to the servers: all requests, second attempts, failures, and replies in progress."""

    requests: int = 0
    second_attempts: int = 0
    failures: int = 0
    answering: int = 0


class ModelServerClient:
    """Requests to the servers of one model, for all conversations of a process, from one event loop.

    `pool` has the servers' URLs without `path`, which requests are sent to. The key appears in no error message.
    `next_s`: the seconds in which each further word has to arrive. `make_reader` creates the reader of one reply. Only
    the log names the URLs, because clients see the errors.
    """

    def __init__(self, pool: Pool[Endpoint], path: str, next_s: float, make_reader: Callable[[], ReplyReader]) -> None:
        self.pool = pool
        self._path = path
        self._next_s = next_s
        self._make_reader = make_reader
        self._answering = 0

    @property
    def counts(self) -> Counts:
        """Counts of the requests so far."""
        of = self.pool.all
        return Counts(
            sum(e.requests for e in of),
            sum(e.second_attempts for e in of),
            sum(e.failures for e in of),
            self._answering,
        )

    async def replies(self, body: bytes, owner: Hashable | None = None) -> AsyncGenerator[Reply, None]:
        """Send JSON, and yield the reply, with a ReplyDone last. Closing the generator ends the request at the server.

        Raises Refused if no server has room for `owner` or all circuit breakers are open, RemoteProtocolError if the
        server does not accept the request, RemoteError, and ModelError.
        """
        self._answering += 1
        request = partial(self.read, body)
        try:
            async with aclosing(self.pool.stream(request, owner, next_s=self._next_s)) as replies:
                async for reply in replies:
                    yield reply
                    if isinstance(reply, ReplyDone):
                        return
        finally:
            self._answering -= 1

    async def read(self, body: bytes, endpoint: Endpoint) -> AsyncGenerator[Reply, None]:
        """Make one attempt: send a body and yield the reply as it is streamed. Raises the same errors as `replies`."""
        headers = {"Content-Type": "application/json"} | self.pool.headers()
        reader = self._make_reader()
        try:
            http = await self.pool.client()
            async with http.stream("POST", endpoint.url + self._path, content=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise await self._error(answer)
                if not answer.headers.get("content-type", "").lower().startswith("text/event-stream"):
                    raise RemoteError("the model's server does not stream its answer")
                async with aclosing(events(chunks(answer))) as found:
                    async for data in found:
                        for reply in reader.feed(without_key(data, self.pool.key)):
                            yield reply
                        if reader.done and data == b"[DONE]":
                            break
        except httpx.HTTPError as error:
            raise RemoteError(f"the model's server: {reason(error)}") from error
        if not reader.done:
            raise RemoteError("the model's server ended in the middle of its answer")
        for reply in reader.end():
            yield reply

    async def _error(self, answer: httpx.Response) -> AntiphonError:
        """Turn an answer's status into an error. It contains the server's message if the client can act on it."""
        said = await read_failure("the model's server", answer, self.pool.key)
        if not isinstance(said, str):
            return said
        too_long = any(words in said.lower() for words in ("context length", "context size", "context window"))
        code = "context_length_exceeded" if too_long else "invalid_value"
        return RemoteProtocolError(code, f"The model's server does not accept this: {said}")
