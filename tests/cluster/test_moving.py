"""Sessions that move between hosts: relayed, claimed, handed over, or carried by a door. Sockets are real."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.cluster.door.app import Door, build
from antiphon.cluster.door.hosts import Hosts
from antiphon.server.live.moving import stored_copy
from antiphon.store.sessions import StoredSession
from tests.scripted import FRAME, speech, text
from tests.server.clients import b64, connect
from tests.server.live.test_ownership import Server, answer, conversation, last_seq, resuming, sharing

MANUAL = {
    "type": "realtime",
    "output_modalities": ["text"],
    "audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": None, "transcription": {}}},
}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Server]]:
    """Three hosts that share a store and can reach each other."""
    with sharing(tmp_path, 3, reachable=True) as found:
        yield found


@contextmanager
def door(*hosts: Server) -> Iterator[str]:
    """Yield the ws:// URL of a door in front of these hosts."""
    app = build(Door(Hosts(tuple(host.state.sessions.address for host in hosts), time.monotonic), grace_s=20.0))
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="websockets-sansio", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()


def dies(host: Server, supervisor: Server) -> None:
    """Break the host's sockets, mark it as dead as a supervisor would, and cut it off from the store."""
    host.state.sessions.store = None
    supervisor.store.unregister(host.state.sessions.host_name)


def spoken(frames: list[dict[str, Any]]) -> list[str]:
    """Return the transcripts of the user's turns, in order."""
    kind = "conversation.item.input_audio_transcription.completed"
    return [f["transcript"] for f in frames if f["type"] == kind]


def test_when_a_client_resumes_at_another_host_then_it_is_relayed_and_the_owner_goes_on(hosts: list[Server]) -> None:
    one, two, _ = hosts

    async def main() -> None:
        async with conversation(one) as (wire, session_id, token):
            wire.socket.transport.abort()
            async with resuming(two, session_id, token) as (second, resumed):
                assert (resumed["how"], resumed.get("restored")) == ("relayed", None)
                missed = await second.until("response.done")
                assert missed["response"]["output"][0]["content"][0]["text"] == "one two"
                assert await answer(second, "three") == "three"
                assert (one.state.admission.num_sessions, two.state.admission.num_sessions) == (1, 0)
                assert one.row(session_id).fence == 1
                # The owner ends. The relayed client gets a close code, and may resume.
                await asyncio.to_thread(one.stop.close)
                await second.until("session.moving")
                with pytest.raises(ConnectionClosed):
                    await second.socket.recv()
                assert second.socket.close_code == 1012

    asyncio.run(main())


def test_when_a_relayed_token_is_wrong_then_the_session_goes_on(hosts: list[Server]) -> None:
    one, two, _ = hosts

    async def main() -> None:
        async with conversation(one) as (wire, session_id, _):
            async with resuming(two, session_id, "forged") as (_, refused):
                assert refused["error"]["code"] == "invalid_resume_token"
            assert await answer(wire, "three") == "three"

    asyncio.run(main())


def test_when_a_host_dies_in_a_turn_then_the_next_one_says_what_to_send_again_and_does_nothing_twice(
    hosts: list[Server],
) -> None:
    one, two, _ = hosts

    async def main() -> None:
        async with connect(one.ws, "?resume=1") as wire:
            created = await wire.read()
            await wire.say("session.update", session=MANUAL)
            sent: list[dict[str, Any]] = []

            async def send(type: str, **fields: Any) -> None:
                sent.append({"type": type, **fields})
                await wire.say(type, **fields)

            await send("input_audio_buffer.append", audio=b64(speech(1, 2), 24000))
            await send("input_audio_buffer.commit")
            await wire.until("conversation.item.input_audio_transcription.completed")
            await send("input_audio_buffer.append", audio=b64(speech(3, 2), 24000))
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "written"}]}
            await send("conversation.item.create", item=item)
            while (await wire.until("conversation.item.done"))["item"]["content"][0].get("text") != "written":
                pass
            last = wire.seen[-1]["server_event_seq"]
        dies(one, two)
        session_id, token = created["session"]["id"], created["resume_token"]
        async with connect(two.ws, f"?resume={session_id}") as again:
            await again.say(
                "session.resume", session_id=session_id, resume_token=token, last_received_server_event_seq=last
            )
            resumed = await again.read()
            assert (resumed["how"], resumed["restored"]) == ("claimed", True)
            # The snapshot has the first turn and its commit, but not the audio of the second turn.
            assert resumed["received_events"] == 3
            assert resumed["num_items"] == 2
            for message in sent[2:]:
                await again.socket.send(json.dumps(message))
            await again.say("input_audio_buffer.commit")
            await again.until("conversation.item.input_audio_transcription.completed")
            assert spoken(again.seen) == [text(3, 2)]
            # The first host handled the written item before it died, so the second host skips it.
            added = [f["item"] for f in again.seen if f["type"] == "conversation.item.added"]
            assert [i["content"][0]["type"] for i in added] == ["input_audio"]

    asyncio.run(main())


