"""Transcription sessions over /v1/realtime: OpenAI's, in both generations of names, and vLLM's."""

from __future__ import annotations

from typing import Any

from tests.traces.harness import Frame, Socket, Stage, b64, pcm16, pieces, scenario

APPEND, COMMIT = "input_audio_buffer.append", "input_audio_buffer.commit"
COMPLETED = "conversation.item.input_audio_transcription.completed"
FAILED = "conversation.item.input_audio_transcription.failed"
VAD = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 200, "silence_duration_ms": 400}


async def speak(stage: Stage, socket: Socket, text: str, silence_s: float = 0.0, rate_hz: int = 24_000) -> None:
    """Say this, as fast as it sounds, 200 ms an event."""
    for piece in pieces(pcm16(text, silence_s, rate_hz), rate_hz // 5 * 2):
        await socket.say(APPEND, audio=b64(piece))
        await stage.wait(len(piece) / (2 * rate_hz))


def update(**input: Any) -> Frame:
    """A session.update of the GA names."""
    return {"type": "session.update", "session": {"type": "transcription", "audio": {"input": input}}}


@scenario()
async def transcription_openai(stage: Stage) -> None:
    socket = await stage.connect("/v1/realtime?intent=transcription&model=gpt-4o-transcribe")
    await socket.until("session.created")
    await socket.send(
        update(transcription={"model": "whisper-1", "language": "en", "prompt": "time"}, turn_detection=VAD)
    )
    await socket.until("session.updated")
    await speak(stage, socket, "what is the time?", 0.9)
    await socket.until(COMPLETED)
    await speak(stage, socket, "tell me a story and now please stop", 0.9)
    await socket.until(COMPLETED)
    await socket.send(update(turn_detection=None, noise_reduction={"type": "near_field"}))
    await speak(stage, socket, "hello")
    await socket.say(COMMIT)
    await socket.until(COMPLETED)
    await speak(stage, socket, "fail")
    await socket.say(COMMIT)
    await socket.until(FAILED)
    await speak(stage, socket, "yes")
    await socket.say("input_audio_buffer.clear")
    await socket.say(COMMIT, event_id="nothing")
    assert (await socket.until("error"))["error"]["code"] == "input_audio_buffer_commit_empty"
    assert [f["transcript"] for f in socket.of(COMPLETED)] == [
        "what is the time?",
        "tell me a story and now please stop",
        "hello",
    ]


@scenario()
async def transcription_openai_words(stage: Stage) -> None:
    """The logprobs and formats that a transcription session knows, and its errors."""
    socket = await stage.connect("/v1/realtime?dialect=openai&intent=transcription")
    await socket.until("session.created")
    session = {
        "type": "transcription",
        "include": ["item.input_audio_transcription.logprobs"],
        "audio": {"input": {"format": {"type": "audio/pcma"}, "turn_detection": None}},
    }
    await socket.say("session.update", session=session)
    await socket.say(APPEND, audio=b64(b"\xd5" * 1600))
    for input in (
        {"format": {"type": "audio/pcm", "rate": 16000}},
        {"format": {"type": "audio/pcm", "rate": 1}},
        {"format": "pcm16"},
        {"transcription": {"model": "nobody"}},
        {"transcription": {"language": "tlh"}},
        {"transcription": {"what": 1}},
        {"noise_reduction": {"type": "magic"}},
        {"turn_detection": {"type": "semantic_vad", "eagerness": "x"}},
        {"turn_detection": VAD | {"threshold": 2}},
        {"what": 1},
    ):
        await socket.send(update(**input) | {"event_id": "mine"})
    for event in (
        {"type": "response.create"},
        {"type": "boo"},
        {"type": APPEND},
        {"type": APPEND, "audio": "*"},
        {"type": "session.update"},
        {"type": "session.update", "session": {"type": "realtime"}},
        {},
    ):
        await socket.send(event | {"event_id": "mine"})
    await socket.send("[]")
    assert len(socket.of("error")) >= 14
    await socket.send(update(format={"type": "audio/pcm", "rate": 24000}, turn_detection=VAD))
    await speak(stage, socket, "hello", 0.8)
    await socket.until(COMPLETED)


@scenario()
async def transcription_openai_beta(stage: Stage) -> None:
    socket = await stage.connect("/v1/realtime?intent=transcription", headers={"OpenAI-Beta": "realtime=v1"})
    await socket.until("transcription_session.created")
    session = {
        "input_audio_format": "pcm16",
        "input_audio_transcription": {"model": "whisper-1", "language": "en"},
        "turn_detection": VAD,
        "input_audio_noise_reduction": {"type": "far_field"},
    }
    await socket.say("transcription_session.update", session=session)
    await socket.until("transcription_session.updated")
    await speak(stage, socket, "what is the time?", 0.9)
    await socket.until(COMPLETED)
    await socket.say("transcription_session.update", session={"input_audio_format": "opus"}, event_id="format")
    assert (await socket.until("error"))["error"]["event_id"] == "format"
    await socket.say("transcription_session.update", session={"turn_detection": None})
    await speak(stage, socket, "hello")
    await socket.say(COMMIT)
    await socket.until(COMPLETED)
    assert "conversation.item.created" in socket.kinds


@scenario()
async def transcription_vllm(stage: Stage) -> None:
    """`commit` without `final` begins, `final` ends; what a stream may be tuned with; word times."""
    socket = await stage.connect("/v1/realtime?model=ears")
    await socket.until("session.created")
    await socket.say("session.update", model="ears", language="en", word_timestamps=True, prompt="time")
    await socket.say(COMMIT, final=False)
    await speak(stage, socket, "what is the time?", rate_hz=16_000)
    await stage.wait(0.5)
    await socket.say(COMMIT, final=True)
    first = await socket.until("transcription.done")
    assert first["text"] == "what is the time?"
    assert [w["word"] for w in first["words"]] == ["what", "is", "the", "time?"]
    await socket.say(COMMIT)
    await speak(stage, socket, "tell me a story and now please stop what is the time? hello", 1.0, rate_hz=16_000)
    await socket.say(COMMIT, final=True)
    await socket.until("transcription.done")
    assert socket.joined("transcription.delta").endswith("hello")
    await speak(stage, socket, "fail", rate_hz=16_000)
    await socket.say(COMMIT, final=True)
    assert (await socket.until("error"))["code"] == "processing_error"


@scenario()
async def transcription_vllm_errors(stage: Stage) -> None:
    socket = await stage.connect("/v1/realtime?dialect=vllm")
    await socket.until("session.created")
    for event in (
        {"type": APPEND, "audio": "AAAA"},
        {"type": COMMIT, "final": True},
        {"type": "session.update"},
        {"type": "session.update", "model": "nobody"},
        {"type": "session.update", "model": "ears", "language": "tlh"},
        {"type": "session.update", "model": "ears", "word_timestamps": 1},
        {"type": "session.update", "model": "ears", "prompt": 1},
        {"type": "session.update", "model": "ears"},
        {"type": APPEND},
        {"type": APPEND, "audio": "AAA="},
        {"type": APPEND, "audio": "*"},
        {"type": COMMIT, "final": "yes"},
        {"type": "boo"},
        {},
    ):
        await socket.send(event)
    for text in ("{", "[]", b"\xff"):
        await socket.send(text)
    assert len(socket.of("error")) == 15
    await socket.say(COMMIT, final=True)
    await stage.wait(1)
    unknown = await stage.connect("/v1/realtime?dialect=klingon")
    await unknown.end()
    nobody = await stage.connect("/v1/realtime?dialect=vllm&model=nobody")
    await nobody.end()


@scenario()
async def conversation_vllm(stage: Stage) -> None:
    """vLLM's dialect with a model that answers: its audio comes as `response.audio.delta`."""
    socket = await stage.connect("/v1/realtime?dialect=vllm")
    await socket.until("session.created")
    await socket.say("session.update", model="writer", prompt="Be brief.", voice="two")
    await speak(stage, socket, "what is the time?", rate_hz=16_000)
    await socket.say(COMMIT, final=True)
    await stage.wait(5)
    await socket.say("session.update", model="ears")
    await speak(stage, socket, "fail", rate_hz=16_000)
    await socket.say(COMMIT, final=True)
    await stage.wait(5)
    assert socket.of("error")
    assert len(socket.seen) > 10


@scenario(audio={"max_events_per_s": 5, "max_frame_bytes": 2048})
async def transcription_limits(stage: Stage) -> None:
    """A frame that is too large, and more events than a session may send."""
    large = await stage.connect("/v1/realtime?intent=transcription")
    await large.until("session.created")
    await large.say(APPEND, audio="A" * 4096)
    await stage.wait(0.1)
    assert large.of("error")
    busy = await stage.connect("/v1/realtime?intent=transcription")
    await busy.until("session.created")
    for _ in range(11):
        await busy.say("input_audio_buffer.clear")
    assert (await busy.end())[0] == 1008


@scenario(audio={"overflow": "close", "max_backlog_s": 1.0})
async def transcription_overflow(stage: Stage) -> None:
    """A caller that has to stay live is closed where it is ahead of what is heard."""
    socket = await stage.connect("/v1/realtime?intent=transcription")
    await socket.until("session.created")
    for _ in range(4):
        await socket.say(APPEND, audio=b64(pcm16("what is the time?", 2.0)))
    assert (await socket.end())[0] == 1008
    assert socket.of("error")[0]["error"]["code"] == "input_audio_buffer_overflow"
