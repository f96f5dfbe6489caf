"""One generation: requests to servers, each of which goes on behind the tokens of those before.

A generation is mostly one request. It goes on with another where a server failed (another server is asked, and whoever
reads the tokens does not notice), where the context is full, and where a grammar begins or ends within the text: a
server takes a grammar that holds from its first token on, so what follows a trigger is a request of its own.

A grammar whose text was cut in the middle cannot be sent again. From there on, and with servers that take no grammar,
it is held to here: tokens are taken as long as it allows them, and where it allows few, only those are asked for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from antiphon.engine.api import Finish, Grammar, Sampling, Token
from antiphon.engine.grammar import GrammarFollower
from antiphon.errors import EngineError, ModelError, Refused, RemoteError
from antiphon.remote.engine.endpoints import TRIVIAL, Endpoint
from antiphon.remote.engine.served_rows import ServedRows
from antiphon.remote.engine.sglang import SessionLost
from antiphon.remote.engine.wires import Ask

log = logging.getLogger(__name__)

# A server that asks for no more than this is waited for, where there is no other.
MAX_WAIT_S = 2.0
# After an answer's last token its counts may come for so long.
USAGE_S = 0.5
# Where a grammar allows no more tokens than this, only these are asked for.
MAX_ALLOWED = 512
# Tokens that a grammar did not allow, one after another, before a generation fails.
MAX_REJECTED = 32


class Answer:
    """The tokens of one generation. They become rows of `served` as they are yielded.

    `guide`: follows the grammar of `params`; None where it has none. `finish`: why the tokens ended; None while they
    come, and where they failed.
    """

    def __init__(self, served: ServedRows, params: Sampling, guide: GrammarFollower | None) -> None:
        self.finish: Finish | None = None
        self._served, self._server = served, served.server
        self._params, self._guide = params, guide
        self._seed = secrets.randbits(62) if params.seed is None else params.seed
        self._num_tokens = 0
        # Servers that have failed since the last token, and how often one has.
        self._failed: set[Endpoint] = set()
        self._num_failures = 0
        # Tokens that the grammar does not allow next.
        self._rejected: list[int] = []

    async def tokens(self) -> AsyncGenerator[Token, None]:
        """Yield the tokens. Raises ModelError, Refused and EngineError."""
        while self.finish is None:
            endpoint = self._served.bind(self._failed)
            try:
                async with aclosing(self._request(endpoint)) as tokens:
                    async for token in tokens:
                        yield token
            except (ModelError, Refused) as error:
                await self._recover(endpoint, error)

    async def _request(self, endpoint: Endpoint) -> AsyncGenerator[Token, None]:
        """The tokens of one request to one server."""
        served, server = self._served, self._server
        await server.verify(endpoint)
        ask, began_inside = self._ask(endpoint), self._is_inside
        before = self._num_tokens
        timeout_s = server.timeouts.first_s / (2 if len(server.endpoints.all) > 1 else 1)
        try:
            with server.reading(endpoint, ask) as reader:
                finish = None
                while finish is None:
                    piece = await reader.next(timeout_s)
                    served.note(piece)
                    timeout_s, finish = server.timeouts.next_s, piece.finish
                    for token, logprob in zip(piece.tokens, piece.logprobs or [None] * len(piece.tokens), strict=True):
                        server.check_alive()
                        if not self._take(token):
                            return
                        yield Token(token, logprob)
                        if self.finish is not None or self._is_inside != began_inside:
                            finish = finish or "length"
                            if piece.finish is None:
                                return
                    endpoint.breaker.succeeded(served.owner)
                if finish == "stop" and self.finish is None:
                    self.finish = Finish.STOP
                elif finish == "length" and self._num_tokens == before:
                    raise RemoteError("the model's server ended an answer without a token")
                # The counts come last.
                with suppress(RemoteError):
                    while True:
                        served.note(await reader.next(USAGE_S))
        except EngineError as error:
            server.check_alive()
            if ask.rule is None:
                raise
            await self._give_up_grammar(endpoint, ask, ask.rule, error)

    def _ask(self, endpoint: Endpoint) -> Ask:
        """The request to a server for the tokens that are still wanted, behind the rows that there are."""
        served, params = self._served, self._params
        rows = served.fitting()
        max_tokens = min(params.max_tokens - self._num_tokens, self._server.context_rows - len(rows))
        rule, forbid, allow = None, tuple[int, ...](), None
        if self._guide and (depth := self._guide.num_tokens) is not None:
            assert params.grammar
            whole = Grammar(params.grammar.kind, params.grammar.text)
            is_refused = endpoint.grammars.is_refused(served.owner, whole, time.monotonic())
            if depth == 0 and not is_refused and not self._rejected:
                rule = whole
            else:
                forbid, allow = tuple(self._rejected), self._few_allowed(params)
                max_tokens = 1 if allow is not None else max_tokens
        # A server that goes on draws other numbers than the one before.
        seed = self._seed + self._num_tokens
        return Ask(rows, max_tokens, params, seed, served.salt, served.name, rule, forbid, allow, served.held())

    def _few_allowed(self, params: Sampling) -> list[int] | None:
        """The tokens that the grammar allows next, where these are few."""
        assert self._guide
        found: list[int] = allowed_tokens(self._guide.allowed()).tolist()
        if params.allow is not None:
            found = [token for token in found if token in params.allow]
        return found if len(found) <= MAX_ALLOWED else None

    def _take(self, token: int) -> bool:
        """Make a token a row. False where the grammar does not allow it, and another one has to be asked for."""
        params = self._params
        if self._guide and not is_allowed(self._guide.allowed(), token):
            self._rejected.append(token)
            if len(self._rejected) > MAX_REJECTED:
                raise EngineError("the model's server gave no token that the grammar allows")
            return False
        if self._guide:
            self._guide.accept(token)
        self._served.add(token)
        self._num_tokens += 1
        self._rejected.clear()
        self._failed.clear()
        self._num_failures = 0
        if token in params.stop:
            self.finish = Finish.STOP
        elif self._num_tokens == params.max_tokens:
            self.finish = Finish.LENGTH
        return True

    @property
    def _is_inside(self) -> bool:
        """Whether the grammar holds for the next token. A request ends where that changes."""
        return self._guide is not None and self._guide.num_tokens is not None

    async def _give_up_grammar(self, endpoint: Endpoint, ask: Ask, rule: Grammar, error: EngineError) -> None:
        """The server does not take the grammar: for some minutes it is held to here. Others are sent as before, unless
        the server refuses one of our own too.
        """
        grammars, now_s = endpoint.grammars, time.monotonic()
        log.info("%s refuses a grammar, which is held to here: %s", endpoint.host, error)
        if not grammars.refused(self._served.owner, rule, now_s):
            return
        # Others that come meanwhile do not ask.
        grammars.tried(rule.kind, now_s, takes=True)
        own = replace(ask, rows=ask.rows[:1], max_tokens=1, params=Sampling(), salt=secrets.token_hex(32), held=None)
        own = replace(own, rule=TRIVIAL[rule.kind], forbid=(), allow=None)
        try:
            async with (
                asyncio.timeout(self._server.timeouts.first_s),
                aclosing(self._server.ask(endpoint, own)) as pieces,
            ):
                async for _ in pieces:
                    pass
        except EngineError:
            grammars.tried(rule.kind, now_s, takes=False)
            log.warning("the model's server takes no %s grammar, which are held to here: %s", rule.kind, error)
        except (ModelError, Refused, TimeoutError) as failure:
            log.info("%s does not say whether it takes grammars: %s", endpoint.host, failure)

    async def _recover(self, endpoint: Endpoint, error: ModelError | Refused) -> None:
        """Get ready to ask another server, or the same one again. Raises `error` where that would be for nothing."""
        endpoints = self._server.endpoints.all
        self._server.check_alive()
        self._num_failures += 1
        if isinstance(error, SessionLost) and self._num_failures == 1:
            # Asked again with all rows, and looked at before. That is no failure of the server.
            endpoint.verified = False
            log.info("%s", error)
            return
        if isinstance(error, Refused):
            endpoint.breaker.refused(self._served.owner, time.monotonic(), error.retry_after_s)
        else:
            endpoint.failed(self._served.owner)
            log.warning("a model's server failed after %d tokens: %s", self._num_tokens, error)
        self._failed.add(endpoint)
        others = set(endpoints) - self._failed
        if others and self._num_failures <= len(endpoints):
            return
        waits = isinstance(error, Refused) and error.retry_after_s <= MAX_WAIT_S
        if self._num_failures > max(1, len(endpoints)) or (isinstance(error, Refused) and not waits):
            raise error
        if isinstance(error, Refused):
            await asyncio.sleep(error.retry_after_s)
        self._failed.clear()


# A mask is an array of numpy's.
def allowed_tokens(mask: Any) -> Any:
    """The tokens whose bits are set in a Constraint's mask, int64 [n]."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]


def is_allowed(mask: Any, token: int) -> bool:
    """Whether a Constraint's mask allows a token; None allows all."""
    return mask is None or bool(mask[token // 32] >> (token % 32) & 1)
