"""The rows of a session, and the server that holds their KV."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Hashable

from antiphon.engine.rows import Rows
from antiphon.remote.engine.endpoints import EngineEndpoint
from antiphon.remote.engine.server import EngineServer
from antiphon.remote.engine.wires import HeldRows, Piece

# A full context is cut to this share, the same as in the local engine.
KEPT_SHARE = 0.75
_NUMBERS = itertools.count(1)


class ServedRows:
    """The rows of one session. `server`: the servers to use. `salt`, `name`: the `salt` and `session` of each Ask.

    `cached`: the number of rows at the head that the server of the first request already had; None while unknown.
    """

    def __init__(self, server: EngineServer, rows: Rows, salt: str) -> None:
        self.server, self.rows, self.salt = server, rows, salt
        self.name = f"{server.instance}-{next(_NUMBERS)}"
        self.cached: int | None = None
        self._endpoint: EngineEndpoint | None = None
        # The part of the session that this server holds, if it supports sessions.
        self._held: HeldRows | None = None

    @property
    def owner(self) -> Hashable | None:
        """The owner of the rows, by which KV is shared."""
        return self.rows.owner

    def copy(self) -> ServedRows:
        """Return a copy of the rows, for a session that no server knows yet."""
        return ServedRows(self.server, copy.deepcopy(self.rows), self.salt)

    def bind(self, avoid: Collection[EngineEndpoint] = ()) -> EngineEndpoint:
        """Return the next request's server, preferably the one with these rows. Raises Refused if none is available."""
        found = self.server.pool.choose(self.owner, self._endpoint, avoid)
        if found is not self._endpoint:
            self.unbind()
            self._endpoint = found
            found.sessions += 1
            # A new server has none of the rows.
            self.rows.computed = 0
        return found

    def unbind(self) -> None:
        """Make the bound server forget the rows."""
        if self._endpoint:
            self._endpoint.sessions -= 1
            self.server.forget(self._endpoint, self._held)
            self._endpoint = self._held = None

    def fitting(self) -> list[int]:
        """Return the rows for a request. Cuts the context before it is full, so that the server never does."""
        limit = self.server.context_rows
        if len(self.rows.ids) >= limit:
            self.rows.cut(int(limit * KEPT_SHARE))
        return [row for row in self.rows.ids if row is not None]

    def held(self) -> HeldRows | None:
        """Return what the bound server holds of this session; None if it does not support sessions."""
        if self._held is None and self.server.wire.has_sessions:
            self._held = HeldRows()
        return self._held

    def add(self, token: int) -> None:
        """Add a sampled token as the newest row. The rows before it are at the server."""
        self.rows.append((token,))
        self.rows.computed = len(self.rows.ids) - 1

    def note(self, piece: Piece) -> None:
        """Keep the number of cached rows, from the first piece that reports it."""
        if self.cached is None and piece.cached_tokens is not None:
            self.cached = piece.cached_tokens
