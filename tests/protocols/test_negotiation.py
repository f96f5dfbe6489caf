"""Tests how /v1/realtime chooses a dialect, and that no input from a client breaks any dialect."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import AppendAudio, CommitAudio, ConfigureTranscription, ServerVad
from tests.protocols.realtime_connection import VENDOR, connect, exchange, frames, pcm


def test_the_first_frame_has_the_fields_that_each_client_reads() -> None:
    first = frames(connect())[0]
    VENDOR.validate_python(first)
    assert first["type"] == "session.created"
    assert first["id"].startswith("sess-")
    assert isinstance(first["created"], int)
    assert isinstance(first["session"]["expires_at"], int)
    assert first["session"]["type"] == "transcription"


@pytest.mark.parametrize(
    ("name", "strict", "served"),
    [
        ("gpt-realtime", False, True),
        ("whisper-1", False, True),
        ("nova-3", False, True),
        ("flux-general-en", False, True),
        ("scribe_v2_realtime", False, True),
        ("universal-streaming-english", False, True),
        ("ink-whisper", False, True),
        ("models/gemini-live-2.5-flash-preview", False, True),
        ("nova-3", True, False),
        ("whisper-1", True, False),
        ("default", True, True),
        ("tiny", False, False),
    ],
)
def test_hosted_model_names_are_served_unless_names_are_strict(name: str, strict: bool, served: bool) -> None:
    if served:
        assert frames(connect(strict, model=name))[0]["session"]["audio"]["input"]["transcription"]["model"] == name
    else:
        with pytest.raises(RemoteProtocolError, match="does not exist"):
            connect(strict, model=name)


def test_when_the_first_update_has_a_model_and_no_session_then_the_dialect_is_vllm() -> None:
    connection = connect()
    frames(connection)
    assert exchange(connection, type="session.update", model="whisper-base")[0]["type"] == "session.updated"
    assert connection.dialect == "vllm"
    assert isinstance(connection.commands()[0], ConfigureTranscription)


def test_when_the_first_update_has_a_transcription_session_then_the_dialect_is_openai() -> None:
    connection = connect()
    frames(connection)
    assert (
        exchange(connection, type="session.update", session={"type": "transcription"})[0]["type"] == "session.updated"
    )
    assert connection.dialect == "openai"


def test_when_audio_comes_before_any_update_then_it_is_held_and_read_in_the_chosen_dialect() -> None:
    connection = connect()
    assert exchange(connection, type="input_audio_buffer.append", audio=pcm(3200))[1:] == []
    assert connection.commands() == []
    assert connection.dialect == "undecided"
    exchange(connection, type="session.update", model="default")
    configured, audio = connection.commands()
    assert isinstance(configured, ConfigureTranscription)
    assert isinstance(audio, AppendAudio)
    assert len(audio.pcm) == 1600


def test_when_the_url_names_a_model_then_audio_before_any_update_is_openai() -> None:
    connection = connect(model="whisper-base")
    exchange(connection, type="input_audio_buffer.append", audio=pcm(48000))
    assert connection.dialect == "openai"
    configured, audio = connection.commands()
    assert isinstance(configured, ConfigureTranscription)
    assert configured.config.vad == ServerVad()
    assert isinstance(audio, AppendAudio)
    assert 15000 < len(audio.pcm) <= 16000


def test_when_a_client_only_sends_sound_then_the_default_dialect_reads_all_of_it_after_a_second() -> None:
    connection = connect()
    for tenths in range(1, 31):
        connection.receive(json.dumps({"type": "input_audio_buffer.append", "audio": pcm(4800)}))
        assert connection.dialect == ("openai" if tenths > 10 else "undecided")
    configured, *audio = connection.commands()
    assert isinstance(configured, ConfigureTranscription)
    assert configured.config.vad == ServerVad()
    num_samples = sum(len(command.pcm) for command in audio if isinstance(command, AppendAudio))
    # 30 times 2,400 samples at 24 kHz, except for the few that the resampler still holds.
    assert 47_000 < num_samples <= 48_000


@pytest.mark.parametrize(("size", "rate_hz"), [(640, 16000), (3200, 16000), (960, 24000), (2048, 24000)])
def test_when_a_client_only_sends_sound_then_the_size_of_its_frames_tells_its_rate(size: int, rate_hz: int) -> None:
    connection = connect()
    frames(connection)
    while connection.dialect == "undecided":
        connection.receive(json.dumps({"type": "input_audio_buffer.append", "audio": pcm(size)}))
    reported = [f["session"]["audio"]["input"]["format"] for f in frames(connection) if f["type"] == "session.updated"]
    assert reported == ([{"type": "audio/pcm", "rate": 16000}] if rate_hz == 16000 else [])
    for _ in range(50):
        connection.receive(json.dumps({"type": "input_audio_buffer.append", "audio": pcm(4800)}))
    sound = [command.pcm for command in connection.commands() if isinstance(command, AppendAudio)]
    assert sum(map(len, sound[-50:])) == pytest.approx(50 * 2400 * 16000 / rate_hz, abs=500)


def test_when_a_client_commits_without_an_update_then_the_default_dialect_reads_it_behind_the_sound() -> None:
    connection = connect()
    exchange(connection, type="input_audio_buffer.append", audio=pcm(9600))
    exchange(connection, type="input_audio_buffer.commit")
    assert connection.dialect == "openai"
    configured, *audio, committed = connection.commands()
    assert isinstance(configured, ConfigureTranscription)
    assert audio
    assert all(isinstance(command, AppendAudio) for command in audio)
    assert isinstance(committed, CommitAudio)


# --- any input

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


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([{}, {"dialect": "vllm"}, {"dialect": "openai"}, {"beta": True}, {"model": "default"}]),
    st.lists(raw, max_size=8),
)
def test_whatever_a_client_sends_nothing_raises_and_answers_parse(
    opening: dict[str, Any], data: list[str | bytes]
) -> None:
    connection = connect(**opening)
    for item in data:
        connection.receive(item)
        for frame in frames(connection):
            assert isinstance(frame["type"], str)
            # With beta names, the session has no type.
            if connection.dialect == "openai" and hasattr(connection.session(), "type"):
                VENDOR.validate_python(frame)
        for command in connection.commands():
            if isinstance(command, AppendAudio):
                assert command.pcm.dtype == np.float32
