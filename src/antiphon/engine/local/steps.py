"""Runs an engine's steps: plans one, launches it, reads its results and commits them.

One step ahead, a step is launched before the results of the step before it are read. So the device computes while the
host plans, and while it applies what it has read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from antiphon.engine.api import Token
from antiphon.engine.local.scheduler import Scheduler
from antiphon.engine.local.step import LaunchedStep, StepChunk, StepRunner
from antiphon.errors import ModelError

log = logging.getLogger(__name__)

# The interval at which an idle engine looks for sessions to park, in seconds.
IDLE_CHECK_S = 5.0
# Called with the number of rows in a step, the number of sessions in it, and its time in seconds.
ObserveEngineStep = Callable[[int, int, float], None]


class Steps:
    """The steps of one engine. Belongs to the model's thread.

    `ahead`: launch a step before the one before it is read. `observe`: called after each step. `clock`: monotonic
    seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        ahead: bool = False,
        observe: ObserveEngineStep | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._runner, self._ahead = scheduler, runner, ahead
        self._observe, self._clock = observe, clock
        # The step under way: its chunks, and what it is read from, or the error with which its launch failed.
        self._launched: tuple[list[StepChunk], LaunchedStep | ModelError] | None = None
        # When idle sessions were last looked for.
        self._parked_s = float("-inf")
        scheduler.land = self.land

    def run(self) -> bool:
        """Take one step. Returns False if there was nothing to do, or no room to do it."""
        started = self._clock()
        try:
            if self._scheduler.needs_landing:
                self._land()
            chunks = self._scheduler.plan(started)
            before, self._launched = self._launched, (chunks, self._launch(chunks)) if chunks else None
            if before:
                self._commit(*before)
            if not self._ahead:
                self._land()
            if not (chunks or before):
                self._park_idle(started)
        except Exception as error:
            self._fail(error)
            return False
        if self._observe and chunks:
            self._observe(sum(c.count for c in chunks), len(chunks), self._clock() - started)
        return bool(chunks or before)

    def land(self) -> None:
        """Wait for the step under way and commit it, if there is one."""
        try:
            self._land()
        except Exception as error:
            self._fail(error)

    def _land(self) -> None:
        launched, self._launched = self._launched, None
        if launched:
            self._commit(*launched)

    def _park_idle(self, now_s: float) -> None:
        # Looks at all sessions, and an engine may be without work a thousand times a second.
        if now_s - self._parked_s >= IDLE_CHECK_S:
            self._parked_s = now_s
            self._scheduler.park_idle(now_s)

    def _fail(self, error: Exception) -> None:
        # Whatever the error is, no session may be left waiting for a step that never runs.
        log.exception("an engine step failed")
        self._launched = None
        self._scheduler.fail_all(ModelError(f"the engine failed: {error}"))

    def _launch(self, chunks: list[StepChunk]) -> LaunchedStep | ModelError:
        try:
            return self._runner.launch(chunks)
        except Exception as error:
            return _failed(error)

    def _commit(self, chunks: list[StepChunk], launched: LaunchedStep | ModelError) -> None:
        """Apply a step's results. If it fails, for example for lack of memory, the work of each of its sessions fails.

        Rows that are already in the KV stay valid: a row counts as computed only after its step has succeeded.
        """
        results: Sequence[Token | Exception | None]
        try:
            results = [launched] * len(chunks) if isinstance(launched, ModelError) else launched.read()
        except Exception as error:
            results = [_failed(error)] * len(chunks)
        self._scheduler.commit(chunks, results)


def _failed(error: Exception) -> ModelError:
    log.error("an engine step failed", exc_info=error)
    return ModelError(f"the engine's step failed: {error}")
