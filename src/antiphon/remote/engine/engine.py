"""An engine whose model runs on another server: vLLM or SGLang. See docs/design/remote.md."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from tokenizers import Tokenizer

from antiphon.engine.api import (
    Capabilities,
    EngineSettings,
    EngineState,
    Finish,
    Grammar,
    Position,
    Sampling,
    Sink,
    Token,
    require,
)
from antiphon.engine.generation import collected
from antiphon.engine.grammar import GrammarCompiler, GrammarFollower
from antiphon.engine.rows import Rows
from antiphon.errors import EngineError, ModelError, Refused, RemoteError
from antiphon.remote.engine import CAPABILITIES, EngineServers
from antiphon.remote.engine.answer import Answer
from antiphon.remote.engine.endpoints import EngineEndpoint
from antiphon.remote.engine.served_rows import ServedRows
from antiphon.remote.engine.server import EngineServer, ModelFacts
from antiphon.remote.engine.wires import Ask
from antiphon.remote.http import salt_of
from antiphon.remote.pool import Pool
from antiphon.shares.threads import GRAMMAR_THREADS, in_thread

log = logging.getLogger(__name__)

# Rows that are appended within this number of seconds are prefilled together.
COALESCE_S = 0.005


class VllmSession:
    """A Session (engine/api.py) of a VllmEngine."""

    def __init__(self, served: ServedRows, compiler: GrammarCompiler, opened: set[VllmSession]) -> None:
        """`opened`: the engine's open sessions. The session adds itself, and removes itself when it is closed."""
        self.finish: Finish | None = None
        self._served, self._server, self._rows = served, served.server, served.rows
        self._compiler, self._opened = compiler, opened
        self._closed = self.generating = False
        self._prefilling: asyncio.Task[None] | None = None
        opened.add(self)

    # --- the contract -------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        return self._rows.length

    @property
    def cached(self) -> int:
        return self._served.cached or 0

    @property
    def context_start(self) -> int:
        return self._rows.pinned + self._rows.dropped

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        self._check()
        if positions is not None:
            require(self._server, Capabilities.EMBEDDING_ROWS)
        self._rows.append(tuple(ids))
        self._prefill_soon()

    def append_embeddings(
        self, rows: Any, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        require(self._server, Capabilities.EMBEDDING_ROWS)

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
        require(self._server, Capabilities.EVICT)

    async def settle(self, *, include_newest: bool = False) -> None:
        """Wait until all whole blocks of the rows so far are at the server. An incomplete block is left for later."""
        self._check_open()
        if self._prefilling:
            await asyncio.wait([self._prefilling])
        self._check_open()

    async def generate(self, params: Sampling) -> AsyncGenerator[Token, None]:
        self._check()
        asked = {
            Capabilities.CHOOSER: params.chooser or params.program,
            Capabilities.HIDDEN_STATES: params.hidden,
        }
        for capability, wanted in asked.items():
            if wanted:
                require(self._server, capability)
        if not self._rows.ids:
            raise EngineError("there is nothing to continue: append rows first")
        self.generating, self.finish = True, None
        self._stop_prefill()
        reason: Finish | None = Finish.CANCELLED
        try:
            guide = await follower(self._compiler, params.grammar, params.stop) if params.grammar else None
            answer = Answer(self._served, params, guide)
            async with aclosing(answer.tokens()) as tokens:
                async for token in tokens:
                    yield token
            reason = answer.finish
        except (EngineError, ModelError, Refused):
            reason = None
            raise
        finally:
            self.generating, self.finish = False, reason

    async def collect(
        self, params: Sampling, *, until: Callable[[Sequence[Token]], bool] | None = None, group: int = 16
    ) -> list[Token]:
        return await collected(self, params, until, group)

    async def fork(self) -> VllmSession:
        self._check()
        return VllmSession(self._served.copy(), self._compiler, self._opened)

    def close(self, *, keep: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._stop_prefill()
            self._served.unbind()
            self._opened.discard(self)

    # --- rows ahead of a generation -----------------------------------------------------------------------------------

    @property
    def _due(self) -> int:
        """The number of rows to prefill: all except the newest, and 0 if they do not fill a block."""
        count = len(self._rows.ids) - 1
        return count if count - self._rows.computed >= self._server.block_rows else 0

    def _prefill_soon(self) -> None:
        if self._prefilling is None and self._due and len(self._rows.ids) < self._server.context_rows:
            self._prefilling = asyncio.create_task(self._prefill())
            self._prefilling.add_done_callback(self._prefill_ended)

    def _prefill_ended(self, task: asyncio.Task[None]) -> None:
        if self._prefilling is task:
            self._prefilling = None

    def _stop_prefill(self) -> None:
        """End a running prefill. The server keeps what it has computed. Returns at once."""
        if self._prefilling:
            self._prefilling.cancel()
            self._prefilling = None

    async def _prefill(self) -> None:
        """Make the server compute rows by requesting one token, which is discarded. Ignores failures."""
        await asyncio.sleep(COALESCE_S)
        while (count := self._due) and not self._closed and count < self._server.context_rows:
            epoch, endpoint = self._rows.epoch, None
            ids = [row for row in self._rows.ids[:count] if row is not None]
            try:
                endpoint = self._served.bind()
                await self._server.verify(endpoint)
                await self._compute(endpoint, ids)
            except (ModelError, EngineError, Refused) as error:
                log.debug("a prefill failed: %s", error)
                if endpoint and isinstance(error, RemoteError):
                    endpoint.failed(self._served.owner)
                return
            if self._rows.epoch == epoch:
                self._rows.computed = max(self._rows.computed, count)

    async def _compute(self, endpoint: EngineEndpoint, ids: list[int]) -> None:
        served, timeouts = self._served, self._server.timeouts
        ask = Ask(ids, 1, Sampling(), 0, served.salt, served.name, held=served.held())
        with self._server.reading(endpoint, ask) as reader:
            finish = None
            while finish is None:
                piece = await reader.next(timeouts.first_s)
                served.note(piece)
                finish = piece.finish
            endpoint.succeeded(served.owner)
            with suppress(RemoteError):
                while True:
                    served.note(await reader.next(timeouts.next_s))

    def _check_open(self) -> None:
        self._server.check_open()
        if self._closed:
            raise EngineError("the session is closed")

    def _check(self) -> None:
        self._check_open()
        if self.generating:
            raise EngineError("the session is generating: end that first")


async def follower(compiler: GrammarCompiler, grammar: Grammar, stop: frozenset[int]) -> GrammarFollower:
    """Return the follower that enforces a grammar in one generation. Raises GrammarError if the grammar is invalid."""
    if found := compiler.kept(grammar, stop):
        return found
    return await in_thread(compiler.compile, grammar, stop, places=GRAMMAR_THREADS)


class VllmEngine:
    """An Engine whose sessions keep their rows, while servers keep the KV. EngineServer verifies the servers.

    `tokenizer`: the model's. `settings`: only the context size is used. The servers enforce grammars. A grammar that a
    server refuses is enforced locally.
    """

    def __init__(
        self, servers: EngineServers, tokenizer: Tokenizer, facts: ModelFacts, settings: EngineSettings | None = None
    ) -> None:
        self.name = servers.kind
        self.capabilities: Capabilities = CAPABILITIES
        self.vocabulary_size, self.width, self.eos_tokens = facts.vocabulary_size, facts.width, facts.eos_tokens
        self.server = EngineServer(servers, tokenizer, facts, (settings or EngineSettings()).context_rows)
        self.context_rows = self.server.context_rows
        self._secret = secrets.token_bytes(32)
        self._compiler = GrammarCompiler(tokenizer, facts.vocabulary_size)
        self._sessions: set[VllmSession] = set()

    @property
    def pool(self) -> Pool[EngineEndpoint]:
        """The servers that compute the engine's rows, for the metrics."""
        return self.server.pool

    @property
    def last_state(self) -> EngineState:
        return EngineState(len(self._sessions), sum(session.generating for session in self._sessions))

    async def state(self) -> EngineState:
        self.server.check_open()
        return self.last_state

    async def open(self, reserve_rows: int | None = None, *, owner: Hashable | None = None) -> VllmSession:
        self.server.check_open()
        await asyncio.sleep(0)
        rows = ServedRows(self.server, Rows(owner=owner), salt_of(self._secret, owner))
        return VllmSession(rows, self._compiler, self._sessions)

    async def prepare_grammar(self, grammar: Grammar, stop: frozenset[int]) -> None:
        await follower(self._compiler, grammar, stop)

    def close(self, timeout_s: float = 10.0) -> None:
        self.server.close()
