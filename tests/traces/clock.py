"""A process whose time is virtual, whose threads run inline and whose random tokens are counted.

`install()` has to be called before anything else is imported: functions keep `time.monotonic` as a default value. It
replaces names in the standard library and anyio only.
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

# Where each run begins: seconds of the monotonic clock, and seconds since 1970.
MONOTONIC_S, EPOCH_S = 1_000, 1_700_000_000


class Stuck(RuntimeError):
    """Everything waits, and nothing is due: a run would wait forever."""


class Clock:
    """The time of the process. It counts whole microseconds: what sums of seconds round to does not show."""

    def __init__(self) -> None:
        self.now_us = 0
        self.idle: list[asyncio.Future[None]] = []
        self.num_tokens = 0
        self.tokens: set[str] = set()

    def reset(self) -> None:
        """Begin a run."""
        self.__init__()  # type: ignore[misc]

    @property
    def now_s(self) -> float:
        """Seconds since the beginning of the run."""
        return self.now_us / 1e6

    def advance(self, seconds: float) -> None:
        """Let time pass, up to the next whole microsecond."""
        self.now_us += max(1, math.ceil(seconds * 1e6 - 1e-3))

    def token(self, length: int) -> str:
        """Characters of [0-9a-f] that no other call gets."""
        self.num_tokens += 1
        token = hashlib.sha512(f"token {self.num_tokens}".encode()).hexdigest()[:length]
        self.tokens.add(token)
        return token


CLOCK = Clock()


class _Selector(selectors.DefaultSelector):
    """Lets time pass where the event loop would wait for it."""

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
    """Wait until nothing more can happen at this instant."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    CLOCK.idle.append(waiter)
    await waiter


def run(main: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run, from the beginning of time."""
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
