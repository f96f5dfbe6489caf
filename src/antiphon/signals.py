"""Wakes tasks that wait for a change of state. For tasks of one event loop; threads use `threading.Condition`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


class Signal:
    """A repeatable notification that any number of tasks of one event loop can wait for.

    The waiter checks the state itself, in a loop: `while not ready(): await signal.wait()`. It must not await anything
    between the check and `wait`; otherwise it may miss a notification in between. If it has to await something there,
    it calls `pending()` before the check and waits on the returned event.
    """

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake all tasks that wait now. Tasks that wait later are not woken by it."""
        self._event.set()
        self._event = anyio.Event()

    def pending(self) -> anyio.Event:
        """Return the event that the next `notify` sets. The event stays set, so it can be awaited at any later time."""
        return self._event

    async def wait(self) -> None:
        """Wait for the next `notify`. Several tasks may wait at once; all of them are woken."""
        await self._event.wait()


async def become(reached: Callable[[], bool], every_s: float) -> None:
    """Poll `reached` every `every_s` seconds until it is true. For conditions that change with time alone."""
    while True:
        if reached():
            return
        await anyio.sleep(every_s)


async def unless_set(event: anyio.Event, work: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of `work`. If `event` is set first, cancel `work` and return None.

    An exception of `work` is raised in an ExceptionGroup.
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
