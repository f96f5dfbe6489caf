"""A session whose rows are here and whose KV is on a server.

Every request carries all rows; the server computes those that it does not have. So an append is a longer request, and a
rollback a shorter one.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
from collections.abc import AsyncGenerator, Collection, Hashable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from antiphon.engine.api import Capabilities, Finish, Position, Sampling, Sink, Token, require
from antiphon.engine.rows import Rows
from antiphon.engine.vllm.answer import Answer
from antiphon.engine.vllm.endpoints import Endpoint
from antiphon.engine.vllm.sglang import HeldRows
from antiphon.engine.vllm.wires import Ask, Piece
from antiphon.errors import EngineError, ModelError, Refused, RemoteError
from antiphon.upstream.sse import ReaderTask

if TYPE_CHECKING:
    from antiphon.engine.vllm.engine import VllmEngine

log = logging.getLogger(__name__)

# Rows that are given within so short a time are prefilled together.
COALESCE_S = 0.005
# The share of the context that a full one is cut back to, as the local engine does it.
KEPT_SHARE = 0.75
_NUMBERS = itertools.count(1)


class VllmSession:
    """A Session of a VllmEngine."""

    def __init__(self, engine: VllmEngine, rows: Rows, salt: str) -> None:
        self.engine = engine
        self.salt = salt
        self.name = f"{engine.instance}-{next(_NUMBERS)}"
        self.finish: Finish | None = None
        self._rows = rows
        self._endpoint: Endpoint | None = None
        # What that server holds of the session, where it has sessions of its own.
        self._held: HeldRows | None = None
        self._cached: int | None = None
        self._closed = self.generating = False
        self._prefilling: asyncio.Task[None] | None = None

    # --- what the contract has ----------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        return self._rows.length

    @property
    def cached(self) -> int:
        return self._cached or 0

    @property
    def context_start(self) -> int:
        return self._rows.pinned + self._rows.dropped

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        self._check()
        if positions is not None:
            require(self.engine, Capabilities.EMBEDDING_ROWS)
        self._rows.append(tuple(ids))
        self._prefill_soon()

    def append_embeddings(
        self, rows: Any, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        require(self.engine, Capabilities.EMBEDDING_ROWS)

    def pin(self) -> None:
        self._check()
        self._rows.pin()

    def start_turn(self) -> None:
        self._check()
        self._rows.start_turn()

    def rollback(self, position: int) -> None:
        self._check()
        self._rows.rollback(position)

    def evict(self, count: int) -> None:
        require(self.engine, Capabilities.EVICT)

    async def settle(self, *, include_newest: bool = False) -> None:
        """Wait until whole blocks of the rows given so far are at the server; less than a block is left for later."""
        self._check_open()
        if self._prefilling:
            await asyncio.wait([self._prefilling])
        self._check_open()

    async def generate(self, params: Sampling) -> AsyncGenerator[Token, None]:
        self._check()
        asked = {
            Capabilities.CHOOSER: params.chooser,
            Capabilities.HIDDEN_STATES: params.hidden,
        }
        for capability, wanted in asked.items():
            if wanted:
                require(self.engine, capability)
        if not self._rows.ids:
            raise EngineError("there is nothing to continue: append rows first")
        self.generating, self.finish = True, None
        self._stop_prefill()
        reason: Finish | None = Finish.CANCELLED
        try:
            guide = await self.engine.follower(params.grammar, params.stop) if params.grammar else None
            answer = Answer(self, params, guide)
            async with aclosing(answer.tokens()) as tokens:
                async for token in tokens:
                    yield token
            reason = answer.finish
        except (EngineError, ModelError, Refused):
            reason = None
            raise
        finally:
            self.generating, self.finish = False, reason

    async def fork(self) -> VllmSession:
        self._check()
        rows = copy.deepcopy(self._rows)
        return self.engine.opened(VllmSession(self.engine, rows, self.salt))

    def close(self, *, keep: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._stop_prefill()
            self._unbind()
            self.engine.closed_session(self)

    # --- what an answer needs -----------------------------------------------------------------------------------------

    @property
    def owner(self) -> Hashable | None:
        """Whose the rows are."""
        return self._rows.owner

    def bind(self, avoid: Collection[Endpoint] = ()) -> Endpoint:
        """The server to ask, which has this session's rows if any has. Raises Refused where none may be asked."""
        found = self.engine.endpoints.choose(self.owner, self._endpoint, avoid)
        if found is not self._endpoint:
            self._unbind()
            self._endpoint = found
            found.sessions += 1
            # Another server has none of the rows.
            self._rows.computed = 0
        return found

    def fitting_rows(self) -> list[int]:
        """The rows for a request. The context is cut before the server's is full, so that it never does so itself."""
        rows, limit = self._rows, self.engine.context_rows
        if len(rows.ids) >= limit:
            rows.cut(int(limit * KEPT_SHARE))
        return [row for row in rows.ids if row is not None]

    def held(self) -> HeldRows | None:
        """What the server that is bound holds of this session, where it has sessions of its own."""
        if self._held is None and self.engine.server.wire.has_sessions:
            self._held = HeldRows()
        return self._held

    def add(self, token: int) -> None:
        """A token was sampled: it is the newest row, and those before it are at the server."""
        self._rows.append((token,))
        self._rows.computed = len(self._rows.ids) - 1

    def note(self, piece: Piece) -> None:
        """Keep what a piece says of the first rows."""
        if self._cached is None and piece.cached_tokens is not None:
            self._cached = piece.cached_tokens

    # --- rows ahead of a generation -----------------------------------------------------------------------------------

    @property
    def _due(self) -> int:
        """Rows to prefill: without the newest, and only where they make a block that the server can find again."""
        count = len(self._rows.ids) - 1
        return count if count - self._rows.computed >= self.engine.block_rows else 0

    def _prefill_soon(self) -> None:
        if self._prefilling is None and self._due and len(self._rows.ids) < self.engine.context_rows:
            self._prefilling = asyncio.create_task(self._prefill())
            self._prefilling.add_done_callback(self._prefill_ended)

    def _prefill_ended(self, task: asyncio.Task[None]) -> None:
        if self._prefilling is task:
            self._prefilling = None

    def _stop_prefill(self) -> None:
        """End a prefill under way, which leaves at the server what it has computed. Returns at once."""
        if self._prefilling:
            self._prefilling.cancel()
            self._prefilling = None

    async def _prefill(self) -> None:
        """Have the server compute rows, by asking for one token, which is thrown away. A failure is for the generation
        to meet.
        """
        await asyncio.sleep(COALESCE_S)
        while (count := self._due) and not self._closed and count < self.engine.context_rows:
            epoch, endpoint = self._rows.epoch, None
            ids = [row for row in self._rows.ids[:count] if row is not None]
            try:
                endpoint = self.bind()
                await self.engine.server.verify(endpoint)
                await self._compute(endpoint, ids)
            except (ModelError, EngineError, Refused) as error:
                log.debug("a prefill failed: %s", error)
                if endpoint and isinstance(error, RemoteError):
                    endpoint.failed(self.owner)
                return
            if self._rows.epoch == epoch:
                self._rows.computed = max(self._rows.computed, count)

    async def _compute(self, endpoint: Endpoint, ids: list[int]) -> None:
        server = self.engine.server
        ask = Ask(ids, 1, Sampling(), 0, self.salt, self.name, held=self.held())
        reader: ReaderTask[Piece] = ReaderTask(server.ask(endpoint, ask), server.tasks)
        try:
            finish = None
            while finish is None:
                piece = await reader.next(self.engine.timeouts.first_s)
                self.note(piece)
                finish = piece.finish
            endpoint.breaker.succeeded(self.owner)
            with suppress(RemoteError):
                while True:
                    self.note(await reader.next(self.engine.timeouts.next_s))
        finally:
            reader.end()

    def _unbind(self) -> None:
        if self._endpoint:
            self._endpoint.sessions -= 1
            self.engine.server.forget(self._endpoint, self._held)
            self._endpoint = self._held = None

    def _check_open(self) -> None:
        self.engine.check_open()
        if self._closed:
            raise EngineError("the session is closed")

    def _check(self) -> None:
        self._check_open()
        if self.generating:
            raise EngineError("the session is generating: end that first")
