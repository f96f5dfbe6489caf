"""Requests tokens from servers and verifies their models, over HTTP. The wires write requests and read events."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass

import httpx
import msgspec
from tokenizers import Tokenizer

from antiphon.engine.api import Capabilities
from antiphon.errors import EngineError, ModelError, Refused, RemoteError
from antiphon.remote.breaker import PROBE
from antiphon.remote.engine import CAPABILITIES, EngineServers
from antiphon.remote.engine.endpoints import EngineEndpoint
from antiphon.remote.engine.sglang import SessionLost, Sglang
from antiphon.remote.engine.wires import Ask, HeldRows, Piece, VllmCompletions, VllmGenerate, Wire
from antiphon.remote.http import (
    PROBE_TIMEOUT_S,
    ask_document,
    chunks,
    decoded,
    models_in,
    read_failure,
    reason,
    without_key,
)
from antiphon.remote.pool import Pool
from antiphon.remote.sse import ReaderTask, events

log = logging.getLogger(__name__)

# The text by which tokenizers are compared, with scripts, numbers, spaces, code and characters of several bytes.
PROBE_TEXT = "Hello, wörld! 1234567890  \n\tfür 東京 Привет مرحبا 🙂 def f(x): return x**2 <|im_start|></s>"
# The maximum block size. A larger one in a server's metrics is reduced to it.
MAX_BLOCK_ROWS = 4096
# The number of rows in a block if the server does not report it: vLLM's default on GPUs.
DEFAULT_BLOCK_ROWS = 16


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_tokenized_decoder = msgspec.json.Decoder(_Tokenized)


@dataclass(frozen=True, slots=True)
class Served:
    """The facts that a server reports about itself.

    `model`: the name to use in requests. `context_rows`, `block_rows`: 0 if it does not report them. `generates`:
    vLLM's `/inference/v1/generate` is enabled.
    """

    model: str
    context_rows: int = 0
    block_rows: int = 0
    generates: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's facts in its checkpoint's configuration; see Engine. `context_rows`: the positions that it supports."""

    context_rows: int
    vocabulary_size: int
    width: int
    eos_tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class TokenTimeouts:
    """Timeouts, in seconds: for the first token of a request, and between two pieces of an answer."""

    first_s: float
    next_s: float


