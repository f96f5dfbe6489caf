"""The speech stream's dialect, frame by frame."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    ConfigureSpeech,
    FlushText,
    SentenceAudio,
    SentenceDone,
    SentenceStarted,
    SpeechCommand,
    SpeechConfig,
    SpeechEvent,
    UtteranceDone,
    VoiceSample,
)
from antiphon.events.words import Word
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.speech.stream import MAX_CONFIG_BYTES, MAX_MESSAGE_BYTES, SpeechDialect, SpeechMessage
from antiphon.protocols.wire import Frame, Received
from tests.protocols.struct_values import JSON_TYPES, fields_of_every_type, has_wrong_type

aliases: list[str] = []


def check_url(url: str, param: str) -> None:
    if "listed" not in url:
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': nothing is fetched.", param)


def catalog(*, strict: bool = False) -> SpeechCatalog:
    return SpeechCatalog(
        ModelNames(("hibari-heart",), strict=strict),
        ("heart", "emma"),
        ("en",),
        clones=False,
        uploaded=lambda name: VoiceSample() if name == "mine" else None,
        check_url=check_url,
        log_alias=lambda name, model: aliases.append(name),
    )


def configured(**config: Any) -> SpeechConfig:
    received = SpeechDialect(catalog()).feed(json.dumps({"type": "session.config"} | config))
    assert received.answers == []
    (command,) = received.commands
    assert isinstance(command, ConfigureSpeech)
    return command.config


def stream() -> SpeechDialect:
    wire = SpeechDialect(catalog())
    wire.feed('{"type":"session.config"}')
    assert wire.configured
    return wire


def texts(frames: Iterable[Frame]) -> list[dict[str, Any]]:
    return [json.loads(text) for f in frames if isinstance(text := f.encode(), str)]


def sent(wire: SpeechDialect, *events: SpeechEvent) -> list[Frame]:
    return [frame for event in events for frame in wire.send(event)]


def test_a_configuration_has_defaults_for_missing_fields() -> None:
    assert configured() == SpeechConfig(None, "sentence", "wav", 1.0, None, stream=False, word_times=False)
    assert configured(
        model="default",
        voice="Emma",
        response_format="pcm",
        speed=1,
        seed=-1,
        stream_audio=True,
        word_timestamps=True,
        split_granularity="clause",
        language="English",
        instructions="softly",
        task_type="CustomVoice",
        max_new_tokens=1,
        initial_codec_chunk_frames=0,
        ref_audio=None,
        x_vector_only_mode=False,
        something_else={"a": 1},
    ) == SpeechConfig(
        "emma",
        "clause",
        "pcm",
        1.0,
        2**64 - 1,
        stream=True,
        word_times=True,
        language="en",
        instructions="softly",
        max_frames=1,
    )
    assert configured(speaker="heart").voice == "heart"


def test_a_request_may_set_the_rate_how_the_text_is_given_and_the_models_own_numbers() -> None:
    wire = SpeechDialect(replace(catalog(), parameters={"temperature": (0.0, 2.0), "top_k": (0, 1000)}))

    def answer(**config: Any) -> Received[SpeechCommand]:
        return wire.feed(json.dumps({"type": "session.config"} | config))

    (command,) = answer(
        sample_rate=8000, non_streaming_mode=False, extra_params={"temperature": 1, "top_k": None}
    ).commands
    assert isinstance(command, ConfigureSpeech)
    config = command.config
    assert (config.rate_hz, config.whole_text, config.parameters) == (8000, False, {"temperature": 1.0})
    for extra, reported in (
        ({"cfg_scale": 2}, "Unknown parameter 'extra_params.cfg_scale': the model takes temperature, top_k."),
        ({"top_k": 1001}, "Invalid value for 'extra_params.top_k': expected 0 to 1000."),
        ({"temperature": "hot"}, "Invalid type for 'extra_params.temperature'"),
    ):
        assert reported in texts(answer(extra_params=extra).answers)[0]["message"]
    assert configured(extra_params={}).parameters == {}


def test_a_request_may_bring_a_recording_or_an_embedding_of_a_voice() -> None:
    cloning = replace(catalog(), clones=True, tasks=("Base",), languages=("en", "it"))

    def answer(**config: Any) -> Received[SpeechCommand]:
        return SpeechDialect(cloning).feed(json.dumps({"type": "session.config"} | config))

    def sample(**config: Any) -> VoiceSample | None:
        received = answer(**config)
        assert received.answers == []
        (command,) = received.commands
        assert isinstance(command, ConfigureSpeech)
        assert command.config.voice is None
        return command.config.sample

    assert sample(ref_audio="data:audio/wav;base64,AAAA", ref_text="Hi") == VoiceSample(bytes(3), "Hi")
    assert sample(ref_audio="AAAA", ref_text="Hi", x_vector_only_mode=True) == VoiceSample(bytes(3))
    assert sample(speaker_embedding=[1, 0.5], task_type="Base") == VoiceSample(embedding=(1.0, 0.5))
    assert sample(ref_audio="https://listed.org/a.wav", ref_text="Hi") == VoiceSample(
        url="https://listed.org/a.wav", text="Hi"
    )
    assert sample(voice="mine") == VoiceSample()
    assert sample(voice="mine", ref_audio="AAAA", ref_text="Hi") == VoiceSample(bytes(3), "Hi")
    assert sample(language="Italian") is None
    for number in (10**400, float("nan"), float("inf"), 1e7):
        received = answer(speaker_embedding=[0.5, number])
        assert received.commands == []
        assert texts(received.answers)
    for wrong in ("https://x.org/a.wav", "not base64!"):
        assert "Invalid value for 'ref_audio'" in texts(answer(ref_audio=wrong).answers)[0]["message"]
    for without in ({}, {"ref_text": " "}, {"x_vector_only_mode": False}):
        assert "'ref_text' is required" in texts(answer(ref_audio="AAAA", **without).answers)[0]["message"]
    assert "The loaded model does Base." in texts(answer(task_type="VoiceDesign").answers)[0]["message"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"response_format": "midi"}, "Invalid session config: Invalid value for 'response_format'"),
        ({"speed": 0.2}, "Invalid value for 'speed': expected 0.25 to 4"),
        ({"speed": "fast"}, "Invalid type for 'speed'"),
        ({"speed": True}, "Invalid type for 'speed'"),
        ({"seed": 2**63}, "Invalid value for 'seed'"),
        ({"seed": 1.5}, "Invalid type for 'seed'"),
        ({"split_granularity": "word"}, "'split_granularity': expected one of sentence, clause, none"),
        ({"stream_audio": 1}, "Invalid type for 'stream_audio'"),
        ({"stream_audio": True}, "stream_audio=true requires response_format='pcm'. Got 'wav'."),
        ({"stream_audio": True, "response_format": "pcm", "speed": 2}, "requires speed=1.0. Got 2.0."),
        ({"word_timestamps": True, "response_format": "pcm"}, "word_timestamps=true requires stream_audio=true"),
        ({"max_new_tokens": 0}, "Invalid value for 'max_new_tokens'"),
        ({"initial_codec_chunk_frames": -1}, "Invalid value for 'initial_codec_chunk_frames'"),
        ({"sample_rate": 11025}, "Invalid value for 'sample_rate': expected one of 8000, 16000, 24000, 48000"),
        ({"sample_rate": "8k"}, "Invalid type for 'sample_rate'"),
        ({"non_streaming_mode": 1}, "Invalid type for 'non_streaming_mode'"),
        ({"extra_params": [1]}, "Invalid type for 'extra_params'"),
        ({"extra_params": {"temperature": 1}}, "Unknown parameter 'extra_params.temperature': the model has none"),
        ({"task_type": "Singing"}, "'task_type': expected one of CustomVoice, VoiceDesign, Base"),
        ({"task_type": "Base"}, "speaks with its own voices only"),
        ({"ref_audio": "data:audio/wav;base64,AAAA"}, "speaks with its own voices only"),
        ({"speaker_embedding": [0.1]}, "speaks with its own voices only"),
        ({"speaker_embedding": [0.0] * 8193}, "expected 1 to 8192 numbers"),
        ({"speaker_embedding": ["a"]}, "Invalid type for 'speaker_embedding[0]'"),
        ({"language": "German"}, "the loaded model speaks en"),
        ({"instructions": 3}, "Invalid type for 'instructions'"),
        ({"voice": "nobody"}, "The voice `nobody` does not exist; there are: heart, emma."),
        ({"voice": "mine"}, "cannot speak with an uploaded voice"),
        ({"voice": 3}, "Invalid type for 'voice'"),
        ({"voice": {"id": 3}}, "Invalid type for 'voice.id'"),
        ({"speaker": 3}, "Invalid type for 'speaker'"),
        ({"speaker": {"id": []}}, "Invalid type for 'speaker.id'"),
        ({"model": "nonsense"}, "The model `nonsense` does not exist."),
        ({"model": 3}, "Invalid type for 'model'"),
        ({"model": "gpt-" + "x" * 200}, "does not exist."),
    ],
)
def test_when_a_field_of_the_configuration_is_wrong_then_it_is_refused(config: dict[str, Any], message: str) -> None:
    # A wrong first configuration ends the connection. Later, the session keeps the previous one.
    for wire, ends in ((SpeechDialect(catalog()), True), (stream(), False)):
        received = wire.feed(json.dumps({"type": "session.config"} | config))
        (error,) = texts(received.answers)
        assert error["type"] == "error"
        assert message in error["message"]
        assert wire.closing is ends
        assert received.commands == []


def test_hosted_voices_are_spoken_by_the_default_voice_unless_names_are_strict() -> None:
    aliases.clear()
    assert configured(voice="alloy", model="gpt-4o-mini-tts").voice is None
    assert aliases == ["gpt-4o-mini-tts", "voice alloy"]
    for config in ({"voice": "alloy"}, {"model": "tts-1"}):
        wire = SpeechDialect(catalog(strict=True))
        wire.feed(json.dumps({"type": "session.config"} | config))
        assert wire.closing


def test_when_the_first_message_is_no_configuration_then_the_connection_ends() -> None:
    for message, error in (
        ({"type": "input.text", "text": "Hi"}, "Expected session.config, got: input.text"),
        ({"type": "session.close"}, "Expected session.config, got: session.close"),
        ({}, "Expected session.config, got: None"),
        ({"type": "boo"}, "Expected session.config, got: boo"),
        ([], "WebSocket messages must be JSON objects"),
    ):
        wire = SpeechDialect(catalog())
        received = wire.feed(json.dumps(message))
        assert texts(received.answers) == [{"type": "error", "message": error}]
        assert wire.closing
    for raw in ("{", "", b"\xff\xfe", "x" * (MAX_CONFIG_BYTES + 1)):
        wire = SpeechDialect(catalog())
        wire.feed(raw)
        assert wire.closing


def test_messages_become_commands() -> None:
    wire = stream()
    for message, command in (
        ({"type": "input.text", "text": "Hi. "}, AppendText("Hi. ")),
        ({"type": "input.text"}, AppendText("")),
        ({"text": "Hi. ", "type": "input.text", "more": [1]}, AppendText("Hi. ")),
        ({"type": "input.done"}, FlushText()),
        ({"type": "input.cancel"}, CancelSpeech()),
    ):
        assert wire.feed(json.dumps(message)) == Received([command])
    assert not wire.closing
    assert wire.feed('{"type":"session.close"}') == Received()
    assert wire.closing


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("{", "Invalid JSON message"),
        ('"hello"', "WebSocket messages must be JSON objects"),
        (b"\x00\xff", "Invalid JSON message"),
        ("[" * 100_000, "Invalid JSON message"),
        ('{"type":"boo"}', "Unknown message type: boo"),
        ('{"type":["a"]}', "Unknown message type: ['a']"),
        ('{"type":"input.text","text":5}', "input.text requires a string value"),
        (json.dumps({"type": "input.text", "text": "x" * MAX_MESSAGE_BYTES}), "input.text message too large"),
        ("x" * (MAX_CONFIG_BYTES + 1), "WebSocket message too large"),
    ],
)
def test_when_a_message_is_wrong_then_it_is_an_error_and_the_session_goes_on(raw: str | bytes, message: str) -> None:
    wire = stream()
    received = wire.feed(raw)
    assert texts(received.answers) == [{"type": "error", "message": message}]
    assert not wire.closing
    assert received.commands == []


@given(st.binary(max_size=200) | st.text(max_size=200), st.booleans())
def test_whatever_a_message_holds_nothing_raises(raw: bytes | str, configured: bool) -> None:
    wire = stream() if configured else SpeechDialect(catalog())
    received = wire.feed(raw)
    assert not received.commands
    assert received.answers


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    (
        "model",
        "voice",
        "speaker",
        "language",
        "instructions",
        "task_type",
        "response_format",
        "speed",
        "max_new_tokens",
        "initial_codec_chunk_frames",
        "ref_audio",
        "ref_text",
        "x_vector_only_mode",
        "speaker_embedding",
        "stream_audio",
        "word_timestamps",
        "seed",
        "split_granularity",
        "text",
    )
)


@given(st.sampled_from(("session.config", "input.text", "input.done")), st.dictionaries(FIELDS, JSON, max_size=4))
def test_whatever_fields_a_message_has_nothing_raises(kind: str, fields: dict[str, Any]) -> None:
    wire = stream()
    received = wire.feed(json.dumps({"type": kind} | fields))
    assert bool(received.commands) is not bool(received.answers)
    assert not wire.closing


@pytest.mark.parametrize("message", get_args(SpeechMessage), ids=lambda m: m.__struct_config__.tag)
def test_when_a_field_has_another_type_then_the_error_names_it(message: type[msgspec.Struct]) -> None:
    kind = message.__struct_config__.tag
    for name, fields in fields_of_every_type(message):
        wire = stream()
        received = wire.feed(json.dumps({"type": kind} | fields))
        errors = [answer for answer in texts(received.answers) if answer["type"] == "error"]
        assert bool(received.commands) is not bool(errors)
        if has_wrong_type(message, fields):
            (error,) = errors
            assert name in error["message"], fields
            assert wire.closing is False
        # A first message is refused for the same reason, or because it is not a configuration.
        first = SpeechDialect(catalog())
        assert first.feed(json.dumps({"type": kind} | fields)).answers or first.configured
        assert first.closing is not first.configured


def test_when_a_type_or_a_whole_message_has_another_type_then_the_error_says_so() -> None:
    for value in JSON_TYPES:
        (error,) = texts(stream().feed(json.dumps({"type": value})).answers)
        assert error["message"] == f"Unknown message type: {value}"
        if not isinstance(value, dict):
            (error,) = texts(stream().feed(json.dumps(value)).answers)
            assert error["message"] == "WebSocket messages must be JSON objects"


@pytest.mark.parametrize("value", JSON_TYPES, ids=repr)
def test_what_was_always_taken_for_missing_still_is(value: object) -> None:
    # If `voice` is present, its other name `speaker` is not read.
    assert configured(voice="emma", speaker=value).voice == "emma"
    assert configured(text=value, stream=value, stream_format=value) == configured()
    if not value:
        assert configured(response_format=value, split_granularity=value) == configured()


def test_without_streaming_each_sentence_is_one_file() -> None:
    config = SpeechConfig(format="mp3")
    start, data, done, end = (
        frame.encode()
        for frame in sent(
            stream(),
            SentenceStarted(0, 0, "Hi.", config, 24000),
            SentenceAudio(0, 0, b"abc", 0, 1),
            SentenceDone(0, 0),
            UtteranceDone(0, 1),
        )
    )
    assert json.loads(start) == {
        "type": "audio.start",
        "utterance_index": 0,
        "sentence_index": 0,
        "sentence_text": "Hi.",
        "format": "mp3",
    }
    assert data == b"abc"
    assert json.loads(done) == {
        "type": "audio.done",
        "utterance_index": 0,
        "sentence_index": 0,
        "total_bytes": 3,
        "error": False,
    }
    assert json.loads(end) == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}


def test_with_word_times_audio_is_json_and_the_last_chunk_has_the_times() -> None:
    config = SpeechConfig(format="pcm", stream=True, word_times=True)
    frames = sent(
        stream(),
        SentenceStarted(2, 1, "Hi you.", config, 24000),
        SentenceAudio(2, 1, bytes(4800), 0.0, 0.1),
        SentenceAudio(2, 1, bytes(2400), 0.1, 0.15),
        SentenceDone(2, 1, (Word("Hi", 0.02, 0.06, 1.0), Word("you.", 0.06, 0.1504, 1.0))),
    )
    start, one, two, last, done = texts(frames)
    assert start["sample_rate"] == 24000
    assert start["word_timestamps"] is True
    assert [c["chunk_id"] for c in (one, two, last)] == [0, 1, 2]
    assert [(c["chunk_start_ms"], c["chunk_end_ms"]) for c in (one, two, last)] == [(0, 100), (100, 150), (150, 150)]
    assert [c["timestamps"] for c in (one, two)] == [None, None]
    assert base64.b64decode(one["audio_b64"]) == bytes(4800)
    assert last["audio_b64"] == ""
    assert last["timestamps"] == [
        {"word": "Hi", "start_ms": 20, "end_ms": 60},
        {"word": "you.", "start_ms": 60, "end_ms": 150},
    ]
    assert done["total_bytes"] == 7200


def test_when_a_sentence_fails_or_is_spoken_in_part_then_its_end_says_so() -> None:
    config = SpeechConfig(format="pcm", stream=True)
    frames = sent(
        stream(),
        SentenceStarted(0, 0, "x", config, 24000),
        SentenceDone(0, 0, error="the model failed"),
        SentenceStarted(0, 1, "y 你", config, 24000),
        SentenceDone(0, 1, skipped="你"),
    )
    _, error, failed, _, done = texts(frames)
    assert error == {"type": "error", "message": "Generation failed for utterance 0, sentence 0: the model failed"}
    assert failed["error"] is True
    assert done["error"] is False
    assert done["skipped"] == "你"


def test_when_an_utterance_is_cancelled_then_the_open_sentence_is_ended() -> None:
    wire = stream()
    config = SpeechConfig(format="pcm", stream=True)
    frames = sent(
        wire,
        SentenceStarted(0, 0, "x", config, 24000),
        SentenceAudio(0, 0, bytes(100), 0, 1),
        UtteranceDone(0, 3, cancelled=True),
    )
    *_, done, end = texts(frames)
    assert (done["type"], done["total_bytes"], done["error"], done["cancelled"]) == ("audio.done", 100, False, True)
    # The client has heard the beginning of one sentence, not of three.
    assert end == {"type": "session.done", "utterance_index": 0, "total_sentences": 1, "cancelled": True}
    again = texts(wire.send(UtteranceDone(1, 0, cancelled=True)))
    assert again == [{"type": "session.done", "utterance_index": 1, "total_sentences": 0, "cancelled": True}]
