"""Telephone calls over real sockets, with scripted models and a caller written from Twilio's documents."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from bench import carrier
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.audio.line.g711 import to_ulaw
from antiphon.audio.pcm import Resampler
from antiphon.server.state import ServerState
from antiphon.server.telephone.tickets import signature_of
from antiphon.settings import ServerSettings, Settings, TelephoneSettings
from tests.scripted import speech
from tests.server.scripted import serving

TOKEN, KEY, LIMIT_S = "0123456789abcdef0123456789abcdef", "key-1", 15
FORM = {"CallSid": "CA1", "AccountSid": "AC1", "From": "+4930111", "To": "+4930222"}
MEDIA = "/v1/telephone/media"


def settings(**telephone: Any) -> Settings:
    return replace(Settings(), telephone=TelephoneSettings(**telephone))


@pytest.fixture(scope="module")
def signed() -> Iterator[tuple[str, ServerState]]:
    """A server with a Twilio account, and with an API key for others."""
    chosen = replace(settings(twilio_auth_token=TOKEN), server=ServerSettings(api_keys=(KEY,)))
    with serving(chosen) as (ws, state, _):
        yield ws, state


@pytest.fixture(scope="module")
def open_server() -> Iterator[tuple[str, ServerState]]:
    with serving() as (ws, state, _):
        yield ws, state


def ask(ws: str, token: str, form: dict[str, str] | None = None) -> httpx.Response:
    """Ask for TwiML as Twilio does, signed with `token`."""
    url, fields = ws.replace("ws", "http", 1) + "/v1/telephone/twilio", form or FORM
    public = url.replace("http", "https", 1)
    signature = signature_of(token, public, fields.items())
    return httpx.post(url, data=fields, headers={"X-Twilio-Signature": signature}, timeout=LIMIT_S)


def stream_url(answer: httpx.Response) -> str:
    found = re.search(r'<Stream url="([^"]*)"/>', answer.text)
    assert found, answer.text
    return found[1]


@asynccontextmanager
async def stream(ws: str, path: str = MEDIA, token: str = "") -> AsyncIterator[ClientConnection]:
    """Open a media stream. With `token`, the upgrade is signed for the URL as the carrier knows it."""
    public = f"wss://{urlsplit(ws).netloc}{path}"
    headers = {"X-Twilio-Signature": signature_of(token, public)} if token else {}
    async with connect(ws + path, additional_headers=headers) as socket, asyncio.timeout(LIMIT_S):
        yield socket


def status(ws: str, path: str = MEDIA, token: str = "") -> int:
    """Return the HTTP status of a stream that is opened; 101 if it is accepted."""

    async def main() -> int:
        try:
            async with stream(ws, path, token):
                return 101
        except InvalidStatus as refusal:
            return refusal.response.status_code

    return asyncio.run(main())


async def end(socket: ClientConnection) -> tuple[int, str]:
    """Read until the server closes the stream; return the code and the reason."""
    with pytest.raises(ConnectionClosed):
        while True:
            await socket.recv()
    return socket.close_code or 0, socket.close_reason or ""


def spoken(first: int, count: int) -> list[str]:
    """Return the messages of a caller who speaks words, and then is silent for a second."""
    pcm = Resampler(16_000, 8000).feed(speech(first, count, 31))
    data = to_ulaw(pcm)
    return [carrier.media(data[at : at + 160], at // 160) for at in range(0, len(data), 160)]


async def answered(socket: ClientConnection, *, key_after_s: float | None = None) -> float:
    """Play what the server sends as Twilio does, until a response has ended. Return the seconds that were played.

    With `key_after_s`, the caller presses a key after this time of playing.
    """
    loop = asyncio.get_running_loop()
    buffer = carrier.PlayBuffer(loop.time)
    silence = carrier.media(to_ulaw(np.zeros(160, np.float32)))
    while not buffer.spans or loop.time() < buffer.ends_s + 0.3:
        if key_after_s is not None and buffer.played_s >= key_after_s:
            await socket.send(carrier.dtmf("5"))
            key_after_s = None
        for name in buffer.due():
            await socket.send(carrier.mark(name))
        await socket.send(silence)
        try:
            async with asyncio.timeout(0.02):
                while True:
                    buffer.take(json.loads(await socket.recv()))
        except TimeoutError:
            continue
    return buffer.played_s


async def live_call(state: ServerState) -> tuple[str, Any]:
    """Return the id and the live session of the only call, once it has begun."""
    while not state.sessions.calls:  # noqa: ASYNC110 (it is of the server's event loop)
        await asyncio.sleep(0.01)
    (found,) = state.sessions.calls.items()
    return found


async def until(app: ClientConnection, type: str) -> dict[str, Any]:
    """Return an application's next event of this type."""
    while True:
        event: dict[str, Any] = json.loads(await app.recv())
        if event["type"] == type:
            return event


