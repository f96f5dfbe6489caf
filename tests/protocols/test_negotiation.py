"""Both dialects of /v1/realtime without a socket: golden traces, errors, and what no client may break."""

from __future__ import annotations

import base64
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.beta.realtime import RealtimeServerEvent as BetaServerEvent
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    CommitRefused,
    ConfigureTranscription,
    ServerVad,
    SessionEnding,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.events.words import Word
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import Opening

TRACES = Path(__file__).parents[1] / "traces"
VENDOR = TypeAdapter[Any](RealtimeServerEvent)
BETA = TypeAdapter[Any](BetaServerEvent)


def connect(strict: bool = False, **opening: Any) -> RealtimeConnection:
    count = itertools.count()
    connection = RealtimeConnection(
        Opening(**opening),
        ModelNames(("whisper-base",), strict),
        lambda: 1_700_000_000.0,
        new_id=lambda prefix: f"{prefix}{next(count)}",
        language_check=("en", "de").__contains__,
        max_append_bytes=64_000,
    )
    connection.open()
    return connection


def frames(connection: RealtimeConnection) -> list[dict[str, Any]]:
    return [json.loads(f) for f in connection.frames()]


def tell(connection: RealtimeConnection, **event: Any) -> list[dict[str, Any]]:
    connection.receive(json.dumps(event))
    return frames(connection)


def pcm(num_bytes: int) -> str:
    return base64.b64encode(bytes(num_bytes)).decode()


DONE = TranscriptDone(0, "Hello there.", "hello there.", (Word("Hello", 0.1, 0.4, 0.9),), "en", 1.25, 4, 3)
OUTPUTS: list[TranscriptionEvent] = [
    SpeechStarted(0, 100),
    TranscriptDelta(0, "hello"),
    SpeechStopped(0, 1350),
    TurnCommitted(0, 100, 1350),
    TranscriptDelta(0, " there."),
    DONE,
    SpeechStarted(1, 2000),
    SpeechStopped(1, 2500),
    TurnCommitted(1, 2000, 2500),
    TranscriptFailed(1, "the model failed"),
    TurnCleared(),
    SessionEnding("session_expired", "Your session hit the maximum duration."),
]


def trace(
    name: str, connection: RealtimeConnection, events: list[dict[str, Any]], outputs: list[TranscriptionEvent]
) -> list[dict[str, Any]]:
    """Play a session and compare each server frame with tests/traces/NAME.jsonl (ANTIPHON_TRACES=write makes it anew)."""
    got = frames(connection)
    for event in events:
        got += tell(connection, **event)
    for output in outputs:
        connection.send(output)
        got += frames(connection)
    path = TRACES / f"{name}.jsonl"
    text = "".join(json.dumps(f, ensure_ascii=False) + "\n" for f in got)
    if os.environ.get("ANTIPHON_TRACES") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    return got


def test_openai_trace_is_golden_and_parses_with_the_vendors_types() -> None:
    update = {
        "type": "transcription",
        "audio": {"input": {"transcription": {"model": "gpt-4o-transcribe", "language": "en"}}},
    }
    events = [
        {"type": "session.update", "session": update},
        {"type": "input_audio_buffer.append", "audio": pcm(4800)},
        {"type": "input_audio_buffer.append", "audio": "?"},
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.clear"},
        {"type": "response.create", "event_id": "mine"},
    ]
    for frame in trace("openai", connect(intent="transcription"), events, OUTPUTS):
        VENDOR.validate_python(frame, strict=False)
        # The pydantic union falls back to lenient members: the type must be a known one.
        assert VENDOR.validate_python(frame).type == frame["type"]


def test_beta_trace_is_golden() -> None:
    update = {
        "input_audio_format": "g711_ulaw",
        "input_audio_transcription": {"model": "whisper-1"},
        "turn_detection": {"type": "server_vad", "silence_duration_ms": 600},
    }
    events: list[dict[str, Any]] = [
        {"type": "transcription_session.update", "session": update},
        {"type": "input_audio_buffer.append", "audio": pcm(801)},
    ]
    first, *rest = trace("openai-beta", connect(beta=True, intent="transcription"), events, OUTPUTS[:6])
    assert first["type"] == "transcription_session.created"
    for frame in rest:
        assert (
            BETA.validate_python(
                frame
                | (
                    {"session": frame["session"] | {"client_secret": {"expires_at": 1, "value": ""}}}
                    if "session" in frame
                    else {}
                )
            ).type
            == frame["type"]
        )


