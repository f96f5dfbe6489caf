"""Every route of a host, with every kind of key: which keys open it, and that no key sees the data of another.

The table has a row for each route of the application, and a new route needs a new row. Alice has a session, a call, a
voice, a client secret and a recording. Every other key requests them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import websockets
from starlette.routing import Route, WebSocketRoute

from antiphon.loading.loaded import LoadedModels
from antiphon.server.credentials import Caller
from antiphon.server.routes.table import ROUTES
from antiphon.server.state import ServerState
from antiphon.server.watches import as_host
from antiphon.settings import Settings
from antiphon.store.sessions import open_store
from antiphon.store.voices import StoredSpeaker
from tests.attack.doors import UPGRADE, as_key
from tests.server.clients import Wire
from tests.server.routes.test_calls import call
from tests.server.scripted import serving
from tests.traces import models

# Every piece of Alice's data contains this word. No response to another key may contain it.
MARK = "blackbird"
VOICE = "of-alice"
# Alice comes last, because her own requests end her session and her call.
CREDENTIALS = ("none", "wrong", "metrics", "internal", "captions", "conversation", "bob", "alice")
EVERYBODY = CREDENTIALS


@dataclass(frozen=True)
class Row:
    """The expected status of one route for each credential.

    This is `status` for those in `opens`; otherwise the value in `others`, or 401. `path` is the path to request, if it
    differs from the route's own; `{id}` stands for Alice's id. `options` are httpx's, for the body. `tells_bob` is text
    that Bob's response has to contain.
    """

    status: int
    opens: tuple[str, ...] = ("alice", "bob")
    others: Mapping[str, int] = field(default_factory=dict)
    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    tells_bob: str = ""

    def statuses(self) -> dict[str, int]:
        return {name: self.others.get(name, self.status if name in self.opens else 401) for name in CREDENTIALS}


CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
SPEECH = {"input": "hello", "voice": VOICE, "response_format": "pcm"}
UPLOAD = {"name": "another", "consent": "yes", "speaker_embedding": "[0.1, 0.2]"}
OFFER = {"content": "v=0", "headers": {"content-type": "application/sdp"}}
FILE = {"files": {"file": ("a.wav", b"RIFF")}}
TALKS = ("alice", "bob", "conversation")
GOOGLE = "/ws/google.ai.generativelanguage"
TABLE: dict[tuple[str, str], Row] = {
    ("GET", "/"): Row(200, EVERYBODY),
    ("GET", "/web/{name}"): Row(200, EVERYBODY, path="/web/app.js"),
    ("GET", "/web/client/{name}"): Row(200, EVERYBODY, path="/web/client/antiphon.js"),
    ("GET", "/health"): Row(200, EVERYBODY),
    ("GET", "/ready"): Row(200, EVERYBODY),
    ("GET", "/metrics"): Row(200, ("metrics",)),
    ("POST", "/internal/drain"): Row(202, ("internal",)),
    ("GET", "/internal/hosts"): Row(200, ("internal",)),
    ("DELETE", "/internal/hosts/{name:path}"): Row(200, ("internal",), path="/internal/hosts/nobody"),
    # The profiler is turned off.
    ("POST", "/start_profile"): Row(404),
    ("POST", "/stop_profile"): Row(404),
    ("GET", "/v1/models"): Row(200),
    ("GET", "/v1/audio/models"): Row(200),
    ("GET", "/v1/models/{id:path}"): Row(200, path="/v1/models/default"),
    ("POST", "/v1/audio/transcriptions"): Row(400, options=FILE),
    ("POST", "/v1/audio/translations"): Row(400, options=FILE),
    ("POST", "/v1/chat/completions"): Row(200, options={"json": CHAT}),
    ("POST", "/v1/audio/speech"): Row(200, others={"bob": 404}, options={"json": SPEECH}),
    # Each item of a batch has its own status.
    ("POST", "/v1/audio/speech/batch"): Row(
        200, options={"json": {"items": [{"input": "hello"}], "voice": VOICE}}, tells_bob="voice_not_found"
    ),
    ("GET", "/v1/audio/voices"): Row(200),
    ("POST", "/v1/audio/voices"): Row(200, options={"data": UPLOAD}),
    # ElevenLabs' clients use the same voices, until they are deleted.
    ("GET", "/v1/voices/{voice_id}"): Row(200, others={"bob": 404}, path=f"/v1/voices/{VOICE}"),
    ("POST", "/v1/voices/add"): Row(400, options={"data": {"name": "more"}}),
    ("DELETE", "/v1/voices/{voice_id}"): Row(200, path="/v1/voices/another"),
    **{
        ("POST", f"/v1/text-to-speech/{{voice_id}}{end}"): Row(
            200, others={"bob": 404}, path=f"/v1/text-to-speech/{VOICE}{end}", options={"json": {"text": "hello"}}
        )
        for end in ("", "/with-timestamps", "/stream", "/stream/with-timestamps")
    },
    ("DELETE", "/v1/audio/voices/{name:path}"): Row(200, others={"bob": 404}, path=f"/v1/audio/voices/{VOICE}"),
    ("GET", "/v1/speakers"): Row(200),
    # There is no speaker model.
    ("POST", "/v1/speakers"): Row(404),
    ("DELETE", "/v1/speakers/{name:path}"): Row(200, others={"bob": 404}, path=f"/v1/speakers/{VOICE}"),
    ("GET", "/v1/voices"): Row(200),
    ("WS", "/v1/audio/speech/stream"): Row(101),
    ("WS", "/v1/video/chat/stream"): Row(101),
    ("POST", "/v1/realtime/calls"): Row(400, (*TALKS, "captions"), options=OFFER),
    ("POST", "/v1/realtime/calls/{id}/hangup"): Row(200, others={"bob": 404}, path="/v1/realtime/calls/{id}/hangup"),
    ("POST", "/v1/realtime/client_secrets"): Row(200, options={"json": {}}),
    ("POST", "/v1/realtime/sessions"): Row(200, options={"json": {}}),
    # No call of Alice's waits for an application, and hers is no telephone call.
    **{
        ("POST", f"/v1/realtime/calls/{{id}}/{what}"): Row(404, path=f"/v1/realtime/calls/{{id}}/{what}")
        for what in ("accept", "reject", "refer")
    },
    ("GET", "/v1/telephone/calls"): Row(200),
    ("POST", "/v1/telephone/calls"): Row(400, options={"json": {"to": "+1"}}),
    ("POST", "/v1/telephone/twilio"): Row(200),
    ("WS", "/v1/telephone/media"): Row(101, TALKS),
    ("WS", "/v1/telephone/media/{key}"): Row(101, TALKS, path="/v1/telephone/media/wrong"),
    ("WS", "/v1/realtime"): Row(101, (*TALKS, "captions")),
    ("WS", "/realtime"): Row(101, (*TALKS, "captions")),
    ("WS", "/v1/duplex"): Row(101, TALKS),
    ("WS", "/v1/omni"): Row(101),
    ("WS", "/ws/duplex"): Row(101),
    # Of other vendors' clients.
    ("GET", "/v2/voices"): Row(200),
    **{
        ("WS", f"/v1/text-to-speech/{{voice_id}}/{end}"): Row(101, path=f"/v1/text-to-speech/{VOICE}/{end}")
        for end in ("stream-input", "multi-stream-input")
    },
    ("POST", "/v1/speech-to-text"): Row(400, options=FILE),
    ("WS", "/v1/speech-to-text/realtime"): Row(101),
    ("POST", "/tts/bytes"): Row(400, options={"json": {}}),
    ("POST", "/tts/sse"): Row(400, options={"json": {}}),
    ("WS", "/tts/websocket"): Row(101),
    ("WS", "/stt/websocket"): Row(101),
    ("WS", "/stt/turns/websocket"): Row(101),
    ("POST", "/v1/listen"): Row(400, options={"content": b"RIFF"}),
    ("POST", "/v1/speak"): Row(200, options={"json": {"text": "hello"}}),
    ("WS", "/v1/speak"): Row(101),
    ("WS", "/v1/listen"): Row(101),
    ("WS", "/v2/listen"): Row(101),
    ("WS", "/v1/agent/converse"): Row(101),
    ("WS", "/v1/convai/conversation"): Row(101, TALKS),
    **{
        ("GET", f"/v1/convai/conversation/{name}"): Row(200, path=f"/v1/convai/conversation/{name}?agent_id=any")
        for name in ("get-signed-url", "get_signed_url")
    },
    ("WS", "/v3/ws"): Row(101),
    ("WS", "/v1/live/sessions"): Row(101, TALKS),
    **{
        ("WS", f"{GOOGLE}.{version}.GenerativeService.BidiGenerateContent{end}"): Row(101, TALKS)
        for version in ("v1", "v1alpha", "v1beta")
        for end in ("", "Constrained")
    },
}


class CloningVoice(models.Voice):
    def __init__(self) -> None:
        super().__init__()
        self.profile = replace(self.profile, clones_voices=True)


@dataclass(frozen=True)
class Host:
    ws: str
    state: ServerState

    @property
    def url(self) -> str:
        return self.ws.replace("ws", "http", 1)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    settings = Settings()
    settings = replace(
        settings,
        server=replace(
            settings.server,
            api_keys=("alice", "bob"),
            metrics_key="metrics",
            record=str(tmp_path / "recordings"),
        ),
        cluster=replace(settings.cluster, internal_key="internal"),
        models=replace(settings.models, home=str(tmp_path)),
        speech=replace(settings.speech, voices_per_key=3, speakers_per_key=3),
    )
    loaded = LoadedModels(
        models.Ears(),
        models.Detector(),
        models.Judge(),
        models.Writer(),
        CloningVoice(),
        models.Reader(),
        None,
        None,
        ("ears", "writer", "voice"),
        (),
    )
    store = open_store(str(tmp_path / "state"), 3600, 1000.0)
    with serving(settings, models=loaded) as (ws, state, _):
        state.sessions.store = store
        store.renew(as_host(state))
        yield Host(ws, state)
    store.close()


@dataclass
class Alices:
    """Alice's data. `hidden` has the texts that no other key may see, each by the part that a request may contain."""

    wire: Wire
    session_id: str
    token: str
    item_id: str
    response_id: str
    call_id: str
    secrets: dict[str, str]

    def seen_in(self, answer: str, request: str) -> list[str]:
        """Return the texts of hers that are in a response but were not in the request."""
        of_hers = [MARK, self.session_id, self.token, self.item_id, self.response_id, self.call_id, VOICE]
        return [mark for mark in (*of_hers, *self.secrets.values()) if mark in answer and mark not in request]


