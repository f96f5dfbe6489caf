"""Media streams of telephone calls as targets of fuzzing: those of carriers and of switches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.asterisk import AudioSocketStream, WebSocketChannel, framed
from antiphon.protocols.telephony.carriers import CarrierStream
from antiphon.protocols.telephony.fork import ForkStream
from antiphon.protocols.telephony.stream import MediaStream, Started
from antiphon.protocols.telephony.vonage import VonageStream
from tests.fuzz.mutations import mutated_bytes, mutated_frame, mutated_text

CARRIER: tuple[dict[str, Any], ...] = (
    {"event": "connected"},
    {
        "event": "start",
        "start": {
            "streamSid": "MZ1",
            "callSid": "CA1",
            "customParameters": {"a": "b"},
            "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000},
        },
    },
    {"event": "start", "start": {"call_control_id": "c", "media_format": {"encoding": "PCMU", "sample_rate": 8000}}},
    {"event": "start", "start": {"streamId": "s", "mediaFormat": {"encoding": "audio/x-l16", "sampleRate": 16000}}},
    {"event": "media", "media": {"track": "inbound", "chunk": "2", "payload": "////"}},
    {"event": "dtmf", "dtmf": {"digit": "1"}},
    {"event": "mark", "mark": {"name": "m1"}},
)
VONAGE: tuple[dict[str, Any], ...] = (
    {"event": "websocket:connected", "content-type": "audio/l16;rate=16000"},
    {"event": "websocket:dtmf", "digit": "5"},
    {"event": "websocket:notify", "payload": {"mark": "m1"}},
)
CHANNEL: tuple[dict[str, Any], ...] = (
    {"event": "MEDIA_START", "channel_id": "1", "format": "ulaw", "optimal_frame_size": 160, "channel_variables": {}},
    {"event": "DTMF_END", "digit": "5"},
    {"event": "MEDIA_MARK_PROCESSED", "correlation_id": "m1"},
)
PLAIN = (
    "MEDIA_START connection_id:c channel:W channel_id:1 format:slin16 optimal_frame_size:640 ptime:20",
    "DTMF_END digit:5 channel_id:1",
    "MEDIA_MARK_PROCESSED m1",
)
FORK: tuple[dict[str, Any], ...] = (
    {"callSid": "c1", "from": "+49", "sampleRate": 16000, "mixType": "mono"},
    {"event": "dtmf", "dtmf": "2"},
    {"type": "mark", "data": {"name": "m1", "event": "playout"}},
)
FRAMES = (framed(0x01, bytes(16)), framed(0x10, bytes(320)), framed(0x12, bytes(640)), framed(0x03, b"5"), framed(0))


def reader(make: Callable[[], MediaStream]) -> Callable[[], Callable[[str | bytes], str]]:
    """Return a function that makes readers of one stream. A stream that has started also writes."""

    def new() -> Callable[[str | bytes], str]:
        stream, has_started = make(), False

        def read(data: str | bytes) -> str:
            nonlocal has_started
            try:
                has_started = any(isinstance(item, Started) for item in stream.read(data)) or has_started
            except RemoteProtocolError as error:
                return error.message
            if has_started:
                assert stream.audio(np.zeros(160, np.int16))
                return stream.mark("m1") + stream.clear()
            return ""

        return read

    return new


def in_json(seeds: tuple[dict[str, Any], ...]) -> Callable[[random.Random], str | bytes]:
    def draw_message(draw: random.Random) -> str | bytes:
        # A part is as a peer sends it, so that streams start.
        if draw.random() < 0.1:
            return bytes(draw.randrange(700))
        return mutated_frame(seeds, draw)

    return draw_message


def in_words(draw: random.Random) -> str | bytes:
    text = draw.choice(PLAIN)
    return text if draw.random() < 0.3 else mutated_text(text, draw)


def in_frames(draw: random.Random) -> str | bytes:
    data = draw.choice(FRAMES)
    return data if draw.random() < 0.5 else mutated_bytes(data, draw)


STREAMS: dict[str, tuple[Callable[[], MediaStream], Callable[[random.Random], str | bytes]]] = {
    "carrier": (CarrierStream, in_json(CARRIER)),
    "vonage": (VonageStream, in_json(VONAGE)),
    "asterisk channel": (WebSocketChannel, in_json(CHANNEL)),
    "asterisk channel in words": (WebSocketChannel, in_words),
    "freeswitch fork": (ForkStream, in_json(FORK)),
    "audiosocket": (AudioSocketStream, in_frames),
}
