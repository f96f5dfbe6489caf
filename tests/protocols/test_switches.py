"""The messages of Asterisk and FreeSWITCH as their sources write them, and messages that no switch sends."""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.asterisk import RATES_HZ, UUID, AudioSocketStream, WebSocketChannel, framed
from antiphon.protocols.telephony.carriers import CarrierStream, stream_of
from antiphon.protocols.telephony.fork import ForkStream
from antiphon.protocols.telephony.stream import (
    Call,
    CallerAudio,
    MarkReturned,
    MediaStream,
    Pressed,
    Started,
    Stopped,
)
from antiphon.protocols.telephony.vonage import VonageStream

PLAIN = (
    "MEDIA_START connection_id:c1 channel:WebSocket/conn1/0x7f channel_id:1700.1 format:slin16 "
    "optimal_frame_size:640 ptime:20"
)
IN_JSON = {
    "event": "MEDIA_START",
    "connection_id": "c1",
    "channel": "WebSocket/conn1/0x7f",
    "channel_id": "1700.1",
    "format": "ulaw",
    "optimal_frame_size": 160,
    "ptime": 20,
    "channel_variables": {"CALLERID(num)": "+4930111", "order": "17"},
}
FORK = {
    "callSid": "c1",
    "accountSid": "a1",
    "from": "+4930111",
    "to": "+4930222",
    "sampleRate": 16000,
    "mixType": "mono",
}
ID = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
TONE = np.arange(320, dtype=np.int16)


def begun(stream: MediaStream, *first: str | bytes) -> tuple[MediaStream, Call, int]:
    (started, *_) = [item for data in first for item in stream.read(data)]
    assert isinstance(started, Started)
    return stream, started.call, started.codec.rate_hz


def channel(start: str = PLAIN) -> MediaStream:
    return begun(WebSocketChannel(), start)[0]


def fork() -> MediaStream:
    return begun(ForkStream(), json.dumps(FORK))[0]


def audio_socket(kind: int = 0x10) -> MediaStream:
    return begun(AudioSocketStream(), framed(UUID, ID.bytes), framed(kind, bytes(320)))[0]


