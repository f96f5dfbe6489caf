"""Asks one server for tokens, and looks at what it serves. HTTP only: what is sent and read, wires know."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

import httpx
import msgspec
from tokenizers import Tokenizer

from antiphon.engine.vllm.endpoints import Endpoint
from antiphon.engine.vllm.sglang import HeldRows, SessionLost, Sglang
from antiphon.engine.vllm.wires import Ask, Piece, VllmCompletions, VllmGenerate, Wire
from antiphon.errors import EngineError, ModelError, RemoteError
from antiphon.upstream.breaker import PROBE
from antiphon.upstream.http import (
    PROBE_TIMEOUT_S,
    LoopClients,
    ask_document,
    chunks,
    decoded,
    models_in,
    read_failure,
    without_key,
)
from antiphon.upstream.sse import events
from antiphon.upstream.trace_context import trace_headers

log = logging.getLogger(__name__)

# What every tokenizer is asked for: scripts, numbers, spaces, code, a character of several bytes.
PROBE_TEXT = "Hello, wörld! 1234567890  \n\tfür 東京 Привет مرحبا 🙂 def f(x): return x**2 <|im_start|></s>"
# A block of a server that says it has larger ones is not believed.
MAX_BLOCK_ROWS = 4096


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_tokenized_decoder = msgspec.json.Decoder(_Tokenized)


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself. `model`: the name that requests carry. `context_rows`, `block_rows`: 0 where it
    does not say. `generates`: vLLM's `/inference/v1/generate` is on.
    """

    model: str
    context_rows: int = 0
    block_rows: int = 0
    generates: bool = False


