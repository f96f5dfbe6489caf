"""The rows of a session, which are here, and the server that holds their KV."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Hashable

from antiphon.engine.rows import Rows
from antiphon.remote.engine.endpoints import Endpoint
from antiphon.remote.engine.server import EngineServer
from antiphon.remote.engine.wires import HeldRows, Piece

# The share of the context that a full one is cut back to, as the local engine does it.
KEPT_SHARE = 0.75
_NUMBERS = itertools.count(1)


class ServedRows:
    """The rows of one session. `server`: the servers that may be asked. `salt`, `name`: as in Ask.

    `cached`: the rows at the head that the server of the first request had; None while that is not known.
    """

    def __init__(self, server: EngineServer, rows: Rows, salt: str) -> None:
        self.server, self.rows, self.salt = server, rows, salt
        self.name = f"{server.instance}-{next(_NUMBERS)}"
        self.cached: int | None = None
        self._endpoint: Endpoint | None = None
        # What that server holds of the session, where it has sessions of its own.
        self._held: HeldRows | None = None

    @property
    def owner(self) -> Hashable | None:
        """Whose the rows are."""
        return self.rows.owner

    def copy(self) -> ServedRows:
        """Return rows like these, of a session that no server knows yet."""
        return ServedRows(self.server, copy.deepcopy(self.rows), self.salt)

    def bind(self, avoid: Collection[Endpoint] = ()) -> Endpoint:
        """The server to ask, which has these rows if any has. Raises Refused where none may be asked."""
        found = self.server.endpoints.choose(self.owner, self._endpoint, avoid)
        if found is not self._endpoint:
            self.unbind()
            self._endpoint = found
            found.sessions += 1
            # Another server has none of the rows.
            self.rows.computed = 0
        return found

    def unbind(self) -> None:
        """Have the server that is bound forget the rows."""
        if self._endpoint:
            self._endpoint.sessions -= 1
            self.server.forget(self._endpoint, self._held)
            self._endpoint = self._held = None

    def fitting(self) -> list[int]:
        """The rows for a request. The context is cut before the server's is full, so that it never does so itself."""
        limit = self.server.context_rows
        if len(self.rows.ids) >= limit:
            self.rows.cut(int(limit * KEPT_SHARE))
        return [row for row in self.rows.ids if row is not None]

    def held(self) -> HeldRows | None:
        """What the server that is bound holds of this session, where it has sessions of its own."""
        if self._held is None and self.server.wire.has_sessions:
            self._held = HeldRows()
        return self._held

    def add(self, token: int) -> None:
        """A token was sampled: it is the newest row, and those before it are at the server."""
        self.rows.append((token,))
        self.rows.computed = len(self.rows.ids) - 1

    def note(self, piece: Piece) -> None:
        """Keep what a piece says of the first rows."""
        if self.cached is None and piece.cached_tokens is not None:
            self.cached = piece.cached_tokens
