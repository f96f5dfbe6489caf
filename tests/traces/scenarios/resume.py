"""Sessions of /v1/realtime that outlive their connection, and the server."""

from __future__ import annotations

from tests.traces.harness import Frame, Socket, Stage, b64, pcm16, pieces, scenario
from tests.traces.scenarios.conversation import APPEND, DONE, write


async def come_back(stage: Stage, created: Frame, last: int, token: str = "") -> Socket:
    """Another connection that takes up the session."""
    session_id = created["session"]["id"]
    socket = await stage.connect(f"/v1/realtime?resume={session_id}")
    await socket.say(
        "session.resume",
        session_id=session_id,
        resume_token=token or created["resume_token"],
        last_received_server_event_seq=last,
    )
    return socket


@scenario()
async def conversation_resume(stage: Stage) -> None:
    """The connection is cut while the server speaks: missed frames are sent again, and the client gets the number of
    its own frames that were received."""
    socket = await stage.connect("/v1/realtime?resume=1&model=gpt-realtime")
    created = await socket.until("session.created")
    await write(socket, "tell me a story")
    await socket.say("response.create")
    await socket.until("response.output_audio.delta", count=2)
    last = socket.seen[-1]["server_event_seq"]
    await socket.leave(1006)
    await stage.wait(2)
    again = await come_back(stage, created, last)
    resumed = await again.next()
    assert (resumed["type"], resumed["received_events"]) == ("session.resumed", 2)
    await again.until(DONE)
    again_numbers = [f["server_event_seq"] for f in again.seen if "server_event_seq" in f]
    assert again_numbers == list(range(last + 1, last + 1 + len(again_numbers)))
    await again.say("session.event_ack", server_event_seq=again_numbers[-1])
    await again.say("session.event_ack", server_event_seq="x", event_id="odd")
    await write(again, "hello")
    # A second one replaces it.
    third = await come_back(stage, created, again_numbers[-1], resumed["resume_token"])
    await third.until("session.resumed")
    assert await again.end() == (1000, "session_replaced")


@scenario(resume={"journal_s": 3, "grace_s": 60.0})
async def transcription_resume(stage: Stage) -> None:
    """Cut between a turn and its transcript; then away for so long that what was missed is gone."""
    socket = await stage.connect("/v1/realtime?resume=1&intent=transcription")
    created = await socket.until("session.created")
    for piece in pieces(pcm16("what is the time?", 0.4), 9600):
        await socket.say(APPEND, audio=b64(piece))
        await stage.wait(0.2)
    last = socket.seen[-1]["server_event_seq"]
    await socket.leave(1006)
    await stage.wait(0.5)
    again = await come_back(stage, created, last)
    resumed = await again.until("session.resumed")
    assert resumed["received_audio_ms"] > 1000
    await stage.wait(0.5)
    await again.leave(1006)
    await stage.wait(10)
    late = await come_back(stage, created, 1, resumed["resume_token"])
    await late.end()
    assert late.of("session.resync_required")[0]["reason"] == "journal_gap"


@scenario()
async def restart(stage: Stage) -> None:
    """Conversations that are kept are taken up after the server was killed."""
    plain = await stage.connect("/v1/realtime?resume=1")
    created = await plain.until("session.created")
    await plain.say("session.update", session={"type": "realtime", "output_modalities": ["text"], "instructions": "x"})
    await write(plain, "hello")
    await plain.say("response.create")
    await plain.until(DONE)
    duplex = await stage.connect("/v1/duplex")
    await duplex.say("session.update", session={"modalities": ["text"], "voice": "two"})
    await duplex.say("push_text", text="hello")
    await duplex.until(DONE)
    opened = duplex.of("session.created")[0]
    opened["session"]["id"] = opened["session_id"]
    lasts = [s.seen[-1]["server_event_seq"] for s in (plain, duplex)]
    await stage.kill()
    wrong = await come_back(stage, created, lasts[0], "x")
    await wrong.end()
    for first, last in ((created, lasts[0]), (opened, lasts[1])):
        again = await come_back(stage, first, last)
        resumed = await again.until("session.resumed")
        assert (resumed["restored"], resumed["num_items"]) == (True, 2)
        await again.say("response.create")
        await again.until(DONE)
    gone = await come_back(stage, {"session": {"id": "sess-0"}, "resume_token": "x"}, 0)
    await gone.end()
