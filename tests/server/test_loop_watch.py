"""The monitor of the event loop: the lag that it measures, and the function that it names when the loop is blocked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from antiphon.server.watches import watch_loop

LIMIT_S, WAIT_S = 0.05, 30


def hold_the_loop(until: Callable[[], object]) -> None:
    """Block the event loop's thread until `until` returns something true because of another thread."""
    end_s = time.monotonic() + WAIT_S
    while not until() and time.monotonic() < end_s:
        pass


@pytest.mark.anyio
async def test_when_the_loop_is_held_then_the_log_names_the_function_and_the_lag_is_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lags_s: list[float] = []
    measured = threading.Event()

    def observe(lag_s: float) -> None:
        lags_s.append(lag_s)
        if lag_s > LIMIT_S:
            measured.set()

    with caplog.at_level(logging.WARNING, "antiphon.server.watches"):
        async with anyio.create_task_group() as group:
            group.start_soon(watch_loop, observe, LIMIT_S)
            await anyio.lowlevel.checkpoint()
            hold_the_loop(until=lambda: caplog.records)
            assert await anyio.to_thread.run_sync(measured.wait, WAIT_S)
            group.cancel_scope.cancel()
    (record,) = caplog.records
    assert "hold_the_loop(until=" in record.getMessage()
    assert max(lags_s) > LIMIT_S


@pytest.mark.anyio
async def test_when_the_loop_answers_then_short_lags_are_measured_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lags_s: list[float] = []
    measured = threading.Event()

    def observe(lag_s: float) -> None:
        lags_s.append(lag_s)
        if len(lags_s) == 3:
            measured.set()

    async with anyio.create_task_group() as group:
        group.start_soon(watch_loop, observe, WAIT_S)
        assert await anyio.to_thread.run_sync(measured.wait, WAIT_S)
        group.cancel_scope.cancel()
    assert all(0 <= lag_s < WAIT_S for lag_s in lags_s)
    assert not caplog.records
