"""An engine whose model runs on another server: vLLM, or SGLang. docs/design/remote.md."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable

from tokenizers import Tokenizer

from antiphon.engine.api import Capabilities, EngineSettings, EngineState, Grammar
from antiphon.engine.grammar import GrammarCompiler
from antiphon.engine.rows import Rows
from antiphon.engine.vllm import CAPABILITIES, EngineServers
from antiphon.engine.vllm.served_rows import ServedRows
from antiphon.engine.vllm.server import EngineServer, ModelFacts
from antiphon.engine.vllm.session import VllmSession, follower
from antiphon.upstream.http import salt_of


class VllmEngine:
    """An Engine. Its sessions keep their rows, and servers keep their KV; EngineServer says how these are looked at.

    `tokenizer`: the model's. `settings`: of these, the context counts. Tokens are held to grammars by the servers, and
    here where these refuse one.
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
