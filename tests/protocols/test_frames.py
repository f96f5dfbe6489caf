"""Tests of all dialects with OpenAI's messages: errors quote the client's message id, and formats can change."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import RemoteProtocolError
from antiphon.protocols.realtime.audio_buffer import AudioBuffer
from antiphon.protocols.realtime.input_fields import PCM_24K, AudioFormat
from antiphon.protocols.wire import Frame
from tests.protocols.test_typos import begun, noted

DIALECTS = ("ga", "transcription", "duplex")


def errors(frames: list[Frame]) -> list[tuple[str, Any]]:
    found = [json.loads(frame.encode())["error"] for frame in frames]
    return [(error["code"], error.get("event_id")) for error in found]


@pytest.mark.parametrize("name", DIALECTS)
def test_an_error_names_the_message_at_fault(name: str) -> None:
    wire = begun(name)
    (wrong,) = noted(wire, {"type": "input_audio_buffer.append", "audio": "*", "event_id": "mine"})
    assert wrong["error"]["event_id"] == "mine"
    (unread,) = noted(wire, {"type": "input_audio_buffer.append", "audio": 1, "event_id": "other"})
    assert unread["error"]["event_id"] == "other"


def test_the_name_of_an_inner_message_is_not_that_of_the_next_one() -> None:
    wire = begun("duplex")
    inner = {"event_id": "inner", "item_id": ""}
    (wrong,) = noted(wire, {"type": "turn.signal", "event": "conversation.item.delete", "payload": inner})
    assert wrong["error"]["event_id"] == "inner"
    (nameless,) = noted(wire, {"type": "input_audio_buffer.append", "audio": "*"})
    assert nameless["error"].get("event_id") is None


@pytest.mark.parametrize("name", DIALECTS)
def test_a_frame_that_is_too_large_is_answered_by_its_name(name: str) -> None:
    wire = begun(name)
    code = "event_too_large" if name == "duplex" else "invalid_event"
    assert errors(wire.too_large('{"event_id": "large", "audio": "' + "A" * 2000, 1000)) == [(code, "large")]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_refusal_is_one_error(name: str) -> None:
    assert errors(begun(name).refuse(RemoteProtocolError("some_code", "why"), "mine")) == [("some_code", "mine")]


def samples(text: str, audio_format: AudioFormat, param: str) -> Pcm:
    return np.full(int(text), 0.5, np.float32)


def test_when_a_format_changes_then_what_was_held_back_of_the_one_before_comes() -> None:
    buffer = AudioBuffer(PCM_24K, samples)
    heard = len(buffer.feed("2400"))
    assert not len(buffer.change_format(AudioFormat("audio/pcm", 24_000)))
    held_back = buffer.change_format(AudioFormat("audio/pcm", SAMPLE_RATE_HZ))
    assert heard + len(held_back) == 1600
    assert len(buffer.feed("100")) == 100