@asynccontextmanager
async def alice_has(host: Host) -> AsyncIterator[Alices]:
    """Yield Alice's data: a session with an item and a response, a call, a voice and two client secrets."""
    key = as_key("alice")
    async with httpx.AsyncClient(base_url=host.url, headers=key, timeout=30) as client:
        form = {"name": VOICE, "consent": MARK, "ref_text": MARK, "speaker_embedding": "[0.1, 0.2]"}
        assert (await client.post("/v1/audio/voices", data=form)).status_code == 200
        speaker = StoredSpeaker(VOICE, MARK, int(time.time()), "none", (0.1, 0.2), 5.0)
        host.state.remembered_speakers(Caller("alice")).add(speaker)
        secrets = {}
        for name, kind in (("captions", "transcription"), ("conversation", "realtime")):
            made = await client.post("/v1/realtime/client_secrets", json={"session": {"type": kind}})
            secrets[name] = made.json()["value"]
    url = f"{host.ws}/v1/realtime?resume=1"
    async with (
        websockets.connect(url, max_size=None, additional_headers=key) as socket,
        call(host, np.zeros(1600, np.float32), headers=key) as called,  # type: ignore[arg-type]
    ):
        wire = Wire(socket)
        created = await wire.read()
        await wire.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        content = [{"type": "input_text", "text": f"hello {MARK}"}]
        await wire.say("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        item_id = (await wire.until("conversation.item.done"))["item"]["id"]
        await wire.say("response.create")
        response_id = (await wire.until("response.done"))["response"]["id"]
        call_id = called.seen[0]["session"]["id"]
        yield Alices(wire, created["session"]["id"], created["resume_token"], item_id, response_id, call_id, secrets)


def test_when_a_route_is_new_then_it_has_a_row_in_the_table() -> None:
    """Compares the path and method of each route. HEAD is tested with GET."""
    found = {("WS", route.path) for route in ROUTES if isinstance(route, WebSocketRoute)}
    for route in ROUTES:
        if isinstance(route, Route):
            found |= {(method, route.path) for method in (route.methods or set()) - {"HEAD"}}
    assert found == TABLE.keys()


async def asked(
    client: httpx.AsyncClient, method: str, path: str, headers: dict[str, str], options: Mapping[str, Any]
) -> tuple[int, str]:
    """Send a request. Return its status and body; for a WebSocket, the status of its upgrade and its first frames."""
    if method == "WS":
        async with client.stream("GET", path, headers=UPGRADE | headers) as answer:
            if answer.status_code == 101:
                return 101, ""
            return answer.status_code, (await answer.aread()).decode()
    options = dict(options)
    headers = headers | options.pop("headers", {})
    answer = await client.request(method, path, headers=headers, **options)
    return answer.status_code, f"{answer.headers}\n{answer.text}"


@pytest.mark.slow
def test_every_route_opens_to_its_keys_alone_and_no_answer_has_anything_of_another_keys(host: Host) -> None:
    async def main() -> None:
        async with (
            alice_has(host) as hers,
            httpx.AsyncClient(base_url=host.url, timeout=30) as client,
        ):
            keys = {name: as_key(hers.secrets.get(name, name)) for name in CREDENTIALS} | {"none": {}}
            # Alice's data exists until Alice ends it.
            found: dict[tuple[str, str], dict[str, int]] = {place: {} for place in TABLE}
            seen: list[tuple[str, str, list[str]]] = []
            for name in CREDENTIALS:
                for (method, route), row in TABLE.items():
                    path = (row.path or route).replace("{id}", hers.call_id)
                    status, answer = await asked(client, method, path, keys[name], row.options)
                    found[method, route][name] = status
                    if name != "alice" and (marks := hers.seen_in(answer, f"{path} {row.options}")):
                        seen.append((name, path, marks))
                    assert name != "bob" or row.tells_bob in answer, answer
                    if method == "GET" and name in ("none", "alice"):
                        status, answer = await asked(client, "HEAD", path, keys[name], row.options)
                        assert (status, answer.partition("\n")[2]) == (found[method, route][name], ""), path
            assert seen == []
            other = {place: found[place] for place, row in TABLE.items() if found[place] != row.statuses()}
            assert other == {}, "\n".join(f"{place}: {statuses}" for place, statuses in other.items())
            await still_there(hers)

    asyncio.run(main())


async def still_there(hers: Alices) -> None:
    """Check that Alice's session still has its history, and still answers."""
    await hers.wire.say("conversation.item.retrieve", item_id=hers.item_id)
    item = (await hers.wire.until("conversation.item.retrieved"))["item"]
    assert item["content"][0]["text"] == f"hello {MARK}"
    await hers.wire.say("response.create")
    assert (await hers.wire.until("response.done"))["response"]["status"] == "completed"


# Paths at which the session of a client secret can be resumed.
OPENED_BY_A_SECRET = ("/v1/realtime", "/realtime", "/v1/duplex")
RESUMES = (*OPENED_BY_A_SECRET, "/v1/audio/speech/stream", "/v1/video/chat/stream")


@pytest.mark.parametrize("path", RESUMES)
def test_when_another_key_resumes_a_session_with_its_very_token_then_there_is_no_such_session(
    host: Host, path: str
) -> None:
    async def main() -> None:
        async with alice_has(host) as hers:
            # The same with the client secret of Alice's page, which does not resume a session that her API key opened.
            for key in ("bob", hers.secrets["conversation"]):
                url = f"{host.ws}{path}?resume={hers.session_id}"
                ask = {"type": "session.resume", "session_id": hers.session_id, "resume_token": hers.token}
                if key != "bob" and path not in OPENED_BY_A_SECRET:
                    with pytest.raises(websockets.InvalidStatus, match="401"):
                        await websockets.connect(url, additional_headers=as_key(key))
                    continue
                async with websockets.connect(url, additional_headers=as_key(key)) as socket:
                    await socket.send(json.dumps(ask))
                    frame = json.loads(await socket.recv())
                error = frame.get("error") if isinstance(frame.get("error"), dict) else frame
                assert error["code"] == "unknown_session", frame
                assert hers.seen_in(json.dumps(frame), json.dumps(ask)) == []
            await still_there(hers)

    asyncio.run(main())


def test_when_a_session_names_what_another_has_then_it_is_not_found_and_stays_as_it_is(host: Host) -> None:
    async def main() -> None:
        async with alice_has(host) as hers:
            url = f"{host.ws}/v1/realtime?resume=1"
            async with websockets.connect(url, max_size=None, additional_headers=as_key("bob")) as socket:
                wire = Wire(socket)
                await wire.read()
                item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
                reference = {"type": "item_reference", "id": hers.item_id}
                for kind, fields in (
                    ("conversation.item.retrieve", {"item_id": hers.item_id}),
                    ("conversation.item.delete", {"item_id": hers.item_id}),
                    ("conversation.item.truncate", {"item_id": hers.item_id, "content_index": 0, "audio_end_ms": 0}),
                    ("conversation.item.create", {"item": item, "previous_item_id": hers.item_id}),
                    ("response.create", {"response": {"conversation": "none", "input": [reference]}}),
                    ("response.cancel", {"response_id": hers.response_id}),
                    ("session.update", {"session": {"type": "realtime", "audio": {"output": {"voice": VOICE}}}}),
                    ("session.resume", {"session_id": hers.session_id, "resume_token": hers.token}),
                ):
                    await wire.say(kind, **fields)
                    reported = await wire.until(lambda frame: frame["type"] in ("error", "response.done"))
                    error = reported.get("error") or reported["response"]["status_details"]["error"]
                    assert error["type"] == "invalid_request_error", (kind, reported)
                    assert [frame for frame in wire.seen if hers.seen_in(json.dumps(frame), json.dumps(fields))] == []
                    wire.seen.clear()
            await still_there(hers)
            assert hers.session_id in host.state.sessions.resumable
            assert hers.call_id in host.state.sessions.calls

    asyncio.run(main())


def test_when_a_secret_is_used_up_or_of_another_kind_then_no_other_secret_is_told(host: Host) -> None:
    """A client secret opens only its own session, and no response contains the key or another secret."""

    async def main() -> None:
        async with alice_has(host) as hers:
            for kind, secret in hers.secrets.items():
                query = "?intent=transcription" if kind == "captions" else ""
                async with websockets.connect(
                    f"{host.ws}/v1/realtime{query}", additional_headers=as_key(secret)
                ) as socket:
                    frame = str(await socket.recv())
                    assert json.loads(frame)["type"] == "session.created"
                assert hers.seen_in(frame, "") == []
                assert '"alice"' not in frame

    asyncio.run(main())
