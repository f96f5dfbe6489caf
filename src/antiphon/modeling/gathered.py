"""Requests of many sessions to one part of a model, served in batches in the model's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError, ModelLost

Request = TypeVar("Request")
Result = TypeVar("Result")


class GatheredCalls(Generic[Request, Result]):
    """Serves all requests that arrive before the next step of a model's thread as one batch.

    `serve`: called in the thread with the requests. Returns a result or an error for each request. If it raises an
    exception, all requests fail.
    """

    def __init__(
        self, thread: ModelThread, serve: Callable[[Sequence[Request]], Sequence[Result | ModelError]]
    ) -> None:
        self._thread, self._serve = thread, serve
        # Bound: one request for each session.
        self._waiting: deque[tuple[Request, asyncio.AbstractEventLoop, asyncio.Future[Result]]] = deque()

    async def call(self, request: Request) -> Result:
        """Return the result of a request. Waits for the model's thread.

        Raises ModelError if the request fails or the thread is lost, and Refused after the thread is closed.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def lose(error: ModelLost) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, done, error)

        self._waiting.append((request, loop, done))
        with self._thread.waiting(lose):
            self._thread.post(self._serve_all)
            return await done

    def _serve_all(self) -> None:
        # Skips the requests of callers that were cancelled.
        batch = [each for each in (self._waiting.popleft() for _ in range(len(self._waiting))) if not each[2].done()]
        if not batch:
            return
        results: Sequence[Result | ModelError]
        try:
            results = self._serve([request for request, _, _ in batch])
        except Exception as error:
            # The model's code may raise any exception. It must fail only these requests, not the engine.
            failure = error if isinstance(error, ModelError) else ModelError(f"{type(error).__name__}: {error}")
            results = [failure] * len(batch)
        for (_, loop, done), result in zip(batch, results, strict=True):
            self._thread.deliver(loop, partial(_resolve, done, result))


def _resolve(done: asyncio.Future[Result], result: Result | ModelError) -> None:
    if done.done():
        return
    if isinstance(result, ModelError):
        done.set_exception(result)
    else:
        done.set_result(result)


class Tick:
    """Lets requests of many sessions wait for a common moment, so that they share the passes of a model.

    `interval_s`: the time between two moments; 0: no request waits.
    """

    # A session counts as active if its last request was at most this number of seconds ago.
    ACTIVE_S = 2.5

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        # The last two sessions that asked, the newest first, and when they did.
        self._asked: list[tuple[Hashable, float]] = []
        self._next: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def wait(self, session: Hashable) -> None:
        """Wait for the next moment. Returns at once if no other session is active."""
        loop = asyncio.get_running_loop()
        now, others = loop.time(), [(s, at) for s, at in self._asked if s != session]
        self._asked = [(session, now), *others[:1]]
        if not self.interval_s or not others or now - others[0][1] > self.ACTIVE_S:
            return
        if self._next is None or self._next[0] is not loop:
            moment = asyncio.Event()
            self._next = loop, moment
            loop.call_at((now // self.interval_s + 1) * self.interval_s, self._come, moment)
        await self._next[1].wait()

    def _come(self, moment: asyncio.Event) -> None:
        self._next = None
        moment.set()
