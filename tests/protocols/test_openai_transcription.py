"""Tests OpenAI's transcription dialect with GA and beta names, without a socket."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.beta.realtime import RealtimeServerEvent as BetaServerEvent
from openai.types.realtime import InputAudioBufferTimeoutTriggered
from pydantic import TypeAdapter

from antiphon.events.transcription import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    CommitRefused,
    ConfigureTranscription,
    LanguageDetected,
    SilenceCommitted,
    TranscriptDelta,
    TurnCommitted,
)
from antiphon.events.words import TokenLogprob, Word
from antiphon.protocols.realtime.transcript_events import LANGUAGE, LOGPROBS, WORDS
from tests.protocols.realtime_connection import DONE, OUTPUTS, VENDOR, connect, exchange, frames, pcm, trace

BETA = TypeAdapter[Any](BetaServerEvent)


def audio_input(**fields: Any) -> dict[str, Any]:
    return {
        "type": "session.update",
        "session": {"type": "transcription", "audio": {"input": fields}},
        "event_id": "e1",
    }


def test_the_recorded_session_is_replayed_and_parses_with_the_vendors_types() -> None:
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
        # The pydantic union falls back to lenient members, so also check the type.
        assert VENDOR.validate_python(frame).type == frame["type"]


def test_the_recorded_beta_session_is_replayed_and_parses_with_the_vendors_types() -> None:
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
        if "session" in frame:
            # OpenAI's type requires a client secret, which only the answer to an HTTP request has.
            secret = {"client_secret": {"expires_at": 1, "value": ""}}
            frame = frame | {"session": frame["session"] | secret}
        assert BETA.validate_python(frame).type == frame["type"]


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
            audio_input(turn_detection={"type": "psychic_vad"}),
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
def test_when_an_event_is_wrong_then_the_error_names_the_field_and_nothing_changes(
    event: Any, code: str, param: str | None
) -> None:
    connection = connect(dialect="openai")
    frames(connection)
    connection.commands()
    before = connection.session()
    connection.receive(event if isinstance(event, str | bytes) else json.dumps(event))
    (answer,) = frames(connection)
    VENDOR.validate_python(answer)
    assert (answer["type"], answer["error"]["code"], answer["error"].get("param")) == ("error", code, param)
    assert connection.commands() == []
    assert connection.session() == before
    if isinstance(event, dict) and "event_id" in event:
        assert answer["error"]["event_id"] == "e1"


@pytest.mark.parametrize("value", [{"type": "audio/g726"}, ["pcm16"], 24000])
def test_when_a_beta_format_is_no_text_then_it_is_an_error(value: Any) -> None:
    connection = connect(beta=True)
    frames(connection)
    (answer,) = exchange(connection, type="transcription_session.update", session={"input_audio_format": value})
    assert answer["type"] == "error"
    assert answer["error"]["param"] == "session.input_audio_format"


def test_when_a_commit_is_refused_then_the_error_says_how_much_audio_there_was() -> None:
    connection = connect(dialect="openai")
    frames(connection)
    connection.send(CommitRefused(40, 100, "mine"))
    (answer,) = frames(connection)
    assert answer["error"]["code"] == "input_audio_buffer_commit_empty"
    assert "40.00ms" in answer["error"]["message"]
    assert answer["error"]["event_id"] == "mine"


def test_an_update_changes_the_fields_it_has_and_shows_the_whole_session() -> None:
    connection = connect(dialect="openai")
    frames(connection)
    connection.commands()
    (answer,) = exchange(
        connection, **audio_input(turn_detection={"silence_duration_ms": 700}, noise_reduction={"type": "near_field"})
    )
    assert answer["session"]["audio"]["input"]["turn_detection"] == {
        "type": "server_vad",
        "threshold": 0.5,
        "prefix_padding_ms": 300,
        "silence_duration_ms": 700,
    }
    (answer,) = exchange(
        connection, **audio_input(turn_detection=None, transcription={"prompt": "Sintra", "keywords": ["Byron"]})
    )
    assert answer["session"]["audio"]["input"]["turn_detection"] is None
    assert answer["session"]["audio"]["input"]["noise_reduction"] == {"type": "near_field"}
    *_, last = connection.commands()
    assert isinstance(last, ConfigureTranscription)
    assert last.config.vad is None
    assert last.config.prompt == "Sintra"
    assert last.config.keyterms == ("Byron",)


def test_keyterms_are_another_name_for_keywords() -> None:
    connection = connect(dialect="openai")
    frames(connection)
    (answer,) = exchange(connection, **audio_input(transcription={"keyterms": [" Byron  Bay ", ""]}))
    assert answer["session"]["audio"]["input"]["transcription"]["keywords"] == ["Byron Bay"]
    *_, last = connection.commands()
    assert isinstance(last, ConfigureTranscription)
    assert last.config.keyterms == ("Byron Bay",)


@pytest.mark.parametrize(
    ("transcription", "code"),
    [
        ({"keywords": ["a"] * 201}, "invalid_value"),
        ({"keywords": ["a" * 65]}, "string_above_max_length"),
        ({"keywords": ["a"], "keyterms": ["b"]}, "invalid_value"),
        ({"keyterms": [1]}, "invalid_type"),
    ],
)
def test_keyterms_out_of_bounds_refuse_the_update(transcription: dict[str, Any], code: str) -> None:
    connection = connect(dialect="openai")
    frames(connection)
    (answer,) = exchange(connection, **audio_input(transcription=transcription))
    assert answer["error"]["code"] == code
    assert answer["error"]["param"].startswith("session.audio.input.transcription.key")


@pytest.mark.parametrize(
    ("form", "num_bytes", "seconds"),
    [
        ({"type": "audio/pcm", "rate": 24000}, 48000, 1.0),
        ({"type": "audio/pcm", "rate": 16000}, 32000, 1.0),
        ({"type": "audio/pcmu"}, 8000, 1.0),
        ({"type": "audio/pcma"}, 8000, 1.0),
    ],
)
def test_audio_of_every_format_reaches_the_session_at_16_khz(
    form: dict[str, Any], num_bytes: int, seconds: float
) -> None:
    connection = connect(dialect="openai")
    exchange(connection, **audio_input(format=form))
    connection.commands()
    exchange(connection, type="input_audio_buffer.append", audio=pcm(num_bytes))
    exchange(connection, type="input_audio_buffer.commit", event_id="mine")
    *sound, last = connection.commands()
    assert last == CommitAudio(event_id="mine")
    assert sum(len(s.pcm) for s in sound if isinstance(s, AppendAudio)) == seconds * 16000


def test_a_silence_is_an_item_whose_transcript_is_empty() -> None:
    connection = connect(dialect="openai")
    frames(connection)

    def timeout_ms(**vad: Any) -> float | None:
        exchange(connection, **audio_input(turn_detection={"type": "server_vad"} | vad))
        command = connection.commands()[-1]
        assert isinstance(command, ConfigureTranscription)
        return command.config.idle_timeout_ms

    assert timeout_ms(idle_timeout_ms=3000) == 3000
    connection.send(SilenceCommitted(4, 1000, 4000))
    connection.send(TurnCommitted(4, 1000, 3300))
    first, committed, *_ = frames(connection)
    triggered = InputAudioBufferTimeoutTriggered.model_validate(first)
    assert (triggered.audio_start_ms, triggered.audio_end_ms) == (1000, 4000)
    assert (committed["type"], committed["item_id"]) == ("input_audio_buffer.committed", triggered.item_id)
    assert timeout_ms() == 3000
    assert timeout_ms(idle_timeout_ms=None) is None
    (refused,) = exchange(connection, **audio_input(turn_detection={"type": "server_vad", "idle_timeout_ms": 999}))
    assert "expected 1000 to 60000" in refused["error"]["message"]


def test_a_clear_reaches_the_session() -> None:
    connection = connect(dialect="openai")
    connection.commands()
    exchange(connection, type="input_audio_buffer.clear")
    assert connection.commands() == [ClearAudio()]


def test_each_turn_is_an_item_that_names_the_one_before() -> None:
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


def test_what_include_asks_for_is_sent_with_transcripts_and_nothing_else_is() -> None:
    connection = connect(dialect="openai")
    words, tokens = (Word("Hi", 0.5, 0.75, 0.9),), (TokenLogprob(b"H\xc3", -0.25),)
    delta = TranscriptDelta(0, "Hi", words, tokens)
    done = replace(DONE, words=words, logprobs=tokens)
    events = [delta, LanguageDetected(0, "en", 0.98765), done]

    def sent(*include: str) -> list[dict[str, Any]]:
        exchange(connection, type="session.update", session={"type": "transcription", "include": list(include)})
        command = connection.commands()[-1]
        assert isinstance(command, ConfigureTranscription)
        asked = (command.config.logprobs, command.config.word_times, command.config.reports_language)
        assert asked == (LOGPROBS in include, WORDS in include, LANGUAGE in include)
        for event in events:
            connection.send(event)
        return frames(connection)

    plain_delta, plain_done = sent()
    assert not {"words", "logprobs"} & (set(plain_delta) | set(plain_done))
    shown_words = [{"word": "Hi", "start": 0.5, "end": 0.75, "confidence": 0.9}]
    shown_tokens = [{"token": "H\ufffd", "logprob": -0.25, "bytes": [72, 195]}]
    for frame in sent(LOGPROBS):
        VENDOR.validate_python(frame)
        assert (frame["logprobs"], "words" in frame) == (shown_tokens, False)
    first, language, last = sent(WORDS, LANGUAGE)
    assert first["words"] == last["words"] == shown_words
    assert language["type"] == "conversation.item.input_audio_transcription.language"
    assert (language["item_id"], language["language"], language["probability"]) == (first["item_id"], "en", 0.988)


def test_languages_restrict_what_is_detected() -> None:
    connection = connect(dialect="openai")
    frames(connection)
    (shown,) = exchange(connection, **audio_input(transcription={"languages": ["en", "de"]}))
    assert shown["session"]["audio"]["input"]["transcription"]["languages"] == ["en", "de"]
    (answer,) = exchange(connection, **audio_input(transcription={"languages": ["en", "tlh"]}))
    assert answer["error"]["param"] == "session.audio.input.transcription.languages"
    command = connection.commands()[-1]
    assert isinstance(command, ConfigureTranscription)
    assert command.config.languages == ("en", "de")
