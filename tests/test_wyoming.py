"""The Wyoming protocol's wire: events as bytes, in pieces of any size, and within bounds."""

from __future__ import annotations

import json

import pytest

from antiphon.wyoming import MAX_DATA_BYTES, MAX_LINE_BYTES, MAX_PAYLOAD_BYTES, WyomingAudio, WyomingDecoder, encode

CHUNK = WyomingAudio(16000, 2, 1)


def test_an_event_is_a_line_then_its_data_and_its_payload() -> None:
    line, _, rest = encode("audio-chunk", CHUNK, b"\x01\x02").partition(b"\n")
    head = json.loads(line)
    assert (head["type"], head["payload_length"]) == ("audio-chunk", 2)
    assert json.loads(rest[: head["data_length"]]) == {"rate": 16000, "width": 2, "channels": 1}
    assert rest[head["data_length"] :] == b"\x01\x02"
    assert json.loads(encode("describe")) == {"type": "describe", "version": head["version"]}


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_from_pieces_of_any_size(size: int) -> None:
    data = encode("describe") + encode("audio-chunk", CHUNK, b"\n{}\n" * 50) + encode("audio-stop")
    decoder = WyomingDecoder()
    found = [event for at in range(0, len(data), size) for event in decoder.feed(data[at : at + size])]
    assert [event.kind for event in found] == ["describe", "audio-chunk", "audio-stop"]
    assert found[1].read(WyomingAudio) == CHUNK
    assert found[1].payload == b"\n{}\n" * 50


def test_data_may_be_inline_and_those_after_the_line_replace_them() -> None:
    after = b'{"rate": 8000}'
    line = b'{"type": "audio-start", "data": {"rate": 1, "width": 2, "channels": 1}, "data_length": %d}\n%s'
    (event,) = WyomingDecoder().feed(line % (len(after), after))
    assert event.read(WyomingAudio) == WyomingAudio(8000, 2, 1)
    (event,) = WyomingDecoder().feed(b'{"type": "audio-start", "data": {"rate": 1, "width": 2, "channels": 1}}\n')
    assert event.read(WyomingAudio) == WyomingAudio(1, 2, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"{}\n",
        b'{"type": 1}\n',
        b'{"type": "a", "data_length": -1}\n',
        b'{"type": "a", "data_length": %d}\n' % (MAX_DATA_BYTES + 1),
        b'{"type": "a", "payload_length": %d}\n' % (MAX_PAYLOAD_BYTES + 1),
        b'{"type": "a", "data": {"b": 1}, "data_length": 1}\n[',
        b"x" * MAX_LINE_BYTES,
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="event"):
        list(WyomingDecoder().feed(data))


def test_data_of_another_shape_are_refused_when_they_are_read() -> None:
    (event,) = WyomingDecoder().feed(encode("audio-start"))
    with pytest.raises(ValueError, match="no valid data of audio-start"):
        event.read(WyomingAudio)