def test_vllm_trace_is_golden() -> None:
    events: list[dict[str, Any]] = [
        {"type": "session.update", "model": "default", "rollback_tokens": 3, "word_timestamps": True},
        {"type": "input_audio_buffer.append", "audio": pcm(3200)},
        {"type": "input_audio_buffer.commit", "final": True},
        {"type": "nonsense"},
    ]
    got = trace("vllm", connect(), events, OUTPUTS)
    assert [f["type"] for f in got[2:5]] == ["transcription.delta", "transcription.delta", "transcription.done"]
    assert got[2]["delta"] + got[3]["delta"] == got[4]["text"]


def test_the_first_frame_is_read_by_every_client() -> None:
    first = frames(connect())[0]
    VENDOR.validate_python(first)
    assert first["type"] == "session.created"
    assert first["id"].startswith("sess-")
    assert isinstance(first["created"], int)
    assert isinstance(first["session"]["expires_at"], int)
    assert first["session"]["type"] == "transcription"


# --- which dialect ------------------------------------------------------------------------------------------------------


def test_a_flat_update_with_a_model_is_vllm() -> None:
    connection = connect()
    frames(connection)
    assert tell(connection, type="session.update", model="whisper-base") == []
    assert connection.dialect == "vllm"
    assert isinstance(connection.commands()[0], ConfigureTranscription)


def test_a_session_object_is_openai() -> None:
    connection = connect()
    frames(connection)
    assert tell(connection, type="session.update", session={"type": "transcription"})[0]["type"] == "session.updated"
    assert connection.dialect == "openai"


def test_sound_before_any_update_is_held_and_then_read_in_the_dialect() -> None:
    connection = connect()
    assert tell(connection, type="input_audio_buffer.append", audio=pcm(3200))[1:] == []
    assert connection.commands() == []
    assert connection.dialect == "undecided"
    tell(connection, type="session.update", model="default")
    configured, audio = connection.commands()
    assert isinstance(configured, ConfigureTranscription)
    assert isinstance(audio, AppendAudio)
    assert len(audio.pcm) == 1600


def test_sound_before_any_update_is_openais_when_the_url_named_the_model() -> None:
    connection = connect(model="whisper-base")
    tell(connection, type="input_audio_buffer.append", audio=pcm(48000))
    assert connection.dialect == "openai"
    configured, audio = connection.commands()
    assert isinstance(configured, ConfigureTranscription)
    assert configured.config.vad == ServerVad()
    assert isinstance(audio, AppendAudio)
    assert 15000 < len(audio.pcm) <= 16000


def test_held_sound_is_bounded() -> None:
    connection = connect()
    for _ in range(100):
        connection.receive(json.dumps({"type": "input_audio_buffer.append", "audio": pcm(60000)}))
    assert connection.dialect == "openai"
    assert connection._held == []


# --- errors -------------------------------------------------------------------------------------------------------------


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
def test_vllm_errors_are_flat_and_change_nothing(event: Any, code: str, message: str | None) -> None:
    connection = connect(dialect="vllm")
    tell(connection, type="session.update", model="default")
    connection.commands()
    connection.receive(event if isinstance(event, str) else json.dumps(event))
    (answer,) = frames(connection)
    assert set(answer) == {"type", "error", "code"}
    assert (answer["type"], answer["code"]) == ("error", code)
    assert message is None or answer["error"] == message
    assert connection.commands() == []


@pytest.mark.parametrize("kind", ["append", "commit"])
def test_vllm_sound_without_a_model_is_refused(kind: str) -> None:
    connection = connect(dialect="vllm")
    frames(connection)
    (answer,) = tell(connection, type=f"input_audio_buffer.{kind}", audio=pcm(2))
    assert answer["code"] == "model_not_validated"