@pytest.mark.parametrize("num_frames", [1, 30], ids=["before it is known", "after it was reported"])
def test_when_a_host_drains_while_somebody_begins_to_speak_then_the_turn_stays_whole(
    hosts: list[Server], monkeypatch: pytest.MonkeyPatch, num_frames: int
) -> None:
    one, two, _ = hosts
    monkeypatch.setattr(stored_copy, "MAX_TURN_S", 0.1)
    detects = {"type": "server_vad", "silence_duration_ms": 300}
    audio_input = {**MANUAL["audio"]["input"], "turn_detection": detects}
    config = {**MANUAL, "audio": {"input": audio_input}}
    turn = base64.b64decode(b64(speech(2, 5, 20), 24000))
    size = FRAME * 24 // 16 * 2
    said = [b64(speech(1, 1, 30), 24000)]
    said += [base64.b64encode(turn[i : i + size]).decode() for i in range(0, len(turn), size)]

    async def main() -> None:
        async with connect(one.ws, "?resume=1") as wire:
            created = await wire.read()
            await wire.say("session.update", session=config)
            await wire.say("input_audio_buffer.append", audio=said[0])
            await wire.until("response.done")
            for audio in said[1 : 1 + num_frames]:
                await wire.say("input_audio_buffer.append", audio=audio)
            if num_frames > 1:
                await wire.until("input_audio_buffer.speech_started")
            await asyncio.to_thread(one.stop.close)
            await wire.until("session.moving")
        assert spoken(wire.seen) == [text(1, 1)]
        session_id, token = created["session"]["id"], created["resume_token"]
        async with resuming(two, session_id, token, last_seq(wire)) as (again, resumed):
            assert resumed["how"] == "handed_over"
            # The second message contains the answered turn, and silence in which another turn might begin.
            assert resumed["received_events"] == 1
            for audio in said:
                await again.say("input_audio_buffer.append", audio=audio)
            await again.until("response.done")
            assert spoken(again.seen) == [text(2, 5)]

    asyncio.run(main())


def test_when_a_host_drains_then_a_client_of_a_door_goes_on_at_another_and_knows_nothing_of_it(
    hosts: list[Server],
) -> None:
    async def main(url: str) -> None:
        async with connect(url, "") as wire:
            created = await wire.read()
            assert "resume_token" not in created
            await wire.say("session.update", session=MANUAL)
            assert await answer(wire, "one two") == "one two"
            for word in ("three", "four"):
                (owner,) = (h for h in hosts if h.state.admission.num_sessions)
                await asyncio.to_thread(owner.stop.close)
                assert await answer(wire, word) == word
            assert all("server_event_seq" not in frame for frame in wire.seen)
            about = {"session.moving", "session.resumed", "session.replaced", "error"}
            assert not about & {frame["type"] for frame in wire.seen}
            done = [f for f in wire.seen if f["type"] == "response.done"]
            assert [f["response"]["status"] for f in done] == ["completed"] * 3

    with door(*hosts) as url:
        asyncio.run(main(url))


def test_when_a_client_of_a_door_leaves_then_its_session_ends_at_once(hosts: list[Server]) -> None:
    async def main(url: str) -> None:
        async with connect(url, "") as wire:
            await wire.read()
            await wire.say("session.update", session=MANUAL)
            await wire.until("session.updated")
            assert sum(h.state.admission.num_sessions for h in hosts) == 1
        for _ in range(200):
            if not sum(h.state.admission.num_sessions for h in hosts):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the session waits for a client that will not come back")

    with door(*hosts) as url:
        asyncio.run(main(url))


def test_when_a_client_resumes_by_itself_then_a_door_passes_it_on_as_it_is(hosts: list[Server]) -> None:
    async def main(url: str) -> None:
        async with connect(url, "?resume=1") as wire:
            created = await wire.read()
            await wire.say("session.update", session=MANUAL)
            assert await answer(wire, "one") == "one"
            assert wire.seen[-1].get("server_event_seq")
            wire.socket.transport.abort()
        session_id = created["session"]["id"]
        async with connect(url, f"?resume={session_id}") as again:
            await again.say("session.resume", session_id=session_id, resume_token=created["resume_token"])
            assert (await again.read())["how"] in ("attached", "relayed")

    with door(*hosts) as url:
        asyncio.run(main(url))


def test_when_no_host_can_be_reached_then_a_door_says_so_over_http(hosts: list[Server]) -> None:
    for host in hosts:
        host.stop.close()
    with door(*hosts) as url, httpx.Client(base_url=url.replace("ws", "http", 1), trust_env=False) as client:
        assert client.get("/health").json() == {"status": "ok", "role": "door"}
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_host")

        async def main() -> None:
            with pytest.raises(InvalidStatus) as error:
                async with connect(url, ""):
                    pass
            assert error.value.response.status_code == 503

        asyncio.run(main())


def test_a_snapshot_with_a_transcript_owes_its_answer_or_has_it(hosts: list[Server]) -> None:
    """Whichever snapshot a dead host leaves, the next host neither deletes the turn nor forgets to answer it."""
    one = hosts[0]
    snapshots: list[dict[str, Any]] = []
    put = one.store.put

    def noting_put(session: StoredSession, *, turn_kept: bool = False) -> Future[None]:
        snapshots.append(json.loads(session.snapshot))
        return put(session, turn_kept=turn_kept)

    one.store.put = noting_put  # type: ignore[method-assign]

    async def main() -> None:
        async with connect(one.ws, "?resume=1") as wire:
            await wire.read()
            detects = {"type": "server_vad", "silence_duration_ms": 300}
            audio = {"input": MANUAL["audio"]["input"] | {"turn_detection": detects}}  # type: ignore[index]
            await wire.say("session.update", session=MANUAL | {"audio": audio})
            await wire.say("input_audio_buffer.append", audio=b64(speech(1, 2, silence_frames=15), 24000))
            await wire.until("response.done")

    asyncio.run(main())
    heard = [s for s in snapshots if s["items"] and s["items"][0]["parts"][0].get("text") == text(1, 2)]
    assert heard
    for snapshot in heard:
        continued = snapshot["continued"]
        assert continued["unread_items"] == []
        assert continued["owed"] or len(snapshot["items"]) == 2, continued
