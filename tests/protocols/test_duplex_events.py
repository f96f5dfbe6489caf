"""The full-duplex dialect: the frames of a session's events."""

from __future__ import annotations

import json
from base64 import b64decode

import numpy as np
import pytest

from antiphon.events.conversation import (
    ContentPart,
    ContentPartDone,
    ContentPosition,
    Item,
    ItemAdded,
    ItemDone,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import (
    EpochRaised,
    ListenStepTaken,
    OverlapReported,
    PlaybackAcknowledged,
    PlaybackCursors,
    SpeakStepTaken,
    TurnStateChanged,
)
from antiphon.events.transcription import CommitRefused, SessionEnding
from antiphon.events.words import Word
from tests.protocols.duplex_connection import (
    frames_of,
    opened,
)

AT = ContentPosition("resp_1", "item_1", 0)


def test_the_frames_of_a_response_have_its_epoch_its_length_and_its_words() -> None:
    wire = opened()
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    wire.send(SpeakStepTaken("resp_1"))
    wire.send(ResponseTextDelta(AT, "Two words.", True))
    half = np.zeros(12_000, np.float32)
    wire.send(ResponseAudioDelta(AT, half, 24_000, (Word("Two", 0.1, 0.4, 1.0),)))
    wire.send(ResponseAudioDelta(AT, half, 24_000, (Word("words.", 0.5, 0.9, 1.0),)))
    wire.send(ContentPartDone(AT, ContentPart("output_audio", "Two words.")))
    frames = wire.frames()
    media = [f for f in frames if f.epoch is not None]
    assert {f.epoch for f in media} == {0}
    out = [json.loads(f.encode()) for f in frames]
    assert [o["type"] for o in out][:3] == [
        "response.created",
        "response.speak",
        "response.output_audio_transcript.delta",
    ]
    assert out[0]["response_id"] == out[0]["response"]["id"] == "resp_1"
    first, second, last = (o for o in out if o["type"] == "response.output_audio.delta")
    assert len(b64decode(first["delta"])) == 24_000
    assert first["sample_rate_hz"] == 24_000
    assert first["metadata"]["audio_duration_ms"] == 500
    assert first["metadata"]["audio_text_marks"] == [{"text_chars": 3, "audio_end_ms": 400}]
    assert second["metadata"]["audio_text_marks"] == [{"text_chars": 10, "audio_end_ms": 900}]
    assert (second["metadata"]["end_of_turn"], last["metadata"]["end_of_turn"]) == (False, True)
    assert last["metadata"]["audio_duration_ms"] == 1000


@pytest.mark.parametrize(
    ("beta", "names"),
    [
        (
            False,
            [
                "response.created",
                "conversation.item.added",
                "response.output_text.delta",
                "response.output_audio_transcript.delta",
                "response.output_audio.delta",
                "response.output_audio.delta",
                "response.output_audio.done",
                "response.output_audio_transcript.done",
                "response.content_part.done",
                "conversation.item.done",
                "response.done",
            ],
        ),
        (
            True,
            [
                "response.created",
                "conversation.item.created",
                "response.text.delta",
                "response.audio_transcript.delta",
                "response.audio.delta",
                "response.audio.delta",
                "response.audio.done",
                "response.audio_transcript.done",
                "response.content_part.done",
                "response.done",
            ],
        ),
    ],
)
def test_the_names_of_events_are_those_that_the_client_asked_for(beta: bool, names: list[str]) -> None:
    wire = opened(beta=beta)
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    item = Item("item_1", "message", "assistant")
    wire.send(ItemAdded(item, None))
    wire.send(ResponseTextDelta(AT, "Two ", False))
    wire.send(ResponseTextDelta(AT, "words.", True))
    wire.send(ResponseAudioDelta(AT, np.zeros(2400, np.float32), 24_000))
    wire.send(ContentPartDone(AT, ContentPart("output_audio", "Two words.")))
    wire.send(ItemDone(item, None))
    wire.send(ResponseDone(Response("resp_1", True, None, None, status="completed")))
    frames = frames_of(wire)
    assert [f["type"] for f in frames] == names
    shown = frames[-1]["response"]
    assert ("modalities" in shown, "output_modalities" in shown) == (beta, not beta)


def test_when_the_epoch_was_raised_then_only_the_end_of_the_old_response_is_sent() -> None:
    wire = opened()
    response = Response("resp_1", True, None, None, status="cancelled", reason="turn_detected")
    wire.send(ResponseCreated(response))
    wire.send(ResponseAudioDelta(AT, np.zeros(2400, np.float32), 24_000))
    wire.frames()
    wire.send(EpochRaised(1))
    wire.send(ResponseTextDelta(AT, "more", True))
    wire.send(ResponseAudioDelta(AT, np.zeros(2400, np.float32), 24_000))
    wire.send(ContentPartDone(AT, ContentPart("output_audio", "more")))
    wire.send(ResponseDone(response))
    frames = wire.frames()
    assert not [f for f in frames if f.epoch is not None]
    assert json.loads(frames[-1].encode())["type"] == "response.done"


@pytest.mark.parametrize("audio_format", ["pcm16", "pcm_f32le", "g711_ulaw", "g711_alaw", "wav"])
def test_audio_goes_out_in_every_format(audio_format: str) -> None:
    rate = 8000 if audio_format.startswith("g711") else 24_000
    wire = opened(output_audio_format=audio_format)
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    wire.send(ResponseAudioDelta(AT, np.zeros(24_000, np.float32), 24_000))
    wire.send(ContentPartDone(AT, ContentPart("output_audio", "")))
    deltas = [f for f in frames_of(wire) if f["type"] == "response.output_audio.delta"]
    size = {"pcm16": 2, "pcm_f32le": 4, "g711_ulaw": 1, "g711_alaw": 1, "wav": 2}[audio_format]
    data = [b64decode(f["delta"]) for f in deltas]
    if audio_format == "wav":
        assert data[0][:4] == b"RIFF"
        data = [d[44:] for d in data]
    assert sum(map(len, data)) == rate * size
    assert {f["sample_rate_hz"] for f in deltas} == {rate}


def test_events_of_turns_overlap_and_playback() -> None:
    wire = opened()
    wire.send(EpochRaised(3))
    wire.send(TurnStateChanged("duck", "assistant_playing", {"a": 1}))
    wire.send(OverlapReported("auto", "barge_in", "words"))
    wire.send(ListenStepTaken("nothing_said"))
    wire.send(PlaybackAcknowledged("r", "i", 5, 4, PlaybackCursors(9, 9, 5, 4), history_exact=True))
    wire.send(CommitRefused(0, 1))
    turn, overlap, listen, known, refused = frames_of(wire)
    assert (turn["event"], turn["turn_state"], turn["epoch"], turn["payload"]) == (
        "duck",
        "assistant_playing",
        3,
        {"a": 1},
    )
    assert (overlap["policy"], overlap["action"], overlap["reason"]) == ("auto", "barge_in", "words")
    assert listen["response"]["status"] == "listening"
    assert "response_id" not in listen
    assert known["event"]["playback"] == {"generated_ms": 9, "sent_ms": 9, "played_ms": 5, "committed_ms": 4}
    assert known["event"]["history_committed"] is True
    assert refused["error"]["code"] == "input_audio_buffer_empty"


def test_the_end_of_a_session_has_its_reason() -> None:
    for code, kind, shown_code in (
        ("session_expired", "session.expired", "session_expired"),
        ("idle_timeout", "session.expired", "idle_timeout"),
        ("input_audio_buffer_overflow", "session.closed", "input_backpressure"),
    ):
        wire = opened()
        wire.send(SessionEnding(code, "why"))
        error, end = frames_of(wire)
        assert error["error"]["code"] == shown_code
        assert end["type"] == kind
    assert error["error"]["type"] == "rate_limit_error"
    assert error["error"]["retryable"] is True