def test_twilio_signs_as_its_documents_show() -> None:
    fields = {
        "CallSid": "CA1234567890ABCDE",
        "Caller": "+14158675309",
        "Digits": "1234",
        "From": "+14158675309",
        "To": "+18005551212",
    }
    url = "https://mycompany.com/myapp.php?foo=1&bar=2"
    assert signature_of("12345", url, fields.items()) == "RSOYDt4T1cUTdK1PDd93/VVr8B8="


def test_one_url_in_the_console_is_enough_for_a_call(signed: tuple[str, ServerState]) -> None:
    ws, state = signed
    answer = ask(ws, TOKEN)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/xml; charset=utf-8")
    url = stream_url(answer)
    assert url.startswith(f"wss://{urlsplit(ws).netloc}{MEDIA}/")

    async def main() -> tuple[float, str]:
        async with stream(ws, urlsplit(url).path, TOKEN) as socket:
            await socket.send(carrier.connected())
            await socket.send(carrier.start(order="17"))
            for message in spoken(1, 3):
                await socket.send(message)
            played_s = await answered(socket)
            _, live = await live_call(state)
            opened_with = str(bytes(live.wire.opening.session))
            await socket.send(carrier.stop())
            await end(socket)
            return played_s, opened_with

    played_s, opened_with = asyncio.run(main())
    # The scripted model says the words that it heard, 300 ms each.
    assert played_s == pytest.approx(3 * 0.3, abs=0.05)
    for fact in ("+4930111", "+4930222", "order"):
        assert fact in opened_with
    assert not state.sessions.calls


def test_another_accounts_signature_and_a_replayed_one_open_nothing(signed: tuple[str, ServerState]) -> None:
    ws, _ = signed
    other = "f" * 32
    assert [ask(ws, other).status_code, ask(ws, "").status_code] == [401, 401]
    path = urlsplit(stream_url(ask(ws, TOKEN))).path
    # A stream that another account has signed, or nobody, or for another URL.
    assert status(ws, path, other) == 401
    assert status(ws, f"{path}x", TOKEN) == 401
    assert status(ws, path, TOKEN) == 101
    # The same request once more, with its right signature.
    assert status(ws, path, TOKEN) == 401
    path = urlsplit(stream_url(ask(ws, TOKEN))).path
    assert status(ws, path) == 401


def test_a_form_that_was_changed_is_not_signed(signed: tuple[str, ServerState]) -> None:
    ws, _ = signed
    url = ws.replace("ws", "http", 1) + "/v1/telephone/twilio"
    signature = signature_of(TOKEN, url.replace("http", "https", 1), FORM.items())
    headers = {"X-Twilio-Signature": signature}
    assert httpx.post(url, data=FORM | {"From": "+1"}, headers=headers).status_code == 401
    assert httpx.post(url, data=FORM, headers=headers).status_code == 200


def test_a_ticket_opens_only_the_call_that_it_was_made_for(signed: tuple[str, ServerState]) -> None:
    ws, _ = signed
    path = urlsplit(stream_url(ask(ws, TOKEN))).path

    async def main() -> tuple[int, str]:
        async with stream(ws, path, TOKEN) as socket:
            await socket.send(carrier.start(call="CA2"))
            return await end(socket)

    assert asyncio.run(main()) == (1008, "bad_event")


def test_other_carriers_show_an_api_key_in_the_path(signed: tuple[str, ServerState]) -> None:
    ws, state = signed
    assert [status(ws), status(ws, f"{MEDIA}/wrong"), status(ws, f"{MEDIA}/{KEY}")] == [401, 401, 101]
    url = ws.replace("ws", "http", 1)
    wanted = {"session": {"type": "realtime", "instructions": "Sell flowers."}}
    secret = httpx.post(f"{url}/v1/realtime/client_secrets", json=wanted, headers={"Authorization": f"Bearer {KEY}"})

    async def main() -> str:
        async with stream(ws, f"{MEDIA}/{secret.json()['value']}") as socket:
            await socket.send(carrier.start())
            id, live = await live_call(state)
            opened_with = str(bytes(live.wire.opening.session))
            hang_up = f"{url}/v1/realtime/calls/{id}/hangup"
            async with httpx.AsyncClient() as http:
                await http.post(hang_up, headers={"Authorization": f"Bearer {KEY}"})
            assert await end(socket) == (1000, "hung_up")
            return opened_with

    assert "Sell flowers." in asyncio.run(main())
    of_captions = {"session": {"type": "transcription"}}
    secret = httpx.post(
        f"{url}/v1/realtime/client_secrets", json=of_captions, headers={"Authorization": f"Bearer {KEY}"}
    )
    assert status(ws, f"{MEDIA}/{secret.json()['value']}") == 401


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((carrier.start(), carrier.start()), "bad_event"),
        ((carrier.media(b"\xff" * 160),), "bad_event"),
        (("no JSON",), "invalid_json"),
        (("[]",), "invalid_type"),
        ((carrier.start().replace("audio/x-mulaw", "audio/opus"),), "unsupported_format"),
    ],
)
def test_a_stream_that_no_carrier_sends_is_closed(
    messages: tuple[str, ...], expected: str, open_server: tuple[str, ServerState]
) -> None:
    async def main() -> tuple[int, str]:
        async with stream(open_server[0]) as socket:
            for message in messages:
                await socket.send(message)
            return await end(socket)

    assert asyncio.run(main()) == (1008, expected)


