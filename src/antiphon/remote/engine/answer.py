"""One generation: a sequence of requests to servers, each of which continues after the tokens of the previous ones.

Usually one request is enough. Another one follows in three cases. A server failed: another server continues, invisibly
to the reader of the tokens. The context is full. Or a grammar begins or ends within the text: a server applies a
grammar from its first token on, so the text after a trigger needs its own request.

A grammar whose text was interrupted in the middle cannot be sent again. From there on, and with servers that support no
grammars, it is enforced locally. Tokens are accepted as long as the grammar allows them; if it allows only a few
tokens, the request allows only those.
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
from antiphon.remote.engine.endpoints import TRIVIAL, EngineEndpoint
from antiphon.remote.engine.served_rows import ServedRows
from antiphon.remote.engine.sglang import SessionLost
from antiphon.remote.engine.wires import Ask
from antiphon.remote.pool import MAX_WAIT_S

log = logging.getLogger(__name__)

# Seconds to wait for the token counts after an answer's last token.
USAGE_S = 0.5
# If a grammar allows at most MAX_ALLOWED tokens, the request allows only these.
MAX_ALLOWED = 512
# A generation fails after this number of consecutive tokens that its grammar does not allow.
MAX_REJECTED = 32


class Answer:
    """The tokens of one generation. They become rows of `served` as they are yielded.

    `guide`: follows the grammar of `params`; None without a grammar. `finish`: why the tokens ended; None while they
    arrive, and if the generation failed.
    """

    def __init__(self, served: ServedRows, params: Sampling, guide: GrammarFollower | None) -> None:
        self.finish: Finish | None = None
        self._served, self._server = served, served.server
        self._params, self._guide = params, guide
        self._seed = secrets.randbits(62) if params.seed is None else params.seed
        self._num_tokens = 0
        # The servers that failed since the last token, and the number of their failures.
        self._failed: set[EngineEndpoint] = set()
        self._num_failures = 0
        # Tokens that the grammar does not allow at the next position.
        self._rejected: list[int] = []

    async def tokens(self) -> AsyncGenerator[Token, None]:
        """Yield the tokens. Raises ModelError, Refused or EngineError."""
        while self.finish is None:
            endpoint = self._served.bind(self._failed)
            try:
                async with aclosing(self._request(endpoint)) as tokens:
                    async for token in tokens:
                        yield token
            except (ModelError, Refused) as error:
                await self._recover(endpoint, error)

    async def _request(self, endpoint: EngineEndpoint) -> AsyncGenerator[Token, None]:
        """Yield the tokens of one request to one server."""
        served, server = self._served, self._server
        await server.verify(endpoint)
        ask, began_inside = self._ask(endpoint), self._is_inside
        before = self._num_tokens
        timeout_s = server.timeouts.first_s / (2 if len(server.pool.all) > 1 else 1)
        try:
            with server.reading(endpoint, ask) as reader:
                finish, since_s = None, time.monotonic()
                while finish is None:
                    piece = await reader.next(timeout_s)
                    served.note(piece)
                    if self._num_tokens == before and piece.tokens:
                        endpoint.times.note(time.monotonic() - since_s)
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
                    endpoint.succeeded(served.owner)
                if finish == "stop" and self.finish is None:
                    self.finish = Finish.STOP
                elif finish == "length" and self._num_tokens == before:
                    raise RemoteError("the model's server ended an answer without a token")
                # The token counts arrive last.
                with suppress(RemoteError):
                    while True:
                        served.note(await reader.next(USAGE_S))
        except EngineError as error:
            server.check_alive()
            if ask.rule is None:
                raise
            await self._give_up_grammar(endpoint, ask, ask.rule, error)

    def _ask(self, endpoint: EngineEndpoint) -> Ask:
        """Build the request for the remaining tokens, after the rows so far."""
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
        # A server that continues an answer must not draw the same random numbers again.
        seed = self._seed + self._num_tokens
        return Ask(rows, max_tokens, params, seed, served.salt, served.name, rule, forbid, allow, served.held())

    def _few_allowed(self, params: Sampling) -> list[int] | None:
        """Return the tokens that the grammar allows next; None if there are more than MAX_ALLOWED."""
        assert self._guide
        found: list[int] = allowed_tokens(self._guide.allowed()).tolist()
        if params.allow is not None:
            found = [token for token in found if token in params.allow]
        return found if len(found) <= MAX_ALLOWED else None

    def _take(self, token: int) -> bool:
        """Add a token as a row. Returns False if the grammar does not allow it; then another one must be requested."""
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
        """Whether the grammar applies to the next token. A request ends when that changes."""
        return self._guide is not None and self._guide.num_tokens is not None

    async def _give_up_grammar(self, endpoint: EngineEndpoint, ask: Ask, rule: Grammar, error: EngineError) -> None:
        """Enforce the grammar locally for LOOK_AGAIN_S, because the server does not accept it.

        Other grammars are still sent, unless the server also refuses a trivial one.
        """
        grammars, now_s = endpoint.grammars, time.monotonic()
        log.info("%s refuses a grammar, which is enforced locally: %s", endpoint.host, error)
        if not grammars.refused(self._served.owner, rule, now_s):
            return
        # Concurrent generations do not send the trivial grammar again.
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
            log.warning("the model's server takes no %s grammars, which are enforced locally: %s", rule.kind, error)
        except (ModelError, Refused, TimeoutError) as failure:
            log.info("%s does not say whether it takes grammars: %s", endpoint.host, failure)

    async def _recover(self, endpoint: EngineEndpoint, error: ModelError | Refused) -> None:
        """Prepare a request to another server, or to the same one again. Raises `error` if a retry would be useless."""
        endpoints = self._server.pool.all
        self._server.check_alive()
        self._num_failures += 1
        if isinstance(error, SessionLost) and self._num_failures == 1:
            # Retry with all rows and verify the server first. This does not count as a failure of the server.
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


# Masks are numpy arrays.
def allowed_tokens(mask: Any) -> Any:
    """Return the tokens whose bits are set in a Constraint's mask, int64 [n]."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]


def is_allowed(mask: Any, token: int) -> bool:
    """Whether a Constraint's mask allows a token. The mask None allows all."""
    return mask is None or bool(mask[token // 32] >> (token % 32) & 1)