class EngineServer:
    """What an engine's servers have in common: the kind, the key, the tokenizer that theirs has to equal.

    `kind`: "vllm" or "sglang". `key`: sent as a bearer token, and in no message. `tokenizer`: the model's own.
    `vocabulary_size`: tokens that it has; one beyond is none.
    """

    def __init__(self, kind: str, key: str, tokenizer: Tokenizer, eos: frozenset[int], vocabulary_size: int) -> None:
        self._kind, self._key, self._eos, self._vocabulary_size = kind, key, eos, vocabulary_size
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, what in added.items() if what.special)
        self._probe = (PROBE_TEXT, tokenizer.encode(PROBE_TEXT, add_special_tokens=False).ids)
        self._clients = LoopClients()
        # What the first server said; the others, and each after a failure, have to serve the same.
        self.served: Served | None = None
        # Requests that go on or are being closed.
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def wire(self) -> Wire:
        """How the servers are asked. Known once one of them was looked at."""
        assert self.served
        if self._kind == "sglang":
            return Sglang(self._special)
        wire = VllmGenerate if self.served.generates else VllmCompletions
        return wire(self.served.model, self._eos)

    async def verify(self, endpoint: Endpoint) -> None:
        """See to it that a server serves what the first one did, with the same tokenizer, unless that is known.

        Raises RemoteError where it does not answer, ModelError where it serves something else, or takes another key.
        """
        if endpoint.verified:
            return
        try:
            served = await self._look(endpoint)
        except RemoteError:
            endpoint.breaker.failed(PROBE, time.monotonic())
            raise
        endpoint.breaker.succeeded(PROBE)
        if self.served is None:
            self.served = served
        same = (served.model, served.generates) == (self.served.model, self.served.generates)
        if not same or (served.context_rows and served.context_rows < self.served.context_rows):
            raise ModelError(f"{endpoint.host} serves {served.model} now, and not what it did at the start")
        endpoint.verified = True

    async def ask(self, endpoint: Endpoint, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Send a request and yield its answer, of which one piece has a `finish`. Closing the generator ends it there.

        Raises RemoteError where the server fails, Refused where it has no room, ModelError where it does not accept
        the request.
        """
        wire, held, given, finished, goes_on = self.wire, ask.held, 0, False, False
        endpoint.requests += 1
        headers = self._headers() | trace_headers() | {"X-Session-ID": ask.session}
        try:
            client = await self._clients.client()
            if held and not held.opened:
                # Also where this is cancelled, so that it is closed.
                held.opened = True
                url = f"{endpoint.url}/open_session"
                status, _ = await ask_document(client, "POST", url, headers, held.opening())
                if status != 200:
                    raise RemoteError(f"{endpoint.host} opened no session: status {status}")
            goes_on = bool(held and held.request)
            body = wire.body(ask)
            async with client.stream("POST", endpoint.url + wire.path, json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise await self._error(endpoint, answer)
                async with aclosing(events(chunks(answer))) as found:
                    async for data in found:
                        piece = wire.read(without_key(data, self._key), given)
                        if piece is None:
                            break
                        if piece.prompt_tokens not in (None, len(ask.rows)):
                            raise RemoteError(f"{endpoint.host} counts {piece.prompt_tokens} of {len(ask.rows)} rows")
                        if max(piece.tokens, default=0) >= self._vocabulary_size:
                            raise RemoteError(f"{endpoint.host} sent a token that the model does not have")
                        if given + len(piece.tokens) > ask.max_tokens:
                            raise RemoteError(f"{endpoint.host} sent more than the {ask.max_tokens} tokens asked for")
                        if held:
                            held.answered(body["rid"], ask.rows, piece.tokens, given)
                        given += len(piece.tokens)
                        finished = finished or piece.finish is not None
                        yield piece
            if not finished:
                raise RemoteError(f"{endpoint.host} ended in the middle of its answer")
        except httpx.HTTPError as error:
            self.forget(endpoint, held)
            raise RemoteError(f"{endpoint.host}: {error or type(error).__name__}") from error
        except Exception as error:
            self.forget(endpoint, held)
            if goes_on and not given and type(error) in (RemoteError, EngineError):
                raise SessionLost(str(error)) from error
            raise

    def forget(self, endpoint: Endpoint, held: HeldRows | None) -> None:
        """Have a server forget what it holds of a session. Returns at once."""
        if held and held.opened:
            closing = asyncio.create_task(self._close_session(endpoint, held.id))
            self.tasks.add(closing)
            closing.add_done_callback(self.tasks.discard)
            held.lose()

    async def _close_session(self, endpoint: Endpoint, session: str) -> None:
        with suppress(httpx.HTTPError, TimeoutError, RemoteError):
            client = await self._clients.client()
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                url = f"{endpoint.url}/close_session"
                await ask_document(client, "POST", url, self._headers(), {"session_id": session})

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    async def _look(self, endpoint: Endpoint) -> Served:
        try:
            client = await self._clients.client()
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                served = await self._facts(client, endpoint)
                await self._compare_tokenizer(client, endpoint, served.model)
        except (httpx.HTTPError, TimeoutError, RemoteError) as error:
            raise RemoteError(
                f"{endpoint.host} does not say what it serves: {error or type(error).__name__}"
            ) from error
        return served

    async def _get(self, client: httpx.AsyncClient, url: str) -> tuple[int, bytes]:
        status, data = await ask_document(client, "GET", url, self._headers())
        if status in (401, 403):
            raise ModelError(f"{url} does not accept the key (ANTIPHON_REMOTE_KEY)")
        return status, data

    async def _facts(self, client: httpx.AsyncClient, endpoint: Endpoint) -> Served:
        status, data = await self._get(client, f"{endpoint.url}/v1/models")
        if status != 200:
            raise RemoteError(f"status {status}")
        # Adapters of a model come behind it.
        first = next((model for model in models_in(data) if not model.has_parent), None)
        if first is None:
            raise RemoteError("it has no models")
        if self._kind == "sglang":
            return Served(first.id, first.context_tokens)
        metrics = b""
        with suppress(RemoteError):
            _, metrics = await self._get(client, f"{endpoint.url}/metrics")
        probe, _ = await ask_document(client, "POST", endpoint.url + VllmGenerate.path, self._headers(), {})
        return Served(first.id, first.context_tokens, _block_rows(metrics), probe in (400, 422))

    async def _compare_tokenizer(self, client: httpx.AsyncClient, endpoint: Endpoint, model: str) -> None:
        text, expected = self._probe
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        status, data = await ask_document(client, "POST", f"{endpoint.url}/tokenize", self._headers(), body)
        if status != 200:
            log.warning("%s has no /tokenize: whether its tokenizer is the model's is not known", endpoint.host)
            return
        if decoded(_tokenized_decoder, data, "list of tokens").tokens != expected:
            raise ModelError(f"{endpoint.host} has another tokenizer than the folder of --language-model")

    async def _error(self, endpoint: Endpoint, answer: httpx.Response) -> Exception:
        """What an answer's status says."""
        if answer.status_code == 404:
            # It serves another model now.
            return RemoteError(f"{endpoint.host} failed with status 404")
        said = await read_failure(endpoint.host, answer, self._key)
        return EngineError(f"{endpoint.host} does not accept this: {said}") if isinstance(said, str) else said


def _block_rows(metrics: bytes) -> int:
    """The rows of a block of vLLM's KV, by its metrics; 0 where these do not say."""
    found = re.search(rb'^vllm:cache_config_info\{.*?\bblock_size="(\d{1,9})"', metrics, re.MULTILINE)
    return min(int(found[1]), MAX_BLOCK_ROWS) if found else 0
