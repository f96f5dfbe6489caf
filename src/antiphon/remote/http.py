"""HTTP to other servers: connections, bounded answers, error messages, model lists and cache salts.

All requests to other servers use this module. Answers must not be compressed, and are bounded in bytes and in time.
After each CHUNKS_A_TURN chunks, the event loop can run other tasks, even if the whole answer has already arrived.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http.cookiejar import CookieJar
from typing import Annotated, Any, TypeVar
from weakref import WeakKeyDictionary

import httpx
import msgspec

from antiphon.errors import AntiphonError, ModelError, Refused, RemoteError
from antiphon.remote.breaker import retry_after_s

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS, MAX_IDLE_CONNECTIONS = 1024, 64


class LoopClients:
    """An `httpx.AsyncClient` for each event loop. A client is closed with its loop (`shutdown_asyncgens`).

    Only the time to connect is limited; requests have their own limits. Redirects are not followed. The constructor
    reads certificates, which takes tens of milliseconds. `tls`: the context that verifies the servers.
    """

    def __init__(self) -> None:
        self.tls = httpx.create_ssl_context()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()
        self._closers: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[httpx.AsyncClient, None]] = (
            WeakKeyDictionary()
        )

    async def client(self) -> httpx.AsyncClient:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._clients.get(loop)
        if found is None:
            self._closers[loop] = closer = _open(self.tls)
            self._clients[loop] = found = await anext(closer)
        return found

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        loop = asyncio.get_running_loop()
        if closer := self._closers.pop(loop, None):
            del self._clients[loop]
            await closer.aclose()


class _NoCookies(CookieJar):
    """Keeps no cookies. A server's cookies would be sent with the requests of all keys, and would use memory."""

    def extract_cookies(self, response: Any, request: Any) -> None:
        """Do nothing, so that no cookie is kept."""


async def _open(tls: ssl.SSLContext) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Yield a client that is closed with the generator, at the latest when its event loop ends."""
    client = httpx.AsyncClient(
        verify=tls,
        headers={"Accept-Encoding": "identity"},
        cookies=_NoCookies(),
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_IDLE_CONNECTIONS),
    )
    try:
        yield client
    finally:
        await client.aclose()


# Bounds: bytes of a streamed answer, total seconds spent waiting for it, and bytes of a document such as a model list.
MAX_ANSWER_BYTES, MAX_ANSWER_S, MAX_DOCUMENT_BYTES = 64 << 20, 600.0, 2 << 20
CHUNKS_A_TURN = 64
# Bound: objects of one document or event, which are created in one step; 32,768 take some tens of milliseconds.
MAX_OBJECTS = 1 << 15


async def chunks(answer: httpx.Response, max_bytes: int = MAX_ANSWER_BYTES) -> AsyncGenerator[bytes, None]:
    """Yield an answer's bytes as they arrive.

    The time that the caller spends between chunks does not count for MAX_ANSWER_S. Raises RemoteError if the answer is
    larger than `max_bytes`, takes longer than MAX_ANSWER_S, or is compressed. A compressed answer is an error, because
    no request asks for compression and because a few compressed bytes could expand to gigabytes.
    """
    if encoding := answer.headers.get("content-encoding", "").strip().lower().removeprefix("identity"):
        raise RemoteError(f"the model's server compresses its answer ({encoding[:40]}), which was not asked for")
    num_bytes = num_chunks = 0
    waited_s, since_s = 0.0, time.monotonic()
    async for chunk in answer.aiter_raw():
        num_bytes += len(chunk)
        num_chunks += 1
        waited_s += time.monotonic() - since_s
        if num_bytes > max_bytes:
            raise RemoteError(f"the model's server sent more than {max_bytes} bytes in one answer")
        if waited_s > MAX_ANSWER_S:
            raise RemoteError(f"the model's server took longer than {MAX_ANSWER_S:g} s for one answer")
        yield chunk
        if num_chunks % CHUNKS_A_TURN == 0:
            await asyncio.sleep(0)
        since_s = time.monotonic()


# `body` is any JSON value.
async def ask_document(
    client: httpx.AsyncClient, method: str, url: str, headers: Mapping[str, str], body: Any = None
) -> tuple[int, bytes]:
    """Send a request; return the status and all bytes of its answer.

    Raises RemoteError if the answer is larger than MAX_DOCUMENT_BYTES, the errors of `chunks`, and httpx.HTTPError.
    """
    async with (
        client.stream(method, url, headers=headers, json=body) as answer,
        aclosing(chunks(answer, MAX_DOCUMENT_BYTES)) as found,
    ):
        return answer.status_code, b"".join([chunk async for chunk in found])


def decoded(decoder: msgspec.json.Decoder[T], data: bytes, what: str) -> T:
    """Decode a server's JSON.

    Raises RemoteError ("the model's server sent no valid `what`") if the JSON is invalid, nested too deeply, or has
    more than MAX_OBJECTS objects.
    """
    if data.count(b"{") > MAX_OBJECTS:
        raise RemoteError(f"the model's server sent no valid {what}: it has too many objects")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteError(f"the model's server sent no valid {what}: {error}") from None


def optional(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw) -> T | None:
    """Decode an optional part of a server's JSON; return None if it has another type than expected."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


