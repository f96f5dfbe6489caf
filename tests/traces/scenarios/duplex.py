"""Full duplex: epochs, speech over an answer, acknowledged playback, and a connection that breaks."""

from __future__ import annotations

from typing import Any

from tests.traces.harness import Frame, Socket, Stage, b64, f32, image, pcm16, pieces, scenario

APPEND, COMMIT, DONE = "input_audio_buffer.append", "input_audio_buffer.commit", "response.done"
AUDIO = "response.output_audio.delta"
QUERY = "/v1/realtime?duplex=1"


async def opened(stage: Stage, url: str = QUERY, **session: Any) -> Socket:
    """A duplex session; its first frame opens it."""
    socket = await stage.connect(url)
    await socket.say("session.update", session=session)
    await socket.until("session.created")
    return socket


async def speak(stage: Stage, socket: Socket, text: str, silence_s: float = 0.0, **more: Any) -> None:
    """Say this, as fast as it sounds, 100 ms an event."""
    for piece in pieces(pcm16(text, silence_s, 16_000), 3200):
        await socket.say(APPEND, audio=b64(piece), **more)
        await stage.wait(len(piece) / 32_000)


async def story(socket: Socket, chunks: int = 4) -> Frame:
    """Have it tell its story; the first chunks of its sound are there. Its response."""
    await socket.say("push_text", text="tell me a story")
    created = await socket.until("response.created")
    await socket.until(AUDIO, count=chunks)
    return created["response"]  # type: ignore[no-any-return]


def decisions(socket: Socket) -> list[str]:
    return [f["action"] for f in socket.of("overlap.decision")]


@scenario()
async def duplex_turns(stage: Stage) -> None:
    """A spoken turn, a typed one and one by hand; then the client says goodbye."""
    socket = await opened(stage, instructions="Be brief.", metadata={"a": 1})
    await speak(stage, socket, "what is the time?", 1.5)
    await socket.until(DONE)
    await socket.say("session.heartbeat")
    await socket.say("playback.ack", played_ms=400)
    await stage.wait(2.5)
    await socket.say("push_text", text="hello")
    await socket.until(DONE)
    await stage.wait(2)
    await socket.say(
        "session.update", session={"extra_body": {"auto_response": False}, "turn_detection": {"type": "server_vad"}}
    )
    await socket.until("session.updated")
    await speak(stage, socket, "tell me")
    await socket.say("input.commit")
    await socket.until(DONE)
    await stage.wait(3)
    await speak(stage, socket, "", 0.5)
    await socket.say(COMMIT, final=True)
    await stage.wait(1)
    assert socket.of("response.listen")[-1]["response"]["metadata"]["reason"] == "nothing_said"
    await socket.say("session.close", reason="goodbye")
    assert (await socket.end()) == (1000, "session_closed")
    assert socket.of("session.closed")[0]["reason"] == "goodbye"
    numbers = [f["server_event_seq"] for f in socket.seen if "server_event_seq" in f]
    assert numbers == list(range(1, len(numbers) + 1))


@scenario()
async def duplex_door(stage: Stage) -> None:
    """/v1/duplex; a session that opens by itself; formats; a first frame that never comes."""
    socket = await stage.connect("/v1/duplex?model=writer")
    await socket.until("session.created")
    session = {"input_audio_format": "pcm_f32le", "output_audio_format": "wav", "audio": {"output": {"voice": "two"}}}
    await socket.say("session.update", session=session)
    await socket.until("session.updated")
    for piece in pieces(f32("hello.", 1.2), 12_800):
        await socket.say("input.audio.append", audio=b64(piece))
        await stage.wait(0.2)
    await socket.until(DONE)
    await socket.say(APPEND, audio=b64(b"\xff" * 800), format="g711_ulaw", sample_rate_hz=8000)
    await socket.say("close")
    await socket.end()
    other = await stage.connect("/v1/duplex")
    await other.say("session.heartbeat")
    await other.until("session.heartbeat_ack")
    silent = await stage.connect("/v1/duplex")
    assert await silent.end() == (1008, "config_timeout")


