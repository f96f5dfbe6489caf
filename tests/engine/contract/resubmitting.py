"""The smallest engine that fulfils the contract: it keeps rows but no KV, and computes all rows again for each token.

Its model is that of the scripted runner: the token after a row is that row's id + 1, modulo 1000. This engine shows
that the contract tests, and the models that run on an engine, require no feature of the local engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from antiphon.engine.api import Capabilities, EngineState, Finish, Grammar, Position, Sampling, Sink, Token, require
from antiphon.engine.generation import collected
from antiphon.engine.rows import Rows
from antiphon.errors import EngineError, Refused

VOCABULARY = 1000


class ResubmittingEngine:
    """An Engine without capabilities. Its sessions compute in the caller's event loop, one row at a time."""

    name = "resubmitting"
    capabilities = Capabilities(0)
    vocabulary_size = VOCABULARY
    width = 1
    eos_tokens = frozenset((VOCABULARY - 1,))

    def __init__(self, context_rows: int = 4096) -> None:
        self.context_rows = context_rows
        self.sessions: list[ResubmittingSession] = []
        self.closed = False

    @property
    def last_state(self) -> EngineState:
        return EngineState(sessions=len(self.sessions), generating=sum(s.generating for s in self.sessions))

    async def state(self) -> EngineState:
        self.check_open()
        return self.last_state

    async def open(self, reserve_rows: int | None = None, *, owner: object = None) -> ResubmittingSession:
        self.check_open()
        await asyncio.sleep(0)
        session = ResubmittingSession(self)
        self.sessions.append(session)
        return session

    async def prepare_grammar(self, grammar: Grammar, stop: frozenset[int]) -> None:
        require(self, Capabilities.GRAMMAR)

    def close(self, timeout_s: float = 10.0) -> None:
        self.closed = True

    def check_open(self) -> None:
        if self.closed:
            raise Refused("the engine is shutting down", 5.0)


class ResubmittingSession:
    """A Session that only stores its rows."""

    cached = 0

    def __init__(self, engine: ResubmittingEngine) -> None:
        self._engine, self._rows = engine, Rows()
        self._closed = self.generating = False
        self.finish: Finish | None = None

    @property
    def length(self) -> int:
        return self._rows.length

    @property
    def context_start(self) -> int:
        return self._rows.pinned + self._rows.dropped

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        self._check()
        if positions is not None:
            require(self._engine, Capabilities.EMBEDDING_ROWS)
        self._rows.append(tuple(ids))

    def append_embeddings(
        self, rows: Any, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        require(self._engine, Capabilities.EMBEDDING_ROWS)

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
        require(self._engine, Capabilities.EVICT)

    async def settle(self, *, include_newest: bool = False) -> None:
        self._engine.check_open()
        if self._closed:
            raise EngineError("the session is closed")

    async def generate(self, params: Sampling) -> AsyncGenerator[Token, None]:
        self._check()
        asked = {
            Capabilities.GRAMMAR: params.grammar,
            Capabilities.CHOOSER: params.chooser or params.program,
            Capabilities.HIDDEN_STATES: params.hidden,
        }
        for capability, wanted in asked.items():
            if wanted:
                require(self._engine, capability)
        if not self._rows.ids:
            raise EngineError("there is nothing to continue: append rows first")
        self.generating, self.finish = True, None
        reason: Finish | None = Finish.CANCELLED
        try:
            for _ in range(params.max_tokens):
                token = await self._next()
                yield Token(token)
                if token in params.stop:
                    reason = Finish.STOP
                    return
            reason = Finish.LENGTH
        except EngineError:
            reason = None
            raise
        finally:
            self.generating, self.finish = False, reason

    async def collect(
        self, params: Sampling, *, until: Callable[[Sequence[Token]], bool] | None = None, group: int = 16
    ) -> list[Token]:
        return await collected(self, params, until, group)

    async def _next(self) -> int:
        await asyncio.sleep(0)
        if self._engine.closed:
            raise EngineError("the engine was closed")
        if len(self._rows.ids) >= self._engine.context_rows:
            self._rows.cut(self._engine.context_rows * 3 // 4)
        last = self._rows.ids[-1]
        assert last is not None
        token = (last + 1) % VOCABULARY
        self._rows.append((token,))
        return token

    async def fork(self) -> ResubmittingSession:
        require(self._engine, Capabilities.FORK)
        raise AssertionError

    def close(self, *, keep: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._engine.sessions.remove(self)

    def _check(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise EngineError("the session is closed")
        if self.generating:
            raise EngineError("the session is generating: end that first")
