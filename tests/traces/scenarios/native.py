"""A partner that takes turns by itself: units, its own decisions to speak, and what its client may do about them."""

from __future__ import annotations

from tests.traces.harness import Stage, b64, f32, image, pieces, scenario
from tests.traces.scenarios.duplex import APPEND, DONE, opened, speak


@scenario(native=True)
async def native_duplex(stage: Stage) -> None:
    """It listens, answers, sees, is interrupted, and answers when it is asked."""
    socket = await opened(stage, instructions="Be kind.", extra_body={"force_listen_count": 2}, temperature=0)
    created = socket.of("session.created")[0]["session"]["capabilities"]
    assert (created["implementation_level"], created["chunk_period_ms"]) == ("model_native_duplex", 200)
    await speak(stage, socket, "hello. what is the time?", 0.5)
    await socket.until(DONE)
    assert socket.joined("response.output_audio_transcript.delta") == "I heard you. Go on, and tell me more of it."
    await socket.say("playback.ack", played_ms=2200)
    await stage.wait(3)
    await socket.say(APPEND, audio=b64(bytes(6400)), video_frames=[b64(image(1)), b64(image(2))])
    await speak(stage, socket, "tell me", 0.7)
    await socket.until("response.output_audio.delta", count=3)
    await socket.say("barge_in")
    await socket.until(DONE)
    await socket.say("response.create", response={"conversation": "none"}, event_id="asked")
    assert (await socket.until("error"))["error"]["code"] == "response_create_unsupported"
    await socket.say("response.create")
    await socket.until(DONE)
    await speak(stage, socket, "yes", 0.7)
    await socket.until("response.output_audio.delta")
    await socket.say("response.cancel")
    await socket.until(DONE)
    await socket.say("push_text", text="typed")
    await socket.until(DONE)
    reasons = [f["response"]["metadata"]["reason"] for f in socket.of("response.listen")]
    assert "model" in reasons
    assert [f["response"]["status"] for f in socket.of(DONE)] == [
        "completed",
        "cancelled",
        "completed",
        "cancelled",
        "completed",
    ]


@scenario(native=True)
async def native_speech_over_it(stage: Stage) -> None:
    """Speech over what it says takes the floor where the client wants that."""
    socket = await opened(stage, turn_detection={"type": "server_vad"}, overlap_policy="barge_in_on_speech")
    await speak(stage, socket, "hello.", 0.3)
    await socket.until("response.output_audio.delta", count=2)
    await speak(stage, socket, "", 1.7)
    await speak(stage, socket, "stop now. please tell me a story.", 0.6)
    await stage.wait(5)
    assert len(socket.of(DONE)) >= 2


@scenario(native=True)
async def native_conversation(stage: Stage) -> None:
    """Over the plain conversation, the client gets the events of its turns, and no event that it does not know."""
    socket = await stage.connect("/v1/realtime?model=default")
    await socket.until("session.created")
    sound = {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": None}
    await socket.say("session.update", session={"type": "realtime", "audio": {"input": sound}})
    await socket.until("session.updated")
    from tests.traces.scenarios.conversation import speak as say

    await say(stage, socket, "hello.", 0.4)
    await socket.until(DONE)
    await socket.say("response.create")
    await socket.until(DONE)
    assert "response.listen" not in socket.kinds
    assert "error" not in socket.kinds


@scenario(native=True)
async def native_push_to_talk(stage: Stage) -> None:
    """A client that commits and then sends nothing is answered, and once if it asks for the answer too."""
    socket = await opened(stage)
    await socket.say(APPEND, audio=b64(bytes(8000)))
    await socket.say("input_audio_buffer.commit")
    await socket.until(DONE)
    assert socket.joined("response.output_audio_transcript.delta").strip() == "You asked me."
    await socket.say(APPEND, audio=b64(bytes(8000)))
    await socket.say("input_audio_buffer.commit")
    await socket.say("response.create")
    await socket.until(DONE)
    await stage.wait(2)
    assert len(socket.of(DONE)) == 2
    assert "error" not in socket.kinds


@scenario(native=True, speaks=False)
async def native_writes(stage: Stage) -> None:
    """Without a voice it writes."""
    socket = await opened(stage)
    await speak(stage, socket, "hello.", 0.4)
    await socket.until(DONE)
    assert socket.joined("response.output_text.delta") == "I heard you. Go on, and tell me more of it."


@scenario(native=True)
async def native_worker(stage: Stage) -> None:
    """The MiniCPM-o demo's worker over such a partner."""
    socket = await stage.connect("/ws/duplex")
    await socket.say("prepare", system_prompt="Be kind.", ref_audio_base64=b64(f32("hello")))
    await socket.until("prepared")
    for number, piece in enumerate(pieces(f32("hello. what is the time?", 6.5), 64_000)):
        await socket.say("audio_chunk", audio_base64=b64(piece), force_listen=number == 4)
        await stage.wait(1)
    await socket.say("stop")
    await socket.end()
    results = socket.of("result")
    assert any(not r["is_listen"] for r in results)
    assert "I heard you." in "".join(r["text"] for r in results)