def refusal(stream: MediaStream, data: str | bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        stream.read(data)
    return caught.value.code


@pytest.mark.parametrize(
    ("stream", "first", "call", "rate_hz"),
    [
        (
            WebSocketChannel(),
            [PLAIN],
            Call("asterisk", "1700.1", parameters={"channel": "WebSocket/conn1/0x7f"}),
            16_000,
        ),
        (
            WebSocketChannel(),
            [json.dumps(IN_JSON)],
            Call(
                "asterisk", "1700.1", caller="+4930111", parameters={"channel": "WebSocket/conn1/0x7f", "order": "17"}
            ),
            8000,
        ),
        (
            ForkStream(),
            [json.dumps(FORK | {"order": "17"})],
            Call("freeswitch", "c1", "a1", "+4930111", "+4930222", {"order": "17"}),
            16_000,
        ),
        (AudioSocketStream(), [framed(UUID, ID.bytes), framed(0x12, bytes(640))], Call("audiosocket", str(ID)), 16_000),
    ],
)
def test_a_start_says_which_call_a_stream_carries(
    stream: MediaStream, first: list[str | bytes], call: Call, rate_hz: int
) -> None:
    assert begun(stream, *first)[1:] == (call, rate_hz)


def test_a_subprotocol_or_the_first_message_tells_switches_and_carriers_apart() -> None:
    for first, subprotocol, kind in (
        (PLAIN, "", WebSocketChannel),
        (json.dumps(IN_JSON), "", WebSocketChannel),
        (b"\0\0", "media", WebSocketChannel),
        (json.dumps(FORK), "audio.drachtio.org", ForkStream),
        (json.dumps(FORK), "audio.jambonz.org", ForkStream),
        ('{"event": "websocket:connected"}', "", VonageStream),
        ('{"event": "connected"}', "", CarrierStream),
    ):
        assert type(stream_of(first, subprotocol)) is kind


def test_asterisk_gets_commands_in_the_form_of_its_start() -> None:
    plain, as_json = channel(), channel(json.dumps(IN_JSON))
    assert (plain.mark("m1"), plain.clear()) == ("MARK_MEDIA m1", "FLUSH_MEDIA")
    assert json.loads(as_json.mark("m1")) == {"command": "MARK_MEDIA", "correlation_id": "m1"}
    assert json.loads(as_json.clear()) == {"command": "FLUSH_MEDIA"}
    # Asterisk drops a text of more than 128 bytes.
    assert max(len(stream.mark(f"m{10**9}")) for stream in (plain, as_json)) <= 128
    # A rest of a frame would be dropped.
    for size in (640, 320, 960):
        start = PLAIN.replace("size:640", f"size:{size}")
        (sent,) = channel(start).audio(TONE[:100])
        assert len(sent) % size == 0
        assert isinstance(sent, bytes)
        assert sent[:200] == TONE[:100].tobytes()


def test_the_events_of_asterisk_are_read_in_both_forms() -> None:
    for stream, given_, expected in (
        (channel(), "DTMF_END digit:5 channel_id:1700.1", [Pressed("5")]),
        (channel(), "MEDIA_MARK_PROCESSED m7", [MarkReturned("m7")]),
        (channel(), "MEDIA_MARK_PROCESSED", [MarkReturned("")]),
        (channel(), "MEDIA_XOFF", []),
        (channel(), "STATUS channel_id:1700.1 queue_length:5 xon_level:800", []),
        (channel(), '{"event": "DTMF_END", "channel_id": "1", "digit": "#"}', [Pressed("#")]),
        (channel(), '{"event": "MEDIA_MARK_PROCESSED", "correlation_id": "m7"}', [MarkReturned("m7")]),
        (channel(), '{"event": "ERROR", "error_text": "no"}', []),
    ):
        assert stream.read(given_) == expected
    (heard,) = channel().read(TONE.tobytes())
    assert isinstance(heard, CallerAudio)
    assert (heard.pcm * 32768).astype(int).tolist() == TONE.tolist()


def test_freeswitch_says_whether_a_mark_was_played_and_only_that_counts() -> None:
    stream = fork()
    assert json.loads(stream.mark("m1")) == {"type": "mark", "data": {"name": "m1"}}
    assert json.loads(stream.clear()) == {"type": "killAudio"}
    assert stream.read('{"type": "mark", "data": {"name": "m1", "event": "playout"}}') == [MarkReturned("m1")]
    assert stream.read('{"type": "mark", "data": {"name": "m1", "event": "cleared"}}') == []
    assert stream.read('{"event": "dtmf", "dtmf": "2", "duration": "1600"}') == [Pressed("2")]
    assert stream.read('{"type": "new of this year"}') == []
    (heard,) = stream.read(TONE.tobytes())
    assert isinstance(heard, CallerAudio)
    assert stream.audio(TONE) == [TONE.tobytes()]


def test_audio_socket_has_frames_of_20_ms_in_the_kind_of_the_callers_audio() -> None:
    for kind, rate_hz in RATES_HZ.items():
        stream = audio_socket(kind)
        size = rate_hz // 50
        sent = stream.audio(np.arange(2 * size).astype(np.int16))
        assert [(frame[0], int.from_bytes(frame[1:3], "big"), len(frame)) for frame in map(bytes, sent)] == [
            (kind, 2 * size, 2 * size + 3)
        ] * 2
        (heard,) = stream.read(sent[0])
        assert isinstance(heard, CallerAudio)
        assert len(heard.pcm) == size
    stream = audio_socket()
    assert (stream.mark("m1"), stream.clear(), stream.returns_marks) == ("", "", False)
    assert stream.read(framed(0x03, b"5")) == [Pressed("5")]
    assert stream.read(framed(0x00)) == [Stopped()]
    assert stream.read(framed(0xFF, b"\1")) == [Stopped()]


# --- what no switch sends


def test_a_second_start_and_audio_before_the_first_are_refused() -> None:
    assert refusal(channel(), PLAIN) == "bad_event"
    assert refusal(WebSocketChannel(), b"\0\0") == "bad_event"
    assert refusal(WebSocketChannel(), "DTMF_END digit:5") == "bad_event"
    assert refusal(ForkStream(), b"\0\0") == "bad_event"
    assert refusal(audio_socket(), framed(UUID, ID.bytes)) == "bad_event"
    assert refusal(AudioSocketStream(), framed(0x10, bytes(320))) == "bad_event"
    assert refusal(AudioSocketStream(), framed(0x03, b"5")) == "bad_event"


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        (WebSocketChannel(), PLAIN.replace("slin16", "opus")),
        (WebSocketChannel(), PLAIN.replace(" format:slin16", "")),
        (ForkStream(), json.dumps(FORK | {"sampleRate": 44100})),
        (ForkStream(), json.dumps(FORK | {"sampleRate": "fast"})),
        (ForkStream(), json.dumps(FORK | {"mixType": "stereo"})),
        (ForkStream(), "{}"),
    ],
)
def test_audio_in_an_encoding_that_is_not_known_is_refused(stream: MediaStream, data: str) -> None:
    assert refusal(stream, data) == "unsupported_format"