def audio_input(**fields: Any) -> dict[str, Any]:
    return {
        "type": "session.update",
        "session": {"type": "transcription", "audio": {"input": fields}},
        "event_id": "e1",
    }


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ("{", "invalid_event", None),
        (b"\xff\x00", "invalid_event", None),
        ("[]", "invalid_event", None),
        ({}, "missing_required_parameter", "type"),
        ({"type": 7}, "invalid_type", "type"),
        ({"type": "boo"}, "invalid_value", "type"),
        ({"type": "session.update"}, "missing_required_parameter", "session"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "invalid_value", "session.type"),
        ({"type": "session.update", "session": {"colour": 1}}, "unknown_parameter", "session.colour"),
        ({"type": "session.update", "session": {"include": ["all"]}}, "invalid_value", "session.include"),
        (audio_input(volume=1), "unknown_parameter", "session.audio.input.volume"),
        (audio_input(format={"type": "audio/mp3"}), "invalid_value", "session.audio.input.format"),
        (audio_input(format={"type": "audio/pcm", "rate": 7}), "invalid_value", "session.audio.input.format.rate"),
        (
            audio_input(transcription={"model": "nonsense"}),
            "model_not_found",
            "session.audio.input.transcription.model",
        ),
        (audio_input(transcription={"language": "tlh"}), "invalid_value", "session.audio.input.transcription.language"),
        (audio_input(transcription="x"), "invalid_type", "session.audio.input.transcription"),
        (
            audio_input(turn_detection={"type": "semantic_vad"}),
            "invalid_value",
            "session.audio.input.turn_detection.type",
        ),
        (audio_input(turn_detection={"threshold": 2}), "invalid_value", "session.audio.input.turn_detection.threshold"),
        (
            audio_input(turn_detection={"threshold": True}),
            "invalid_type",
            "session.audio.input.turn_detection.threshold",
        ),
        (audio_input(noise_reduction={"type": "x"}), "invalid_value", "session.audio.input.noise_reduction.type"),
        ({"type": "input_audio_buffer.append"}, "missing_required_parameter", "audio"),
        ({"type": "input_audio_buffer.append", "audio": 1}, "invalid_type", "audio"),
        ({"type": "input_audio_buffer.append", "audio": "%%%"}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append", "audio": pcm(3)}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append", "audio": pcm(64_002)}, "invalid_value", "audio"),
    ],
)
def test_openai_errors_name_code_and_parameter_and_change_nothing(event: Any, code: str, param: str | None) -> None:
    connection = connect(dialect="openai")
    frames(connection)
    connection.commands()
    before = connection._transcription.session() if connection._transcription else None
    connection.receive(event if isinstance(event, str | bytes) else json.dumps(event))
    (answer,) = frames(connection)
    VENDOR.validate_python(answer)
    assert (answer["type"], answer["error"]["code"], answer["error"].get("param")) == ("error", code, param)
    assert connection.commands() == []
    assert connection._transcription is not None
    assert connection._transcription.session() == before
    if isinstance(event, dict) and "event_id" in event:
        assert answer["error"]["event_id"] == "e1"


def test_an_empty_commit_says_how_much_there_was() -> None:
    connection = connect(dialect="openai")
    frames(connection)
    connection.send(CommitRefused(40, 100))
    (answer,) = frames(connection)
    assert answer["error"]["code"] == "input_audio_buffer_commit_empty"
    assert "40.00ms" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("name", "strict", "served"),
    [
        ("gpt-realtime", False, True),
        ("whisper-1", False, True),
        ("whisper-1", True, False),
        ("default", True, True),
        ("tiny", False, False),
    ],
)
def test_a_clients_own_model_name_is_served_unless_strict(name: str, strict: bool, served: bool) -> None:
    if served:
        assert frames(connect(strict, model=name))[0]["session"]["audio"]["input"]["transcription"]["model"] == name
    else:
        with pytest.raises(RemoteProtocolError, match="does not exist"):
            connect(strict, model=name)


# --- sessions -----------------------------------------------------------------------------------------------------------


