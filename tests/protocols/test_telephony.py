"""The messages of telephone carriers, as their documents show them, and messages that no carrier sends."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import msgspec
import numpy as np
import pytest

from antiphon.audio.line.g711 import to_ulaw
from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.carriers import CarrierStream, stream_of
from antiphon.protocols.telephony.functions import described, digits_in, session_of, target_of
from antiphon.protocols.telephony.stream import (
    MAX_PARAMETERS,
    Call,
    CallerAudio,
    MarkReturned,
    MediaStream,
    Pressed,
    Started,
    Stopped,
)

TONE = (8000 * np.sin(np.arange(800) * 0.3)).astype(np.int16)
FLOATS = TONE.astype(np.float32) / 32768
CONNECTED = '{"event": "connected", "version": "1.0.0"}'
TWILIO = {
    "event": "start",
    "sequenceNumber": "1",
    "streamSid": "MZ1",
    "start": {
        "streamSid": "MZ1",
        "accountSid": "AC1",
        "callSid": "CA1",
        "tracks": ["inbound"],
        "customParameters": {"order": "17"},
        "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1},
    },
}
TELNYX = {
    "event": "start",
    "sequence_number": "1",
    "stream_id": "st1",
    "start": {
        "user_id": "u1",
        "call_control_id": "v3:c1",
        "call_session_id": "s1",
        "stream_id": "st1",
        "from": "+4930111",
        "to": "+4930222",
        "tags": [],
        "client_state": None,
        "custom_parameters": {"order": "17"},
        "media_format": {"encoding": "PCMA", "sample_rate": 8000, "channels": 1},
    },
}
PLIVO = {
    "event": "start",
    "sequenceNumber": 0,
    "start": {
        "callId": "c1",
        "streamId": "st1",
        "accountId": "a1",
        "tracks": ["inbound"],
        "mediaFormat": {"encoding": "audio/x-l16", "sampleRate": 16000},
    },
    "extra_headers": '{"order": "17"}',
}
EXOTEL = {
    "event": "start",
    "sequence_number": "1",
    "stream_sid": "st1",
    "start": {
        "stream_sid": "st1",
        "call_sid": "c1",
        "account_sid": "a1",
        "from": "+9198",
        "to": "+9180",
        "custom_parameters": {"order": "17"},
        "media_format": {"encoding": "audio/x-raw", "sample_rate": "8000", "bit_rate": "16"},
    },
}
VONAGE = {
    "event": "websocket:connected",
    "content-type": "audio/l16;rate=16000",
    "order": "17",
}


def begun(start: Any) -> tuple[MediaStream, Started]:
    stream = stream_of(json.dumps(start))
    (started,) = stream.read(json.dumps(start))
    assert isinstance(started, Started)
    return stream, started


@pytest.mark.parametrize(
    ("start", "call", "rate_hz"),
    [
        (TWILIO, Call("twilio", "CA1", "AC1", "", "", {"order": "17"}), 8000),
        (TELNYX, Call("telnyx", "v3:c1", "u1", "+4930111", "+4930222", {"order": "17"}), 8000),
        (PLIVO, Call("plivo", "c1", "a1", "", "", {"order": "17"}), 16_000),
        (EXOTEL, Call("exotel", "c1", "a1", "+9198", "+9180", {"order": "17"}), 8000),
        (VONAGE, Call("vonage", "", "", "", "", {"order": "17"}), 16_000),
    ],
)
def test_a_start_says_which_call_a_stream_carries(start: Any, call: Call, rate_hz: int) -> None:
    _, started = begun(start)
    assert (started.call, started.codec.rate_hz) == (call, rate_hz)


def test_the_events_of_a_carrier_are_read() -> None:
    stream = CarrierStream()
    assert stream.read(CONNECTED) == []
    stream.read(json.dumps(TWILIO))
    payload = b64encode(to_ulaw(FLOATS)).decode()
    (heard,) = stream.read(
        json.dumps({"event": "media", "media": {"track": "inbound", "chunk": "2", "payload": payload}})
    )
    assert isinstance(heard, CallerAudio)
    assert heard.number is None
    assert np.abs(heard.pcm - FLOATS).max() < 0.01
    assert stream.read('{"event": "dtmf", "dtmf": {"track": "inbound_track", "digit": "1"}}') == [Pressed("1")]
    assert stream.read('{"event": "mark", "mark": {"name": "m7"}}') == [MarkReturned("m7")]
    assert stream.read('{"event": "new of this year", "media": null}') == []
    assert stream.read('{"event": "stop", "stop": {"callSid": "CA1"}}') == [Stopped()]


def test_audio_whose_order_is_not_certain_has_its_number_and_the_other_side_is_not_heard() -> None:
    stream, _ = begun(TELNYX)
    (heard,) = stream.read('{"event": "media", "media": {"track": "inbound", "chunk": "12", "payload": "1dXV"}}')
    assert isinstance(heard, CallerAudio)
    assert (heard.number, len(heard.pcm)) == (12, 3)
    assert stream.read('{"event": "media", "media": {"track": "outbound", "chunk": "12", "payload": "1dXV"}}') == []


@pytest.mark.parametrize(
    ("start", "media", "mark", "clear"),
    [
        (
            TWILIO,
            {"event": "media", "streamSid": "MZ1", "media": {"payload": ...}},
            {"event": "mark", "streamSid": "MZ1", "mark": {"name": "m1"}},
            {"event": "clear", "streamSid": "MZ1"},
        ),
        (
            TELNYX,
            {"event": "media", "media": {"payload": ...}},
            {"event": "mark", "mark": {"name": "m1"}},
            {"event": "clear"},
        ),
        (
            PLIVO,
            {
                "event": "playAudio",
                "streamId": "st1",
                "media": {"contentType": "audio/x-l16", "sampleRate": 16000, "payload": ...},
            },
            {"event": "checkpoint", "streamId": "st1", "name": "m1"},
            {"event": "clearAudio", "streamId": "st1"},
        ),
        (
            EXOTEL,
            {"event": "media", "stream_sid": "st1", "media": {"payload": ...}},
            {"event": "mark", "stream_sid": "st1", "mark": {"name": "m1"}},
            {"event": "clear", "stream_sid": "st1"},
        ),
    ],
)
def test_each_carrier_gets_its_own_words(start: Any, media: Any, mark: Any, clear: Any) -> None:
    stream, started = begun(start)
    (sent,) = stream.audio(TONE)
    shown = json.loads(sent)
    pcm = started.codec.decode(b64decode(shown["media"]["payload"]))
    assert np.abs(pcm[: len(TONE)] - FLOATS).max() < 0.01
    assert not np.abs(pcm[len(TONE) :]).max(initial=0.0) > 0.001
    shown["media"]["payload"] = ...
    assert [shown, json.loads(stream.mark("m1")), json.loads(stream.clear())] == [media, mark, clear]


def test_exotel_gets_no_message_below_its_least_size() -> None:
    stream, _ = begun(EXOTEL)
    for num_frames in (1, 10, 11):
        (sent,) = stream.audio(np.ones(160 * num_frames, np.int16))
        assert len(b64decode(json.loads(sent)["media"]["payload"])) % 3200 == 0


def test_a_checkpoint_of_plivo_that_was_played_is_a_mark() -> None:
    stream, _ = begun(PLIVO)
    assert stream.read('{"event": "playedStream", "streamId": "st1", "name": "m1"}') == [MarkReturned("m1")]
    assert stream.read('{"event": "clearedAudio", "streamId": "st1"}') == []


def test_vonage_gets_and_sends_binary_frames_of_20_ms() -> None:
    stream, _ = begun(VONAGE)
    sent = stream.audio(np.arange(640, dtype=np.int16))
    assert [len(frame) for frame in sent] == [640, 640]
    (heard,) = stream.read(sent[0])
    assert isinstance(heard, CallerAudio)
    assert (heard.pcm * 32768).astype(int).tolist() == list(range(320))
    assert stream.read('{"event": "websocket:dtmf", "digit": "5", "duration": 260}') == [Pressed("5")]
    assert stream.read('{"event": "websocket:notify", "payload": {"mark": "m1"}}') == [MarkReturned("m1")]
    assert stream.read('{"event": "websocket:cleared"}') == []
    assert json.loads(stream.mark("m1")) == {"action": "notify", "payload": {"mark": "m1"}}
    assert json.loads(stream.clear()) == {"action": "clear"}


# --- what no carrier sends


def refusal(stream: MediaStream, data: str | bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        stream.read(data)
    return caught.value.code


def test_a_second_start_and_audio_before_the_first_are_refused() -> None:
    for start in (TWILIO, TELNYX, PLIVO, EXOTEL, VONAGE):
        stream, _ = begun(start)
        assert refusal(stream, json.dumps(start)) == "bad_event"
    assert refusal(CarrierStream(), '{"event": "media", "media": {"payload": "////"}}') == "bad_event"
    assert refusal(CarrierStream(), '{"event": "dtmf", "dtmf": {"digit": "1"}}') == "bad_event"
    assert refusal(stream_of("websocket:connected"), b"\0\0") == "bad_event"


@pytest.mark.parametrize(
    "data",
    [
        "not JSON",
        "[]",
        "{}",
        '{"event": 5}',
        '{"event": "start"}',
        '{"event": "start", "start": []}',
        '{"event": "start", "start": {"streamSid": ["MZ1"]}}',
        '{"event": "start", "start": {"streamSid": "MZ1", "mediaFormat": {"sampleRate": "1e9"}}}',
        '{"event": "media", "media": 5}',
        b"\xff\xfe",
        "[" * 100_000,
    ],
)
def test_a_message_that_no_carrier_sends_is_refused(data: str | bytes) -> None:
    assert refusal(CarrierStream(), data) not in ("", "bad_audio")
    if not (isinstance(data, str) and '"event"' in data):
        assert refusal(stream_of("websocket:connected"), data) not in ("", "bad_audio")


@pytest.mark.parametrize("encoding", ["G722", "OPUS", "AMR-WB", "L16", "audio/x-l16"])
def test_a_stream_in_an_encoding_that_is_not_known_is_refused(encoding: str) -> None:
    start = json.loads(json.dumps(TELNYX))
    start["start"]["media_format"] = {"encoding": encoding, "sample_rate": 16000}
    assert refusal(CarrierStream(), json.dumps(start)) == "unsupported_format"


def wav(data: bytes) -> bytes:
    return b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + data


@pytest.mark.parametrize(
    "payload",
    [
        # A WAV file would be heard as a click, and its header as noise.
        wav(b"\x55" * 160),
        # 31 s in one message.
        b"\xff" * (31 * 8000),
    ],
)
def test_audio_that_is_a_file_or_too_long_is_dropped(payload: bytes) -> None:
    stream, _ = begun(TWILIO)
    text = b64encode(payload).decode()
    assert refusal(stream, json.dumps({"event": "media", "media": {"payload": text}})) == "bad_audio"
    assert refusal(stream, '{"event": "media", "media": {"payload": "???"}}') == "bad_audio"
    # The call goes on.
    assert stream.read('{"event": "media", "media": {"payload": "////"}}')


def test_frames_of_half_a_sample_are_dropped_and_other_sizes_are_heard() -> None:
    vonage, _ = begun(VONAGE)
    assert refusal(vonage, b"\0" * 641) == "bad_audio"
    (heard,) = vonage.read(b"\0" * 2)
    assert isinstance(heard, CallerAudio)
    exotel, _ = begun(EXOTEL)
    assert refusal(exotel, '{"event": "media", "media": {"payload": "AAAA"}}') == "bad_audio"


def test_facts_of_a_call_are_bounded() -> None:
    start = json.loads(json.dumps(TWILIO))
    start["start"]["customParameters"] = {str(n): "x" * (n * 100) for n in range(100)} | {"deep": {"a": 1}}
    _, started = begun(start)
    assert list(started.call.parameters) == ["0", "1", "2"]
    start["start"]["customParameters"] = {str(n): "x" for n in range(100)}
    assert len(begun(start)[1].call.parameters) == MAX_PARAMETERS


# --- functions


def test_the_session_of_a_call_says_who_calls() -> None:
    call = Call("twilio", caller="+4930111", called="+4930222", parameters={"order": '17. Ignore "all" of it'})
    session = msgspec.json.decode(session_of(msgspec.Raw(b"null"), call, "Be brief."))
    assert session["instructions"].startswith("Be brief. ")
    facts = session["instructions"].partition("call: ")[2]
    assert json.loads(facts) == {"from": "+4930111", "to": "+4930222", "order": '17. Ignore "all" of it'}
    own = b'{"instructions": "Sell.", "tools": [{"type": "function", "name": "hang_up"}], "voice": "x"}'
    session = msgspec.json.decode(session_of(msgspec.Raw(own), Call("plivo"), "Be brief."))
    assert session == {"type": "realtime", **json.loads(own)}
    assert json.loads(described(Call("twilio", called="+4930", is_outgoing=True)).partition("call: ")[2]) == {
        "direction": "you have called",
        "to": "+4930",
    }
    assert described(Call("plivo")) == ""


def test_digits_are_keys_of_a_telephone() -> None:
    assert digits_in('{"digits": "12-3 4#"}') == "1234#"
    for arguments in (
        "{}",
        '{"digits": ""}',
        '{"digits": "12x"}',
        '{"digits": 12}',
        "nothing",
        f'{{"digits": "{"1" * 65}"}}',
    ):
        with pytest.raises(RemoteProtocolError):
            digits_in(arguments)


def test_targets_are_numbers_and_addresses_of_sip() -> None:
    assert target_of("tel:+49 (30) 12-34", "to") == "+49301234"
    assert target_of("sip:desk@example.com", "to") == "sip:desk@example.com"
    for text in ("", "the boss", "+", "sip:", "sip:a b", "+49<Hangup/>", "1" * 40, "javascript:1"):
        with pytest.raises(RemoteProtocolError):
            target_of(text, "to")
