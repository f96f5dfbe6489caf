"""The one thread of a model that may run its torch code.

An engine steps its model in this thread. The model's other parts (encoders, vocoders, a talker's code predictor) run in
the same thread, between two steps. One thread is enough, and faster than several: OpenMP keeps a team of workers for
every thread that ever ran a matrix product, and with more workers than cores every product is slower (`threads.py`).

The thread is *lost* if it ends without being closed, or if a watchdog declares it lost (`fail`). All calls that wait
for it then fail, and it accepts no more.

This module knows neither sessions, models nor tensors.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

from antiphon.errors import AntiphonError, ModelError, ModelLost, Refused

log = logging.getLogger(__name__)

T = TypeVar("T")


class DeviceStream(Protocol):
    """The thread's own order of work on a device. All methods are called in the thread, and none waits for the device.

    What callers compute before they post a call, and what they do with its result, is in another order.
    """

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which the thread's work goes to this stream. The thread runs within it."""
        ...

    def take(self) -> None:
        """Let later work of the thread wait for what callers have computed so far. Called before posted calls run."""
        ...

    def give(self) -> None:
        """Let later work of callers wait for what the thread has computed so far. Called before results leave it."""
        ...


class _CommonStream:
    """The order of work that all threads share: nothing has to wait."""

    def entered(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def take(self) -> None:
        return

    def give(self) -> None:
        return


# The longest wait for an event loop before a step, in seconds, and the maximum number of such waits before one step.
YIELD_S, MAX_YIELDS = 0.01, 3
Given = TypeVarTuple("Given")
# A function and its arguments.
Call = tuple[Callable[..., None], tuple[Any, ...]]


class ModelThread:
    """Runs posted calls one after another, and its owner's `step` between them.

    The thread starts at once and ends with `close`. `name`: the thread's name, also used in errors.
    `step`: called in the thread after all posted calls. Returns True if there may be more to do at once. Must not
    raise: an exception loses the thread. Without `step` the thread only runs calls.
    `pause_s`: called after a step that found nothing to do. Returns the seconds until the next step if no call is
    posted before; None: no limit. Called with the thread's lock held, so that no `wake` is missed; must not post.
    `on_close`: called in the thread when it ends, before the calls that were posted last.
    `stream`: the thread's stream of device work; None: it shares that of the process.
    `lost`: why the thread no longer runs calls; None while it is alive.
    """

    def __init__(
        self,
        name: str,
        *,
        step: Callable[[], bool] = lambda: False,
        pause_s: Callable[[], float | None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
        stream: DeviceStream | None = None,
    ) -> None:
        self.name = name
        self._stream: DeviceStream = stream or _CommonStream()
        self._step, self._pause_s, self._on_close = step, pause_s, on_close
        # Bound: a few small calls for each session and step. The thread runs all of them before each step.
        self._posted: deque[Callable[[], None]] = deque()
        # The loops whose receivers run before the next step.
        self._yields: set[asyncio.AbstractEventLoop] = set()
        self._results: list[tuple[asyncio.AbstractEventLoop, Call]] = []
        self._changed = threading.Condition()
        self._closed = False
        self.lost: str | None = None
        # Callbacks for the thread's loss: one for each call and generation under way.
        self._waiting: set[Callable[[ModelLost], None]] = set()
        # When the running call or step began; None while nothing runs.
        self._since_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def call_model(self, function: Callable[[], T]) -> T:
        """Like `call`, for a function that runs a part of the model other than the decoder, such as an encoder.

        Turns every exception into a ModelError, except the project's own errors.
        """

        def guarded() -> T:
            try:
                return function()
            except AntiphonError:
                raise
            except Exception as error:
                raise ModelError(f"{type(error).__name__}: {error}") from error

        return await self.call(guarded)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in this thread between two steps, and return its result or raise its error.

        Waits for the step under way. `function` delays every session while it runs. If the caller is cancelled before
        `function` has begun, `function` is not run. Raises Refused after the thread is closed, ModelLost if the thread
        is lost before the result is available.
        """
        future: Future[T] = Future()

        def fail(error: Exception) -> None:
            # The caller gets the first of the two: the result or the loss of the thread.
            with suppress(InvalidStateError):
                future.set_exception(error)

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
                self._stream.give()
            except Exception as error:
                if not isinstance(error, AntiphonError):
                    log.exception("a call in the thread %s failed", self.name)
                fail(error)
            else:
                with suppress(InvalidStateError):
                    future.set_result(result)

        with self.waiting(fail):
            self.post(run)
            return await asyncio.wrap_future(future)

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` in this thread before its next step, and return at once. May be called from any thread.

        Functions run in the order they were posted; their exceptions are logged. Raises Refused after the thread is
        closed, ModelLost if it is lost.
        """
        with self._changed:
            if self.lost:
                raise self._lost_error()
            if self._closed:
                raise Refused(f"the {self.name} is shutting down", 5.0)
            self._posted.append(function)
            self._changed.notify()

    @contextmanager
    def waiting(self, on_lost: Callable[[ModelLost], None]) -> Iterator[None]:
        """Call `on_lost`, in any thread, if this thread is lost while the block runs.

        For callers that wait for something that this thread delivers. Raises ModelLost if the thread is lost already.
        """
        with self._changed:
            if self.lost:
                raise self._lost_error()
            self._waiting.add(on_lost)
        try:
            yield
        finally:
            with self._changed:
                self._waiting.discard(on_lost)

    def busy_s(self) -> float:
        """Return how long the call or step under way has run, in seconds; 0 if none runs."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def fail(self, reason: str) -> None:
        """Declare the thread lost: waiting calls get a ModelLost now, later calls when they are made.

        May be called from any thread. `reason`: a clause for the error and the log. If the thread hangs, it is left
        until the process ends; if its call returns, it ends. A no-op if the thread is already lost.
        """
        with self._changed:
            if self.lost:
                return
            self.lost = reason
            waiting = list(self._waiting)
            self._changed.notify()
        log.critical("the %s is lost: %s; %d calls failed", self.name, reason, len(waiting))
        for on_lost in waiting:
            on_lost(self._lost_error())

    def _lost_error(self) -> ModelLost:
        return ModelLost(f"the {self.name} is lost: {self.lost}")

    def deliver(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[Unpack[Given]], None], *given: *Given
    ) -> None:
        """Call `function(*given)` in `loop` after this step, together with the step's other results for that loop.

        Must be called in this thread. Waking a loop once for all its sessions costs less than once for each.
        """
        self._results.append((loop, (function, given)))

    def yield_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver the results so far to `loop` before the next step, and let their receivers run.

        So the calls that several receivers post at once are in one step. The thread waits for the loop for at most
        YIELD_S. Must be called in this thread.
        """
        self._yields.add(loop)

    def wake(self) -> None:
        """Begin the next step now, because its input may have arrived. May be called from any thread."""
        with self._changed:
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread after the call or step under way, and block until it has ended or `timeout_s` has passed.

        Calls that were posted before still run; later ones raise Refused. Does not wait for a lost thread.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(0 if self.lost else timeout_s)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with self._stream.entered():
                self._run()
        except BaseException as error:
            # The calls of a dead thread would otherwise wait forever.
            log.critical("the thread %s ended", self.name, exc_info=True)
            self.fail(f"its thread ended with {type(error).__name__}: {error}")

    def _run(self) -> None:
        stepped = False
        while True:
            with self._changed:
                if not self._posted and not self._closed and not self.lost and not stepped:
                    self._changed.wait(self._pause_s())
                if self._closed or self.lost:
                    break
            self._run_posted()
            for _ in range(MAX_YIELDS):
                if not self._yield_to_receivers():
                    break
                self._run_posted()
            stepped = self._timed(self._step)
            self._deliver_results()
        self._on_close()
        self._run_posted()
        self._deliver_results()

    def _yield_to_receivers(self) -> bool:
        """Do what `yield_to` asked for. Returns False if it was not called."""
        loops, self._yields = self._yields, set()
        if not loops:
            return False
        self._deliver_results()
        deadline_s = time.monotonic() + YIELD_S
        for loop in loops:
            ran = threading.Event()
            with suppress(RuntimeError):
                # The results are set in the loop's next iteration. Their receivers run in the one after it.
                loop.call_soon_threadsafe(loop.call_soon, ran.set)
                ran.wait(max(0.0, deadline_s - time.monotonic()))
        return True

    def _run_posted(self) -> None:
        if self._posted:
            self._stream.take()
        while self._posted and not self.lost:
            function = self._posted.popleft()
            try:
                self._timed(function)
            except Exception:
                # One session's mistake must not end the thread that serves them all.
                log.exception("a call in the thread %s failed", self.name)

    def _timed(self, function: Callable[[], T]) -> T:
        self._since_s = time.monotonic()
        try:
            return function()
        finally:
            self._since_s = None

    def _deliver_results(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Call]] = {}
        for loop, call in self._results:
            by_loop.setdefault(loop, []).append(call)
        if self._results:
            self._stream.give()
        self._results.clear()
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_run_all, calls)
            except RuntimeError:
                # The loop was closed while its sessions were open: their results have no receiver.
                log.info("dropped %d results: their event loop is closed", len(calls))


def _run_all(calls: list[Call]) -> None:
    for function, given in calls:
        function(*given)