def test_an_update_changes_what_it_names_and_echoes_everything() -> None:
    connection = connect(dialect="openai")
    frames(connection)
    connection.commands()
    (answer,) = tell(
        connection, **audio_input(turn_detection={"silence_duration_ms": 700}, noise_reduction={"type": "near_field"})
    )
    assert answer["session"]["audio"]["input"]["turn_detection"] == {
        "type": "server_vad",
        "threshold": 0.5,
        "prefix_padding_ms": 300,
        "silence_duration_ms": 700,
    }
    (answer,) = tell(
        connection, **audio_input(turn_detection=None, transcription={"prompt": "Sintra", "keywords": ["Byron"]})
    )
    assert answer["session"]["audio"]["input"]["turn_detection"] is None
    assert answer["session"]["audio"]["input"]["noise_reduction"] == {"type": "near_field"}
    *_, last = connection.commands()
    assert isinstance(last, ConfigureTranscription)
    assert last.config.vad is None
    assert last.config.prompt == "Sintra Byron"


@pytest.mark.parametrize(
    ("form", "num_bytes", "seconds"),
    [
        ({"type": "audio/pcm", "rate": 24000}, 48000, 1.0),
        ({"type": "audio/pcm", "rate": 16000}, 32000, 1.0),
        ({"type": "audio/pcmu"}, 8000, 1.0),
        ({"type": "audio/pcma"}, 8000, 1.0),
    ],
)
def test_every_format_arrives_at_the_models_rate(form: dict[str, Any], num_bytes: int, seconds: float) -> None:
    connection = connect(dialect="openai")
    tell(connection, **audio_input(format=form))
    connection.commands()
    tell(connection, type="input_audio_buffer.append", audio=pcm(num_bytes))
    tell(connection, type="input_audio_buffer.commit")
    *sound, last = connection.commands()
    assert last == CommitAudio()
    assert sum(len(s.pcm) for s in sound if isinstance(s, AppendAudio)) == seconds * 16000


def test_clear_reaches_the_session() -> None:
    connection = connect(dialect="openai")
    connection.commands()
    tell(connection, type="input_audio_buffer.clear")
    assert connection.commands() == [ClearAudio()]


def test_items_are_one_a_turn_and_chained() -> None:
    connection = connect(dialect="openai")
    frames(connection)
    for output in OUTPUTS[:9]:
        connection.send(output)
    got = frames(connection)
    items = {f["item_id"] for f in got if "item_id" in f}
    assert len(items) == 2
    first, second = [f for f in got if f["type"] == "input_audio_buffer.committed"]
    assert first["previous_item_id"] is None
    assert second["previous_item_id"] == first["item_id"]


# --- what no client may break -------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
json_values = st.recursive(
    scalars, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3), max_leaves=8
)
names = st.sampled_from(
    [
        "session.update",
        "transcription_session.update",
        "input_audio_buffer.append",
        "input_audio_buffer.commit",
        "input_audio_buffer.clear",
        "x",
    ]
)
keys = st.sampled_from(
    [
        "type",
        "session",
        "audio",
        "model",
        "input",
        "format",
        "transcription",
        "turn_detection",
        "include",
        "final",
        "language",
        "threshold",
        "rate",
        "rollback_tokens",
        "input_audio_format",
        "event_id",
    ]
)
trees = st.recursive(scalars, lambda c: st.dictionaries(keys, c, max_size=4) | st.lists(c, max_size=2), max_leaves=12)
events = st.builds(lambda t, rest: {**rest, "type": t}, names, st.dictionaries(keys, trees, max_size=4))
raw = st.one_of(st.binary(max_size=40), st.text(max_size=40), json_values.map(json.dumps), events.map(json.dumps))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([{}, {"dialect": "vllm"}, {"dialect": "openai"}, {"beta": True}, {"model": "default"}]),
    st.lists(raw, max_size=8),
)
def test_receive_never_raises_and_answers_parse(opening: dict[str, Any], data: list[str | bytes]) -> None:
    connection = connect(**opening)
    for item in data:
        connection.receive(item)
        for frame in frames(connection):
            assert isinstance(frame["type"], str)
            if connection.dialect == "openai" and not connection._transcription.beta:  # type: ignore[union-attr]
                VENDOR.validate_python(frame)
        for made in connection.commands():
            if isinstance(made, AppendAudio):
                assert made.pcm.dtype == np.float32