class EngineServer:
    """The servers of one engine, used by its sessions: all of one kind, with one key and one tokenizer.

    The constructor verifies each server, which takes up to some seconds. A server that does not answer yet is logged
    and is not an error. Raises ModelError if a server serves another model than the tokenizer's, or does not accept the
    key.

    - `name`: the kind of the servers.
    - `tokenizer`: the model's.
    - `context_rows`: the maximum number of rows of a session; 0: the limit of the server and the model.
    - `block_rows`: the number of rows in a block of the servers' KV.
    """

    capabilities: Capabilities = CAPABILITIES

    def __init__(self, servers: EngineServers, tokenizer: Tokenizer, facts: ModelFacts, context_rows: int) -> None:
        self.name = servers.kind
        self.timeouts = TokenTimeouts(servers.first_token_s, servers.token_s)
        urls = dict.fromkeys(url.rstrip("/") for url in servers.urls)
        self.pool = Pool("language", [EngineEndpoint(url) for url in urls], servers.key, measures=False)
        self.instance = secrets.token_hex(4)
        self._eos, self._vocabulary_size = facts.eos_tokens, facts.vocabulary_size
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, what in added.items() if what.special)
        self._probe = (PROBE_TEXT, tokenizer.encode(PROBE_TEXT, add_special_tokens=False).ids)
        # The report of the first server. The other servers must serve the same model, and so must each server after a
        # failure.
        self.served: Served | None = None
        # Requests that run or are being closed.
        self.tasks: set[asyncio.Task[None]] = set()
        self._readers: dict[ReaderTask[Piece], asyncio.AbstractEventLoop] = {}
        self._closed = False
        asyncio.run(self._verify_all())
        limits = context_rows, self.served and self.served.context_rows, facts.context_rows
        self.context_rows = min(limit for limit in limits if limit)
        self.block_rows = (self.served and self.served.block_rows) or DEFAULT_BLOCK_ROWS

    def close(self) -> None:
        """End all answers that are being read. Returns at once."""
        self._closed = True
        for reader, loop in list(self._readers.items()):
            # The reader's loop may have ended.
            if not loop.is_closed():
                loop.call_soon_threadsafe(reader.fail, EngineError("the engine was closed"))

    def check_alive(self) -> None:
        """Raise EngineError if the engine of a running generation was closed."""
        if self._closed:
            raise EngineError("the engine was closed")

    def check_open(self) -> None:
        """Raise Refused if the engine was closed."""
        if self._closed:
            raise Refused("the engine is shutting down", 5.0)

    @contextmanager
    def reading(self, endpoint: EngineEndpoint, ask: Ask) -> Iterator[ReaderTask[Piece]]:
        """Send a request and read its answer in a task, until the block ends or `close` ends the answer."""
        reader = ReaderTask(self.ask(endpoint, ask), self.tasks)
        self._readers[reader] = asyncio.get_running_loop()
        try:
            yield reader
        finally:
            del self._readers[reader]
            reader.end()

    async def _verify_all(self) -> None:
        for endpoint in self.pool.all:
            try:
                await self.verify(endpoint)
            except RemoteError as error:
                log.warning("%s", error)

    @property
    def wire(self) -> Wire:
        """The wire to the servers. It is known after one of them was verified."""
        assert self.served
        if self.name == "sglang":
            return Sglang(self._special)
        wire = VllmGenerate if self.served.generates else VllmCompletions
        return wire(self.served.model, self._eos)

    async def verify(self, endpoint: EngineEndpoint) -> None:
        """Verify that a server has the same model and tokenizer as the first one. A no-op if it is already verified.

        Raises RemoteError if it does not answer, and ModelError if it serves something else or does not accept the key.
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
            raise ModelError(f"{endpoint.host} now serves {served.model}, and not the same as at the start")
        endpoint.verified = True

    async def ask(self, endpoint: EngineEndpoint, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Send a request and yield the pieces of its answer, one of which has a `finish`.

        Closing the generator ends the request at the server. Raises RemoteError if the server fails, Refused if it has
        no room, and ModelError if it does not accept the request.
        """
        wire, held, given, finished, goes_on = self.wire, ask.held, 0, False, False
        endpoint.requests += 1
        headers = self.pool.headers() | {"X-Session-ID": ask.session}
        try:
            client = await self.pool.client()
            if held and not held.opened:
                # Set before the request, so that the session is closed even if this is cancelled.
                held.opened = True
                url = f"{endpoint.url}/open_session"
                status, _ = await ask_document(client, "POST", url, headers, held.opening())
                if status != 200:
                    raise RemoteError(f"{endpoint.host} opened no session: status {status}")
            goes_on = bool(held and held.request)
            body, request = wire.body(ask), held.asked if held else ""
            async with client.stream("POST", endpoint.url + wire.path, json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise await self._error(endpoint, answer)
                async with aclosing(events(chunks(answer))) as found:
                    async for data in found:
                        piece = wire.read(without_key(data, self.pool.key), given)
                        if piece is None:
                            break
                        if piece.prompt_tokens not in (None, len(ask.rows)):
                            raise RemoteError(f"{endpoint.host} counts {piece.prompt_tokens} of {len(ask.rows)} rows")
                        if max(piece.tokens, default=0) >= self._vocabulary_size:
                            raise RemoteError(f"{endpoint.host} sent a token that the model does not have")
                        if given + len(piece.tokens) > ask.max_tokens:
                            raise RemoteError(f"{endpoint.host} sent more than the {ask.max_tokens} tokens asked for")
                        if held:
                            held.answered(request, ask.rows, piece.tokens, given)
                        given += len(piece.tokens)
                        finished = finished or piece.finish is not None
                        yield piece
            if not finished:
                raise RemoteError(f"{endpoint.host} ended in the middle of its answer")
        except httpx.HTTPError as error:
            self.forget(endpoint, held)
            raise RemoteError(f"{endpoint.host}: {reason(error)}") from error
        except Exception as error:
            self.forget(endpoint, held)
            if goes_on and not given and type(error) in (RemoteError, EngineError):
                raise SessionLost(str(error)) from error
            raise

    def forget(self, endpoint: EngineEndpoint, held: HeldRows | None) -> None:
        """Make a server forget what it holds of a session. Returns at once."""
        if held and held.opened:
            closing = asyncio.create_task(self._close_session(endpoint, held.id))
            self.tasks.add(closing)
            closing.add_done_callback(self.tasks.discard)
            held.lose()

    async def _close_session(self, endpoint: EngineEndpoint, session: str) -> None:
        with suppress(httpx.HTTPError, TimeoutError, RemoteError):
            client = await self.pool.client()
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                url = f"{endpoint.url}/close_session"
                await ask_document(client, "POST", url, self.pool.headers(), {"session_id": session})

    async def _look(self, endpoint: EngineEndpoint) -> Served:
        try:
            client = await self.pool.client()
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                served = await self._facts(client, endpoint)
                await self._compare_tokenizer(client, endpoint, served.model)
        except (httpx.HTTPError, TimeoutError, RemoteError) as error:
            raise RemoteError(f"{endpoint.host} does not say what it serves: {reason(error)}") from error
        return served

    async def _get(self, client: httpx.AsyncClient, url: str) -> tuple[int, bytes]:
        status, data = await ask_document(client, "GET", url, self.pool.headers())
        if status in (401, 403):
            raise ModelError(f"{url} does not accept the key (ANTIPHON_REMOTE_KEY)")
        return status, data

    async def _facts(self, client: httpx.AsyncClient, endpoint: EngineEndpoint) -> Served:
        status, data = await self._get(client, f"{endpoint.url}/v1/models")
        if status != 200:
            raise RemoteError(f"status {status}")
        # In the list, a model is followed by its adapters.
        first = next((model for model in models_in(data) if not model.has_parent), None)
        if first is None:
            raise RemoteError("it has no models")
        if self.name == "sglang":
            return Served(first.id, first.context_tokens)
        metrics = b""
        with suppress(RemoteError):
            _, metrics = await self._get(client, f"{endpoint.url}/metrics")
        probe, _ = await ask_document(client, "POST", endpoint.url + VllmGenerate.path, self.pool.headers(), {})
        return Served(first.id, first.context_tokens, _block_rows(metrics), probe in (400, 422))

    async def _compare_tokenizer(self, client: httpx.AsyncClient, endpoint: EngineEndpoint, model: str) -> None:
        text, expected = self._probe
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        status, data = await ask_document(client, "POST", f"{endpoint.url}/tokenize", self.pool.headers(), body)
        if status != 200:
            log.warning("%s has no /tokenize: its tokenizer cannot be compared with the model's", endpoint.host)
            return
        if decoded(_tokenized_decoder, data, "list of tokens").tokens != expected:
            raise ModelError(f"{endpoint.host} has another tokenizer than the folder of --language-model")

    async def _error(self, endpoint: EngineEndpoint, answer: httpx.Response) -> Exception:
        """Turn an answer's status into an error."""
        if answer.status_code == 404:
            # The server serves another model now.
            return RemoteError(f"{endpoint.host} failed with status 404")
        said = await read_failure(endpoint.host, answer, self.pool.key)
        return EngineError(f"{endpoint.host} does not accept this: {said}") if isinstance(said, str) else said


def _block_rows(metrics: bytes) -> int:
    """Return the rows of a block of vLLM's KV from its metrics; 0 if they are missing."""
    found = re.search(rb'^vllm:cache_config_info\{.*?\bblock_size="(\d{1,9})"', metrics, re.MULTILINE)
    return min(int(found[1]), MAX_BLOCK_ROWS) if found else 0
