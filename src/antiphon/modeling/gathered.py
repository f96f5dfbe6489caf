"""Requests of many sessions to one part of a model, served in batches in the model's thread."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError, ModelLost

log = logging.getLogger(__name__)

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


def served(
    serve: Callable[[Sequence[Request]], Sequence[Result | ModelError]], requests: Sequence[Request], *, together: bool
) -> Sequence[Result | ModelError]:
    """Return the results of `serve` for all requests as one batch, or for each alone unless `together`.

    If a batch raises an exception, each of its requests is served alone, so that only those at fault fail.
    """
    if together and len(requests) > 1:
        try:
            return serve(requests)
        except Exception:
            log.warning("serving %d requests one by one, because their batch failed", len(requests), exc_info=True)
    return [_alone(serve, request) for request in requests]


def _alone(
    serve: Callable[[Sequence[Request]], Sequence[Result | ModelError]], request: Request
) -> Result | ModelError:
    try:
        return serve([request])[0]
    except Exception as error:
        # The model's code may raise any exception.
        failed = ModelError(f"{type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed


def _resolve(done: asyncio.Future[Result], result: Result | ModelError) -> None:
    if done.done():
        return
    if isinstance(result, ModelError):
        done.set_exception(result)
    else:
        done.set_result(result)
