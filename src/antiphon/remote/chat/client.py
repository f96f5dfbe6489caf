"""Sends requests to a model's server and yields the replies, with timeouts, a second attempt and a circuit breaker.

A second attempt starts if the first one fails before its first word, or if its first word is late. In the latter case
both run, and the first to yield a word is used. After a word was yielded, the request is never repeated, because the
user may have heard it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing
from dataclasses import dataclass

import httpx

from antiphon.contracts import Reply, ReplyDone
from antiphon.errors import AntiphonError, Refused, RemoteError, RemoteProtocolError
from antiphon.remote.breaker import ServerBreaker
from antiphon.remote.chat.replies import ReplyReader
from antiphon.remote.http import LoopClients, chunks, read_failure, without_key
from antiphon.remote.sse import ReaderTask, events
from antiphon.remote.trace_context import trace_headers

log = logging.getLogger(__name__)

# If a server asks for a pause up to MAX_WAIT_S, the request is repeated after it. A longer pause is passed to the
# client.
MAX_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of a server, in seconds.

    `first_s`: to the first word of each of two attempts; the second one starts after half of it. `next_s`: from one
    word to the next.
    """

    first_s: float
    next_s: float


@dataclass(slots=True)
class Counts:
    """Counts of the requests to a server: all requests, second attempts, failures, and replies in progress."""

    requests: int = 0
    second_attempts: int = 0
    failures: int = 0
    answering: int = 0


class ModelServerClient:
    """Requests to one URL, for all conversations of a process, from one event loop.

    `key` is sent as a bearer token and appears in no error message. `make_reader` creates the reader of one reply.
    `is_away`: True if the server did not answer the last request. Only the log names the URL, because clients see the
    errors.
    """

    def __init__(self, url: str, key: str, timeouts: Timeouts, make_reader: Callable[[], ReplyReader]) -> None:
        self.counts = Counts()
        self.is_away = False
        # Attempts that run or are being closed, so that none is garbage-collected before its connection is closed.
        self.tasks: set[asyncio.Task[None]] = set()
        self._url = url
        self._key = key
        self._timeouts = timeouts
        self._make_reader = make_reader
        self._breaker = ServerBreaker()
        self._clients = LoopClients()

    async def replies(self, body: bytes, owner: Hashable | None = None) -> AsyncGenerator[Reply, None]:
        """Send JSON, and yield the reply, with a ReplyDone last. Closing the generator ends the request at the server.

        Raises Refused if the server has no room for `owner` or the circuit breaker is open, RemoteProtocolError if the
        server does not accept the request, RemoteError, and ModelError.
        """
        self._breaker.check(owner, time.monotonic())
        attempts = [ReaderTask(self.read(body), self.tasks)]
        self.counts.answering += 1
        try:
            reply, attempt = await self._first(attempts, body, owner)
            self._breaker.succeeded(owner)
            if self.is_away:
                log.info("%s answers again", self._url)
            self.is_away = False
            while True:
                yield reply
                if isinstance(reply, ReplyDone):
                    return
                try:
                    reply = await attempt.next(self._timeouts.next_s)
                except RemoteError:
                    self.counts.failures += 1
                    raise
        finally:
            self.counts.answering -= 1
            for attempt in attempts:
                attempt.end()

    async def close(self) -> None:
        """Close all connections to the server."""
        await self._clients.close()

    async def _first(
        self, attempts: list[ReaderTask[Reply]], body: bytes, owner: Hashable | None
    ) -> tuple[Reply, ReaderTask[Reply]]:
        """Return the first reply of either attempt. Adds the second attempt to `attempts` if one is made."""
        waiting: dict[asyncio.Future[Reply], ReaderTask[Reply]] = {
            asyncio.ensure_future(attempts[0].take()): attempts[0]
        }
        first_s = self._timeouts.first_s
        failure: AntiphonError = RemoteError(f"the model's server gave no word within {first_s:g} s")
        try:
            timeout_s = first_s / 2
            while True:
                done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    attempt = waiting.pop(future)
                    error = future.exception()
                    if error is None:
                        return future.result(), attempt
                    failure = self._counted(error, owner)
                if done and waiting:
                    # The other attempt may still succeed.
                    continue
                if len(attempts) == 2:
                    raise failure
                if done:
                    await self._pause_before_again(failure)
                self.counts.second_attempts += 1
                attempts.append(ReaderTask(self.read(body), self.tasks))
                waiting[asyncio.ensure_future(attempts[1].take())] = attempts[1]
                timeout_s = first_s
        except RemoteError as error:
            self._breaker.failed(owner, time.monotonic())
            log.warning("%s gave no answer: %s", self._url, error)
            self.is_away = True
            raise
        finally:
            for future in waiting:
                future.cancel()

    def _counted(self, error: BaseException, owner: Hashable | None) -> AntiphonError:
        """Count an attempt's failure and return it. Raises it if it is not the server's fault or would occur again."""
        if not isinstance(error, RemoteError | Refused):
            raise error
        self.counts.failures += 1
        if isinstance(error, Refused):
            self._breaker.refused(owner, time.monotonic(), error.retry_after_s)
        return error

    async def _pause_before_again(self, failure: AntiphonError) -> None:
        if isinstance(failure, Refused):
            if failure.retry_after_s > MAX_WAIT_S:
                raise failure
            await asyncio.sleep(failure.retry_after_s)

    async def read(self, body: bytes) -> AsyncGenerator[Reply, None]:
        """Make one attempt: send a body and yield the reply as it is streamed. Raises the same errors as `replies`."""
        self.counts.requests += 1
        headers = {"Content-Type": "application/json"} | trace_headers()
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        reader = self._make_reader()
        try:
            http = await self._clients.client()
            async with http.stream("POST", self._url, content=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise await self._error(answer)
                if not answer.headers.get("content-type", "").lower().startswith("text/event-stream"):
                    raise RemoteError("the model's server does not stream its answer")
                async with aclosing(events(chunks(answer))) as found:
                    async for data in found:
                        for reply in reader.feed(without_key(data, self._key)):
                            yield reply
                        if reader.done and data == b"[DONE]":
                            break
        except httpx.HTTPError as error:
            raise RemoteError(f"the model's server: {error or type(error).__name__}") from error
        if not reader.done:
            raise RemoteError("the model's server ended in the middle of its answer")
        for reply in reader.end():
            yield reply

    async def _error(self, answer: httpx.Response) -> AntiphonError:
        """Turn an answer's status into an error. It contains the server's message if the client can act on it."""
        said = await read_failure("the model's server", answer, self._key)
        if not isinstance(said, str):
            return said
        too_long = any(words in said.lower() for words in ("context length", "context size", "context window"))
        code = "context_length_exceeded" if too_long else "invalid_value"
        return RemoteProtocolError(code, f"The model's server does not accept this: {said}")