# Bounds: the bytes of an error's body that are read, and the characters of its message that are passed on.
MAX_ERROR_BYTES, MAX_SENTENCE_CHARS = 1 << 16, 300
_error_decoder = msgspec.json.Decoder()


# `error` is any JSON value, because servers differ.
def error_text(error: Any) -> str:
    """Return the message in an error's body, cut to MAX_SENTENCE_CHARS characters."""
    if isinstance(error, dict):
        error = error.get("error", error)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)[:MAX_SENTENCE_CHARS]


def reason(error: BaseException) -> str:
    """Return an error's message, or the name of its kind if it has none."""
    return str(error) or type(error).__name__


def without_key(data: bytes, key: str) -> bytes:
    """Return data from a server with every occurrence of the key masked. `key`: "" for none."""
    return data.replace(key.encode(), b"***") if key else data


async def read_failure(server: str, answer: httpx.Response, key: str) -> AntiphonError | str:
    """Turn an answer with a status other than 200 into an error to raise. `server` is its name in messages.

    Returns a ModelError if the key is not accepted, Refused if the server has no room, and a RemoteError if the server
    failed. If the server does not accept the request itself, returns its message, and the caller builds the error.
    """
    status = answer.status_code
    if status in (401, 403):
        return ModelError(f"{server} does not accept the key (status {status})")
    if status in (429, 503):
        return Refused("The model's server has no room.", retry_after_s(answer.headers.get("retry-after", "")))
    if status >= 500 or status < 400:
        redirect = ", a redirect, which is not followed" if answer.is_redirect else ""
        return RemoteError(f"{server} failed with status {status}{redirect}")
    data = bytearray()
    async with aclosing(chunks(answer)) as found:
        async for chunk in found:
            data += chunk
            if len(data) > MAX_ERROR_BYTES:
                break
    said = without_key(bytes(data), key)
    try:
        return error_text(decoded(_error_decoder, said, "JSON"))
    except RemoteError:
        return error_text(said.decode(errors="replace").strip())


PROBE_TIMEOUT_S = 5.0
# The maximum length of a model's name in characters, because messages contain it. A model with a longer name is
# skipped.
MAX_NAME_CHARS = 512


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a server's list of models.

    - `context_tokens`: the size of its context, in tokens; 0 if the list does not report it.
    - `owner`: the software that serves the model, such as "vllm".
    - `has_parent`: True if it is an adapter of another model in the list.
    - `languages`: those that it understands or speaks; empty if the list does not report them.
    """

    id: str
    context_tokens: int = 0
    owner: str = ""
    has_parent: bool = False
    languages: tuple[str, ...] = ()


_null = msgspec.Raw(b"null")


class _Entry(msgspec.Struct, gc=False):
    """One model in the server's list. Servers add fields, and differ in the fields' types."""

    id: msgspec.Raw = _null
    max_model_len: msgspec.Raw = _null
    owned_by: msgspec.Raw = _null
    parent: msgspec.Raw = _null
    languages: msgspec.Raw = _null


class _List(msgspec.Struct):
    data: list[_Entry]


_list_decoder, _text_decoder = msgspec.json.Decoder(_List), msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(tuple[str, ...])
_tokens_decoder = msgspec.json.Decoder(Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)])


async def list_models(base_url: str, key: str) -> list[ListedModel]:
    """Ask a server for its models, within PROBE_TIMEOUT_S. `key`: "" for none.

    Raises ModelError if the server does not accept the key, and RemoteError if it does not list its models. If the
    server did not answer, the cause of the RemoteError is an httpx.HTTPError.
    """
    clients, url = LoopClients(), f"{base_url}/models"
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            client = await clients.client()
            status, data = await ask_document(client, "GET", url, {"Authorization": f"Bearer {key}"} if key else {})
    except TimeoutError:
        raise RemoteError(f"no answer within {PROBE_TIMEOUT_S:g} s") from httpx.ReadTimeout("")
    except httpx.HTTPError as error:
        raise RemoteError(reason(error)) from error
    finally:
        await clients.close()
    if status in (401, 403):
        raise ModelError(f"{base_url} does not accept the key (ANTIPHON_REMOTE_KEY)")
    if status != 200:
        raise RemoteError(f"status {status}")
    return models_in(data)


def models_in(data: bytes) -> list[ListedModel]:
    """Return the models of a list that have a valid name. Raises RemoteError if `data` is not a list of models."""
    found = []
    for entry in decoded(_list_decoder, data, "list of models").data:
        name = optional(_text_decoder, entry.id) if entry.id is not _null else None
        if name and len(name) <= MAX_NAME_CHARS:
            found.append(
                ListedModel(
                    name,
                    optional(_tokens_decoder, entry.max_model_len) or 0,
                    optional(_text_decoder, entry.owned_by) or "",
                    entry.parent != _null,
                    optional(_texts_decoder, entry.languages) or (),
                )
            )
    return found


def salt_of(secret: bytes, owner: Hashable | None) -> str:
    """Return the salt of an owner's requests: always the same for an owner, and unpredictable without `secret`.

    Requests with different salts share no cache, so that neither token counts nor timing reveal another owner's
    conversations. The owner None shares with no other request: it gets a new salt each time.
    """
    if owner is None:
        return secrets.token_hex(32)
    return hmac.new(secret, repr(owner).encode(), hashlib.sha256).hexdigest()
