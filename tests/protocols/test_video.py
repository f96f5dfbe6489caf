"""Tests the frames of the video dialect: every default, limit, older name, event and error."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from antiphon.events.video import (
    AnswerAudioDelta,
    AnswerDone,
    AnswerSampling,
    AnswerStarted,
    AnswerTextDelta,
    AppendFrame,
    AppendVideoAudio,
    AskQuestion,
    FinishVideo,
    FrameInfo,
    FrameReceived,
    VideoConfig,
    VideoEnded,
    VideoEvent,
    VideoFailed,
)
from antiphon.protocols.video.stream import JPEG, MAX_FRAME_CHARS, PNG, VideoDialect, VideoMessage
from antiphon.protocols.wire import Frame, Received
from tests.protocols.struct_values import JSON_TYPES, fields_of_every_type, has_wrong_type

IMAGE = b64encode(JPEG + b"...").decode()


def configured(**config: Any) -> VideoConfig:
    received = VideoDialect(lambda: 0.0).feed(json.dumps({"type": "session.config"} | config))
    assert received.answers == []
    (command,) = received.commands
    assert isinstance(command, VideoConfig)
    return command


def stream(**options: Any) -> VideoDialect:
    wire = VideoDialect(lambda: 5.0, **options)
    wire.feed('{"type":"session.config"}')
    assert wire.configured
    return wire


def shown(frames: Iterable[Frame]) -> list[dict[str, Any]]:
    return [json.loads(f.encode()) for f in frames]


def sent(wire: VideoDialect, *events: VideoEvent) -> list[dict[str, Any]]:
    return shown(frame for event in events for frame in wire.send(event))


def test_a_configuration_has_defaults_for_missing_fields() -> None:
    assert configured() == VideoConfig(True, True, 4, 50, "", "evs", 0.95, True, None, None)


def test_every_field_of_a_configuration_is_read_by_its_older_names_too() -> None:
    assert configured(
        model="m",
        modalities=["text"],
        num_sample_frames=8.0,
        max_frames=256,
        system_prompt="Be brief.",
        use_audio_in_video=False,
        sampling_params_list=[{}],
        evs_threshold=0.5,
        frame_filter="blocks",
        voice="v",
        max_memory_s=60,
    ) == VideoConfig(False, True, 8, 256, "Be brief.", "blocks", 0.5, False, "v", 60.0)
    # The newer name takes precedence, whatever the order of the fields.
    config = configured(num_frames=3, num_sample_frames=9, evs_enabled=False)
    assert (config.num_frames, config.filter) == (3, None)


def test_the_first_sampling_params_are_those_of_the_text() -> None:
    given = {"max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": -1, "repetition_penalty": 1.5, "seed": -1}
    first = given | {"stop": ["x"], "n": 2}
    config = configured(sampling_params_list=[first, {"temperature": 1.0}])
    assert config.sampling == AnswerSampling(5, 0, 0.5, 0, 1.5, 2**64 - 1)
    for without in (None, [], [{}], [dict.fromkeys(given)]):
        assert configured(sampling_params_list=without).sampling == AnswerSampling()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 2.1},
        {"temperature": "hot"},
        {"top_p": -0.1},
        {"top_k": -2},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"repetition_penalty": 0},
        {"seed": 2**63},
        "x",
    ],
    ids=repr,
)
def test_when_sampling_params_are_wrong_then_the_error_names_them(wrong: object) -> None:
    config = {"type": "session.config", "sampling_params_list": [wrong]}
    (error,) = shown(VideoDialect(lambda: 0.0).feed(json.dumps(config)).answers)
    assert error["type"] == "error"
    assert "Invalid session config" in error["message"]
    assert (next(iter(wrong)) if isinstance(wrong, dict) else "sampling_params_list") in error["message"]


@pytest.mark.parametrize("value", JSON_TYPES, ids=repr)
def test_what_was_always_taken_for_missing_still_is(value: object) -> None:
    plain = {"num_frames": 4, "enable_frame_filter": True, "frame_filter_threshold": 0.95}
    # An older name is not read if the newer name is present.
    assert configured(**plain, num_sample_frames=value, evs_enabled=value, evs_threshold=value) == configured()
    assert configured(model=value, data=value) == configured()
    (command,) = stream().feed(json.dumps({"type": "video.query", "text": value})).commands
    assert command == AskQuestion(value if isinstance(value, str) else "")
    if not value:
        assert stream().feed(json.dumps({"type": "video.query", "audio_data": value})) == Received([AskQuestion("")])
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        names = ("frame_id", "pts_ms", "source_pts_ms", "quality_profile", "capture_ts_ms")
        frame = {"type": "video.frame", "data": IMAGE} | dict.fromkeys(names, value)
        assert stream().feed(json.dumps(frame)) == Received([AppendFrame(JPEG + b"...", FrameInfo(5.0))])


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("{", "Invalid JSON in session.config"),
        ("[]", "Expected session.config, got: list"),
        ("[", "Invalid JSON in session.config"),
        ('{"type":"nonsense"}', "Expected session.config, got: nonsense"),
        ('{"type":"video.frame"}', "Expected session.config, got: video.frame"),
        ('{"type":"session.config","num_frames":0}', "Invalid session config: num_frames is from 1 to 128"),
        ('{"type":"session.config","num_frames":1.5}', "Invalid session config: num_frames is a whole number"),
        ('{"type":"session.config","max_frames":257}', "Invalid session config: max_frames is from 1 to 256"),
        (
            '{"type":"session.config","max_frames":true}',
            "Invalid session config: Invalid type for 'max_frames': expected int or float.",
        ),
        (
            '{"type":"session.config","frame_filter_threshold":2}',
            "Invalid session config: frame_filter_threshold is from 0 to 1",
        ),
        (
            '{"type":"session.config","modalities":["video"]}',
            "Invalid session config: modalities is a list of text and audio",
        ),
        ('{"type":"session.config","modalities":[]}', "Invalid session config: modalities is a list of text and audio"),
        (
            '{"type":"session.config","enable_frame_filter":"yes"}',
            "Invalid session config: Invalid type for 'enable_frame_filter': expected bool.",
        ),
        ('{"type":"session.config","frame_filter":"best"}', "Invalid session config: frame_filter is evs or blocks"),
        (
            '{"type":"session.config","system_prompt":7}',
            "Invalid session config: Invalid type for 'system_prompt': expected str or null.",
        ),
        (
            '{"type":"session.config","num_sample_frames":"4"}',
            "Invalid session config: Invalid type for 'num_sample_frames': expected int or float.",
        ),
        ('{"type":"session.config","max_memory_s":0}', "Invalid session config: max_memory_s is from 1 to 86400"),
    ],
)
def test_when_the_first_message_is_wrong_then_the_connection_ends(first: str, message: str) -> None:
    wire = VideoDialect(lambda: 0.0)
    received = wire.feed(first)
    assert shown(received.answers) == [{"type": "error", "message": message}]
    assert wire.closing
    assert not received.commands


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ("3", "Messages must be JSON objects"),
        ('{"type":"nonsense"}', "Unknown type: nonsense"),
        ("{}", "Unknown type: None"),
        ('{"type":"session.config"}', "Unknown type: session.config"),
        ('{"type":"video.frame"}', "Invalid image data"),
        ('{"type":"video.frame","data":"%%%"}', "Invalid image data"),
        ('{"type":"video.frame","data":"AAAA"}', "Invalid image data"),
        (json.dumps({"type": "video.frame", "data": "A" * (MAX_FRAME_CHARS + 4)}), "Frame too large"),
        ("x" * (MAX_FRAME_CHARS + (70 << 10)), "Frame too large"),
        ('{"type":"audio.chunk","data":"%"}', "Invalid audio data"),
        ('{"type":"audio.chunk","data":7}', "Invalid type for 'data': expected str."),
        ('{"type":"video.query","audio_data":7}', "Invalid type for 'audio_data': expected str."),
        ('{"type":"session.config","num_frames":"x"}', "Unknown type: session.config"),
    ],
)
def test_when_a_message_is_wrong_then_it_is_an_error_and_nothing_changes(text: str, message: str) -> None:
    wire = stream()
    received = wire.feed(text)
    assert shown(received.answers) == [{"type": "error", "message": message}]
    assert not received.commands
    assert not wire.closing


def test_messages_become_commands() -> None:
    wire = stream()
    sound = np.array([100, -100], "<i2").tobytes()
    messages: list[dict[str, Any]] = [
        {
            "type": "video.frame",
            "data": IMAGE,
            "frame_id": "a",
            "pts_ms": 40,
            "source_pts_ms": 41,
            "quality_profile": "low",
            "capture_ts_ms": 42.5,
        },
        {"type": "video.frame", "data": b64encode(PNG).decode(), "frame_id": 7, "pts_ms": "x"},
        {"type": "audio.chunk", "data": b64encode(sound + b"odd").decode()},
        {"type": "video.query", "text": "What?", "audio_data": b64encode(sound).decode()},
        {"type": "video.query", "text": None},
        {"type": "video.done"},
    ]
    received = [wire.feed(json.dumps(message)) for message in messages]
    assert all(r.answers == [] for r in received)
    frame, bare, heard, with_it, asked, nothing, over = (command for r in received for command in r.commands)
    assert frame == AppendFrame(JPEG + b"...", FrameInfo(5.0, "a", 40, 41, 42.5, "low"))
    assert isinstance(bare, AppendFrame)
    assert bare.info == FrameInfo(5.0)
    assert isinstance(heard, AppendVideoAudio)
    assert isinstance(with_it, AppendVideoAudio)
    assert len(heard.pcm) == 3
    assert with_it.pcm.tolist() == [100 / 32768, -100 / 32768]
    assert (asked, nothing, over) == (AskQuestion("What?"), AskQuestion(""), FinishVideo())
    pong = wire.feed('{"type":"ping"}')
    assert (pong.commands, shown(pong.answers)) == ([], [{"type": "pong"}])


def test_only_frames_with_an_id_are_acknowledged() -> None:
    info = FrameInfo(9.0, "b", 80, None, 81)
    kept, filtered = sent(
        stream(),
        FrameReceived(FrameInfo(1.0), True, 1),
        FrameReceived(info, True, 50, None, FrameInfo(1.0, "a")),
        FrameReceived(info, False, 50, "filtered"),
    )
    base = {
        "type": "video.frame.ack",
        "frame_id": "b",
        "pts_ms": 80,
        "capture_ts_ms": 81,
        "buffered_frames": 50,
        "server_receive_ts_ms": 9.0,
    }
    assert kept == base | {"accepted": True, "dropped_frame_id": "a"}
    assert filtered == base | {"accepted": False, "reason": "filtered"}


@pytest.mark.parametrize("ga", [False, True])
def test_an_answer_is_sent_as_it_is_made(ga: bool) -> None:
    wire = stream(ga=ga)
    pcm = np.full(240, 0.25, np.float32)
    events = sent(
        wire,
        AnswerStarted("video-1", (FrameInfo(1.0, "a", 0), FrameInfo(2.0, None, 500))),
        AnswerTextDelta("A "),
        AnswerAudioDelta(pcm, 24_000),
        AnswerTextDelta("dog."),
        AnswerAudioDelta(pcm, 24_000),
        AnswerDone("A dog.", True),
        VideoEnded(),
    )
    name = "response.output_audio" if ga else "response.audio"
    assert [e["type"] for e in events] == [
        "response.start",
        "video.frames.consumed",
        "response.text.delta",
        f"{name}.delta",
        "response.text.delta",
        f"{name}.delta",
        "response.text.done",
        f"{name}.done",
        "session.done",
    ]
    consumed = events[1]
    assert consumed["request_id"] == "video-1"
    assert consumed["frame_ids"] == ["a"]
    assert [f["pts_ms"] for f in consumed["frames"]] == [0, 500]
    assert consumed["latest_pts_ms"] == 500
    wav = b64decode(events[3]["data"])
    assert events[3]["format"] == "wav"
    assert wav[:4] == b"RIFF"
    assert len(wav) == 44 + 480
    assert int.from_bytes(wav[40:44], "little") == 480
    assert events[6]["text"] == "A dog."
    assert wire.closing


def test_with_whole_an_answer_is_one_text_and_one_wav() -> None:
    pcm = np.zeros(240, np.float32)
    events = sent(
        stream(whole=True),
        AnswerStarted("r", (FrameInfo(1.0),)),
        AnswerTextDelta("A "),
        AnswerAudioDelta(pcm, 8000),
        AnswerTextDelta("dog."),
        AnswerAudioDelta(pcm, 8000),
        AnswerDone("A dog.", True),
    )
    assert [e["type"] for e in events] == [
        "response.start",
        "response.text.done",
        "response.audio.delta",
        "response.audio.done",
    ]
    assert len(b64decode(events[2]["data"])) == 44 + 960


def test_when_an_answer_is_interrupted_then_its_audio_is_not_in_the_next() -> None:
    events = sent(
        stream(whole=True),
        AnswerStarted("r", ()),
        AnswerAudioDelta(np.zeros(240, np.float32), 8000),
        AnswerStarted("s", ()),
        AnswerDone("No.", False),
    )
    assert [e["type"] for e in events] == ["response.start", "response.start", "response.text.done"]


def test_when_an_answer_fails_then_its_text_is_still_ended() -> None:
    wire = stream()
    events = sent(
        wire,
        AnswerStarted("r", ()),
        AnswerTextDelta("A"),
        VideoFailed("Query processing failed", "no room", ends_answer=True, partial_text="A"),
    )
    assert events[2:] == [
        {"type": "error", "message": "Query processing failed", "detail": "no room"},
        {"type": "response.text.done", "text": "A"},
    ]
    assert not wire.closing


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_client_sends_nothing_raises(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wire = stream() if seed % 2 else VideoDialect(lambda: 0.0)
    kinds = ["session.config", "video.frame", "audio.chunk", "video.query", "video.done", "ping", 7, None, ["x"]]
    values = [None, 7, -1e300, "x", IMAGE, "A" * 99, [1], {"a": 1}, True, "", "\ud83d"]
    keys = [
        "data",
        "text",
        "frame_id",
        "pts_ms",
        "modalities",
        "num_frames",
        "audio_data",
        "max_frames",
        "evs_threshold",
    ]
    for _ in range(200):
        event = {"type": kinds[rng.integers(len(kinds))]} | {
            keys[rng.integers(len(keys))]: values[rng.integers(len(values))] for _ in range(3)
        }
        for data in (json.dumps(event), rng.bytes(int(rng.integers(40)))):
            received = wire.feed(data)
            assert bool(received.answers) is not bool(received.commands)
            assert all(isinstance(json.loads(f.encode()), dict) for f in received.answers)


@pytest.mark.parametrize("message", get_args(VideoMessage), ids=lambda m: m.__struct_config__.tag)
def test_when_a_field_has_another_type_then_the_error_names_it(message: type[msgspec.Struct]) -> None:
    kind = message.__struct_config__.tag
    for name, fields in fields_of_every_type(message):
        wire = VideoDialect(lambda: 5.0) if kind == "session.config" else stream()
        received = wire.feed(json.dumps({"type": kind} | fields))
        assert bool(received.commands) is not bool(received.answers)
        if has_wrong_type(message, fields):
            (error,) = shown(received.answers)
            assert f"Invalid type for '{name}" in error["message"]
        # At a time when the message is not allowed, it is refused for that reason or for the same one.
        other = stream() if kind == "session.config" else VideoDialect(lambda: 5.0)
        assert other.feed(json.dumps({"type": kind} | fields)).commands == []


def test_when_a_type_or_a_whole_message_has_another_type_then_the_error_says_so() -> None:
    for value in JSON_TYPES:
        (error,) = shown(stream().feed(json.dumps({"type": value})).answers)
        assert error["message"] == f"Unknown type: {value}"
        if not isinstance(value, dict):
            (error,) = shown(stream().feed(json.dumps(value)).answers)
            assert error["message"] == "Messages must be JSON objects"