@scenario()
async def duplex_acks(stage: Stage) -> None:
    """An answer is cut where the client had heard it, and cut again where a late acknowledgement says."""
    socket = await opened(stage)
    response = await story(socket, 6)
    await socket.say("playback.ack", played_ms=700, response_id=response["id"])
    await socket.say("barge_in")
    await socket.until(DONE)
    item = socket.of("conversation.item.truncated")[-1]["item_id"]
    assert socket.of("conversation.item.truncated")[-1]["audio_end_ms"] == 700
    await socket.say("conversation.item.retrieve", item_id=item)
    await socket.until("conversation.item.retrieved")
    await socket.say("playback.ack", played_ms=1300, committed_ms=1250, item_id=f"item_{response['id']}")
    await socket.until("conversation.item.truncated")
    await socket.say("conversation.item.retrieve", item_id=item)
    await socket.until("conversation.item.retrieved")
    kept = [f["item"]["content"][0]["transcript"] for f in socket.of("conversation.item.retrieved")]
    assert kept == ["Once upon", "Once upon a time"]
    # Cursors do not go back.
    await socket.say("playback.ack", played_ms=100, item_id=item)
    await socket.say("playback.ack", played_ms=100, item_id="item_nobody", event_id="whose")
    await socket.say("playback.ack", event_id="how much")
    await socket.say("playback.ack", played_ms=-1, event_id="less")
    await speak(stage, socket, "stop now.", 1.5)
    await socket.say("playback.ack", played_ms=2000, item_id=item, event_id="late")
    await stage.wait(3)
    assert "playback_ack_too_late" in [f["error"]["code"] for f in socket.of("error")]


@scenario()
async def duplex_acks_only(stage: Stage) -> None:
    """What was not acknowledged was not heard."""
    socket = await opened(stage, playback_commit_policy="ack_only")
    response = await story(socket, 5)
    await stage.wait(1)
    await socket.say("barge_in")
    await socket.until(DONE)
    await story(socket, 5)
    await socket.say("playback.ack", played_ms=950)
    await stage.wait(2)
    await socket.say("input.cancel")
    await stage.wait(1)
    await socket.say(
        "conversation.item.truncate",
        item_id=socket.of("response.output_item.added")[-1]["item"]["id"],
        audio_end_ms=300,
    )
    await stage.wait(1)
    assert socket.of(DONE)[0]["response"]["id"] == response["id"]
    assert {f["audio_end_ms"] for f in socket.of("conversation.item.truncated")} >= {0}


@scenario()
async def duplex_barge_in(stage: Stage) -> None:
    """Any speech ends the answer: its epoch is over, and nothing more of it is said."""
    socket = await opened(stage, overlap_policy="barge_in_on_speech", turn_detection={"type": "server_vad"})
    response = await story(socket, 5)
    await speak(stage, socket, "stop now.", 1.0)
    await socket.until(DONE)
    cut = socket.of(DONE)[0]["response"]
    assert (cut["id"], cut["status"]) == (response["id"], "cancelled")
    assert socket.of("conversation.item.truncated")
    await stage.wait(4)
    end = socket.seen.index(socket.of(DONE)[0])
    assert not [f for f in socket.seen[end:] if f.get("response_id") == response["id"] and "delta" in f["type"]]
    epochs = [f["metadata"]["epoch"] for f in socket.of(AUDIO)]
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}
    assert "You said: stop now.." in socket.joined("response.output_audio_transcript.delta")


@scenario()
async def duplex_slow_reader(stage: Stage) -> None:
    """What waits for a client that does not read is not sent once its epoch is over."""
    socket = await opened(stage)
    response = await story(socket, 3)
    socket.stop_reading()
    await stage.wait(0.5)
    before = len(socket.seen)
    await socket.say("barge_in")
    await socket.read_on()
    await socket.until(DONE)
    media = [f for f in socket.seen[before:] if f["type"].endswith(".delta")]
    # The one frame that was on its way.
    assert len(media) <= 1
    assert socket.of(DONE)[0]["response"]["id"] == response["id"]
    numbers = [f["server_event_seq"] for f in socket.seen if "server_event_seq" in f]
    assert numbers == list(range(1, len(numbers) + 1))


@scenario()
async def duplex_overlap_held(stage: Stage) -> None:
    """The client ducks at once. "Mm-hm" is let go, and words take the floor."""
    socket = await opened(stage)
    await story(socket)
    # A microphone that is heard to be silent while the answer sounds: there is no echo.
    await speak(stage, socket, "", 2.0)
    await speak(stage, socket, "Mm-hm.", 1.5)
    assert [f["event"] for f in socket.of("turn.event") if f["event"] in ("duck", "unduck")] == ["duck", "unduck"]
    assert decisions(socket) == ["listen"]
    await speak(stage, socket, "stop now. please hello.", 1.5)
    await stage.wait(4)
    assert decisions(socket)[:2] == ["listen", "barge_in"]
    assert socket.of(DONE)[0]["response"]["status"] == "completed"


