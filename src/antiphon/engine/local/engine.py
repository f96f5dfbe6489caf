"""The engine: one model, one thread that steps it, and the sessions' asyncio door to it.

Sessions post what they want; the thread applies it between steps, plans, steps, and hands results back to the loops they
belong to. Nothing on a session's side waits for a step but what awaits its result.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from antiphon.engine.api import EngineSettings, EngineState, Finish, Generation, Position, Sampling, Sink, Token
from antiphon.engine.local.kv_cache import PAGE_ROWS, KvCache, Storage
from antiphon.engine.local.scheduler import MAX_UNREAD, ScheduledSession, Scheduler, StepChunk, StepLimits
from antiphon.errors import AntiphonError, EngineError, ModelError, Refused

log = logging.getLogger(__name__)

# How often an idle engine looks for sessions to park.
REST_S = 5.0
# How soon sessions that found no room are tried again, if nothing happens before.
RETRY_S = 0.05
T = TypeVar("T")
# (rows in the step, sessions in it, seconds it took)
ObserveEngineStep = Callable[[int, int, float], None]


class StepRunner(Protocol):
    """What the engine needs of a runner."""

    @property
    def context_rows(self) -> int: ...

    def storage(self) -> Storage: ...

    def embeddings(self, rows: Any) -> Any: ...

    def step(self, chunks: Sequence[StepChunk]) -> Sequence[Token | Exception | None]: ...


class Engine:
    """Runs `runner` in a thread of its own until closed."""

    def __init__(
        self,
        runner: StepRunner,
        settings: EngineSettings | None = None,
        *,
        observe: ObserveEngineStep | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or EngineSettings()
        self._runner = runner
        self._observe = observe
        self._clock = clock
        s = self.settings
        cache = KvCache(runner.storage(), budget_bytes=s.kv_bytes, host_bytes=s.host_bytes, disk_bytes=s.disk_bytes)
        context = min(s.context_rows or runner.context_rows, runner.context_rows)
        limits = StepLimits(context, s.decode_rows, s.prefill_rows, s.alone_rows, s.park_after_s)
        self.scheduler = Scheduler(cache, limits)
        # Bound: a few small calls a session and step; the thread takes all of them before each step.
        self._posted: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        # As it was after the last step: for whoever must not wait to know.
        self.seen = EngineState()
        self._results: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    async def open(self, reserve_rows: int | None = None) -> EngineSession:
        """A session with no rows, and room promised for `reserve_rows`. Raises Refused where there is none."""
        rows = max(PAGE_ROWS, self.settings.reserve_rows if reserve_rows is None else reserve_rows)
        return EngineSession(self, await self._seat(lambda: self.scheduler.open(rows, self._clock())))

    async def _seat(self, call: Callable[[], ScheduledSession]) -> ScheduledSession:
        """The seat that `call` makes. Who is cancelled while it is made leaves none behind."""
        made: list[ScheduledSession] = []

        def make() -> ScheduledSession:
            made.append(call())
            return made[0]

        def leave() -> None:
            for seat in made:
                self.scheduler.close(seat, keep=False)

        try:
            return await self.ask(make)
        except asyncio.CancelledError:
            with suppress(Refused):
                self.post(leave)
            raise

    async def state(self) -> EngineState:
        """How full it is."""
        return await self.ask(self._state)

    async def ask_model(self, call: Callable[[], T]) -> T:
        """As `ask`, of a call into a model: whatever it raises is a ModelError."""

        def answer() -> T:
            try:
                return call()
            except AntiphonError:
                raise
            except Exception as error:
                raise ModelError(f"{type(error).__name__}: {error}") from error

        return await self.ask(answer)

    async def ask(self, call: Callable[[], T]) -> T:
        """The result of `call`, made in the engine's thread between two steps."""
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except AntiphonError as error:
                future.set_exception(error)
            except Exception as error:
                log.exception("an engine call failed")
                future.set_exception(error)

        self.post(answer)
        return await asyncio.wrap_future(future)

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` made in the engine's thread before its next step. Raises Refused once the engine is closed."""
        with self._changed:
            if self._closed:
                raise Refused("the engine is shutting down", 5.0)
            self._posted.append(call)
            self._changed.notify()

    def deliver(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """From the engine's thread: have `call` made in `loop`, together with the rest of the step's results."""
        self._results.append((loop, call))

    def wake(self) -> None:
        """Something that held a session back is over."""
        with self._changed:
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread after the step under way; what generates gets an EngineError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _state(self) -> EngineState:
        scheduler, cache = self.scheduler, self.scheduler.cache
        return EngineState(
            len(scheduler.seats),
            sum(1 for s in scheduler.seats if s.rows.generation),
            sum(1 for s in scheduler.seats if s.lease.asleep),
            len(scheduler.kept),
            cache.held_pages * cache.page_bytes,
            cache.total_pages * cache.page_bytes,
            cache.parked_rows * cache.storage.row_bytes,
            scheduler.cuts,
        )

    # --- the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        stepped = False
        while True:
            with self._changed:
                if not self._posted and not self._closed and not stepped:
                    self._changed.wait(RETRY_S if self._work() else REST_S)
                if self._closed:
                    break
            self._apply()
            stepped = self._step()
            self.seen = self._state()
            self._hand_back()
        self.scheduler.end(EngineError("the engine was closed"))
        self._apply()
        self._hand_back()

    def _work(self) -> bool:
        return any(s.ready for s in self.scheduler.seats)

    def _apply(self) -> None:
        while self._posted:
            call = self._posted.popleft()
            try:
                call()
            except Exception:
                # One session's mistake must not end the thread that serves them all.
                log.exception("an engine call failed")

    def _step(self) -> bool:
        """False where there was nothing to do, or no room to do it."""
        started = self._clock()
        try:
            chunks = self.scheduler.plan(started)
            if not chunks:
                self.scheduler.rest(started)
                return False
            results = self._runner.step(chunks)
            self.scheduler.commit(chunks, results)
        except Exception as error:
            # Whatever is wrong in here must not leave every session hanging.
            log.exception("an engine step failed")
            self.scheduler.end(ModelError(f"the engine failed: {error}"))
            return False
        if self._observe:
            self._observe(sum(c.count for c in chunks), len(chunks), self._clock() - started)
        return True

    def _hand_back(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for loop, call in self._results:
            by_loop.setdefault(loop, []).append(call)
        self._results.clear()
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_all, calls)
            except RuntimeError:
                # The loop was closed with sessions open: nobody is left to tell.
                log.info("results of %d sessions had no loop to go to", len(calls))


def _all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


class EngineSession:
    """One long-lived sequence. Used from one event loop. Rows are counted from its start.

    Everything but `settle`, `generate` and `fork` returns at once: the engine does it before its next step, in order.
    """

    def __init__(self, engine: Engine, seat: ScheduledSession, length: int = 0) -> None:
        self._engine = engine
        self._seat = seat
        self._length = length
        self._generating = False
        self._closed = False
        self.finish: Finish | None = None

    @property
    def length(self) -> int:
        """Rows given and sampled so far, those that left the context too."""
        return self._length

    @property
    def cached(self) -> int:
        """Rows at its head whose KV was there before it came."""
        return self._seat.cached

    @property
    def context_start(self) -> int:
        """The first row after the pinned ones that is still in the context."""
        return self._seat.rows.pinned + self._seat.rows.dropped

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        """Tokens at the end; their prefill starts at once. `positions` count from the first free one; None: one after another.

        Raises ValueError, EngineError while it generates.
        """
        self._free()
        given = tuple(ids)
        _check(len(given), positions)
        self._engine.post(lambda: self._seat.rows.append(given, positions))
        self._length += len(given)

    def append_embeddings(
        self, rows: Any, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        """Embeddings, float [n, width], at the end; `sink` is told what the decoder's tapped layer made of them, before any token that follows.

        Raises ValueError for another shape, EngineError while it generates.
        """
        self._free()
        given = self._engine._runner.embeddings(rows)
        _check(len(given), positions)
        self._engine.post(lambda: self._seat.rows.append_embeddings(given, len(given), positions, sink))
        self._length += len(given)

    def pin(self) -> None:
        """All rows so far (the system prompt) are kept when the context is cut."""
        self._free()
        self._engine.post(self._seat.rows.pin)

    def start_turn(self) -> None:
        """The next row begins a turn: a context cut falls at such places."""
        self._free()
        self._engine.post(self._seat.rows.start_turn)

    def rollback(self, position: int) -> None:
        """Take back all rows from `position` on. Raises EngineError for one that left the context, or while it generates."""
        self._free()
        rows = self._seat.rows
        if not 0 <= position <= self._length:
            raise EngineError(f"cannot roll back to row {position} of {self._length}")
        if rows.dropped and rows.pinned < position < rows.pinned + rows.dropped:
            raise EngineError(f"row {position} has left the context")
        self._engine.post(lambda: self._engine.scheduler.rollback(self._seat, position))
        self._length = position

    def evict(self, count: int) -> None:
        """Drop the `count` oldest rows after the pinned ones; the KV of what follows them stays. Raises EngineError while it generates.

        Unlike a context cut, what stays goes on knowing of what went: its keys and values were computed with it. Where the keys cannot be
        moved (`Runner.keys_turn_by_halves`), they are computed anew without it.
        """
        self._free()
        self._engine.post(lambda: self._engine.scheduler.evict(self._seat, count))

    def resume(self, ids: Sequence[int]) -> None:
        """The next input of a resumable request: the newest sampled token is taken back, `ids` follow what is left.

        The tokens sampled last of each output are never seen by the model again (spec/transcription.md, vLLM's
        resumable requests); the KV of all the rest stays.
        """
        if self.finish is not None:
            self.rollback(self._length - 1)
            self.finish = None
        self.append(ids)

    async def settle(self, *, whole: bool = False) -> None:
        """Wait until the rows given so far are in the KV (but for `whole` the newest is left for the next step). Raises ModelError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def told(error: Exception | None) -> None:
            self._engine.deliver(loop, lambda: _resolve(done, error))

        self._engine.post(lambda: self._engine.scheduler.settle(self._seat, told, whole=whole))
        await done

    async def generate(self, params: Sampling) -> AsyncGenerator[Token, None]:
        """Sample tokens after the last row and yield them as they come; each becomes a row.

        `finish` says why it ended. Closing the generator, or cancelling its task, ends it within a step and leaves the session with
        the tokens that were yielded. Raises ModelError, EngineError.
        """
        self._free()
        loop = asyncio.get_running_loop()
        # Bound: the engine goes no further than MAX_UNREAD tokens ahead of the reader.
        queue: deque[Token | Finish | Exception] = deque()
        arrived = asyncio.Event()

        def receive(item: Token | Finish | Exception) -> None:
            queue.append(item)
            arrived.set()

        generation = Generation(
            params, lambda item: self._engine.deliver(loop, lambda: receive(item)), start=self._length
        )
        self._generating, self.finish = True, None
        over = False
        try:
            self._engine.post(lambda: self._begin(generation))
            while True:
                while not queue:
                    arrived.clear()
                    await arrived.wait()
                match queue.popleft():
                    case Token() as token:
                        generation.consumed += 1
                        self._length += 1
                        if generation.produced - generation.consumed >= MAX_UNREAD - 2:
                            # The engine waits for this reader, or is about to.
                            self._engine.wake()
                        yield token
                    case Finish() as reason:
                        self.finish, over = reason, True
                        return
                    case error:
                        over = True
                        raise error
        finally:
            self._generating = False
            if not over:
                self.finish = Finish.CANCELLED
                self._cancel(generation)

    async def fork(self) -> EngineSession:
        """Another session with the same rows. Raises Refused."""
        self._free()
        engine = self._engine
        twin = await engine._seat(lambda: engine.scheduler.fork(self._seat, engine._clock()))
        return EngineSession(engine, twin, self._length)

    def close(self, *, keep: bool = False) -> None:
        """Give back its KV. `keep`: leave it to later sessions that begin alike, while there is room. Again is a no-op."""
        if not self._closed:
            self._closed = True
            try:
                self._engine.post(lambda: self._engine.scheduler.close(self._seat, keep))
            except Refused:
                # A closed engine holds nothing.
                return

    def _begin(self, generation: Generation) -> None:
        try:
            self._engine.scheduler.generate(self._seat, generation)
        except EngineError as error:
            generation.deliver(error)

    def _cancel(self, generation: Generation) -> None:
        try:
            self._engine.post(lambda: self._engine.scheduler.cancel(self._seat, generation))
        except Refused:
            return

    def _free(self) -> None:
        if self._closed:
            raise EngineError("the session is closed")
        if self._generating:
            raise EngineError("the session is generating: end that first")


def _check(count: int, positions: Sequence[Position] | None) -> None:
    if positions is not None and len(positions) != count:
        raise ValueError(f"{len(positions)} positions for {count} rows")


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error:
        done.set_exception(error)
    else:
        done.set_result(None)
