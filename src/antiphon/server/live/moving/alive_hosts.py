"""Asks the store which hosts are alive, once for all sessions that wait for the same host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from antiphon.store.sessions import Host

# Seconds for which an answer of the store is reused.
FRESH_S = 0.05


class AliveHosts:
    """Caches the store's answers about hosts, each for FRESH_S. For one event loop.

    A thousand sessions that wait for one host to die cause no more queries than one session.
    """

    def __init__(self) -> None:
        self._answers: dict[str, tuple[float, Host | None]] = {}
        self._asking: dict[str, anyio.Lock] = {}

    async def host(self, name: str, ask: Callable[[], Awaitable[Host | None]]) -> Host | None:
        """Return the host of this full name if it is alive. Calls `ask` if the cached answer is older than FRESH_S.

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
            # A dead host never comes back under the same name.
            self._answers.pop(name, None)
            self._asking.pop(name, None)
        return answer[1]

    async def until_gone(self, name: str, ask: Callable[[], Awaitable[Host | None]], seconds: float) -> None:
        """Wait until this host is dead, for at most `seconds`. Raises what `ask` raises."""
        for _ in range(max(1, round(seconds / FRESH_S))):
            if await self.host(name, ask) is None:
                return
            await anyio.sleep(FRESH_S)
