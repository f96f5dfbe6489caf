"""Deepgram's dialects, with the session's events made by hand. tests/traces has whole conversations."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from antiphon.audio.line.g711 import from_ulaw
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConfigureConversation
from antiphon.events.speech import AppendText, FlushText, SentenceAudio, SpeechCommand, UtteranceDone
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    ConfigureTranscription,
    GuessDropped,
    SessionEnding,
    SpeechStarted,
    TranscriptDelta,
    TranscriptDone,
    TranscriptGuessed,
    TurnCommitted,
)
from antiphon.events.words import Word
from antiphon.protocols.connection import Context, Event
from antiphon.protocols.deepgram.agent import AgentConnection
from antiphon.protocols.deepgram.flux import FluxConnection
from antiphon.protocols.deepgram.forms import plain, shown_text
from antiphon.protocols.deepgram.listen import ListenConnection
from antiphon.protocols.deepgram.query import REFUSED, DeepgramQuery
from antiphon.protocols.deepgram.speak import SpeakConnection, SpeakQuery
from antiphon.protocols.hearing import HearingConnection
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame

CONTEXT = Context(
    models=ModelNames(("whisper-base",)), now_s=lambda: 1.0, steady_s=lambda: 0.0, new_id=lambda prefix: f"{prefix}id"
)
SECOND = b"\0" * 32_000


def opened(kind: type[HearingConnection], context: Context = CONTEXT, **query: str) -> Any:
    raw = {"encoding": "linear16", "sample_rate": "16000"}
    wire = kind(Opening(query=tuple((raw | query).items())), context)
    wire.open()
    wire.feed('{"type": "KeepAlive"}')
    return wire


def frames(found: list[Frame]) -> list[Any]:
    return [json.loads(frame.encode()) for frame in found]


def sent(wire: HearingConnection, *events: Event) -> list[Any]:
    return [frame for event in events for frame in frames(wire.send(event))]


def words(text: str, start_s: float = 0.0) -> tuple[Word, ...]:
    return tuple(Word(w, start_s + i, start_s + i + 0.5, 0.9) for i, w in enumerate(text.split()))


def done(turn: int, text: str, streamed: str = "", **fields: Any) -> TranscriptDone:
    return replace(TranscriptDone(turn, text, streamed, words(text), "en", 1.0, 0, 0), **fields)


def texts(results: list[Any], *, final: bool) -> list[str]:
    return [r["channel"]["alternatives"][0]["transcript"] for r in results if r.get("is_final") is final]


def test_only_the_end_of_a_turn_is_final_whatever_was_sent_before() -> None:
    wire = opened(ListenConnection, interim_results="true", punctuate="true")
    found = sent(
        wire,
        SpeechStarted(0, 500),
        TranscriptDelta(0, "Hello", words("Hello")),
        TranscriptDelta(0, " word", words("word", 1.0)),
        TurnCommitted(0, 500, 2500, 2300),
        SpeechStarted(1, 2600),
        done(0, "Hello, world.", "Hello word"),
        TranscriptDelta(1, "And", words("And", 3.0)),
        TurnCommitted(1, 2600, 4000, 3800),
        done(1, "And on.", "And"),
    )
    assert texts(found, final=False) == ["Hello", "Hello word", "And"]
    assert texts(found, final=True) == ["Hello, world.", "And on."]
    last = [r for r in found if r["is_final"]]
    assert [(r["start"], r["duration"], r["speech_final"]) for r in last] == [(0.5, 2.0, True), (2.6, 1.4, True)]
    first = last[0]["channel"]["alternatives"][0]["words"][0]
    assert first == {"word": "hello", "start": 0.0, "end": 0.5, "confidence": 0.9, "punctuated_word": "Hello,"}


def test_a_finalized_turn_says_so_once() -> None:
    wire = opened(ListenConnection, endpointing="false")
    assert wire.feed('{"type": "Finalize"}').commands == [CommitAudio()]
    found = sent(wire, TurnCommitted(0, 0, 0), done(0, ""))
    wire.feed(SECOND * 2)
    found += sent(wire, SpeechStarted(1, 0), TurnCommitted(1, 0, 1500, 1200), SpeechStarted(2, 1600))
    wire.feed('{"type": "Finalize"}')
    found += sent(wire, done(1, "Yes."), TurnCommitted(2, 1600, 2000, 1900), done(2, "No."))
    found += sent(wire, SpeechStarted(3, 2000), TurnCommitted(3, 2000, 3000, 2500), done(3, "Well."))
    marks = [(texts([r], final=True)[0], r["from_finalize"], r["speech_final"]) for r in found]
    assert marks == [("", True, True), ("yes", True, True), ("no", True, True), ("well", False, False)]


def test_an_utterance_ends_when_no_word_has_followed() -> None:
    wire = opened(ListenConnection, interim_results="true", utterance_end_ms="1000")
    wire.feed(SECOND)
    assert not sent(wire, SpeechStarted(0, 0), TurnCommitted(0, 0, 800, 500), done(0, "Yes."))[1:]
    wire.feed(SECOND[:8000])
    sent(wire, SpeechStarted(1, 1100))
    assert frames(wire.feed(SECOND).answers) == []
    sent(wire, TurnCommitted(1, 1100, 2000, 1800), done(1, "No.", words=(Word("No.", 1.2, 1.5, 1.0),)))
    assert frames(wire.feed(SECOND).answers) == [{"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": 1.5}]
    assert frames(wire.feed(SECOND).answers) == []


def test_speakers_are_numbered_as_they_appear_and_need_a_model() -> None:
    with pytest.raises(RemoteProtocolError, match="speaker-model"):
        opened(ListenConnection, diarize="true")
    wire = opened(ListenConnection, replace(CONTEXT, tells_voices=True), diarize="true")
    said = [sent(wire, done(n, "Yes.", speaker_label=label))[0] for n, label in enumerate(("B", "", "A", "B"))]
    shown = [r["channel"]["alternatives"][0]["words"][0].get("speaker") for r in said]
    assert shown == [0, None, 1, 0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_wish_that_cannot_be_fulfilled_is_refused_unless_it_is_off(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=name):
        opened(ListenConnection, **{name: "true"})
    opened(ListenConnection, **{name: "false"})


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "en"),
        ({"language": "en-US"}, "en"),
        ({"language": "de"}, "de"),
        ({"language": "multi"}, None),
        ({"model": "flux-general-multi"}, None),
    ],
)
def test_the_language_is_english_unless_another_is_asked_for(query: dict[str, str], expected: str | None) -> None:
    assert DeepgramQuery(list(query.items())).language(CONTEXT) == expected


def test_how_the_server_ends_a_stream_is_its_close_code() -> None:
    ends = {"idle_timeout": (1011, "NET-0001"), "server_error": (1011, "NET-0000"), "session_expired": None}
    for code, closes in ends.items():
        wire = opened(ListenConnection)
        assert sent(wire, SessionEnding(code, "Why."))[0]["description"] == "Why."
        assert wire.finishing == closes
        assert wire.close() == []


def test_a_configuration_and_audio_begin_the_session_once() -> None:
    wire = ListenConnection(Opening(query=(("encoding", "linear16"), ("sample_rate", "16000"))), CONTEXT)
    assert wire.open() == []
    first, second = wire.feed(SECOND).commands, wire.feed(SECOND).commands
    assert [type(command) for command in first] == [ConfigureTranscription, AppendAudio]
    assert [type(command) for command in second] == [AppendAudio]


def flux(*events: Event, **query: str) -> list[tuple[str, str, int]]:
    wire = opened(FluxConnection, **{"eager_eot_threshold": "0.5"} | query)
    found = sent(wire, *events)
    assert [frame["sequence_id"] for frame in found] == list(range(1, len(found) + 1))
    return [(frame["event"], frame["transcript"], frame["turn_index"]) for frame in found]


def test_a_guess_that_comes_true_is_the_text_of_the_turn() -> None:
    assert flux(
        SpeechStarted(0, 0),
        TranscriptDelta(0, "Book", words("Book")),
        TranscriptGuessed(0, "Book a table."),
        TranscriptDelta(0, " a table.", words("a table.")),
        done(0, "Book a Table!", "Book a table."),
    ) == [
        ("StartOfTurn", "Book", 0),
        ("EagerEndOfTurn", "Book a table.", 0),
        ("EndOfTurn", "Book a table.", 0),
    ]


def test_a_guess_that_is_dropped_is_followed_by_the_turn() -> None:
    assert flux(
        SpeechStarted(0, 0),
        TranscriptGuessed(0, "Book"),
        GuessDropped(0),
        TranscriptDelta(0, "Book a", words("Book a")),
        done(0, "Book a table."),
        SpeechStarted(1, 5000),
        done(1, ""),
        SpeechStarted(2, 7000),
        done(2, "Yes."),
    ) == [
        ("StartOfTurn", "Book", 0),
        ("EagerEndOfTurn", "Book", 0),
        ("TurnResumed", "Book", 0),
        ("Update", "Book a", 0),
        ("EndOfTurn", "Book a table.", 0),
        ("StartOfTurn", "Yes.", 1),
        ("EndOfTurn", "Yes.", 1),
    ]


def test_thresholds_choose_the_turn_detection() -> None:
    wire = opened(FluxConnection)
    changed = wire.feed('{"type": "Configure", "thresholds": {"eot_threshold": 0.9, "eot_timeout_ms": 4000}}')
    (command,) = changed.commands
    assert (command.config.vad.eagerness, command.config.vad.silence_duration_ms) == ("low", 4000)
    assert command.config.preflight is False
    on = wire.feed('{"type": "Configure", "thresholds": {"eager_eot_threshold": 0.4}}')
    assert on.commands[0].config.preflight is True
    off = wire.feed('{"type": "Configure", "thresholds": {"eager_eot_threshold": null}}')
    assert off.commands[0].config.preflight is False
    wrong = wire.feed('{"type": "Configure", "thresholds": {"eot_threshold": 2}}')
    assert not wrong.commands
    assert frames(list(wrong.answers))[0]["type"] == "ConfigureFailure"


def spoken(*pieces: str) -> list[SpeechCommand]:
    wire = SpeakConnection(SpeakQuery(DeepgramQuery([]), lambda _: (None, None), live=True), "voice", lambda _: "id")
    said = [{"type": "Speak", "text": piece} for piece in pieces] + [{"type": "Close"}]
    return [command for message in said for command in wire.feed(json.dumps(message)).commands]


def test_sentences_without_a_space_between_them_are_not_joined() -> None:
    assert spoken("Hello there.", "How are you?") == [
        AppendText("Hello there."),
        AppendText(" How are you?"),
        FlushText(),
    ]
    assert spoken("Hel", "lo. ", "It is 3.", "5 km.") == [
        *(AppendText(piece) for piece in ("Hel", "lo. ", "It is 3.", "5 km.")),
        FlushText(),
    ]
    assert spoken() == []


def test_telephone_audio_is_a_byte_a_sample() -> None:
    asked = SpeakQuery(DeepgramQuery([("encoding", "mulaw")]), lambda _: (None, None), live=True)
    wire = SpeakConnection(asked, "voice", lambda _: "id")
    assert asked.config.rate_hz == 8000
    payload = wire.send(SentenceAudio(0, 0, b"\0" * 200, 0.0, 0.1))[0].payload
    assert isinstance(payload, bytes)
    assert from_ulaw(payload).tolist() == [0.0] * 100
    assert frames(wire.send(UtteranceDone(0, 1))) == [{"type": "Flushed", "sequence_id": 0}]
    assert wire.send(UtteranceDone(1, 1, cancelled=True)) == []


def test_words_lose_only_the_punctuation_around_them() -> None:
    assert [plain(word) for word in ("Hello,", "“It's", "3.5", "...", "New-York!")] == [
        *("hello", "it's", "3.5", "...", "new-york"),
    ]
    assert shown_text(" It is 3.5 km. ", punctuate=False) == "it is 3.5 km"
    assert shown_text(" It is. ", punctuate=True) == "It is."


def test_an_agents_settings_that_are_refused_change_nothing() -> None:
    wire = AgentConnection(Opening(), replace(CONTEXT, conversation_models=ModelNames(("qwen",)), voices=("one",)))
    wire.open()
    listen = {"provider": {"keyterms": ["story"]}}
    far = {"functions": [{"name": "far", "endpoint": {"url": "http://example.org"}}]}
    settings = {"type": "Settings", "agent": {"listen": listen, "think": far}}
    (error,) = frames([*wire.feed(json.dumps(settings)).answers])
    assert error["code"] == "INVALID_SETTINGS"
    (configured,) = wire.feed('{"type": "Settings"}').commands
    assert isinstance(configured, ConfigureConversation)
    assert configured.config.transcription.keyterms == ()
