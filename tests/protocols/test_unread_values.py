"""Tests values that are only read by a second decoding: names that are not UTF-8, and numbers out of range."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.rest import chat
from antiphon.protocols.speech import rest as speech
from tests.fuzz.targets import CATALOG, connection

HUGE = "1e3308"


@pytest.mark.parametrize(
    ("path", "frame"),
    [
        ("/v1/duplex", b'{"type": "session.update", "se\xffsion": 1}'),
        ("/v1/duplex", b'{"type": "input_audio_buffer.append", "audio": "AAAA", "\xff": 1}'),
        ("/v1/realtime", b'{"type": "response.create", "response": {"prompt": {"\xff": 1}}}'),
        ("/v1/realtime", b'{"type": "session.update", "session": {"type": "realtime", "\xff": 1}}'),
        ("/v1/realtime", f'{{"type": "response.create", "response": {{"prompt": {HUGE}}}}}'),
        ("/v1/realtime", f'{{"type": "response.create", "response": {{"audio": {{"output": {{"format": {HUGE}}}}}}}}}'),
        ("/v1/realtime", f'{{"type": "session.update", "session": {{"type": "realtime", "tracing": {HUGE}}}}}'),
        ("/v1/realtime", f'{{"type": "conversation.item.create", "item": {{"x": {HUGE}, "type": "message"}}}}'),
        ("/v1/realtime?dialect=vllm", b'{"type": "session.update", "model": "default", "\xff": 1}'),
        ("/v1/omni", b'{"type": "session.update", "session": {"\xff": 1}}'),
    ],
)
def test_when_a_frame_has_what_cannot_be_read_then_it_is_answered_and_the_next_one_is_too(
    path: str, frame: str | bytes
) -> None:
    feed = connection(path)
    # An exception here would end the session.
    feed(frame)
    assert feed('{"type": "no.such.type"}')


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (chat.parse, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
        (lambda data: speech.parse(data, CATALOG), {"input": "x", "voice": "heart"}),
        (lambda data: speech.parse_batch(data, CATALOG), {"items": [{"input": "x"}], "voice": "heart"}),
    ],
)
@pytest.mark.parametrize("odd", [b'"\xff": 1', f'"extra": {HUGE}'.encode()])
def test_when_a_body_has_what_cannot_be_read_then_it_is_refused_or_served(
    parse: Callable[[bytes], Any], body: dict[str, Any], odd: bytes
) -> None:
    data = json.dumps(body).encode()[:-1] + b", " + odd + b"}"
    try:
        parse(data)
    except RemoteProtocolError as error:
        refused = error.code
    else:
        refused = "invalid_json"
    assert refused in {"invalid_json", "invalid_value", "invalid_type"}