def test_a_stream_without_a_call_is_closed_after_a_while() -> None:
    async def main(ws: str) -> tuple[int, str]:
        async with stream(ws) as socket:
            await socket.send(carrier.connected())
            return await end(socket)

    with serving(settings(telephone_start_s=0.3)) as (ws, _, _):
        assert asyncio.run(main(ws)) == (1008, "config_timeout")


def test_without_room_the_caller_hears_that_the_line_is_busy(open_server: tuple[str, ServerState]) -> None:
    ws, state = open_server
    assert stream_url(ask(ws, "any"))
    state.admission.draining = True
    try:
        busy = ask(ws, "any")
    finally:
        state.admission.draining = False
    assert (busy.status_code, '<Reject reason="busy"/>' in busy.text) == (200, True)


def test_behind_a_proxy_the_public_url_counts() -> None:
    base = "https://voice.example.com/antiphon"
    with serving(settings(twilio_auth_token=TOKEN, telephone_url=base)) as (ws, _, _):
        url = ws.replace("ws", "http", 1) + "/v1/telephone/twilio"
        signature = signature_of(TOKEN, f"{base}:443/v1/telephone/twilio", FORM.items())
        assert httpx.post(url, data=FORM, headers={"X-Twilio-Signature": signature}).status_code == 401
        spelled = "https://voice.example.com:443/antiphon/v1/telephone/twilio"
        signature = signature_of(TOKEN, spelled, FORM.items())
        answer = httpx.post(url, data=FORM, headers={"X-Twilio-Signature": signature})
        assert stream_url(answer).startswith(f"wss://voice.example.com/antiphon{MEDIA}/")
        # Without API keys, nobody else may open a stream.
        assert status(ws) == 401


def test_an_application_follows_a_call_and_takes_part_in_it(open_server: tuple[str, ServerState]) -> None:
    ws, _ = open_server
    url = ws.replace("ws", "http", 1)

    async def main() -> dict[str, Any]:
        async with stream(ws) as socket, httpx.AsyncClient() as http:
            await socket.send(carrier.start(order="17"))
            shown: dict[str, Any] = {"data": []}
            while not shown["data"]:
                shown = (await http.get(f"{url}/v1/telephone/calls")).json()
            (call,) = shown["data"]
            async with connect(f"{ws}/v1/realtime?call_id={call['id']}") as app:
                await app.send(
                    '{"type": "session.update", "session": {"type": "realtime", "instructions": "Be kind."}}'
                )
                # The first audio lets the session begin.
                await socket.send(carrier.media(to_ulaw(np.zeros(160, np.float32))))
                assert (await until(app, "session.updated"))["session"]["instructions"] == "Be kind."
                for key in "5#":
                    await socket.send(carrier.dtmf(key))
                assert (await until(app, "input_audio_buffer.dtmf_event_received"))["event"] == "5"
                said = await until(app, "response.output_audio_transcript.done")
                assert "5#" in said["transcript"]
                await socket.send(carrier.stop())
                await end(app)
                assert (app.close_code, app.close_reason) == (1000, "caller_hung_up")
            await end(socket)
        return call

    call = asyncio.run(main())
    assert {name: call[name] for name in ("object", "carrier", "carrier_id", "parameters")} == {
        "object": "telephone.call",
        "carrier": "twilio",
        "carrier_id": "CA1",
        "parameters": {"order": "17"},
    }
    with pytest.raises(InvalidStatus):
        asyncio.run(open_call(ws, call["id"]))


def test_the_history_keeps_the_words_that_a_caller_heard_before_a_key(open_server: tuple[str, ServerState]) -> None:
    ws, state = open_server

    async def main() -> tuple[float, int]:
        async with stream(ws) as socket:
            await socket.send(carrier.start())
            id, _ = await live_call(state)
            async with connect(f"{ws}/v1/realtime?call_id={id}") as app:
                for message in spoken(1, 9):
                    await socket.send(message)
                played_s = await answered(socket, key_after_s=1.2)
                cut = await until(app, "conversation.item.truncated")
                await app.send(json.dumps({"type": "conversation.item.retrieve", "item_id": cut["item_id"]}))
                item = (await until(app, "conversation.item.retrieved"))["item"]
            return played_s, len(item["content"][0]["transcript"].split())

    played_s, num_words = asyncio.run(main())
    assert 1.1 < played_s < 2.0
    # Each word has 300 ms.
    assert abs(num_words - played_s / 0.3) <= 1.1


async def open_call(ws: str, call_id: str) -> None:
    async with connect(f"{ws}/v1/realtime?call_id={call_id}"):
        return
