"""Streaming servers: what they are sent, which words count as heard, and which messages are failures."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from antiphon.contracts import Hypothesis, Window
from antiphon.errors import ModelError, Refused
from antiphon.remote.transcriber.sockets import MAX_CHARS, MAX_MESSAGE_BYTES
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from tests.contracts.transcribers import remote

SOUND = np.full(16000, 0.1, np.float32)
VLLM = {"type": "session.created", "id": "sess-1", "created": 1}
OPENAI = {"type": "session.created", "session": {"type": "transcription"}}
ITEM = "conversation.item.input_audio_transcription"
Reply = Callable[[dict[str, Any]], list[Any]]


class Streaming:
    """A WebSocket server that greets, and answers each message with those that `reply` returns for it."""

    def __init__(self, greeting: dict[str, Any], reply: Reply) -> None:
        self.greeting, self.reply = greeting, reply
        self.received: list[dict[str, Any]] = []

    def handle(self, wire: ServerConnection) -> None:
        wire.send(json.dumps(self.greeting))
        for message in wire:
            event = json.loads(message)
            self.received.append(event)
            for answer in self.reply(event):
                wire.send(answer if isinstance(answer, str | bytes) else json.dumps(answer))

    @contextmanager
    def running(self) -> Iterator[str]:
        with serve(self.handle, "127.0.0.1", 0) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/v1/realtime"
            server.shutdown()
            thread.join()

    @property
    def audio(self) -> bytes:
        return b"".join(base64.b64decode(e["audio"]) for e in self.received if e["type"].endswith("append"))


def decoded(server: Streaming, *windows: Window) -> list[Hypothesis]:
    async def main(transcriber: RemoteTranscriber) -> list[Hypothesis]:
        stream = transcriber.open()
        try:
            return [await stream.decode(window) for window in windows]
        finally:
            stream.close()
            await transcriber.pool.close()

    with server.running() as url:
        return asyncio.run(main(remote(url, model="m")))


def text_of(hypothesis: Hypothesis) -> str:
    return "".join(piece.text for piece in hypothesis.pieces)


def vllm(*deltas: str) -> Reply:
    def reply(event: dict[str, Any]) -> list[Any]:
        if event["type"] == "input_audio_buffer.append":
            return [{"type": "transcription.delta", "delta": delta} for delta in deltas]
        if event.get("final"):
            return [{"type": "transcription.done", "text": "".join(deltas), "usage": {"total_tokens": 3}}]
        return []

    return reply


def openai(*answers: dict[str, Any]) -> Reply:
    def reply(event: dict[str, Any]) -> list[Any]:
        if event["type"] == "session.update":
            return [{"type": "session.updated", "session": {}}]
        return list(answers) if event["type"] == "input_audio_buffer.commit" else []

    return reply


def test_a_word_that_may_still_grow_is_not_heard_before_the_final() -> None:
    server = Streaming(VLLM, vllm(" Hel", "lo", " wor"))
    partial, final = decoded(server, Window(SOUND), Window(SOUND, final=True))
    assert (text_of(partial), text_of(final)) == (" Hello", " Hello wor")
    assert [event["type"] for event in server.received][:2] == ["session.update", "input_audio_buffer.commit"]
    assert server.received[0]["model"] == "m"
    assert (server.received[1]["final"], server.received[-1]["final"]) == (False, True)


def test_audio_is_sent_once_and_whole_and_a_window_that_goes_on_after_a_final_is_sent_again() -> None:
    server = Streaming(VLLM, vllm(" a", " b"))
    longer = np.concatenate((SOUND, SOUND))
    decoded(server, Window(SOUND), Window(longer), Window(longer, final=True))
    assert len(server.audio) == 2 * len(longer)
    decoded(server, Window(SOUND, final=True), Window(longer), Window(longer, final=True))
    assert len(server.audio) == 2 * (len(longer) + len(SOUND) + len(longer))


def test_openais_sessions_get_24_khz_the_language_and_the_hint_and_no_turn_detection() -> None:
    done = {"type": f"{ITEM}.completed", "item_id": "i", "transcript": "Ja.", "usage": {}}
    server = Streaming(OPENAI, openai({"type": "input_audio_buffer.committed"}, done))
    (found,) = decoded(server, Window(SOUND, final=True, language="de", prompt="Namen"))
    assert text_of(found) == " Ja."
    session = [event for event in server.received if event["type"] == "session.update"][-1]["session"]
    assert session["audio"]["input"] == {
        "format": {"type": "audio/pcm", "rate": 24000},
        "transcription": {"model": "m", "language": "de", "prompt": "Namen"},
        "turn_detection": None,
    }
    assert "include" not in session
    assert abs(len(server.audio) - 2 * 24000) < 100


def test_a_turn_that_is_too_short_for_the_server_has_no_words() -> None:
    error = {"type": "error", "error": {"code": "input_audio_buffer_commit_empty", "message": "too small"}}
    (found,) = decoded(Streaming(OPENAI, openai(error)), Window(SOUND[:200], final=True))
    assert not found.is_speech


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"type": f"{ITEM}.failed", "error": {"message": "no memory"}}, "no memory"),
        ({"type": "error", "error": {"message": "it broke", "code": "x"}}, "it broke"),
        ("not json", "no valid message"),
        (b"\xff\xfe", "no valid message"),
        ("[1, 2]", "no valid message"),
        ({"type": f"{ITEM}.completed", "transcript": "x" * (MAX_CHARS + 1)}, "more than"),
        ("x" * (MAX_MESSAGE_BYTES + 1), "too big|sent 1009"),
    ],
)
def test_failures_of_the_server_are_named_and_may_be_short(answer: Any, why: str) -> None:
    with pytest.raises(Refused, match=why):
        decoded(Streaming(OPENAI, openai(answer)), Window(SOUND, final=True))


def test_a_rate_that_the_server_cannot_do_is_named_at_the_start() -> None:
    def reply(event: dict[str, Any]) -> list[Any]:
        return [{"type": "error", "error": {"code": "invalid_value", "message": "only 8000 Hz"}}]

    with pytest.raises(ModelError, match="refuses PCM at 24000 Hz or its session: only 8000 Hz"):
        decoded(Streaming(OPENAI, reply))
