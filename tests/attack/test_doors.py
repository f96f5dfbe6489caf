"""Who may use a server: which web pages, and what an empty key or a client secret gives access to."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.attack.doors import as_key, upgrade
from tests.conftest import Process, Serve
from tests.forking import run
from tests.server.clients import connect

SOCKETS = ("/v1/realtime", "/v1/realtime?duplex=1", "/v1/duplex", "/v1/omni", "/v1/audio/speech/stream")
EVIL = "https://evil.example"


@pytest.mark.parametrize("path", SOCKETS)
def test_when_a_page_of_another_site_opens_a_socket_then_it_is_refused(server: Process, path: str) -> None:
    assert upgrade(server, path, Origin=EVIL) == 403
    assert upgrade(server, path, Origin="null") == 403
    # A page whose own host name resolves to this machine (DNS rebinding).
    assert upgrade(server, path, Host="rebind.evil.example") == 403
    assert upgrade(server, path, Host="rebind.evil.example", Origin="http://rebind.evil.example") == 403


@pytest.mark.parametrize("media_type", ["text/plain", "multipart/form-data; boundary=B"])
@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/voices", "/v1/chat/completions"])
def test_when_a_page_of_another_site_posts_without_a_preflight_then_nothing_is_done(
    server: Process, path: str, media_type: str
) -> None:
    answer = httpx.post(f"{server.url}{path}", headers={"Origin": EVIL, "Content-Type": media_type}, content=b"{}")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize("host", ["rebind.evil.example", "rebind.evil.example:8000", "localhost.evil.example", "[::1"])
def test_when_a_name_of_another_site_resolves_to_this_machine_then_nothing_is_told(server: Process, host: str) -> None:
    for path in ("/v1/models", "/v1/audio/voices", "/health", "/"):
        answer = httpx.get(f"{server.url}{path}", headers={"Host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_when_the_servers_own_page_calls_then_it_is_served_under_each_name_of_the_machine(
    server: Process, name: str
) -> None:
    host = f"{name}:{urlsplit(server.url).port}"
    own = {"Host": host, "Origin": f"http://{host.lower()}"}
    assert httpx.get(f"{server.url}/v1/models", headers=own).status_code == 200
    assert upgrade(server, "/v1/realtime", **own) == 101
    # Another server on this machine is another site.
    assert upgrade(server, "/v1/realtime", Host=host, Origin="http://localhost:3000") == 403


def test_when_a_client_is_no_browser_then_it_needs_no_origin(server: Process) -> None:
    assert httpx.get(f"{server.url}/v1/models").status_code == 200
    assert upgrade(server, "/v1/realtime") == 101


def test_when_origins_and_hosts_are_allowed_then_they_are_served_and_no_others(serve: Serve) -> None:
    server = serve("--cors-origin", "https://app.example", "--allowed-host", "speech.example")
    assert upgrade(server, "/v1/realtime", Origin="https://app.example") == 101
    assert upgrade(server, "/v1/realtime", Host="speech.example", Origin="https://speech.example") == 101
    assert upgrade(server, "/v1/realtime", Host="speech.example", Origin=EVIL) == 403
    assert upgrade(server, "/v1/realtime", Host="other.example") == 403
    answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.server
@pytest.mark.parametrize("given", [("--api-key", ""), ("--api-key", "key", "--api-key", " "), ()])
def test_when_a_key_is_empty_then_the_server_does_not_start_open(given: tuple[str, ...]) -> None:
    ended = run("antiphon", "serve", "--port", "0", *given, env={} if given else {"ANTIPHON_API_KEYS": ""})
    assert ended.returncode == 2
    assert "a value is empty" in ended.stderr


def test_when_no_key_is_set_then_the_log_says_who_may_use_the_server(server: Process) -> None:
    assert "no API key is set: every program on this machine may use this server" in server.log.read_text()


def secret_for(server: Process, session: dict[str, Any], key: str = "alice") -> str:
    made = httpx.post(
        f"{server.url}/v1/realtime/client_secrets", json={"session": session}, headers=as_key(key), timeout=30
    )
    return str(made.json()["value"])


def test_when_a_session_is_no_call_then_nobody_learns_its_id_or_hangs_it_up(server: Process) -> None:
    async def main() -> None:
        async with connect(server.ws) as wire, httpx.AsyncClient(base_url=server.url) as other:
            mine = (await wire.read())["session"]["id"]
            for path in ("/health", "/ready", "/metrics"):
                assert mine not in (await other.get(path)).text
            hung_up = await other.post(f"/v1/realtime/calls/{mine}/hangup")
            assert (hung_up.status_code, hung_up.json()["error"]["code"]) == (404, "call_not_found")
            await wire.say("nonsense")
            assert (await wire.read())["type"] == "error"

    asyncio.run(main())


TALKING = ("/v1/realtime", "/v1/duplex")
HEARING = ("/v1/realtime", "/v1/realtime?intent=transcription")
ALL_SOCKETS = (
    *("/v1/realtime", "/v1/realtime?intent=transcription", "/v1/realtime?dialect=vllm", "/v1/realtime?duplex=1"),
    *("/v1/realtime?mode=audio", "/v1/duplex", "/v1/omni", "/ws/duplex"),
    *("/v1/audio/speech/stream", "/v1/video/chat/stream"),
)


@pytest.mark.parametrize(
    ("session", "doors"),
    [({"type": "realtime"}, {*TALKING, "/v1/realtime?duplex=1"}), ({"type": "transcription"}, {*HEARING})],
)
def test_when_a_client_secret_is_for_one_kind_of_session_then_every_other_door_answers_401(
    two_keys: Process, session: dict[str, Any], doors: set[str]
) -> None:
    secret = as_key(secret_for(two_keys, session))
    assert {path: upgrade(two_keys, path, **secret) for path in ALL_SOCKETS} == {
        path: 101 if path in doors else 401 for path in ALL_SOCKETS
    }
    for path in ("/v1/models", "/v1/audio/voices"):
        assert httpx.get(f"{two_keys.url}{path}", headers=secret).status_code == 401
    for path in ("/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/realtime/client_secrets"):
        assert httpx.post(f"{two_keys.url}{path}", headers=secret, json={}).status_code == 401


def test_when_a_secret_for_captions_offers_a_call_with_a_conversation_then_it_answers_401(two_keys: Process) -> None:
    secret = as_key(secret_for(two_keys, {"type": "transcription"}))
    form = {"sdp": (None, "v=0"), "session": (None, '{"type": "realtime"}')}
    answer = httpx.post(f"{two_keys.url}/v1/realtime/calls", headers=secret, files=form)
    assert answer.status_code == 401


def test_when_a_secret_resumes_a_session_that_the_key_opened_then_there_is_no_such_session(two_keys: Process) -> None:
    secret = secret_for(two_keys, {"type": "realtime"})

    async def resumed(key: str, session: dict[str, Any]) -> dict[str, Any]:
        ask = {"type": "session.resume", "session_id": session["id"], "resume_token": session["resume_token"]}
        query = f"?resume={session['id']}"
        async with connect(two_keys.ws, query, additional_headers=as_key(key)) as wire:
            await wire.socket.send(json.dumps(ask))
            return await wire.read()

    async def main() -> None:
        async with connect(two_keys.ws, "?resume=1", additional_headers=as_key("alice")) as wire:
            mine = await wire.read()
        for key in ("bob", secret):
            refused = await resumed(key, mine)
            assert refused["error"]["code"] == "unknown_session"
        async with connect(two_keys.ws, "?resume=1", additional_headers=as_key(secret)) as wire:
            granted = await wire.read()
        # A browser that comes back has a new secret for the same session.
        again = secret_for(two_keys, {"type": "realtime"})
        assert (await resumed(again, granted))["type"] == "session.resumed"

    asyncio.run(main())
