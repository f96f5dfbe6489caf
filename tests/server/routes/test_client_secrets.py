"""Short-lived keys: which sessions they open, for how long, and which requests they do not authorize."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
import websockets

from tests.conftest import SMALL, VOICE, Process, Serve

KEY = {"Authorization": "Bearer long-key"}


@pytest.fixture(scope="module")
def locked(serve: Serve) -> Process:
    return serve("--language-model", SMALL, "--synthesizer", VOICE, "--api-key", "long-key")


def post(server: Process, body: Any, path: str = "client_secrets", headers: dict[str, str] = KEY) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/realtime/{path}", json=body, headers=headers, timeout=30)


def created(server: Process, key: str, query: str = "") -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        protocols: Any = ["realtime", f"openai-insecure-api-key.{key}"]
        async with websockets.connect(f"{server.ws}/v1/realtime{query}", subprotocols=protocols) as socket:
            assert socket.subprotocol == "realtime"
            return dict(json.loads(await socket.recv()))

    return asyncio.run(main())


def test_when_a_key_is_used_then_it_opens_the_session_it_was_made_for(locked: Process) -> None:
    asked = {"type": "realtime", "model": "gpt-realtime", "instructions": "Be kind.", "output_modalities": ["text"]}
    made = post(locked, {"session": asked, "expires_after": {"anchor": "created_at", "seconds": 60}}).json()
    assert made["value"].startswith("ek_")
    assert made["session"]["instructions"] == "Be kind."
    session = created(locked, made["value"])["session"]
    assert (session["type"], session["model"], session["output_modalities"]) == ("realtime", "gpt-realtime", ["text"])
    transcription = post(locked, {"session": {"type": "transcription"}}).json()
    assert created(locked, transcription["value"])["session"]["type"] == "transcription"


def test_when_the_beta_asks_then_the_session_has_its_key_inside(locked: Process) -> None:
    made = post(locked, {"model": "gpt-4o-realtime-preview", "voice": "alloy", "instructions": "x"}, "sessions").json()
    assert made["instructions"] == "x"
    assert created(locked, made["client_secret"]["value"])["session"]["instructions"] == "x"


def test_when_a_key_is_short_lived_or_unknown_then_it_makes_no_key_and_opens_no_other_path(locked: Process) -> None:
    short = post(locked, {}).json()["value"]
    assert post(locked, {}, headers={"Authorization": f"Bearer {short}"}).status_code == 401
    assert post(locked, {}, headers={}).status_code == 401
    bearer = {"Authorization": f"Bearer {short}"}
    assert httpx.get(f"{locked.url}/v1/models", headers=bearer).status_code == 401
    with pytest.raises(websockets.InvalidStatus):
        created(locked, "ek_invented")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"session": {"type": "realtime", "what": 1}}, 400),
        ({"session": {"type": "song"}}, 400),
        ({"session": {"type": "realtime", "model": "nonsense"}}, 404),
        ({"expires_after": {"seconds": 5}}, 400),
        ({"expires_after": {"seconds": 7201}}, 400),
        ({"what": 1}, 400),
        ([], 400),
    ],
)
def test_when_a_session_cannot_be_opened_then_no_key_is_made(locked: Process, body: Any, status: int) -> None:
    assert post(locked, body).status_code == status


def test_when_the_stock_client_asks_then_it_gets_a_key(locked: Process) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="long-key") as client:
        made = client.realtime.client_secrets.create(session={"type": "realtime", "model": "gpt-realtime"})
    assert made.value.startswith("ek_")
    assert made.session.type == "realtime"
