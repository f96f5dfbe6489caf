"""The servers of one model, for all roles: which one is asked, for how long, and what happens when it fails.

A `Pool` has an `Endpoint` for each URL of a role. `Pool.ask` and `Pool.first` send a request to one endpoint, and to
another one if the first fails or is late. `Pool.stream` also passes on what follows the first item. All count the
requests, for `/metrics` and `antiphon top`. A caller supplies the request itself: a function of an endpoint.

- **Choice**: the endpoint that the caller is bound to, otherwise the one with the least load. An endpoint whose breaker
  is open is not asked. An endpoint that failed is asked last until a look at it succeeds.
- **Deadlines** follow the measured times: four times the 95th percentile, within bounds.
- **Hedging** is off by default: the second request then starts only after the deadline of the first.
- **Keys** are sent to the endpoints' URLs only. Redirects are not followed, so no server can send a request elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import httpx

from antiphon.errors import AntiphonError, ModelError, Refused, RemoteError
from antiphon.remote.breaker import FIRST_PAUSE_S, MAX_PAUSE_S, ServerBreaker
from antiphon.remote.http import PROBE_TIMEOUT_S, LoopClients
from antiphon.remote.sse import ReaderTask, StreamEnded
from antiphon.remote.trace_context import trace_headers
from antiphon.roles import ModelRole

log = logging.getLogger(__name__)

# Measured times that are kept, and how many of them a deadline needs. With fewer, the deadline is the longest allowed.
MAX_TIMES, MIN_TIMES = 64, 8
# A deadline is DEADLINE_FACTOR times the 95th percentile of the measured times, and at least MIN_DEADLINE_S.
DEADLINE_FACTOR, MIN_DEADLINE_S = 4.0, 1.0
# If a server asks for a pause up to MAX_WAIT_S, the request is repeated after it. A longer pause is passed to the
# client.
MAX_WAIT_S = 2.0
# The longest time for closing a pool.
CLOSE_S = 4.0


class Times:
    """The times of a server's latest answers. Pure.

    Requests of different sizes are comparable if the time is proportional to the size, such as the seconds of audio.
    """

    def __init__(self) -> None:
        self._seconds_by_size: deque[float] = deque(maxlen=MAX_TIMES)
        # All times since the start, for the metrics: their number and their sum in seconds.
        self.count, self.sum_s = 0, 0.0

    def note(self, took_s: float, size: float = 1.0) -> None:
        """Add the time of one answer, in seconds."""
        self._seconds_by_size.append(took_s / size)
        self.count += 1
        self.sum_s += took_s

    def quantile_s(self, q: float, size: float = 1.0) -> float | None:
        """Return the quantile `q` of the kept times for a request of this size; None with fewer than MIN_TIMES."""
        if len(self._seconds_by_size) < MIN_TIMES:
            return None
        kept = sorted(self._seconds_by_size)
        return kept[min(len(kept) - 1, int(q * len(kept)))] * size


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server of a pool, with its state. Roles may derive their own endpoints from it."""

    # Its URL, without a slash at the end.
    url: str
    # Its circuit breaker.
    breaker: ServerBreaker = field(default_factory=ServerBreaker)
    # The times from a request to the first item of its answer.
    times: Times = field(default_factory=Times)
    # True if the last request, or the last look at it, failed.
    is_away: bool = False
    # The number of requests under way.
    running: int = 0
    # The number of requests since the start.
    requests: int = 0
    # The number of failed requests since the start.
    failures: int = 0
    # The number of requests that replaced a late or failed one.
    second_attempts: int = 0

    @property
    def host(self) -> str:
        """Its host and port, for messages and metrics."""
        return urlsplit(self.url).netloc

    @property
    def load(self) -> int:
        """The load by which endpoints are compared: the requests under way."""
        return self.running

    def succeeded(self, owner: Hashable | None) -> None:
        """Note that the server has answered an owner's request."""
        if self.is_away:
            log.info("%s answers again", self.url)
        self.is_away = False
        self.breaker.succeeded(owner)

    def failed(self, owner: Hashable | None) -> None:
        """Note a failure of an owner's request."""
        self.is_away = True
        self.breaker.failed(owner, time.monotonic())


E = TypeVar("E", bound=Endpoint)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Begun(Generic[T, E]):
    """An answer that has begun: its first item, the reader of the rest, and the endpoint. The caller ends `reader`."""

    first: T
    reader: ReaderTask[T]
    endpoint: E


