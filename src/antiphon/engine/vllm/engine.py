"""An engine whose model runs on another server: vLLM, or SGLang. docs/design/remote.md."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from antiphon.engine.api import Capabilities, EngineSettings, EngineState, Grammar
from antiphon.engine.grammar import GrammarCompiler, GrammarFollower
from antiphon.engine.rows import Rows
from antiphon.engine.vllm import CAPABILITIES, EngineServers
from antiphon.engine.vllm.endpoints import Endpoints
from antiphon.engine.vllm.server import EngineServer
from antiphon.engine.vllm.session import VllmSession
from antiphon.errors import EngineError, Refused, RemoteError
from antiphon.shares.threads import GRAMMAR_THREADS, in_thread
from antiphon.upstream.http import salt_of
from antiphon.upstream.sse import ReaderTask

log = logging.getLogger(__name__)

# The rows of a block where the server does not say: vLLM's on GPUs.
DEFAULT_BLOCK_ROWS = 16


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a checkpoint's configuration says of its model; see Engine. `context_rows`: what it was made for."""

    context_rows: int
    vocabulary_size: int
    width: int
    eos_tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class TokenTimeouts:
    """Seconds to the first token of a request, and from one piece of an answer to the next."""

    first_s: float
    next_s: float


class VllmEngine:
    """An Engine. Its sessions keep their rows, and servers keep their KV.

    It looks at each server first, and waits some seconds for that. Raises ModelError where one serves another model
    than the tokenizer's, or does not take the key. A server that is not there yet is logged, and no error.

    `tokenizer`: the model's. `settings`: of these, the context counts. Tokens are held to grammars by the servers, and
    here where these refuse one.
    """

    def __init__(
        self, servers: EngineServers, tokenizer: Tokenizer, facts: ModelFacts, settings: EngineSettings | None = None
    ) -> None:
        self.name = servers.kind
        self.capabilities: Capabilities = CAPABILITIES
        self.vocabulary_size, self.width, self.eos_tokens = facts.vocabulary_size, facts.width, facts.eos_tokens
        self.timeouts = TokenTimeouts(servers.first_token_s, servers.token_s)
        self.endpoints = Endpoints(servers.urls)
        self.server = EngineServer(servers.kind, servers.key, tokenizer, facts.eos_tokens, facts.vocabulary_size)
        self.instance = secrets.token_hex(4)
        self._secret = secrets.token_bytes(32)
        self._compiler = GrammarCompiler(tokenizer, facts.vocabulary_size)
        self._sessions: set[VllmSession] = set()
        self._readers: dict[ReaderTask[Any], asyncio.AbstractEventLoop] = {}
        self._closed = False
        self._look()
        served = self.server.served
        limits = (settings or EngineSettings()).context_rows, served and served.context_rows, facts.context_rows
        self.context_rows = min(limit for limit in limits if limit)
        self.block_rows = (served and served.block_rows) or DEFAULT_BLOCK_ROWS

    @property
    def last_state(self) -> EngineState:
        return EngineState(len(self._sessions), sum(session.generating for session in self._sessions))

    async def state(self) -> EngineState:
        self.check_open()
        return self.last_state

    async def open(self, reserve_rows: int | None = None, *, owner: Hashable | None = None) -> VllmSession:
        self.check_open()
        await asyncio.sleep(0)
        return self.opened(VllmSession(self, Rows(owner=owner), salt_of(self._secret, owner)))

    async def prepare_grammar(self, grammar: Grammar, stop: frozenset[int]) -> None:
        await self.follower(grammar, stop)

    def close(self, timeout_s: float = 10.0) -> None:
        self._closed = True
        for reader, loop in list(self._readers.items()):
            # Its loop may have ended with it.
            if not loop.is_closed():
                loop.call_soon_threadsafe(reader.fail, EngineError("the engine was closed"))

    # --- for its sessions ---------------------------------------------------------------------------------------------

    async def follower(self, grammar: Grammar, stop: frozenset[int]) -> GrammarFollower:
        """What holds one generation to a grammar. Raises GrammarError for one that is none."""
        if found := self._compiler.kept(grammar, stop):
            return found
        return await in_thread(self._compiler.compile, grammar, stop, places=GRAMMAR_THREADS)

    def opened(self, session: VllmSession) -> VllmSession:
        """Count a session."""
        self._sessions.add(session)
        return session

    def closed_session(self, session: VllmSession) -> None:
        """Count a session no more."""
        self._sessions.discard(session)

    def reading(self, reader: ReaderTask[Any]) -> None:
        """An answer is being read in this event loop, until `read`: `close` ends it."""
        self._readers[reader] = asyncio.get_running_loop()

    def read(self, reader: ReaderTask[Any]) -> None:
        """The answer is not read any more."""
        self._readers.pop(reader, None)

    def check_alive(self) -> None:
        """Raise EngineError for a generation whose engine was closed."""
        if self._closed:
            raise EngineError("the engine was closed")

    def check_open(self) -> None:
        """Raise Refused after `close`."""
        if self._closed:
            raise Refused("the engine is shutting down", 5.0)

    def _look(self) -> None:
        """Look at every server that is there."""

        async def look() -> None:
            for endpoint in self.endpoints.all:
                try:
                    await self.server.verify(endpoint)
                except RemoteError as error:
                    log.warning("%s", error)

        asyncio.run(look())
