"""vLLM's transcription dialect without a socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.protocols.realtime_connection import OUTPUTS, connect, exchange, frames, pcm, trace


def test_the_recorded_session_is_replayed_and_its_deltas_join_to_its_transcript() -> None:
    events: list[dict[str, Any]] = [
        {"type": "session.update", "model": "default", "rollback_tokens": 3, "word_timestamps": True},
        {"type": "input_audio_buffer.append", "audio": pcm(3200)},
        {"type": "input_audio_buffer.commit", "final": True},
        {"type": "nonsense"},
    ]
    got = trace("vllm", connect(), events, OUTPUTS)
    assert [f["type"] for f in got[2:5]] == ["transcription.delta", "transcription.delta", "transcription.done"]
    assert got[2]["delta"] + got[3]["delta"] == got[4]["text"]


@pytest.mark.parametrize(
    ("event", "code", "message"),
    [
        ("{", "invalid_json", "Invalid JSON"),
        ("[]", "invalid_event", "An event is a JSON object"),
        ({"type": "boo"}, "unknown_event", "Unknown event type: boo"),
        ({"type": "session.update"}, "invalid_event", "Missing required field: model"),
        (
            {"type": "session.update", "model": "gpt-4o-transcribe"},
            "model_not_found",
            "The model `gpt-4o-transcribe` does not exist.",
        ),
        ({"type": "session.update", "model": "default", "rollback_tokens": -1}, "invalid_event", None),
        ({"type": "session.update", "model": "default", "rollback_tokens": 1.5}, "invalid_event", None),
        (
            {"type": "session.update", "model": "default", "language": "tlh"},
            "invalid_event",
            "Unsupported language: tlh",
        ),
        ({"type": "session.update", "model": "default", "prompt": 5}, "invalid_event", "Invalid field: prompt"),
        ({"type": "input_audio_buffer.append", "audio": "%%%"}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.append", "audio": pcm(3)}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.append", "audio": pcm(64_002)}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.append", "audio": ["hello"]}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.append"}, "invalid_audio", "Invalid audio data"),
        ({"type": "input_audio_buffer.commit", "final": "yes"}, "invalid_event", "Invalid field: final"),
    ],
)
def test_when_an_event_is_wrong_then_the_error_is_flat_and_nothing_changes(
    event: Any, code: str, message: str | None
) -> None:
    connection = connect(dialect="vllm")
    exchange(connection, type="session.update", model="default")
    connection.commands()
    connection.receive(event if isinstance(event, str) else json.dumps(event))
    (answer,) = frames(connection)
    assert set(answer) == {"type", "error", "code"}
    assert (answer["type"], answer["code"]) == ("error", code)
    assert message is None or answer["error"] == message
    assert connection.commands() == []


@pytest.mark.parametrize("kind", ["append", "commit"])
def test_when_audio_comes_before_a_model_is_named_then_it_is_refused(kind: str) -> None:
    connection = connect(dialect="vllm")
    frames(connection)
    (answer,) = exchange(connection, type=f"input_audio_buffer.{kind}", audio=pcm(2))
    assert answer["code"] == "model_not_validated"