@scenario()
async def duplex_overlap_by_client(stage: Stage) -> None:
    """What the client says of sound over an answer goes before any policy."""
    socket = await opened(stage, overlap_policy="auto")
    await story(socket)
    await speak(stage, socket, "", 2.0)
    await speak(stage, socket, "hello.", 0.4, overlap_action="drop")
    await speak(stage, socket, "hello", 0.4, is_speech=False)
    await speak(stage, socket, "yes", 0.6, overlap_action="listen")
    await speak(stage, socket, "yes", 0.6, transcript="yeah")
    await speak(stage, socket, "hello", 0.3, force_listen=True)
    await socket.say(APPEND, audio=b64(pcm16("stop", 0, 16_000)), force_barge_in=True)
    await stage.wait(1)
    assert "drop" in decisions(socket)
    assert decisions(socket)[-1] == "barge_in"
    await story(socket)
    await socket.say(APPEND, audio=b64(pcm16("stop", 0, 16_000)), overlap_action="barge_in")
    await stage.wait(2)
    assert socket.of(DONE)


@scenario()
async def duplex_listen_only(stage: Stage) -> None:
    """The answer goes on, and what was said over it is answered after it."""
    socket = await opened(stage, overlap_policy="listen_only")
    await story(socket)
    await speak(stage, socket, "what is the time?", 1.5)
    await stage.wait(20)
    assert [f["response"]["status"] for f in socket.of(DONE)] == ["completed", "completed"]


@scenario()
async def duplex_signals(stage: Stage) -> None:
    """Events by their other names, in signals, and what raises the epoch."""
    socket = await opened(stage, turn_detection={"type": "semantic_vad"}, tools=[])
    await story(socket)
    await socket.say("turn.signal", event="wave", payload={"hand": "left"})
    await socket.say("signal_turn", event="response.cancel")
    await socket.until(DONE)
    await story(socket)
    await socket.say("turn.signal", event="input.cancel")
    await socket.say("response.cancel")
    await stage.wait(1)
    await story(socket)
    await socket.say("input_audio_buffer.clear")
    await socket.say("turn.signal", event="barge_in")
    await stage.wait(1)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    await socket.say("turn.signal", event="conversation.item.create", payload={"item": item})
    await socket.say("turn.signal", event="session.update", payload={"session": {"instructions": "x"}})
    await socket.say("response.create", response={"modalities": ["text"]})
    await stage.wait(3)
    await socket.say("conversation.item.delete", item_id=socket.of("conversation.item.added")[0]["item"]["id"])
    epochs = [f["epoch"] for f in socket.of("turn.event")]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 3


@scenario()
async def duplex_errors(stage: Stage) -> None:
    socket = await opened(stage)
    nothing = b64(bytes(320))
    for number, event in enumerate(
        [
            {"type": "boo"},
            {},
            {"type": 4},
            {"type": "conversation.item.delete"},
            {"type": "conversation.item.delete", "item_id": "x"},
            {"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": 0},
            {"type": "playback.ack", "played_ms": 10},
            {"type": "playback.ack", "played_ms": "x"},
            {"type": APPEND},
            {"type": APPEND, "audio": "*"},
            {"type": APPEND, "audio": "AAA="},
            {"type": APPEND, "audio": b64(b"\x00\x00\xc0\x7f"), "format": "pcm_f32le"},
            {"type": APPEND, "audio": nothing, "format": "opus"},
            {"type": APPEND, "audio": nothing, "sample_rate_hz": 5},
            {"type": APPEND, "audio": nothing, "video_frames": ["AAAA"]},
            {"type": APPEND, "audio": nothing, "video_frames": [1, 2, 3]},
            {"type": "push_text"},
            {"type": "turn.signal"},
            {"type": "response.cancel"},
            {"type": "session.update", "session": {"overlap_policy": "loud"}},
            {"type": "session.update", "session": {"idle_timeout_s": 0}},
            {"type": "session.update", "session": {"turn_detection": {"type": "psychic"}}},
            {"type": "session.update", "session": {"input_audio_format": "opus"}},
            {"type": "session.update", "session": {"ref_audio": "https://example.com/a.wav"}},
            {"type": "session.event_ack"},
            {"type": "session.event_ack", "server_event_seq": 10_000},
            {"type": "session.resume", "session_id": "x", "resume_token": "y"},
            {"type": "response.create"},
            {"type": COMMIT, "final": True},
        ]
    ):
        await socket.send(event | {"event_id": f"mine_{number}"})
    await socket.send("{")
    await socket.send(b"[]")
    await stage.wait(1)
    assert len(socket.of("error")) > 26
    await socket.say(APPEND, audio=nothing, video_frames=[b64(image(10))])
    await socket.say("session.update", session={"idle_timeout_s": 2})
    assert (await socket.end())[0] == 1001
    assert socket.of("session.expired")


