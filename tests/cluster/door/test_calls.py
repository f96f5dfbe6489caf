"""WebRTC calls at a door: real peers, and hosts that die during calls."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.cluster.chaos import PACE_S
from tests.cluster.processes import Cluster, Host, cluster, until
from tests.scripted import text
from tests.server.routes.test_calls import SDP, Caller, Microphone, call

pytestmark = pytest.mark.server
# Seconds; longer than any call here.
SILENCE = np.zeros(60 * 16_000, np.float32)
# Opus removes constant signals, and scripted words are constant signals.
TONE = 0.3 * np.sin(np.arange(20_000) * 0.1, dtype=np.float32)
SESSION = {"audio": {"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 300}}}}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster("", "--max-sessions", "50", "--sessions-per-key", "50", num_hosts=2, pace_s=PACE_S) as found:
        found.add_door().wait()
        yield found


@pytest.fixture(scope="module")
def door(hosts: Cluster) -> Host:
    return hosts.doors[0]


def await_idle(hosts: Cluster) -> None:
    until(lambda: sum(host.num_sessions() for host in hosts.hosts) == 0)


def ask(caller: Caller, words: str) -> None:
    content = [{"type": "input_text", "text": words}]
    caller.say("conversation.item.create", item={"type": "message", "role": "user", "content": content})
    caller.say("response.create")


def transcripts(caller: Caller) -> list[str]:
    """Return the transcripts of the completed responses, from the caller's events."""
    done = [e["response"] for e in caller.seen if e["type"] == "response.done"]
    return [r["output"][0]["content"][0]["transcript"] for r in done if r["status"] == "completed"]


def test_when_the_host_dies_while_an_answer_sounds_then_it_is_begun_anew_and_the_call_goes_on(
    hosts: Cluster, door: Host
) -> None:
    async def main() -> Caller:
        async with call(door, SILENCE, SESSION) as caller:
            ask(caller, text(1, 12))
            await caller.until("output_audio_buffer.started")
            dying = max(hosts.hosts, key=Host.num_sessions)
            await asyncio.to_thread(dying.kill)
            first = await caller.until("response.done")
            assert first["response"]["status"] == "cancelled"
            await caller.until("output_audio_buffer.started")
            await caller.until("output_audio_buffer.stopped")
            num_heard = len(caller.heard)
            ask(caller, text(20, 2))
            await caller.until("output_audio_buffer.stopped")
            assert any(loud > 100 for loud in caller.heard[num_heard:])
            await asyncio.to_thread(dying.start)
            await asyncio.to_thread(dying.wait)
        return caller

    caller = asyncio.run(main())
    assert "error" not in caller.kinds
    assert "output_audio_buffer.cleared" in caller.kinds
    assert transcripts(caller) == [text(1, 12), text(20, 2)]
    await_idle(hosts)


