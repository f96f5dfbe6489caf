"""Clients of every kind take turns while hosts come and go, and check the events that they get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from antiphon.signals import become


class TurnTaker(Protocol):
    """A client with one session. Its methods raise AssertionError for events that are wrong."""

    @property
    def phase(self) -> str:
        """The phase of its turn, according to its events."""
        ...

    def connected(self) -> AbstractAsyncContextManager[object]:
        """Keep the session open while the block runs."""
        ...

    async def turn(self) -> None:
        """Say, show or ask something, and wait for everything that it causes."""
        ...

    def check(self) -> None:
        """Raise AssertionError if anything was lost or came twice, between two turns."""
        ...


async def _nothing(_: TurnTaker) -> None:
    return


@asynccontextmanager
async def taking_turns(
    clients: Sequence[TurnTaker], after_turn: Callable[[TurnTaker], Awaitable[None]] = _nothing
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Let clients take turns during the block. Then each completes its turn, and checks what it got.

    `after_turn` is called after each turn. Yields a function that waits until each client has begun and completed
    another turn.
    """
    is_over = False
    num_turns = [0] * len(clients)

    async def take_turns(number: int, client: TurnTaker) -> None:
        async with client.connected():
            while not is_over:
                await client.turn()
                num_turns[number] += 1
                await after_turn(client)
            client.check()

    async def go_on() -> None:
        before = [*num_turns]
        await become(lambda: all(now >= then + 2 for now, then in zip(num_turns, before, strict=True)), 0.02)

    async with asyncio.TaskGroup() as group:
        for number, client in enumerate(clients):
            group.create_task(take_turns(number, client))
        yield go_on
        is_over = True
