"""Waking tasks that wait for a state to change. For tasks of one event loop; threads have `threading.Condition`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


class Signal:
    """A change that any number of tasks of one event loop can wait for, again and again.

    The waiter checks the state itself, in a loop: `while not ready(): await signal.wait()`. Nothing may be awaited
    between the check and `wait`, or a notification in between is lost; where that cannot be avoided, take `pending()`
    before the check and wait on what it returned.
    """

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake every task that waits now. Does not wait itself, and remembers nothing for tasks that wait later."""
        self._event.set()
        self._event = anyio.Event()

    def pending(self) -> anyio.Event:
        """Return the event that the next `notify` sets. It stays set, so it can be waited for at any later time."""
        return self._event

    async def wait(self) -> None:
        """Wait for the next `notify`. Several tasks may wait at once; all of them are woken."""
        await self._event.wait()


async def become(reached: Callable[[], bool], every_s: float) -> None:
    """Wait until `reached`, looking every `every_s` seconds: for what changes by the clock, which notifies nobody."""
    while True:
        if reached():
            return
        await anyio.sleep(every_s)


async def unless_set(event: anyio.Event, work: Callable[[], Awaitable[T]]) -> T | None:
    """Return what `work` returns, or None where `event` is set before, which cancels it.

    What it raises comes in an ExceptionGroup.
    """
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_when_set, event, group.cancel_scope)
        result = await work()
        group.cancel_scope.cancel()
        return result
    return None


async def _cancel_when_set(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
