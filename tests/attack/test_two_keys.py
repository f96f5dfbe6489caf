"""Two keys: neither can see, change or infer the data of the other."""

from __future__ import annotations

import asyncio
import stat
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from tests.attack.doors import as_key, upgrade
from tests.conftest import Process
from tests.server.clients import connect

ALICE, BOB = as_key("alice"), as_key("bob")


def upload(server: Process, key: dict[str, str], name: str, consent: str) -> httpx.Response:
    form = {"name": name, "consent": consent, "ref_text": f"{consent} text", "speaker_embedding": "[0.1, 0.2]"}
    return httpx.post(f"{server.url}/v1/audio/voices", data=form, headers=key, timeout=30)


def listed(server: Process, key: dict[str, str]) -> list[tuple[str, str]]:
    voices = httpx.get(f"{server.url}/v1/audio/voices", headers=key).json()["uploaded_voices"]
    return [(v["name"], v["consent"]) for v in voices]


def spoken_with(server: Process, key: dict[str, str], voice: str) -> str:
    """Return the error for speech with an uploaded voice, which the loaded model cannot use."""
    body = {"input": "Hi", "voice": voice}
    return str(httpx.post(f"{server.url}/v1/audio/speech", json=body, headers=key).json()["error"]["code"])


def test_when_another_key_uses_the_name_of_a_voice_then_it_has_a_voice_of_its_own(
    two_keys: Process, home: Path
) -> None:
    assert upload(two_keys, ALICE, "Grandmother", "alice").status_code == 200
    assert listed(two_keys, BOB) == []
    assert spoken_with(two_keys, ALICE, "grandmother") == "voice_not_supported"
    assert spoken_with(two_keys, BOB, "grandmother") == spoken_with(two_keys, BOB, "nobody") == "voice_not_found"
    url = f"{two_keys.url}/v1/audio/voices/Grandmother"
    assert httpx.delete(url, headers=BOB).status_code == 404
    assert upload(two_keys, BOB, "grandmother", "bob").status_code == 200
    assert (listed(two_keys, ALICE), listed(two_keys, BOB)) == (
        [("Grandmother", "alice")],
        [("grandmother", "bob")],
    )
    assert httpx.delete(url, headers=BOB).status_code == 200
    assert listed(two_keys, ALICE) == [("Grandmother", "alice")]
    # Other users of the machine cannot read the voices, and the folders' names say nothing about the keys.
    assert stat.S_IMODE((home / "voices").stat().st_mode) == 0o700
    assert not [p for p in (home / "voices").rglob("*") if "alice" in p.name or "grandmother" in p.name.lower()]


def test_when_a_key_has_all_the_voices_it_may_have_then_other_keys_have_theirs(two_keys: Process) -> None:
    for name, _ in listed(two_keys, ALICE):
        httpx.delete(f"{two_keys.url}/v1/audio/voices/{name}", headers=ALICE)
    assert [upload(two_keys, ALICE, f"voice {k}", "yes").status_code for k in range(4)] == [200, 200, 200, 507]
    assert upload(two_keys, ALICE, "voice 0", "again").status_code == 200
    assert upload(two_keys, BOB, "voice 0", "yes").status_code == 200


def cached(server: Process, key: dict[str, str], code: str) -> int:
    """Return the number of cached tokens of a prompt. `code` in it is a guess of a code in another key's prompt."""
    prompt = f"The vault code of the branch in Zurich, which nobody may ever learn from anybody, is {code}."
    body = {"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
    usage = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=key, timeout=60).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_when_a_key_guesses_another_keys_prompt_then_cached_tokens_tell_nothing(two_keys: Process) -> None:
    assert cached(two_keys, ALICE, "7 3 9 1") == 0
    assert cached(two_keys, BOB, "7 3 9 1") == 0
    assert cached(two_keys, ALICE, "7 3 9 1") > 20


def test_when_one_socket_asks_for_400_responses_then_four_are_begun_and_another_key_is_answered(
    two_keys: Process,
) -> None:
    async def main() -> None:
        async with connect(two_keys.ws, additional_headers=ALICE) as wire:
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Count to 1000."}]}
            response = {"conversation": "none", "input": [item], "output_modalities": ["text"]}
            for _ in range(400):
                await wire.say("response.create", response=response)
            refused = [await wire.until("error") for _ in range(380)]
            assert {frame["error"]["code"] for frame in refused} == {"too_many_responses"}
            # The other key has got its answer.
            assert await asyncio.to_thread(cached, two_keys, BOB, "1 2 3 4") >= 0

    asyncio.run(main())


def test_when_a_key_holds_all_its_sessions_then_it_gets_429_and_another_key_is_served(two_keys: Process) -> None:
    async def main() -> None:
        async with AsyncExitStack() as sockets:
            for _ in range(3):
                wire = await sockets.enter_async_context(connect(two_keys.ws, additional_headers=ALICE))
                # The socket has taken its place by the time its session is reported.
                await wire.read()
            assert await asyncio.to_thread(upgrade, two_keys, "/v1/realtime", **ALICE) == 429
            assert await asyncio.to_thread(upgrade, two_keys, "/v1/realtime", **BOB) == 101

    # A request of an earlier test may release its place shortly after its response.
    end_s = time.monotonic() + 30
    while httpx.get(f"{two_keys.url}/ready").json()["sessions"]:
        assert time.monotonic() < end_s
    asyncio.run(main())