async def come_back(stage: Stage, session_id: str, token: str, last: int, url: str = QUERY, **more: Any) -> Socket:
    """Another connection that asks to go on."""
    socket = await stage.connect(url)
    await socket.say(
        "session.resume", session_id=session_id, resume_token=token, last_received_server_event_seq=last, **more
    )
    return socket


@scenario(resume={"grace_s": 5.0})
async def duplex_resume(stage: Stage) -> None:
    """The connection breaks within an answer: what was missed comes again, numbered as it was."""
    socket = await opened(stage)
    created = socket.of("session.created")[0]
    session_id, token = created["session_id"], created["resume_token"]
    await story(socket)
    last = socket.seen[-1]["server_event_seq"]
    await socket.leave(1006)
    await stage.wait(1.5)
    again = await come_back(stage, session_id, token, last - 5)
    resumed = await again.next()
    assert resumed["type"] == "session.resumed"
    assert resumed["resume_token"] != token
    await again.until(DONE)
    numbers = [f["server_event_seq"] for f in again.seen if "server_event_seq" in f]
    assert numbers == list(range(last - 4, last - 4 + len(numbers)))
    await again.say("session.event_ack", server_event_seq=numbers[-1])
    # The token before is used up once the client was heard.
    for wrong in (
        {"session_id": session_id, "token": token, "last": numbers[-1]},
        {"session_id": session_id, "token": "wrong", "last": 0},
        {"session_id": "sess-nobody", "token": token, "last": 0},
        {"session_id": session_id, "token": resumed["resume_token"], "last": 100_000},
        {"session_id": session_id, "token": resumed["resume_token"], "last": 0},
    ):
        other = await come_back(stage, **wrong, event_id="mine")
        await other.end()
    await again.leave(1006)
    # Nobody comes back in time.
    await stage.wait(6)
    late = await come_back(stage, session_id, resumed["resume_token"], numbers[-1], f"/v1/realtime?resume={session_id}")
    await late.end()
    assert late.of("error")[0]["error"]["code"] == "unknown_session"


@scenario()
async def duplex_replaced(stage: Stage) -> None:
    """A second connection replaces the first."""
    first = await opened(stage)
    created = first.of("session.created")[0]
    await first.say("push_text", text="hello")
    await first.until(DONE)
    second = await come_back(stage, created["session_id"], created["resume_token"], first.seen[-1]["server_event_seq"])
    await second.until("session.resumed")
    assert await first.end() == (1000, "session_replaced")
    assert first.seen[-1]["type"] == "session.replaced"
    await second.say("push_text", text="what is the time?")
    await second.until(DONE)
    frame = await stage.connect(f"/v1/realtime?resume={created['session_id']}")
    await frame.say("session.update")
    assert await frame.end() == (1008, "bad_event")
    unknown = await stage.connect("/v1/realtime?resume=sess-0")
    assert await unknown.end() == (1008, "unknown_session")


@scenario(server={"max_sessions": 1}, audio={"max_frame_bytes": 2048})
async def duplex_refused(stage: Stage) -> None:
    """One session too many, by either door; an event too large; the older names of events."""
    socket = await stage.connect("/v1/duplex")
    await socket.say("session.create", session={"instructions": "x"})
    await socket.until("session.created")
    other = await stage.connect("/v1/duplex")
    await other.say("session.update", session={})
    assert (await other.end())[0] == 1013
    assert other.of("error")[0]["error"]["code"] == "resource_exhausted"
    await socket.say("audio.playback_ack", played_ms=1)
    await socket.say("input.text.append", text="hello")
    await socket.until(DONE)
    await socket.say("push_chunk", audio=b64(bytes(4000)))
    await stage.wait(1)
    assert socket.of("error")[-1]["error"]["code"] == "event_too_large"


@scenario(resume={"journal_mb": 1, "grace_s": 20.0})
async def duplex_overflow(stage: Stage) -> None:
    """More events were missed than are kept: a client that comes back has to begin again."""
    socket = await opened(stage)
    created = socket.of("session.created")[0]
    await story(socket, 1)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "tell me a story"}]}
    for _ in range(3):
        await socket.say("response.create", response={"conversation": "none", "input": [item]})
    await socket.leave(1006)
    await stage.wait(5)
    late = await come_back(stage, created["session_id"], created["resume_token"], 3)
    await late.end()
    assert late.of("session.resync_required")[0]["reason"] == "journal_overflow"