@dataclass(slots=True, eq=False)
class _Attempt(Generic[T, E]):
    endpoint: E
    reader: ReaderTask[T]
    since_s: float


class Pool(Generic[E]):
    """The endpoints of one model, for all sessions of a process.

    - `role`: the model's role, for metrics.
    - `endpoints`: at least one.
    - `key`: sent as a bearer token; "" for none.
    - `max_s`: the longest deadline of a request's first item, in seconds. If another attempt may follow, half of it.
    - `measures`: whether deadlines follow the measured times. If not, they are the longest allowed.
    - `attempts`: the most attempts of one request; 0: one for each endpoint, and at least two.
    - `hedges`: whether a second request is sent when the first one is slower than usual, before its deadline.
    - `look`: asks an endpoint whether it works, and returns what it is, in words. Raises ModelError. With `look` and
      several endpoints, one that failed is looked at until it works. Meanwhile, the others are preferred.

    A pool is used from one event loop at a time; connections belong to the loop.
    """

    def __init__(
        self,
        role: ModelRole,
        endpoints: Sequence[E],
        key: str = "",
        *,
        max_s: float = 10.0,
        measures: bool = True,
        attempts: int = 0,
        hedges: bool = False,
        look: Callable[[E], Awaitable[str]] | None = None,
    ) -> None:
        self.role, self.all, self.key = role, tuple(endpoints), key
        # Attempts that run or are being closed, so that none is garbage-collected before its connection is closed.
        self.tasks: set[asyncio.Task[None]] = set()
        self.max_s = max_s
        self._attempts = attempts or max(2, len(self.all))
        self._measures, self._hedges, self._look = measures, hedges, look
        self._watches = look is not None and len(self.all) > 1
        # The looks at endpoints that failed.
        self._looks: dict[E, asyncio.Task[None]] = {}
        self._clients = LoopClients()

    @property
    def is_away(self) -> bool:
        """Whether the last request to each endpoint failed."""
        return all(endpoint.is_away for endpoint in self.all)

    async def client(self) -> httpx.AsyncClient:
        """Return the HTTP client of the running event loop, which keeps connections."""
        return await self._clients.client()

    @property
    def tls(self) -> Any:
        """The TLS context (`ssl.SSLContext`) for sockets that are not opened by the HTTP client."""
        return self._clients.tls

    def headers(self) -> dict[str, str]:
        """Return the headers of a request: the key, and the `traceparent` of the running turn."""
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return key | trace_headers()

    async def close(self) -> None:
        """End what runs in this event loop, and close its connections. Takes up to CLOSE_S."""
        loop = asyncio.get_running_loop()
        for looking in list(self._looks.values()):
            looking.cancel()
        if tasks := [task for task in self.tasks if task.get_loop() is loop]:
            # Connections that are being closed are not interrupted.
            _, running = await asyncio.wait(tasks, timeout=CLOSE_S / 2)
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=CLOSE_S / 2)
        await self._clients.close()

    def deadline_s(self, endpoint: E, size: float = 1.0) -> float:
        """Return the seconds in which an endpoint has to begin its answer to a request of this size."""
        usual_s = endpoint.times.quantile_s(0.95, size) if self._measures else None
        return self.max_s if usual_s is None else min(self.max_s, max(MIN_DEADLINE_S, DEADLINE_FACTOR * usual_s))

    def choose(self, owner: Hashable | None, bound: E | None = None, avoid: Collection[E] = ()) -> E:
        """Return the endpoint for an owner's request: `bound` if available, otherwise the one with the least load.

        `avoid`: endpoints that failed this request; they are used only if no other is available. Raises Refused if the
        breakers of all endpoints are open.
        """
        now_s, refused = time.monotonic(), list[Refused]()
        for endpoint in sorted(
            self.all, key=lambda e: (e in avoid, self._watches and e.is_away, e is not bound, e.load)
        ):
            try:
                endpoint.breaker.check(owner, now_s)
            except Refused as error:
                refused.append(error)
                continue
            return endpoint
        raise min(refused, key=lambda error: error.retry_after_s)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def ask(
        self,
        request: Callable[[E], Awaitable[T]],
        owner: Hashable | None = None,
        *,
        size: float = 1.0,
        bound: E | None = None,
    ) -> T:
        """Send a request that has one answer, and return the answer. See `first` for arguments and errors."""

        async def whole(endpoint: E) -> AsyncGenerator[T, None]:
            yield await request(endpoint)

        begun = await self.first(whole, owner, size=size, bound=bound)
        begun.reader.end()
        return begun.first

    async def once(
        self, request: Callable[[E], Awaitable[T]], endpoint: E, owner: Hashable | None = None, *, size: float = 1.0
    ) -> T:
        """Send a request to an endpoint that `choose` has returned, and return the answer. No other one is asked.

        Raises Refused if it has no room, RemoteError if it fails or is later than its deadline, and the other errors of
        `request`.
        """
        endpoint.requests += 1
        endpoint.running += 1
        since_s, deadline_s = time.monotonic(), self.deadline_s(endpoint, size)
        try:
            async with asyncio.timeout(deadline_s):
                found = await request(endpoint)
        except TimeoutError:
            failure = RemoteError(f"the model's server gave no answer within {deadline_s:g} s")
            self.failed(endpoint, owner, failure)
            raise failure from None
        except (RemoteError, Refused) as error:
            self.failed(endpoint, owner, error)
            raise
        finally:
            endpoint.running -= 1
        endpoint.times.note(time.monotonic() - since_s, size)
        endpoint.succeeded(owner)
        return found

    async def stream(
        self,
        request: Callable[[E], AsyncGenerator[T, None]],
        owner: Hashable | None = None,
        *,
        next_s: float,
        size: float = 1.0,
        bound: E | None = None,
    ) -> AsyncGenerator[T, None]:
        """Yield the items of a streamed answer until it ends. After the first item, no other endpoint is asked.

        `next_s`: the seconds in which each further item has to arrive. Closing the generator ends the request. See
        `first` for the other arguments. Raises the errors of `first`, and RemoteError if the answer breaks off.
        """
        begun = await self.first(request, owner, size=size, bound=bound)
        begun.endpoint.running += 1
        try:
            yield begun.first
            while True:
                yield await begun.reader.next(next_s)
        except StreamEnded:
            return
        except RemoteError:
            begun.endpoint.failures += 1
            raise
        finally:
            begun.endpoint.running -= 1
            begun.reader.end()

    async def first(
        self,
        request: Callable[[E], AsyncGenerator[T, None]],
        owner: Hashable | None = None,
        *,
        size: float = 1.0,
        bound: E | None = None,
    ) -> Begun[T, E]:
        """Send a request to an endpoint, and return its answer as soon as the first item is there.

        If that endpoint fails or is late, another one is asked; the only endpoint is asked a second time. A late
        request goes on, and the first answer is used. A failure counts for the endpoint's breaker once in each call.

        Args:
            request: Sends the request to an endpoint and yields the answer. Closing the generator ends the request.
            owner: The API key on whose behalf it is sent, as the breakers count failures.
            size: The size of the request, to which its usual time is proportional.
            bound: The endpoint to ask first.

        Raises:
            Refused: No endpoint has room, or all breakers are open.
            RemoteError: All attempts failed, or gave nothing within their deadlines.
            AntiphonError: Any other error of `request`, which would occur again elsewhere.
        """
        attempts = [self._begin(request, self.choose(owner, bound))]
        waiting: dict[asyncio.Future[T], _Attempt[T, E]] = {
            asyncio.ensure_future(attempts[0].reader.take()): attempts[0]
        }
        failed: dict[E, None] = {}
        failure: AntiphonError = RemoteError(f"the model's server gave no answer within {self.max_s:g} s")
        winner: _Attempt[T, E] | None = None
        try:
            while True:
                is_last = len(attempts) == self._attempts
                timeout_s = self.max_s if is_last else self._patience_s(attempts[-1].endpoint, size)
                done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    attempt = waiting.pop(future)
                    error = future.exception()
                    if error is None:
                        winner = attempt
                        attempt.endpoint.times.note(time.monotonic() - attempt.since_s, size)
                        attempt.endpoint.succeeded(owner)
                        return Begun(future.result(), attempt.reader, attempt.endpoint)
                    failure = self._noted(attempt, error, owner, failed)
                if done and waiting:
                    # Another attempt may still succeed.
                    continue
                if not done:
                    failed |= {a.endpoint: None for a in waiting.values() if is_last or not self._hedges}
                if is_last:
                    raise failure
                tried = [attempt.endpoint for attempt in attempts]
                attempts.append(self._begin(request, await self._next(owner, tried, failure if done else None)))
                attempts[-1].endpoint.second_attempts += 1
                waiting[asyncio.ensure_future(attempts[-1].reader.take())] = attempts[-1]
        finally:
            for future in waiting:
                future.cancel()
            for attempt in attempts:
                attempt.endpoint.running -= 1
                if attempt is not winner:
                    attempt.reader.end()
            for endpoint in failed:
                if winner is None or endpoint is not winner.endpoint:
                    self._broke(endpoint, owner, failure)

    def _begin(self, request: Callable[[E], AsyncGenerator[T, None]], endpoint: E) -> _Attempt[T, E]:
        endpoint.requests += 1
        endpoint.running += 1
        return _Attempt(endpoint, ReaderTask(request(endpoint), self.tasks), time.monotonic())

    def _patience_s(self, endpoint: E, size: float) -> float:
        """Return the seconds after which another endpoint is asked as well."""
        usual_s = endpoint.times.quantile_s(0.95, size) if self._hedges else None
        return min(self.max_s / 2, self.deadline_s(endpoint, size) if usual_s is None else usual_s)

    def _noted(
        self, attempt: _Attempt[T, E], error: BaseException, owner: Hashable | None, failed: dict[E, None]
    ) -> AntiphonError:
        """Count the error of an attempt and return it. Raises it if another attempt would not help."""
        if not isinstance(error, RemoteError | Refused):
            raise error
        attempt.endpoint.failures += 1
        if isinstance(error, Refused):
            attempt.endpoint.breaker.refused(owner, time.monotonic(), error.retry_after_s)
        else:
            failed[attempt.endpoint] = None
        return error

    async def _next(self, owner: Hashable | None, tried: Sequence[E], failure: AntiphonError | None) -> E:
        """Return the endpoint for the next attempt: one that was not tried, or else the last one again.

        Waits before it repeats a request that was refused. Raises the refusal if the wait would be too long.
        """
        if len(set(tried)) < len(self.all):
            with suppress(Refused):
                found = self.choose(owner, avoid=tried)
                if found not in tried:
                    return found
        if isinstance(failure, Refused):
            if failure.retry_after_s > MAX_WAIT_S:
                raise failure
            await asyncio.sleep(failure.retry_after_s)
        return tried[-1]

    # --- health -------------------------------------------------------------------------------------------------------

    def failed(self, endpoint: E, owner: Hashable | None, error: RemoteError | Refused) -> None:
        """Count a failure of an owner's request, and look at the endpoint until it works again. Returns at once."""
        endpoint.failures += 1
        if isinstance(error, Refused):
            endpoint.breaker.refused(owner, time.monotonic(), error.retry_after_s)
            return
        self._broke(endpoint, owner, error)

    def _broke(self, endpoint: E, owner: Hashable | None, error: Exception) -> None:
        if not endpoint.is_away:
            log.warning("%s gave no answer: %s", endpoint.url, error)
        endpoint.failed(owner)
        if self._watches and endpoint not in self._looks:
            looking = self._looks[endpoint] = asyncio.create_task(self._look_until_back(endpoint))
            looking.add_done_callback(lambda _: self._looks.pop(endpoint, None))

    async def _look_until_back(self, endpoint: E) -> None:
        pause_s = FIRST_PAUSE_S
        while endpoint.is_away:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            with suppress(ModelError, Refused):
                await self._looked(endpoint)
                log.info("%s answers again", endpoint.url)
                endpoint.is_away = False
                endpoint.breaker.end_pauses()

    async def _looked(self, endpoint: E) -> str:
        assert self._look
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self._look(endpoint)
        except TimeoutError:
            raise RemoteError(f"no answer within {PROBE_TIMEOUT_S:g} s") from None

    async def report(self) -> list[tuple[E, str, bool]]:
        """Look at each endpoint once. Return for each what it is, or what is wrong with it, and whether it works."""
        found: list[tuple[E, str, bool]] = []
        for endpoint in self.all if self._look else ():
            try:
                found.append((endpoint, await self._looked(endpoint), True))
            except (ModelError, Refused) as error:
                found.append((endpoint, str(error), False))
        return found
