"""The one thread of a model that may run its torch code.

An engine steps its model in such a thread, and a model's other parts (encoders, vocoders, a talker's code predictor)
run in the same one, between two steps. There is one because OpenMP keeps a team of workers for every thread that ever
ran a product, and with more workers than cores every product is slower (`threads.py`).

The thread is *lost* when it ends without being closed, or when a watch declares it so (`fail`): whatever waits for it
fails then, and it takes no more.

This module knows neither sessions nor models, and no tensor library.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import TypeVar

from antiphon.errors import AntiphonError, ModelError, ModelLost, Refused

log = logging.getLogger(__name__)

T = TypeVar("T")


class ModelThread:
    """Runs the calls that are posted to it one after another, and a step of its owner's between them.

    The thread starts at once and ends with `close`. `name`: of the thread, and in errors.
    `step`: called in the thread after all posted calls; True where there may be more to do at once. Must not raise:
    the thread is lost where it does.
    `pause_s`: called after a step that found nothing to do: seconds until the next one if nothing is posted before,
    None for no limit. It is called with the thread's lock held, so that no `wake` is missed, and must not post.
    `on_close`: called in the thread when it ends, before the calls that were posted last.
    A thread without steps runs nothing but calls. `lost`: why it runs nothing any more; None while it is alive.
    """

    def __init__(
        self,
        name: str,
        *,
        step: Callable[[], bool] = lambda: False,
        pause_s: Callable[[], float | None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._step, self._pause_s, self._on_close = step, pause_s, on_close
        # Bound: a few small calls for each session and step; the thread makes all of them before each step.
        self._posted: deque[Callable[[], None]] = deque()
        self._results: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._closed = False
        self.lost: str | None = None
        # What has to be told where the thread is lost: one for each call and generation under way.
        self._waiting: set[Callable[[ModelLost], None]] = set()
        # When the call or step that runs now began; None while nothing runs.
        self._since_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def call_model(self, function: Callable[[], T]) -> T:
        """Do as `call` does, for a function that runs a part of the model beside the decoder, such as an encoder.

        Whatever it raises becomes a ModelError, but for the project's own errors.
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

        It delays every session while it runs. Waits for the step under way. A caller that is cancelled before it began
        has it skipped. Raises Refused once the thread is closed, ModelLost where it is lost or is so before the result
        is there.
        """
        future: Future[T] = Future()

        def fail(error: Exception) -> None:
            # Whichever comes first, the result or the thread's loss, is what the caller gets.
            with suppress(InvalidStateError):
                future.set_exception(error)

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
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
        """Have `function` run in this thread before its next step, and return at once. From any thread.

        Functions run in the order they were posted; what one raises is logged. Raises Refused once the thread is
        closed, ModelLost where it is lost.
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
        """Have `on_lost` called, from any thread, if this thread is lost while the block runs.

        For whoever waits for something that this thread delivers. Raises ModelLost where it is lost already.
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
        """Return for how many seconds the call or step under way has run; 0 where none is."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def fail(self, reason: str) -> None:
        """Declare the thread lost: what waits for it gets a ModelLost now, later calls at once. From any thread.

        `reason`: a clause for the error and the log. A thread that hangs is left to the process's end; one that comes
        back ends. Does nothing for a thread that is lost already.
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

    def deliver(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        """Have `function` run in `loop` after this step, together with the step's other results for that loop.

        To be called in this thread: one wake-up of a loop for all its sessions costs less than one for each.
        """
        self._results.append((loop, function))

    def wake(self) -> None:
        """Have the next step begin now, since what it waited for may have come. From any thread."""
        with self._changed:
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread after the call or step under way, and block until it ended or `timeout_s` passed.

        Calls that were posted before are still made; later ones raise Refused. A thread that is lost is not waited for.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(0 if self.lost else timeout_s)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._run()
        except BaseException as error:
            # Calls that wait for a thread that is gone would wait for ever.
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
            stepped = self._timed(self._step)
            self._deliver_results()
        self._on_close()
        self._run_posted()
        self._deliver_results()

    def _run_posted(self) -> None:
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
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for loop, function in self._results:
            by_loop.setdefault(loop, []).append(function)
        self._results.clear()
        for loop, functions in by_loop.items():
            try:
                loop.call_soon_threadsafe(_run_all, functions)
            except RuntimeError:
                # The loop was closed while its sessions were open: their results have no receiver.
                log.info("results of %d sessions had no loop to go to", len(functions))


def _run_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
