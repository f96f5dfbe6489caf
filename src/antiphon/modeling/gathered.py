"""Requests of many sessions to one part of a model: when they go on together, and how the thread serves them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError, ModelLost
from antiphon.shares.places import Places

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")
Image = TypeVar("Image")
ImageRows = TypeVar("ImageRows")

# Limit of requests, of all sessions together, whose images wait for the model's thread: on a GPU, and on a CPU. The
# thread encodes all of them before its next step.
MAX_WAITING_GPU, MAX_WAITING_CPU = 8, 2
# Limit of patches in a pass, with padding, because a pass needs memory for each: 16 images of 448 x 448 pixels at 14
# pixels a patch. For MiniCPM-o in bfloat16, this is computed to be about 1 GB.
MAX_PASS_PATCHES = 16_384


class GatheredCalls(Generic[Request, Result]):
    """Serves all requests that arrive before the next step of a model's thread as one batch.

    `serve`: called in the thread with the requests. Returns a result or an error for each request. If it raises an
    exception, all requests fail. `followed`: the callers continue with rows for an engine that the same thread steps.
    They do so before its next step, so that these rows share a step.
    """

    def __init__(
        self,
        thread: ModelThread,
        serve: Callable[[Sequence[Request]], Sequence[Result | ModelError]],
        *,
        followed: bool = False,
    ) -> None:
        self._thread, self._serve, self._followed = thread, serve, followed
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
            if self._followed and len(batch) > 1:
                self._thread.yield_to(loop)


class Moment:
    """A common moment of several sessions, which may meet again after work of different length."""

    def __init__(self) -> None:
        self.come = asyncio.Event()
        self._working: set[Hashable] = set()
        self._met = asyncio.Event()

    def join(self, session: Hashable) -> None:
        """Add a session, which calls `meet` or `leave` later."""
        self._working.add(session)

    def leave(self, session: Hashable) -> None:
        """The others no longer wait for the session. A second call does nothing."""
        self._working.discard(session)
        if not self._working:
            self._met.set()

    async def meet(self, session: Hashable, most_s: float) -> None:
        """Wait until each session has met or left, but not for more than `most_s` seconds."""
        self.leave(session)
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._met.wait()


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
        self._next: tuple[asyncio.AbstractEventLoop, Moment] | None = None

    async def wait(self, session: Hashable) -> Moment:
        """Wait for the next moment, and return it; the session has joined it.

        Returns at once if no other session is active, with a moment of its own.
        """
        loop = asyncio.get_running_loop()
        now, others = loop.time(), [(s, at) for s, at in self._asked if s != session]
        self._asked = [(session, now), *others[:1]]
        moment = Moment()
        if self.interval_s and others and now - others[0][1] <= self.ACTIVE_S:
            if self._next is None or self._next[0] is not loop:
                self._next = loop, moment
                loop.call_at((now // self.interval_s + 1) * self.interval_s, self._come, moment)
            moment = self._next[1]
            moment.join(session)
            try:
                await moment.come.wait()
            except BaseException:
                moment.leave(session)
                raise
        return moment

    def _come(self, moment: Moment) -> None:
        self._next = None
        moment.come.set()


class ImageBatch(Generic[Image, ImageRows]):
    """Encodes images in the model's thread. On a GPU, the images of all sessions that wait there form one pass.

    A pass has at most MAX_PASS_PATCHES patches. On a CPU, each image is a pass, because larger ones are not faster.

    `device`: the type of the encoder's device, such as "cuda". `encode`: encodes images in one pass, and returns the
    rows of each, in order. `num_patches`: returns an image's number of patches. `places`: the requests that wait for
    the thread; API keys take turns.
    """

    def __init__(
        self,
        thread: ModelThread,
        encode: Callable[[Sequence[Image]], Sequence[ImageRows]],
        num_patches: Callable[[Image], int],
        device: str,
    ) -> None:
        self._encode, self._num_patches = encode, num_patches
        shares_passes = device != "cpu"
        self._most = MAX_PASS_PATCHES if shares_passes else 0
        self.places = Places(MAX_WAITING_GPU if shares_passes else MAX_WAITING_CPU)
        self._calls = GatheredCalls[Sequence[Image], list[ImageRows]](thread, self._serve)

    async def rows(self, images: Sequence[Image]) -> list[ImageRows]:
        """Return the rows of each image, in order. Waits for a place of `current_owner`, then for the model's thread.

        Raises ModelError if the encoder fails for one of these images, and Refused after the thread is closed.
        """
        if not images:
            return []
        async with self.places.held():
            return await self._calls.call(images)

    def _serve(self, requests: Sequence[Sequence[Image]]) -> list[list[ImageRows] | ModelError]:
        images = [image for request in requests for image in request]
        made: dict[int, ImageRows | ModelError] = {}
        for numbers in self._passes([self._num_patches(image) for image in images]):
            made |= zip(
                numbers, served(self._encode, [images[number] for number in numbers], together=True), strict=True
            )
        in_order = iter([made[number] for number in range(len(images))])
        return [_all_or_error([next(in_order) for _ in request]) for request in requests]

    def _passes(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of the images of each pass. They are sorted by size, so that there is little padding."""
        numbers: list[int] = []
        for number in sorted(range(len(sizes)), key=lambda number: sizes[number]):
            if numbers and (len(numbers) + 1) * sizes[number] > self._most:
                yield numbers
                numbers = []
            numbers.append(number)
        yield numbers


def _all_or_error(made: Sequence[ImageRows | ModelError]) -> list[ImageRows] | ModelError:
    rows: list[ImageRows] = []
    for each in made:
        if isinstance(each, ModelError):
            return each
        rows.append(each)
    return rows


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
