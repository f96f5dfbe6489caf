"""Which hosts live, asked of the store for all sessions that wait for the same host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from antiphon.store.sessions import Host

# An answer of the store holds for so long.
FRESH_S = 0.05


class AliveHosts:
    """Answers of the store about hosts, each shared by whoever asks while it is fresh. For one event loop.

    A thousand sessions that wait for one host to be dead ask no more often than one.
    """

    def __init__(self) -> None:
        self._answers: dict[str, tuple[float, Host | None]] = {}
        self._asking: dict[str, anyio.Lock] = {}

    async def host(self, name: str, ask: Callable[[], Awaitable[Host | None]]) -> Host | None:
        """Return the host of this full name if it lives, by an answer that is at most FRESH_S old, or else by `ask`.

        Raises what `ask` raises.
        """
        lock = self._asking.setdefault(name, anyio.Lock())
        async with lock:
            answer = self._answers.get(name)
            if answer is None or anyio.current_time() - answer[0] > FRESH_S:
                found = await ask()
                answer = anyio.current_time(), found
                self._answers[name] = answer
        if answer[1] is None:
            # A host that is dead does not come back under this name.
            self._answers.pop(name, None)
            self._asking.pop(name, None)
        return answer[1]

    async def until_gone(self, name: str, ask: Callable[[], Awaitable[Host | None]], seconds: float) -> None:
        """Wait until this host is dead, for so many seconds at most. Raises what `ask` raises."""
        for _ in range(max(1, round(seconds / FRESH_S))):
            if await self.host(name, ask) is None:
                return
            await anyio.sleep(FRESH_S)
