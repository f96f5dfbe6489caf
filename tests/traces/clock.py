"""A process whose time is virtual, whose threads run inline and whose random tokens are counted.

Call `install()` before importing anything else, because functions keep `time.monotonic` as a default value. It replaces
names only in the standard library and in anyio.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import selectors
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

# The time at which each run begins, on the monotonic clock and in seconds since 1970.
MONOTONIC_S, EPOCH_S = 1_000, 1_700_000_000


class Stuck(RuntimeError):
    """Raised when every task waits and no timer is due, because the run would wait forever."""


class Clock:
    """The virtual time of the process.

    It counts whole microseconds, so that rounding errors of float sums do not show.
    """

    def __init__(self) -> None:
        self.now_us = 0
        self.idle: list[asyncio.Future[None]] = []
        self.num_tokens = 0
        self.tokens: set[str] = set()

    def reset(self) -> None:
        """Set the time back to the beginning of a run."""
        self.__init__()  # type: ignore[misc]

    @property
    def now_s(self) -> float:
        """Seconds since the beginning of the run."""
        return self.now_us / 1e6

    def advance(self, seconds: float) -> None:
        """Let time pass, rounded up to a whole microsecond."""
        self.now_us += max(1, math.ceil(seconds * 1e6 - 1e-3))

    def token(self, length: int) -> str:
        """Return characters of [0-9a-f] that no other call returns."""
        self.num_tokens += 1
        token = hashlib.sha512(f"token {self.num_tokens}".encode()).hexdigest()[:length]
        self.tokens.add(token)
        return token


CLOCK = Clock()


class _Selector(selectors.DefaultSelector):
    """Advances the clock instead of waiting when the event loop would wait."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if CLOCK.idle:
            for waiter in CLOCK.idle:
                if not waiter.done():
                    waiter.set_result(None)
            CLOCK.idle.clear()
        elif timeout is None:
            raise Stuck
        else:
            CLOCK.advance(timeout)
        return ready


async def idle() -> None:
    """Wait until no task can do anything more without time passing."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    CLOCK.idle.append(waiter)
    await waiter


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine like asyncio.run, with the clock at the beginning of a run."""
    CLOCK.reset()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector())) as runner:
        runner.run(main)


class _InlineExecutor(futures.ThreadPoolExecutor):
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


async def _run_sync(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    result = function(*args)
    await anyio.lowlevel.checkpoint()
    return result


async def _to_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0)
    result = function(*args, **kwargs)
    await asyncio.sleep(0)
    return result


def install() -> None:
    """Replace the clocks, the threads and the random tokens of this process."""

    def monotonic() -> float:
        return (MONOTONIC_S * 1_000_000 + CLOCK.now_us) / 1e6

    time.monotonic = time.perf_counter = monotonic
    time.monotonic_ns = time.perf_counter_ns = lambda: round(monotonic() * 1e9)
    time.time = lambda: EPOCH_S + CLOCK.now_s
    time.time_ns = lambda: round(time.time() * 1e9)
    secrets.token_hex = lambda nbytes=None: CLOCK.token(2 * (nbytes or 32))
    secrets.token_bytes = lambda nbytes=None: bytes.fromhex(CLOCK.token(2 * (nbytes or 32)))
    secrets.token_urlsafe = lambda nbytes=None: CLOCK.token(-(-4 * (nbytes or 32) // 3))
    uuid.uuid4 = lambda: uuid.UUID(CLOCK.token(32))
    futures.ThreadPoolExecutor = _InlineExecutor  # type: ignore[misc]
    anyio.to_thread.run_sync = _run_sync  # type: ignore[assignment]
    asyncio.to_thread = _to_thread  # type: ignore[assignment]
