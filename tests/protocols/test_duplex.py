"""The full-duplex dialect: how a session opens, and the clients' messages with their aliases."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.events.conversation import (
    CancelResponse,
    CreateItem,
    CreateResponse,
    Response,
    ResponseCreated,
)
from antiphon.events.duplex import (
    AcknowledgePlayback,
    BargeIn,
    CancelInput,
    HoldFloor,
    NativeSampling,
    SignalTurn,
    SkipResponse,
    TurnStateChanged,
)
from antiphon.events.transcription import AppendAudio, ClearAudio, CommitAudio
from antiphon.protocols.duplex.messages import DuplexMessage
from tests.protocols.duplex_connection import (
    commands_of,
    connection,
    error_of,
    frames_of,
    opened,
    receive_event,
    silence,
)
from tests.protocols.json_values import JSON, KEYS

# --- opening a session


@pytest.mark.parametrize("given", ["UklGRg==", "data:audio/wav;base64,UklGRg==", {"data": "UklGRg=="}])
def test_a_reference_recording_is_read_from_base64_and_data_uris(given: Any) -> None:
    wire = connection()
    receive_event(wire, "session.update", session={"ref_audio": given})
    (created,) = frames_of(wire)
    # `ref_audio` is not shown to the client.
    assert "ref_audio" not in created["session"]
    (configured,) = wire.commands()
    assert configured.config.duplex.voice_reference == b"RIFF"


@pytest.mark.parametrize("given", ["https://x.org/voice.wav", "no base64!", {"url": "x"}, 3])
def test_when_a_reference_recording_is_wrong_then_the_update_is_refused(given: Any) -> None:
    wire = connection()
    receive_event(wire, "session.update", session={"ref_audio": given})
    (error,) = frames_of(wire)
    assert error["type"] == "error"
    assert "ref_audio" in error["error"]["param"]


def test_before_the_first_frame_nothing_is_sent() -> None:
    wire = connection()
    assert frames_of(wire) == []
    assert wire.commands() == []


@pytest.mark.parametrize("kind", ["session.update", "session.create"])
def test_when_the_first_frame_is_an_update_then_it_opens_the_session_with_its_fields(kind: str) -> None:
    wire = connection()
    receive_event(wire, kind, session={"instructions": "Be brief.", "overlap_policy": "listen_only"})
    (created,) = frames_of(wire)
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


def test_when_the_first_frame_is_another_then_a_default_session_opens_and_the_frame_is_read() -> None:
    wire = connection()
    receive_event(wire, "input_audio_buffer.append", audio=silence())
    assert [f["type"] for f in frames_of(wire)] == ["session.created"]
    configured, appended = wire.commands()
    assert isinstance(appended, AppendAudio)
    assert configured.config.duplex.policy == "auto"
    # No turn detection was requested, so turns end as with semantic_vad.
    assert configured.config.transcription.vad.eagerness == "auto"


def test_with_autostart_the_session_opens_by_itself() -> None:
    wire = connection(model="gpt-realtime", autostart=True)
    (created,) = frames_of(wire)
    assert created["session"]["model"] == "gpt-realtime"


def test_when_the_first_update_is_wrong_then_the_session_can_still_be_opened() -> None:
    wire = connection()
    receive_event(wire, "session.update", session={"overlap_policy": "never"})
    assert [f["error"]["code"] for f in frames_of(wire)] == ["bad_event"]
    receive_event(wire, "session.update", session={})
    assert [f["type"] for f in frames_of(wire)] == ["session.created"]


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
def test_when_a_field_of_the_session_is_wrong_then_the_update_is_refused(session: dict[str, Any], code: str) -> None:
    wire = opened()
    assert error_of(wire, "session.update", session=session, event_id="mine")["code"] == code


@pytest.mark.parametrize(
    ("knob", "value", "says"),
    [
        ("top_k", 1001, "0 to 1000"),
        ("top_k", 2.5, "top_k"),
        ("top_p", -0.1, "0 to 1"),
        ("text_repetition_penalty", 0, "0.1 to 10"),
        ("length_penalty", 11, "0.1 to 10"),
        ("listen_prob_scale", -1, "0 to 10"),
        ("listen_top_k", -1, "0 to 1000"),
        ("tts_temperature", 0, "0.01 to 2"),
        ("tts_repetition_penalty", "much", "tts_repetition_penalty"),
        ("seed", -1, "0 to "),
        ("force_listen_count", 3601, "0 to 3600"),
    ],
)
def test_when_a_knob_of_a_native_model_is_out_of_range_then_the_error_names_it_and_the_range(
    knob: str, value: object, says: str
) -> None:
    wire = opened()
    error = error_of(wire, "session.update", session={"extra_body": {knob: value}})
    assert error["code"] == "bad_event"
    assert knob in error["message"]
    assert says in error["message"]
    assert wire.commands() == []


def test_the_knobs_of_a_native_model_reach_the_session_and_are_shown() -> None:
    wire = opened()
    knobs = {
        "top_k": 5,
        "top_p": 0.5,
        "text_repetition_penalty": 1.2,
        "length_penalty": 1.3,
        "listen_prob_scale": 0.9,
        "listen_top_k": 2,
        "tts_temperature": 0.6,
        "tts_repetition_penalty": 1.4,
        "seed": 7,
    }
    receive_event(wire, "session.update", session={"temperature": 0.3, "extra_body": knobs})
    assert frames_of(wire)[0]["session"]["extra_body"] == {"auto_response": True} | knobs
    (configured,) = wire.commands()
    assert configured.config.duplex.sampling == NativeSampling(0.3, 5, 0.5, 1.2, 1.3, 0.9, 2, 0.6, 1.4, 7)


def test_a_later_update_shows_the_whole_session() -> None:
    wire = opened()
    receive_event(
        wire, "session.update", session={"overlap_barge_in_ms": 900, "turn_detection": {"type": "server_vad"}}
    )
    (updated,) = frames_of(wire)
    assert updated["type"] == "session.updated"
    assert updated["session"]["overlap_barge_in_ms"] == 900
    assert updated["session"]["turn_detection"]["min_speech_duration_ms"] == 96
    (configured,) = wire.commands()
    assert configured.config.duplex.barge_in_ms == 900
    assert configured.config.transcription.vad.eagerness is None


# --- messages of clients


@pytest.mark.parametrize(
    ("audio_format", "rate", "dtype"),
    [
        ("pcm16", 16000, "<i2"),
        ("pcm_f32le", 16000, "<f4"),
        ("pcm16", 8000, "<i2"),
        ("pcm16", 48000, "<i2"),
        ("pcm_f32le", 192000, "<f4"),
    ],
)
def test_audio_of_every_format_and_rate_reaches_the_session_at_16_khz(audio_format: str, rate: int, dtype: str) -> None:
    tone = np.sin(np.arange(rate) * 2 * np.pi * 300 / rate) * 0.5
    data = (tone * (32767 if dtype == "<i2" else 1)).astype(dtype).tobytes()
    wire = opened()
    fields = {"audio": b64encode(data).decode(), "format": audio_format, "sample_rate_hz": rate}
    heard = commands_of(wire, "input_audio_buffer.append", **fields) + commands_of(wire, "input_audio_buffer.commit")
    pcm = np.concatenate([i.pcm for i in heard if isinstance(i, AppendAudio)])
    assert len(pcm) == 16_000
    want = np.sin(np.arange(16_000) * 2 * np.pi * 300 / 16_000) * 0.5
    assert np.abs(pcm[800:-800] - want[800:-800]).max() < 0.01


def test_g711_without_a_rate_is_at_8_khz() -> None:
    wire = opened(input_audio_format="g711_ulaw")
    pcm = commands_of(wire, "push_chunk", audio=b64encode(bytes([0xFF] * 8000)).decode())
    pcm += commands_of(wire, "input.commit")
    assert sum(len(i.pcm) for i in pcm if isinstance(i, AppendAudio)) == 16_000


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"audio": "!!"}, "bad_audio"),
        ({"audio": b64encode(b"abc").decode()}, "bad_audio"),
        ({"audio": b64encode(np.array([np.nan], "<f4").tobytes()).decode(), "format": "pcm_f32le"}, "bad_audio"),
        ({"audio": silence(), "format": "flac"}, "unsupported_audio_format"),
        ({"audio": silence(), "sample_rate_hz": "x"}, "unsupported_audio_format"),
        ({"audio": silence(), "video_frames": ["x"]}, "invalid_video_frames"),
        ({"audio": silence(), "video_frames": [b64encode(b"\xff\xd8\xff").decode()] * 3}, "invalid_video_frames"),
        ({}, "bad_event"),
    ],
)
def test_when_audio_is_wrong_then_the_append_is_refused(fields: dict[str, Any], code: str) -> None:
    assert error_of(opened(), "input_audio_buffer.append", **fields)["code"] == code


def test_events_are_known_by_their_other_names() -> None:
    wire = opened()
    for name in ("input_audio_buffer.append", "input.audio.append", "push_chunk"):
        assert [type(i) for i in commands_of(wire, name, audio=silence())] == [AppendAudio]
    assert commands_of(wire, "barge_in", event_id="e") == [BargeIn("client_barge_in", "e")]
    assert commands_of(wire, "turn.signal", event="barge_in") == [BargeIn("client_barge_in")]
    assert commands_of(wire, "signal_turn", event="nod", payload={"a": 1}) == [SignalTurn("nod", {"a": 1})]
    assert commands_of(wire, "turn.signal", event="response.cancel") == [CancelResponse(None)]
    for name in ("playback.ack", "audio.playback_ack"):
        assert commands_of(wire, name, played_ms=120.7) == [AcknowledgePlayback(120, 120)]
    assert commands_of(wire, "playback.ack", played_ms=9, committed_ms=7, response_id="r", item_id="i") == [
        AcknowledgePlayback(9, 7, "r", "i")
    ]
    assert [type(i) for i in commands_of(wire, "input.cancel")] == [CancelInput, ClearAudio]
    assert [type(i) for i in commands_of(wire, "input_audio_buffer.clear")] == [ClearAudio]
    for name in ("push_text", "input.text.append", "input_text.append"):
        created, asked = commands_of(wire, name, text="Hello")
        assert isinstance(created, CreateItem)
        assert isinstance(asked, CreateResponse)
        assert created.item.parts[0].text == "Hello"


def test_a_commit_may_ask_for_a_response_or_forbid_it() -> None:
    wire = opened()
    assert commands_of(wire, "input_audio_buffer.commit") == [CommitAudio()]
    assert commands_of(wire, "input_audio_buffer.commit", final=False) == [CommitAudio(False)]
    assert commands_of(wire, "input_audio_buffer.commit", response_create=False) == [SkipResponse(), CommitAudio()]
    # By default, the model responds to turns without a request.
    assert commands_of(wire, "input_audio_buffer.commit", response_create=True) == [CommitAudio()]
    quiet = opened(extra_body={"auto_response": False})
    assert commands_of(quiet, "input_audio_buffer.commit") == [CommitAudio()]
    asked = commands_of(quiet, "input_audio_buffer.commit", response_create=True)
    assert [type(i) for i in asked] == [CommitAudio, CreateResponse]
    assert [type(i) for i in commands_of(quiet, "input.commit")] == [CommitAudio, CreateResponse]


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
def test_what_a_client_says_of_speech_over_a_response_becomes_a_command(
    fields: dict[str, Any], expected: list[Any]
) -> None:
    wire = opened()
    *asked, appended = commands_of(wire, "input_audio_buffer.append", audio=silence(), **fields)
    assert asked == expected
    assert isinstance(appended, AppendAudio)


@pytest.mark.parametrize("fields", [{"overlap_action": "drop"}, {"is_speech": False}])
def test_when_a_client_says_that_overlap_is_no_speech_then_its_audio_is_silence(fields: dict[str, Any]) -> None:
    wire = opened()
    loud = b64encode(np.full(160, 9000, "<i2").tobytes()).decode()
    (appended,) = commands_of(wire, "input_audio_buffer.append", audio=loud, **fields)
    assert appended.pcm.any()
    # The response is complete, but still audible.
    wire.send(TurnStateChanged("playback_started", "assistant_playing"))
    (appended,) = commands_of(wire, "input_audio_buffer.append", audio=loud, **fields)
    assert len(appended.pcm) == 160
    assert not appended.pcm.any()


def test_heartbeats_are_answered_and_a_close_is_noted() -> None:
    wire = opened()
    receive_event(wire, "session.heartbeat")
    assert frames_of(wire)[0]["type"] == "session.heartbeat_ack"
    receive_event(wire, "session.close", reason="bye")
    assert wire.closing
    wire.closed()
    assert frames_of(wire)[0] | {"event_id": ""} == {
        "type": "session.closed",
        "event_id": "",
        "session_id": wire.id,
        "reason": "bye",
    }


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
def test_when_a_frame_is_no_event_then_it_is_an_error(frame: str, code: str) -> None:
    wire = opened()
    wire.receive(frame)
    assert [f["error"]["code"] for f in frames_of(wire)] == [code]
    assert wire.commands() == []


NAMES = (*(kind.__struct_config__.tag for kind in get_args(DuplexMessage)), "x")
MORE = st.sampled_from(
    (
        "format",
        "sample_rate_hz",
        "video_frames",
        "overlap_action",
        "played_ms",
        "committed_ms",
        "event",
        "payload",
        "text",
        "final",
        "overlap_policy",
        "extra_body",
        "turn_detection",
        "input_audio_format",
        "idle_timeout_s",
    )
)


@given(st.sampled_from(NAMES), st.dictionaries(KEYS | MORE, JSON, max_size=5))
def test_whatever_fields_an_event_has_nothing_raises(kind: str, fields: dict[str, Any]) -> None:
    wire = connection()
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    receive_event(wire, **(fields | {"type": kind}))
    receive_event(wire, **(fields | {"type": kind}))
    wire.commands()
    for frame in frames_of(wire):
        assert frame["type"]
