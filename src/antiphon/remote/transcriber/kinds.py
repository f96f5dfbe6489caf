"""Finds out what kind of transcriber's server a URL is, by asking it.

A URL with `tcp://` is a Wyoming server. Any other URL is asked for its models, for a WebSocket at `/realtime`, and for
`/audio/transcriptions`. A URL that ends in one of these paths is asked for that one only. A server that has none of
them is described as what it is.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
from websockets.exceptions import WebSocketException

from antiphon.contracts import Window
from antiphon.errors import ModelError, RemoteError
from antiphon.remote.address import split_api
from antiphon.remote.http import PROBE_TIMEOUT_S, ListedModel, ask_document, error_text, models_in, optional, reason
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.transcriber.rest import RestServer
from antiphon.remote.transcriber.sockets import (
    NULL,
    OpenAiWire,
    StreamingServer,
    StreamWire,
    VllmWire,
    open_socket,
    read_message,
)
from antiphon.remote.transcriber.wyoming import WyomingServer
from antiphon.remote.wyoming import described

FILES, REALTIME = "/audio/transcriptions", "/realtime"
# The name by which antiphon calls its first model, and its name as the owner of models in its list.
DEFAULT_MODEL, ANTIPHON = "default", "antiphon"
# Statuses of a path that a server does not have.
NOT_THERE = (404, 405, 501)
# The most names that an error lists.
MAX_NAMES = 20

Server = RestServer | WyomingServer | StreamingServer


@dataclass(slots=True, eq=False)
class TranscriberEndpoint(Endpoint):
    """One server of a transcriber. `server`: None until it has been asked what it is."""

    server: Server | None = None
    # The languages that the server reports; empty if it does not.
    languages: tuple[str, ...] = ()

    @property
    def is_streaming(self) -> bool:
        """Whether it is known to hear audio as it arrives."""
        return isinstance(self.server, StreamingServer)

    @property
    def is_antiphon(self) -> bool:
        """Whether it is known to be another antiphon, which reports word times and probabilities."""
        return isinstance(self.server, StreamingServer) and self.server.wire.whole_words


async def find(pool: Pool[TranscriberEndpoint], endpoint: TranscriberEndpoint, model: str) -> str:
    """Ask a server what it is, set `endpoint.server`, and return it in words.

    Raises RemoteError if it does not answer, Refused if it has no room, and ModelError if it is no transcriber's
    server, does not have the model, or does not accept the key.
    """
    try:
        if urlsplit(endpoint.url).scheme == "tcp":
            return await _find_wyoming(pool, endpoint, model)
        return await _find_http(pool, endpoint, model)
    except (OSError, WebSocketException, httpx.HTTPError) as error:
        raise RemoteError(f"{endpoint.url}: {reason(error)}") from error


def said(pool: Pool[TranscriberEndpoint], endpoint: TranscriberEndpoint, model: str) -> Server | None:
    """Return the server of a URL that says its kind; None if the server has to be asked."""
    base, path = split_api(endpoint.url, (FILES, REALTIME))
    if urlsplit(endpoint.url).scheme == "tcp":
        return WyomingServer(pool, endpoint, model)
    return RestServer(pool, endpoint, _with_scheme(base, "http"), model) if path == FILES else None


async def _find_wyoming(pool: Pool[TranscriberEndpoint], endpoint: TranscriberEndpoint, model: str) -> str:
    try:
        models, voices = await described(endpoint)
    except RemoteError as error:
        if "does not speak" in str(error):
            raise ModelError(f"{endpoint.url}: {error}; tcp:// is for servers of that protocol only") from None
        raise
    if not models:
        what = f"a Wyoming server of voices ({_names(voices)})" if voices else "a Wyoming server without ASR"
        raise ModelError(f"{endpoint.url} is {what}, and no transcriber")
    if model not in models:
        raise ModelError(f"{endpoint.url} has no model {model}; it has {_names(models)}")
    endpoint.server, endpoint.languages = WyomingServer(pool, endpoint, model), tuple(models[model])
    return _described(endpoint, model)


async def _find_http(pool: Pool[TranscriberEndpoint], endpoint: TranscriberEndpoint, model: str) -> str:
    base, path = split_api(endpoint.url, (FILES, REALTIME))
    http_base = _with_scheme(base, "http")
    models = await _models(pool, http_base)
    names = {listed.id: listed for listed in models}
    is_antiphon = any(listed.owner == ANTIPHON for listed in models)
    if models and model not in names and not (is_antiphon and model == DEFAULT_MODEL):
        raise ModelError(f"{endpoint.url} has no model {model}; it has {_names(names)}")
    listed = names.get(model) or next((one for one in models if is_antiphon and one.languages), None)
    endpoint.languages = listed.languages if listed else ()
    if path != FILES:
        url = f"{_with_scheme(base, 'ws')}{REALTIME}?intent=transcription"
        if wire := await _wire(pool, endpoint, url, model):
            endpoint.server = StreamingServer(pool, endpoint, url, model, wire)
            return _described(endpoint, model)
    if path != REALTIME and urlsplit(endpoint.url).scheme in ("http", "https"):
        status, _ = await _asked(pool, "POST", http_base + FILES)
        if status in (401, 403):
            raise ModelError(f"{endpoint.url} does not accept the key (ANTIPHON_TRANSCRIBER_KEY)")
        if status not in NOT_THERE and (status < 300 or 400 <= status < 500):
            endpoint.server = RestServer(pool, endpoint, http_base, model)
            return _described(endpoint, model)
        if status not in NOT_THERE:
            raise RemoteError(f"{endpoint.url}{FILES} answers with status {status}")
    raise ModelError(f"{endpoint.url} is {await _other_kind(pool, http_base)}, and no transcriber")


async def _models(pool: Pool[TranscriberEndpoint], base: str) -> list[ListedModel]:
    """Return the models that a server lists; none if it has no list. Raises ModelError for a wrong key."""
    status, data = await _asked(pool, "GET", f"{base}/models")
    if status in (401, 403):
        raise ModelError(f"{base} does not accept the key (ANTIPHON_TRANSCRIBER_KEY)")
    if 300 <= status < 400:
        raise ModelError(f"{base} redirects to another address, which is not followed; name that address instead")
    if status == 200:
        with suppress(RemoteError):
            return models_in(data)
    return []


async def _asked(pool: Pool[TranscriberEndpoint], method: str, url: str) -> tuple[int, bytes]:
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        return await ask_document(await pool.client(), method, url, pool.headers())


async def _wire(
    pool: Pool[TranscriberEndpoint], endpoint: TranscriberEndpoint, url: str, model: str
) -> StreamWire | None:
    """Return the wire of a WebSocket; None if there is none.

    Raises Refused if the server has no room, and ModelError if it does not accept the session that an utterance needs,
    such as its sample rate.
    """
    try:
        connection = await open_socket(pool, url, endpoint.host)
    except ModelError:
        return None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S), connection:
            first = read_message(await connection.recv(), pool.key)
            if first.type not in ("session.created", "transcription_session.created"):
                return None
            if first.session == NULL:
                return VllmWire()
            wire = OpenAiWire(is_antiphon=first.created != NULL)
            silence = Window(np.zeros(0, np.float32), final=True)
            for message in wire.opening(model, silence):
                await connection.send(message)
            while (answer := read_message(await connection.recv(), pool.key)).type != "session.updated":
                if answer.type == "error":
                    what = error_text(optional(_any_decoder, answer.error))
                    raise ModelError(f"{endpoint.url} refuses PCM at {wire.rate_hz} Hz or its session: {what}")
            return wire
    except (WebSocketException, TimeoutError):
        return None


_any_decoder = msgspec.json.Decoder()


async def _other_kind(pool: Pool[TranscriberEndpoint], base: str) -> str:
    """Return what a server is that transcribes nothing."""
    for path, what in (("/chat/completions", "a language model's server"), ("/audio/speech", "a voice's server")):
        status, _ = await _asked(pool, "POST", base + path)
        if status not in NOT_THERE:
            return f"{what} (it has {path})"
    return f"a server without {FILES} and {REALTIME}"


def _described(endpoint: TranscriberEndpoint, model: str) -> str:
    assert endpoint.server
    if endpoint.is_antiphon:
        more = "word times and probabilities"
    elif isinstance(endpoint.server, RestServer):
        more = "word times if the server reports them"
    else:
        more = "no word times, no probabilities"
    return f"{endpoint.server.name}, {model}, {more}"


def _names(names: Any) -> str:
    return ", ".join(sorted(names)[:MAX_NAMES]) or "none"


def _with_scheme(url: str, scheme: str) -> str:
    """Return a URL with `http` or `ws`, which keeps its TLS."""
    given, _, rest = url.partition("://")
    return f"{scheme}{'s' if given in ('https', 'wss') else ''}://{rest}"