@pytest.mark.parametrize("data", ["", " ", "{", "[]", "{}", "12 34", "[" * 100_000])
def test_a_control_message_that_is_none_is_refused(data: str) -> None:
    assert refusal(WebSocketChannel(), data) not in ("", "bad_audio")


def test_a_uuid_of_another_length_an_unknown_kind_and_another_rate_are_refused() -> None:
    assert refusal(AudioSocketStream(), framed(UUID, b"123")) == "bad_event"
    assert refusal(AudioSocketStream(), b"") == "bad_event"
    assert refusal(audio_socket(), framed(0x42, b"x")) == "bad_event"
    assert refusal(audio_socket(), framed(0x12, bytes(640))) == "bad_event"


def test_frames_of_half_a_sample_and_files_are_dropped_and_other_sizes_are_heard() -> None:
    header = b"RIFF" + bytes(4) + b"WAVEfmt " + bytes(20)
    for stream, wrap in ((channel(), bytes), (fork(), bytes), (audio_socket(), lambda data: framed(0x10, data))):
        assert refusal(stream, wrap(bytes(641))) == "bad_audio"
        assert refusal(stream, wrap(header)) == "bad_audio"
        (heard,) = stream.read(wrap(bytes(2)))
        assert isinstance(heard, CallerAudio)


WORDS = st.sampled_from(
    [
        "MEDIA_START",
        "DTMF_END",
        "digit:",
        "format:slin",
        "optimal_frame_size:0",
        "optimal_frame_size:99999",
        "{",
        "}",
        ":",
    ]
)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(WORDS, max_size=8).map(" ".join),
    st.dictionaries(st.sampled_from([*IN_JSON, *FORK, "type", "data", "digit", "dtmf"]), st.none() | st.integers()
                    | st.text(max_size=9) | st.lists(st.integers(), max_size=2), max_size=6).map(json.dumps),
)  # fmt: skip
FRAMES = st.tuples(st.integers(0, 255), st.binary(max_size=40)).map(lambda frame: framed(*frame))


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS | st.binary(max_size=40) | FRAMES, max_size=6))
def test_no_message_raises_another_error_than_those_that_are_announced(messages: list[Any]) -> None:
    for make in (WebSocketChannel, channel, ForkStream, fork, AudioSocketStream, audio_socket):
        stream: MediaStream = make()
        for data in messages:
            try:
                read = stream.read(data)
            except RemoteProtocolError:
                continue
            if any(isinstance(item, Started) for item in read):
                assert stream.audio(TONE)
