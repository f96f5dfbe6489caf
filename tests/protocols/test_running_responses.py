"""Tests that a response keeps its format and voice, even if an update changes them in the meantime."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from antiphon.events.conversation import (
    ContentPart,
    ContentPartDone,
    ContentPosition,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
)
from tests.protocols import duplex_connection
from tests.protocols.gathered import Gathered
from tests.protocols.test_openai_conversation import dialect

# Updates to another format, each with the number of bytes in one second of that format.
GA = [
    ({"type": "realtime", "audio": {"output": {"format": {"type": "audio/pcmu"}}}}, 8000),
    ({"type": "realtime", "audio": {"output": {"format": {"type": "audio/pcm", "rate": 16000}}}}, 32000),
]
DUPLEX = [({"output_audio_format": "g711_alaw"}, 8000), ({"audio": {"output": {"sample_rate_hz": 48000}}}, 96000)]


def update(wire: Gathered, session: dict[str, Any]) -> None:
    wire.receive(json.dumps({"type": "session.update", "session": session}))


def spoken(wire: Gathered, response_id: str, between: dict[str, Any] | None = None) -> tuple[int, list[Any]]:
    """Return the number of bytes in a one-second response, and the response's `audio` at its beginning and end.

    The session is updated in the middle of the response.
    """
    wire.frames()
    response, at = Response(response_id, True, None, None), ContentPosition(response_id, f"item_{response_id}", 0)
    wire.send(ResponseCreated(response))
    half = np.full(12_000, 0.1, np.float32)
    wire.send(ResponseAudioDelta(at, half, 24_000))
    if between:
        update(wire, between)
    wire.send(ResponseAudioDelta(at, half, 24_000))
    wire.send(ContentPartDone(at, ContentPart("output_audio")))
    wire.send(ResponseDone(response))
    frames = [json.loads(f.encode()) for f in wire.frames()]
    assert not [f for f in frames if f["type"] == "error"]
    data = b"".join(b64decode(f["delta"]) for f in frames if f["type"] == "response.output_audio.delta")
    shown = [f["response"]["audio"] for f in frames if f["type"] in ("response.created", "response.done")]
    return len(data), shown


@pytest.mark.parametrize(
    ("wire", "session", "num_bytes"),
    [
        *((dialect, *case) for case in GA),
        *((duplex_connection.opened, *case) for case in DUPLEX),
    ],
)
def test_when_the_format_is_changed_in_mid_answer_then_the_next_answer_has_it(
    wire: Any, session: dict[str, Any], num_bytes: int
) -> None:
    wire = wire()
    pcm_24k = 48_000
    length, (began, ended) = spoken(wire, "resp_1", session)
    assert length == pytest.approx(pcm_24k, abs=32)
    assert began == ended
    length, (began, ended) = spoken(wire, "resp_2")
    assert length == pytest.approx(num_bytes, abs=32)
    assert began == ended
