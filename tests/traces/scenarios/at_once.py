"""Sound that comes at once, as a file, and clients that stop sending: turns end where they would have ended live."""

from __future__ import annotations

from typing import Any

from tests.traces.harness import Socket, Stage, b64, pcm16, pieces, scenario
from tests.traces.scenarios.conversation import APPEND, DONE, PIECE, SERVER_VAD, listening, opened
from tests.traces.scenarios.duplex import opened as opened_duplex
from tests.traces.scenarios.resume import come_back

COMPLETED = "conversation.item.input_audio_transcription.completed"
SEMANTIC_VAD = {"type": "semantic_vad"}


async def push(socket: Socket, *said: tuple[str, float], size: int = 5 * PIECE, rate_hz: int = 24_000) -> None:
    """Send all of it at once, each text with the silence after it."""
    for piece in pieces(b"".join(pcm16(text, silence_s, rate_hz) for text, silence_s in said), size):
        await socket.say(APPEND, audio=b64(piece))


async def heard_at_once(stage: Stage, *said: tuple[str, float], turn_detection: Any = SEMANTIC_VAD) -> list[str]:
    """The transcripts of a session that is sent all of this at once, and then nothing."""
    socket = await opened(stage, audio=listening(turn_detection), output_modalities=["text"])
    await push(socket, *said)
    await stage.wait(8)
    turns = len(socket.of("input_audio_buffer.speech_started"))
    assert len(socket.of("input_audio_buffer.speech_stopped")) == turns
    return [f["transcript"] for f in socket.of(COMPLETED)]


@scenario()
async def pushed_at_once(stage: Stage) -> None:
    """Whatever silence a file ends with, its last turn ends."""
    for silence_s in (0.0, 0.1, 1.0, 2.0):
        assert await heard_at_once(stage, ("what is the time?", silence_s)) == ["what is the time?"]
    assert await heard_at_once(stage, ("tell me and", 1.0)) == ["tell me and"]
    assert await heard_at_once(stage, ("hello.", 0.0), turn_detection=SERVER_VAD) == ["hello."]
    assert await heard_at_once(stage, ("hello.", 0.3), turn_detection=SERVER_VAD) == ["hello."]


@scenario()
async def pauses_pushed_at_once(stage: Stage) -> None:
    """A pause inside a file ends a turn, or does not, as it does live."""
    assert await heard_at_once(stage, ("tell me a story.", 1.0), ("what is the time?", 1.0)) == [
        "tell me a story.",
        "what is the time?",
    ]
    assert await heard_at_once(stage, ("tell me and", 0.8), ("a story.", 1.0)) == ["tell me and a story."]


@scenario()
async def duplex_pushed_at_once(stage: Stage) -> None:
    socket = await opened_duplex(stage, modalities=["text"])
    await push(socket, ("what is the time?", 1.0), size=3200, rate_hz=16_000)
    await socket.until(DONE)
    assert [f["transcript"] for f in socket.of(COMPLETED)] == ["what is the time?"]


@scenario()
async def stops_in_a_word(stage: Stage) -> None:
    """A client that sends nothing more ends its turn; one whose connection breaks goes on with it."""
    socket = await opened(stage, "?resume=1&model=gpt-realtime", audio=listening(), output_modalities=["text"])
    created = socket.of("session.created")[0]
    await push(socket, ("what is the", 0.0))
    await stage.wait(1)
    assert not socket.of("input_audio_buffer.speech_stopped")
    last = socket.seen[-1]["server_event_seq"]
    await socket.leave(1006)
    await stage.wait(5)
    again = await come_back(stage, created, last)
    await again.until("session.resumed")
    await push(again, ("time", 0.0))
    await again.until(DONE)
    assert [f["transcript"] for f in again.of(COMPLETED)] == ["what is the time"]