def test_when_somebody_speaks_over_an_answer_then_it_is_cut_to_what_was_played(door: Host) -> None:
    async def main() -> Caller:
        async with call(door, SILENCE, SESSION) as caller:
            ask(caller, text(1, 30))
            await caller.until("output_audio_buffer.started")
            await asyncio.sleep(1.0)
            caller.microphone.speak(np.concatenate((TONE, SILENCE)))
            await caller.until("input_audio_buffer.speech_started")
            cleared = await caller.until("output_audio_buffer.cleared")
            cut = await caller.until("conversation.item.truncated")
            assert cleared["response_id"] in {e["response"]["id"] for e in caller.seen if "response" in e}
            # The response ends when the speech begins. Its transcript is what was heard until then, in words of 0.3 s.
            assert 900 < cut["audio_end_ms"] < 6_000
            caller.say("conversation.item.retrieve", item_id=cut["item_id"])
            kept = (await caller.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
            assert 2 <= len(kept.split()) < 25
        return caller

    caller = asyncio.run(main())
    assert "error" not in caller.kinds
    assert not {"output_audio_buffer.ducked", "response.output_audio.delta"} & set(caller.kinds)


def test_when_the_caller_clears_the_output_then_the_item_is_cut(door: Host) -> None:
    async def main() -> list[str]:
        async with call(door, SILENCE) as caller:
            ask(caller, text(1, 30))
            await caller.until("output_audio_buffer.started")
            caller.say("response.cancel")
            caller.say("output_audio_buffer.clear")
            await caller.until("conversation.item.truncated")
            return caller.kinds

    kinds = asyncio.run(main())
    assert "output_audio_buffer.cleared" in kinds
    assert "error" not in kinds


def test_a_call_begins_with_the_session_that_it_asks_for_and_keeps_the_doors_formats(door: Host) -> None:
    async def main() -> Caller:
        asked = {"instructions": "Be brief.", "audio": {"output": {"format": {"type": "audio/pcmu"}}}}
        async with call(door, SILENCE, asked) as caller:
            caller.say(
                "session.update", session={"type": "realtime", "audio": {"input": {"format": {"type": "audio/pcma"}}}}
            )
            await caller.until("session.updated")
            # The host refuses a message that is not JSON, and the call continues.
            caller.channel.send(b'{"type": "session.update", "session": {"instructions": "\xff"}}')
            await caller.until("error")
            ask(caller, "Hello.")
            await caller.until("response.done")
        return caller

    created, updated = (e["session"] for e in asyncio.run(main()).seen if e["type"].startswith("session."))
    assert created["instructions"] == updated["instructions"] == "Be brief."
    for session in (created, updated):
        assert [session["audio"][side]["format"]["type"] for side in ("input", "output")] == ["audio/pcm"] * 2


def test_a_call_may_be_a_transcription(door: Host) -> None:
    async def main() -> dict[str, Any]:
        asked = {"type": "transcription", "audio": {"input": {"transcription": {"language": "en"}}}}
        async with call(door, SILENCE, asked) as caller:
            return dict(caller.seen[0]["session"])

    session = asyncio.run(main())
    assert session["type"] == "transcription"
    assert session["audio"]["input"]["transcription"]["language"] == "en"


def test_when_the_caller_leaves_while_its_host_is_lost_then_no_host_keeps_the_session(hosts: Cluster) -> None:
    door = hosts.add_door()
    door.wait()

    async def main() -> None:
        async with call(door, SILENCE, SESSION) as caller:
            ask(caller, text(1, 3))
            await caller.until("output_audio_buffer.stopped")
            dying, other = sorted(hosts.hosts, key=Host.num_sessions, reverse=True)
            # The other host answers the resume only after the caller has left.
            other.send(signal.SIGSTOP)
            await asyncio.to_thread(dying.kill)
            await asyncio.sleep(0.5)
        await asyncio.sleep(1.0)
        other.send(signal.SIGCONT)
        await asyncio.to_thread(dying.start)
        await asyncio.to_thread(dying.wait)

    asyncio.run(main())
    await_idle(hosts)
    until(lambda: door.metric("antiphon_door_connections") == 0)


def test_a_call_is_hung_up_by_its_location(hosts: Cluster, door: Host) -> None:
    async def main() -> list[int]:
        async with call(door, SILENCE) as caller, httpx.AsyncClient(base_url=door.url) as http:
            path = f"/v1/realtime/calls/{caller.seen[0]['session']['id']}/hangup"
            others = await http.post(path, headers={"authorization": "Bearer of-another"})
            mine = await http.post(path)
            await asyncio.to_thread(await_idle, hosts)
            assert (await http.post(path)).status_code == 404
            return [others.status_code, mine.status_code]

    assert asyncio.run(main()) == [404, 200]
    await_idle(hosts)


async def offered(session: dict[str, Any] | None = None, num_audio: int = 1) -> dict[str, Any]:
    """Return the fields of a request with an offer like a browser's."""
    caller = Caller(SILENCE)
    for _ in range(num_audio - 1):
        caller.peer.addTrack(Microphone(SILENCE))
    await caller.peer.setLocalDescription(await caller.peer.createOffer())
    offer = caller.peer.localDescription.sdp
    await caller.peer.close()
    if session is None:
        return {"content": offer, "headers": SDP}
    return {"json": None, "files": {"sdp": (None, offer), "session": (None, httpx.Response(200, json=session).text)}}


@pytest.mark.parametrize(
    ("session", "num_audio", "message"),
    [(None, 2, "2 audio"), ({"type": "realtime", "output_modalities": ["smell"]}, 1, "Invalid modalities")],
)
def test_when_an_offer_or_a_session_is_wrong_then_it_is_refused_and_holds_no_place(
    hosts: Cluster, door: Host, session: dict[str, Any] | None, num_audio: int, message: str
) -> None:
    request = asyncio.run(offered(session, num_audio))
    answer = httpx.post(f"{door.url}/v1/realtime/calls", timeout=30, **request)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    await_idle(hosts)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"content": "nonsense", "headers": SDP}, 400),
        ({"content": "{}", "headers": {"content-type": "application/json"}}, 415),
        ({"content": b"x" * (1 << 21), "headers": SDP}, 413),
    ],
)
def test_when_an_offer_is_none_then_it_is_refused(door: Host, request_: Any, status: int) -> None:
    answer = httpx.post(f"{door.url}/v1/realtime/calls", timeout=30, **request_)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_when_the_model_is_unknown_then_a_call_is_refused_at_once(hosts: Cluster) -> None:
    strict = hosts.add_host("--strict-models")
    strict.wait()
    door = hosts.add_door("--behind", strict.url)
    door.wait()
    answer = httpx.post(f"{door.url}/v1/realtime/calls?model=nobody", timeout=5, **asyncio.run(offered()))
    assert answer.status_code == 404, answer.text
    assert answer.json()["error"]["code"] == "model_not_found"
    until(lambda: strict.num_sessions() == 0)
    strict.kill()
    hosts.hosts.remove(strict)


def test_when_no_host_can_be_reached_then_a_call_is_refused(hosts: Cluster) -> None:
    door = hosts.add_door("--behind", "http://127.0.0.1:9")
    door.wait()
    answer = httpx.post(f"{door.url}/v1/realtime/calls", timeout=30, **asyncio.run(offered()))
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
