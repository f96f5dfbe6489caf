"""The duplex dialect: what opens it, what clients may send by which name, and what they are told."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.events.conversation import (
    CancelResponse,
    ConfigureConversation,
    ContentPart,
    ContentPartDone,
    ContentPosition,
    CreateItem,
    CreateResponse,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import (
    AcknowledgePlayback,
    BargeIn,
    CancelInput,
    EpochRaised,
    HoldFloor,
    ListenStepTaken,
    OverlapReported,
    PlaybackAcknowledged,
    PlaybackCursors,
    SignalTurn,
    SkipResponse,
    SpeakStepTaken,
    TurnStateChanged,
)
from antiphon.events.transcription import AppendAudio, ClearAudio, CommitAudio, CommitRefused, SessionEnding
from antiphon.events.words import Word
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.duplex.session_fields import ALIASES
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.openai.conversation import EVENTS
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import MediaFrame
from tests.protocols.test_openai_conversation import JSON, KEYS

AT = ContentPosition("resp_1", "item_1", 0)


def connection(**options: Any) -> DuplexConnection:
    count = iter(range(10**6))
    wire = DuplexConnection(
        Opening(model=options.pop("model", ""), duplex=True),
        ModelNames(("whisper-base",)),
        ModelNames(("qwen",)),
        ("heart",),
        new_id=lambda prefix: f"{prefix}{next(count)}",
        expires_at=1,
        max_append_bytes=1 << 20,
        language_check=lambda code: code in ("en", "de"),
        log_alias=lambda *_: None,
        resume_token="token",
        autostart=options.pop("autostart", False),
    )
    wire.open()
    return wire


def told(wire: DuplexConnection) -> list[dict[str, Any]]:
    return [json.loads(f) for f in wire.frames()]


def say(wire: DuplexConnection, type: str, **fields: Any) -> None:
    wire.receive(json.dumps({"type": type} | fields))


def opened(**session: Any) -> DuplexConnection:
    wire = connection()
    say(wire, "session.update", session=session)
    wire.commands()
    (created,) = told(wire)
    assert created["type"] == "session.created", created
    return wire


def inputs_of(wire: DuplexConnection, type: str, **fields: Any) -> list[Any]:
    say(wire, type, **fields)
    out = wire.commands()
    assert not [f for f in told(wire) if f["type"] == "error"]
    return out


def error_of(wire: DuplexConnection, type: str, **fields: Any) -> dict[str, Any]:
    say(wire, type, **fields)
    assert not [i for i in wire.commands() if not isinstance(i, ConfigureConversation)]
    (frame,) = [f for f in told(wire) if f["type"] == "error"]
    return frame["error"]  # type: ignore[no-any-return]


def sound(samples: int = 160, form: str = "<i2") -> str:
    return b64encode(np.zeros(samples, form).tobytes()).decode()


# --- what opens it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["UklGRg==", "data:audio/wav;base64,UklGRg==", {"data": "UklGRg=="}])
def test_a_voice_to_speak_with(given: Any) -> None:
    wire = connection()
    say(wire, "session.update", session={"ref_audio": given})
    (created,) = told(wire)
    # It is not sent back.
    assert "ref_audio" not in created["session"]
    (configured,) = wire.commands()
    assert configured.config.duplex.voice_reference == b"RIFF"


@pytest.mark.parametrize("given", ["https://x.org/voice.wav", "no base64!", {"url": "x"}, 3])
def test_a_voice_that_cannot_be(given: Any) -> None:
    wire = connection()
    say(wire, "session.update", session={"ref_audio": given})
    (error,) = told(wire)
    assert error["type"] == "error"
    assert "ref_audio" in error["error"]["param"]


def test_nothing_is_said_before_the_first_frame() -> None:
    wire = connection()
    assert told(wire) == []
    assert wire.commands() == []


@pytest.mark.parametrize("kind", ["session.update", "session.create"])
def test_an_update_opens_it_with_what_it_asks(kind: str) -> None:
    wire = connection()
    say(wire, kind, session={"instructions": "Be brief.", "overlap_policy": "listen_only"})
    (created,) = told(wire)
    session = created["session"]
    assert created["resume_token"] == "token"
    assert session["session_id"] == session["id"] == created["session_id"] == wire.id
    assert session["instructions"] == "Be brief."
    assert session["overlap_policy"] == "listen_only"
    assert session["capabilities"]["implementation_level"] == "turn_based_duplex"
    assert session["capabilities"]["supports_session_resume"] is True
    (configured,) = wire.commands()
    assert configured.config.duplex.policy == "listen_only"
    assert configured.config.interrupt_response is False


def test_anything_else_opens_a_default_session_and_is_carried_out() -> None:
    wire = connection()
    say(wire, "input_audio_buffer.append", audio=sound())
    assert [f["type"] for f in told(wire)] == ["session.created"]
    configured, appended = wire.commands()
    assert isinstance(appended, AppendAudio)
    assert configured.config.duplex.policy == "auto"
    # Nobody said how turns end: by meaning.
    assert configured.config.transcription.vad.patience_ms == 4000


def test_it_may_start_by_itself() -> None:
    wire = connection(model="gpt-realtime", autostart=True)
    (created,) = told(wire)
    assert created["session"]["model"] == "gpt-realtime"


def test_an_update_that_cannot_be_leaves_it_to_be_opened() -> None:
    wire = connection()
    say(wire, "session.update", session={"overlap_policy": "never"})
    assert [f["error"]["code"] for f in told(wire)] == ["bad_event"]
    say(wire, "session.update", session={})
    assert [f["type"] for f in told(wire)] == ["session.created"]


@pytest.mark.parametrize(
    ("session", "code"),
    [
        ({"input_audio_format": "mp3"}, "unsupported_audio_format"),
        ({"output_audio_format": "opus"}, "unsupported_audio_format"),
        ({"sample_rate_hz": 4000}, "unsupported_audio_format"),
        ({"sample_rate_hz": 200_000}, "unsupported_audio_format"),
        ({"turn_detection": {"type": "magic"}}, "unsupported_turn_detection"),
        ({"turn_detection": {"type": "server_vad", "threshold": 7}}, "bad_event"),
        ({"playback_commit_policy": "x"}, "bad_event"),
        ({"idle_timeout_s": 0}, "bad_event"),
        ({"extra_body": []}, "bad_event"),
        ({"modalities": "audio"}, "bad_event"),
        ({"tools": [{"type": "x"}]}, "bad_event"),
    ],
)
def test_what_a_session_cannot_be(session: dict[str, Any], code: str) -> None:
    wire = opened()
    assert error_of(wire, "session.update", session=session, event_id="mine")["code"] == code


def test_an_update_later_is_told_whole() -> None:
    wire = opened()
    say(wire, "session.update", session={"overlap_barge_in_ms": 900, "turn_detection": {"type": "server_vad"}})
    (updated,) = told(wire)
    assert updated["type"] == "session.updated"
    assert updated["session"]["overlap_barge_in_ms"] == 900
    assert updated["session"]["turn_detection"]["min_speech_duration_ms"] == 96
    (configured,) = wire.commands()
    assert configured.config.duplex.barge_in_ms == 900
    assert configured.config.transcription.vad.patience_ms is None


# --- what a client may send -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "rate", "numpy_form"),
    [("pcm16", 16000, "<i2"), ("pcm_f32le", 16000, "<f4"), ("pcm16", 8000, "<i2"), ("pcm16", 48000, "<i2"), ("pcm_f32le", 192000, "<f4")],
)  # fmt: skip
def test_sound_of_every_format_and_rate(form: str, rate: int, numpy_form: str) -> None:
    tone = np.sin(np.arange(rate) * 2 * np.pi * 300 / rate) * 0.5
    data = (tone * (32767 if numpy_form == "<i2" else 1)).astype(numpy_form).tobytes()
    wire = opened()
    fields = {"audio": b64encode(data).decode(), "format": form, "sample_rate_hz": rate}
    heard = inputs_of(wire, "input_audio_buffer.append", **fields) + inputs_of(wire, "input_audio_buffer.commit")
    pcm = np.concatenate([i.pcm for i in heard if isinstance(i, AppendAudio)])
    assert len(pcm) == 16_000
    want = np.sin(np.arange(16_000) * 2 * np.pi * 300 / 16_000) * 0.5
    assert np.abs(pcm[800:-800] - want[800:-800]).max() < 0.01


def test_codes_of_eight_bits_have_their_own_rate() -> None:
    wire = opened(input_audio_format="g711_ulaw")
    pcm = inputs_of(wire, "push_chunk", audio=b64encode(bytes([0xFF] * 8000)).decode())
    pcm += inputs_of(wire, "input.commit")
    assert sum(len(i.pcm) for i in pcm if isinstance(i, AppendAudio)) == 16_000


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"audio": "!!"}, "bad_audio"),
        ({"audio": b64encode(b"abc").decode()}, "bad_audio"),
        ({"audio": b64encode(np.array([np.nan], "<f4").tobytes()).decode(), "format": "pcm_f32le"}, "bad_audio"),
        ({"audio": sound(), "format": "flac"}, "unsupported_audio_format"),
        ({"audio": sound(), "sample_rate_hz": "x"}, "unsupported_audio_format"),
        ({"audio": sound(), "video_frames": ["x"]}, "invalid_video_frames"),
        ({"audio": sound(), "video_frames": [b64encode(b"\xff\xd8\xff").decode()] * 3}, "invalid_video_frames"),
        ({}, "bad_event"),
    ],
)
def test_sound_that_is_none(fields: dict[str, Any], code: str) -> None:
    assert error_of(opened(), "input_audio_buffer.append", **fields)["code"] == code


def test_events_by_all_their_names() -> None:
    wire = opened()
    for name in ("input_audio_buffer.append", "input.audio.append", "push_chunk"):
        assert [type(i) for i in inputs_of(wire, name, audio=sound())] == [AppendAudio]
    assert inputs_of(wire, "barge_in", event_id="e") == [BargeIn("client_barge_in", "e")]
    assert inputs_of(wire, "turn.signal", event="barge_in") == [BargeIn("client_barge_in")]
    assert inputs_of(wire, "signal_turn", event="nod", payload={"a": 1}) == [SignalTurn("nod", {"a": 1})]
    assert inputs_of(wire, "turn.signal", event="response.cancel") == [CancelResponse(None)]
    for name in ("playback.ack", "audio.playback_ack"):
        assert inputs_of(wire, name, played_ms=120.7) == [AcknowledgePlayback(120, 120)]
    assert inputs_of(wire, "playback.ack", played_ms=9, committed_ms=7, response_id="r", item_id="i") == [
        AcknowledgePlayback(9, 7, "r", "i")
    ]
    assert [type(i) for i in inputs_of(wire, "input.cancel")] == [CancelInput, ClearAudio]
    assert [type(i) for i in inputs_of(wire, "input_audio_buffer.clear")] == [ClearAudio]
    for name in ("push_text", "input.text.append", "input_text.append"):
        created, asked = inputs_of(wire, name, text="Hello")
        assert isinstance(created, CreateItem)
        assert isinstance(asked, CreateResponse)
        assert created.item.parts[0].text == "Hello"
    assert set(ALIASES) <= {"input.audio.append", "push_chunk", "input.text.append", "input_text.append", "signal_turn",
                            "audio.playback_ack", "close_session", "close", "session.create"}  # fmt: skip


def test_commits() -> None:
    wire = opened()
    assert inputs_of(wire, "input_audio_buffer.commit") == [CommitAudio()]
    assert inputs_of(wire, "input_audio_buffer.commit", final=False) == [CommitAudio(False)]
    assert inputs_of(wire, "input_audio_buffer.commit", response_create=False) == [SkipResponse(), CommitAudio()]
    # Turns are answered without being asked for.
    assert inputs_of(wire, "input_audio_buffer.commit", response_create=True) == [CommitAudio()]
    quiet = opened(extra_body={"auto_response": False})
    assert inputs_of(quiet, "input_audio_buffer.commit") == [CommitAudio()]
    asked = inputs_of(quiet, "input_audio_buffer.commit", response_create=True)
    assert [type(i) for i in asked] == [CommitAudio, CreateResponse]
    assert [type(i) for i in inputs_of(quiet, "input.commit")] == [CommitAudio, CreateResponse]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"overlap_action": "barge_in", "force_listen": True}, [BargeIn("client_overlap_action")]),
        ({"overlap_action": "listen"}, [HoldFloor("client_overlap_action")]),
        ({"force_barge_in": True}, [BargeIn("client_force_barge_in")]),
        ({"force_listen": True}, [HoldFloor("client_force_listen")]),
        ({"transcript": "mm-hm"}, [HoldFloor("short_ack_transcript")]),
        ({"transcript": "stop"}, []),
        ({}, []),
    ],
)
def test_what_a_client_says_of_speech_over_an_answer(fields: dict[str, Any], expected: list[Any]) -> None:
    wire = opened()
    *asked, appended = inputs_of(wire, "input_audio_buffer.append", audio=sound(), **fields)
    assert asked == expected
    assert isinstance(appended, AppendAudio)


@pytest.mark.parametrize("fields", [{"overlap_action": "drop"}, {"is_speech": False}])
def test_what_is_no_speech_over_an_answer_is_silence(fields: dict[str, Any]) -> None:
    wire = opened()
    loud = b64encode(np.full(160, 9000, "<i2").tobytes()).decode()
    (appended,) = inputs_of(wire, "input_audio_buffer.append", audio=loud, **fields)
    assert appended.pcm.any()
    # Made and told, and it still sounds.
    wire.send(TurnStateChanged("playback_started", "assistant_playing"))
    (appended,) = inputs_of(wire, "input_audio_buffer.append", audio=loud, **fields)
    assert len(appended.pcm) == 160
    assert not appended.pcm.any()


def test_heartbeats_are_answered_and_a_close_is_heard() -> None:
    wire = opened()
    say(wire, "session.heartbeat")
    assert told(wire)[0]["type"] == "session.heartbeat_ack"
    say(wire, "session.close", reason="bye")
    assert wire.closing
    wire.closed()
    assert told(wire)[0] | {"event_id": ""} == {
        "type": "session.closed", "event_id": "", "session_id": wire.id, "reason": "bye",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "invalid_json"),
        ("[]", "bad_event"),
        ("{}", "bad_event"),
        ('{"type": "x"}', "unknown_event"),
        ('{"type": "conversation.item.delete"}', "missing_item_id"),
        ('{"type": "conversation.item.retrieve"}', "missing_item_id"),
        ('{"type": "playback.ack"}', "bad_event"),
        ('{"type": "playback.ack", "played_ms": -1}', "bad_event"),
        ('{"type": "playback.ack", "played_ms": true}', "bad_event"),
        ('{"type": "turn.signal"}', "bad_event"),
        ('{"type": "push_text"}', "bad_event"),
    ],
)
def test_what_is_no_event(frame: str, code: str) -> None:
    wire = opened()
    wire.receive(frame)
    assert [f["error"]["code"] for f in told(wire)] == [code]
    assert wire.commands() == []


# --- what a client is told --------------------------------------------------------------------------------------------


def test_an_answer_carries_its_epoch_its_length_and_its_words() -> None:
    wire = opened()
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    wire.send(SpeakStepTaken("resp_1"))
    wire.send(ResponseTextDelta(AT, "Two words.", True))
    half = np.zeros(12_000, np.float32)
    wire.send(ResponseAudioDelta(AT, half, 24_000, (Word("Two", 0.1, 0.4, 1.0),)))
    wire.send(ResponseAudioDelta(AT, half, 24_000, (Word("words.", 0.5, 0.9, 1.0),)))
    wire.send(ContentPartDone(AT, ContentPart("output_audio", "Two words.")))
    frames = wire.frames()
    media = [f for f in frames if isinstance(f, MediaFrame)]
    assert {f.epoch for f in media} == {0}
    out = [json.loads(f) for f in frames]
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


def test_after_the_epoch_was_raised_nothing_of_the_answer_is_told_but_its_end() -> None:
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
    assert not [f for f in frames if isinstance(f, MediaFrame)]
    assert json.loads(frames[-1])["type"] == "response.done"


@pytest.mark.parametrize("form", ["pcm16", "pcm_f32le", "g711_ulaw", "g711_alaw", "wav"])
def test_sound_goes_out_in_every_format(form: str) -> None:
    rate = 8000 if form.startswith("g711") else 24_000
    wire = opened(output_audio_format=form)
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    wire.send(ResponseAudioDelta(AT, np.zeros(24_000, np.float32), 24_000))
    wire.send(ContentPartDone(AT, ContentPart("output_audio", "")))
    deltas = [f for f in told(wire) if f["type"] == "response.output_audio.delta"]
    size = {"pcm16": 2, "pcm_f32le": 4, "g711_ulaw": 1, "g711_alaw": 1, "wav": 2}[form]
    data = [b64decode(f["delta"]) for f in deltas]
    if form == "wav":
        assert data[0][:4] == b"RIFF"
        data = [d[44:] for d in data]
    assert sum(map(len, data)) == rate * size
    assert {f["sample_rate_hz"] for f in deltas} == {rate}


def test_the_dialects_own_events() -> None:
    wire = opened()
    wire.send(EpochRaised(3))
    wire.send(TurnStateChanged("duck", "assistant_playing", {"a": 1}))
    wire.send(OverlapReported("auto", "barge_in", "words", {}))
    wire.send(ListenStepTaken("nothing_said"))
    wire.send(PlaybackAcknowledged("r", "i", 5, 4, PlaybackCursors(9, 9, 5, 4), history_exact=True))
    wire.send(CommitRefused(0, 1))
    turn, overlap, listen, known, refused = told(wire)
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


def test_it_ends_by_name() -> None:
    for code, kind, told_code in (
        ("session_expired", "session.expired", "session_expired"),
        ("idle_timeout", "session.expired", "idle_timeout"),
        ("input_audio_buffer_overflow", "session.closed", "input_backpressure"),
    ):
        wire = opened()
        wire.send(SessionEnding(code, "why"))
        error, end = told(wire)
        assert error["error"]["code"] == told_code
        assert end["type"] == kind
    assert error["error"]["type"] == "rate_limit_error"
    assert error["error"]["retryable"] is True


NAMES = (
    *EVENTS,
    *ALIASES,
    "playback.ack",
    "turn.signal",
    "barge_in",
    "input.cancel",
    "session.heartbeat",
    "push_text",
    "input.commit",
)
MORE = st.sampled_from(("format", "sample_rate_hz", "video_frames", "overlap_action", "played_ms", "committed_ms", "event", "payload", "text", "final",
                        "overlap_policy", "extra_body", "turn_detection", "input_audio_format", "idle_timeout_s"))  # fmt: skip


@given(st.sampled_from(NAMES), st.dictionaries(KEYS | MORE, JSON, max_size=5))
def test_no_event_raises(kind: str, fields: dict[str, Any]) -> None:
    wire = connection()
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    say(wire, **(fields | {"type": kind}))
    say(wire, **(fields | {"type": kind}))
    wire.commands()
    for frame in told(wire):
        assert frame["type"]
