"""Calls that the server makes, and transfers, against an HTTP server that answers as Twilio's API does."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import numpy as np
import pytest
from bench import carrier
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from antiphon.audio.line.g711 import to_ulaw
from antiphon.server.state import ServerState
from antiphon.server.telephone.tickets import signature_of
from tests.server.scripted import Calling, serving
from tests.server.telephone.peers import (
    KEY,
    LIMIT_S,
    Received,
    Site,
    ask,
    end,
    hold,
    settings,
    site,
    stream,
    until,
)

ACCOUNT, TOKEN = "AC" + "0" * 32, "0123456789abcdef0123456789abcdef"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CALLS = f"/2010-04-01/Accounts/{ACCOUNT}/Calls"
Running = tuple[str, ServerState, Site]


def as_twilio(received: Received) -> tuple[int, bytes]:
    if "+4940" in str(parse_qs(received.body.decode())):
        return 400, b'{"code": 21211, "message": "Invalid number.", "status": 400}'
    return 201, b'{"sid": "CA9", "status": "queued"}'


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with site(as_twilio) as api:
        chosen = settings(
            twilio_account=ACCOUNT,
            twilio_auth_token=TOKEN,
            twilio_number="+4930999",
            twilio_api=api.url,
            telephone_dial="+49",
            telephone_transfer=("desk=sip:desk@example.com", "unknown = +4940"),
        )
        with serving(chosen, partner=Calling()) as (ws, state, _):
            yield ws, state, api


def dial(ws: str, **body: Any) -> httpx.Response:
    url = ws.replace("ws", "http", 1) + "/v1/telephone/calls"
    return httpx.post(url, json=body, headers=HEADERS, timeout=LIMIT_S)


def path_in(received: Received) -> str:
    """Return the path of the stream in the TwiML of a call."""
    found = re.search(r'<Stream url="([^"]*)"/>', parse_qs(received.body.decode())["Twiml"][0])
    assert found
    return urlsplit(found[1]).path


def signed(ws: str, path: str) -> dict[str, str]:
    return {"X-Twilio-Signature": signature_of(TOKEN, f"wss://{urlsplit(ws).netloc}{path}")}


def start(call: str = "CA9", account: str = ACCOUNT) -> str:
    return carrier.start(call, account)


def test_a_number_is_called_and_the_application_follows_the_call_and_transfers_it(running: Running) -> None:
    ws, state, api = running
    number = len(api.got)
    made = dial(ws, to="+49 30 111", parameters={"order": "17"}, voicemail="ignore")
    assert made.status_code == 201
    call = made.json()
    assert {name: call[name] for name in call if name != "id"} == {
        "carrier": "twilio",
        "carrier_id": "CA9",
        "from": "+4930999",
        "to": "+4930111",
        "parameters": {"order": "17"},
        "direction": "outgoing",
        "seconds": None,
        "object": "telephone.call",
    }
    asked = api.got[number]
    fields = parse_qs(asked.body.decode())
    assert asked.path == f"{CALLS}.json"
    assert asked.headers["authorization"] == "Basic " + base64.b64encode(f"{ACCOUNT}:{TOKEN}".encode()).decode()
    assert (fields["To"], fields["From"], fields["TimeLimit"]) == (["+4930111"], ["+4930999"], ["1800"])
    path = path_in(asked)

    async def main() -> None:
        async with stream(ws, path, additional_headers=signed(ws, path)) as socket:
            await socket.send(start())
            await socket.send(carrier.media(b"\xff" * 160))
            while not state.sessions.legs:  # noqa: ASYNC110 (it is of the server's event loop)
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(headers=HEADERS) as http:
                (shown,) = (await http.get(ws.replace("ws", "http", 1) + "/v1/telephone/calls")).json()["data"]
            assert (shown["id"], shown["direction"], shown["seconds"]) == (call["id"], "outgoing", 0)
            async with connect(f"{ws}/v1/realtime?call_id={call['id']}", additional_headers=HEADERS) as app:
                caller = asyncio.create_task(hold(socket))
                # The carrier does not know this number.
                await ask(app, 'call transfer {"to": "unknown"}')
                said = await until(app, "response.output_audio_transcript.done")
                assert "Invalid number." in said["transcript"]
                refer = f"{ws.replace('ws', 'http', 1)}/v1/realtime/calls/{call['id']}/refer"
                async with httpx.AsyncClient(headers=HEADERS) as http:
                    refused = await http.post(refer, json={"target_uri": "tel:+1900"})
                assert refused.json()["error"]["code"] == "number_not_allowed"
                await ask(app, 'call transfer {"to": "desk"}')
                await caller
                assert (socket.close_code, socket.close_reason) == (1000, "transfer")
                await end(app)

    asyncio.run(main())
    last = api.got[-1]
    assert last.path == f"{CALLS}/CA9.json"
    twiml = parse_qs(last.body.decode())["Twiml"][0]
    assert twiml == "<Response><Dial><Sip>sip:desk@example.com</Sip></Dial></Response>"
    # The ticket was for one stream.
    with pytest.raises(InvalidStatus):
        asyncio.run(opened(ws, path))


async def opened(ws: str, path: str) -> None:
    async with stream(ws, path, additional_headers=signed(ws, path)):
        return


def test_a_call_begins_with_its_greeting_and_ends_at_an_answering_machine(running: Running) -> None:
    ws, state, api = running
    number = len(api.got)
    assert dial(ws, to="+4930111", voicemail="hang_up", greeting="Good morning.").status_code == 201
    path = path_in(api.got[number])
    times_s = np.arange(4000) / 8000
    data = to_ulaw((0.3 * np.sin(2 * np.pi * 1000 * times_s)).astype(np.float32)) + b"\xff" * 1600

    async def main() -> None:
        async with stream(ws, path, additional_headers=signed(ws, path)) as socket:
            await socket.send(start())
            for at in range(0, len(data), 160):
                await socket.send(carrier.media(data[at : at + 160]))
            assert await end(socket) == (1000, "voicemail")

    asyncio.run(main())
    assert state.models
    model = state.models.conversation_model
    assert isinstance(model, Calling)
    assert any("Good morning." in text for texts in model.asked for text in texts)
    assert not state.sessions.legs


def test_a_stream_of_another_call_or_account_is_closed(running: Running) -> None:
    ws, _, api = running

    async def main(path: str, message: str) -> tuple[int, str]:
        async with stream(ws, path, additional_headers=signed(ws, path)) as socket:
            await socket.send(message)
            return await end(socket)

    for message in (start("CA8"), start(account="AC1")):
        number = len(api.got)
        dial(ws, to="+4930111")
        assert asyncio.run(main(path_in(api.got[number]), message)) == (1008, "bad_event")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "to"),
        ({"to": "the boss"}, "invalid_value", "to"),
        ({"to": "+1900"}, "number_not_allowed", "to"),
        ({"to": "+4940"}, "carrier_refused", None),
        ({"to": "+4930", "via": "pigeon"}, "unsupported_parameter", "via"),
        ({"to": "+4930", "voicemail": "wave"}, "invalid_value", "voicemail"),
        ({"to": "+4930", "parameters": {"a": "x" * 1000}}, "invalid_value", "parameters"),
        ({"to": "+4930", "session": {"type": "transcription"}}, "invalid_value", "session.type"),
        ({"to": "+4930", "session": {"voice": 5}}, "invalid_type", None),
        ({"to": "+4930", "number": "+4930"}, "unknown_parameter", "number"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(body: Any, code: str, param: str | None, running: Running) -> None:
    ws, state, _ = running
    answer = dial(ws, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    if param:
        assert error["param"] == param
    assert not state.sessions.legs


def test_without_an_account_or_with_an_api_that_is_away_nothing_is_called() -> None:
    with serving(settings(telephone_dial="*")) as (ws, _, _):
        assert dial(ws, to="+4930").json()["error"]["code"] == "unsupported_parameter"
        assert httpx.post(ws.replace("ws", "http", 1) + "/v1/telephone/calls", json={}).status_code == 401
    away = {"twilio_account": ACCOUNT, "twilio_auth_token": TOKEN, "twilio_api": "http://127.0.0.1:9"}
    with serving(settings(telephone_dial="*", **away)) as (ws, _, _):
        assert dial(ws, to="+4930").json()["error"]["param"] == "from"
        answer = dial(ws, **{"to": "+4930", "from": "+4931"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "carrier_unreachable")
    # No number is allowed by default.
    with serving(settings(**away)) as (ws, _, _):
        assert dial(ws, **{"to": "+4930", "from": "+4931"}).json()["error"]["code"] == "number_not_allowed"


def test_the_body_of_a_call_is_json() -> None:
    with serving(settings()) as (ws, _, _):
        url = ws.replace("ws", "http", 1) + "/v1/telephone/calls"
        answer = httpx.post(url, content=b"to=+4930", headers=HEADERS)
        assert (answer.status_code, json.loads(answer.content)["error"]["code"]) == (400, "invalid_json")
