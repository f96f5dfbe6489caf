"""A connection to /v1/realtime without a socket, and helper functions for its tests."""

from __future__ import annotations

import base64
import itertools
import json
import os
from pathlib import Path
from typing import Any

from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from antiphon.contracts import TranscriberProfile, TuningCaps
from antiphon.events.transcription import (
    SessionEnding,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.events.words import Word
from antiphon.protocols.connection import Context
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import Opening
from tests.protocols.gathered import Gathered

TRACES = Path(__file__).parents[1] / "traces"
VENDOR = TypeAdapter[Any](RealtimeServerEvent)

DONE = TranscriptDone(0, "Hello there.", "hello there.", (Word("Hello", 0.1, 0.4, 0.9),), "en", 1.25, 4, 3)
# Events of a transcription session with two turns, of which the second fails.
OUTPUTS: list[TranscriptionEvent] = [
    SpeechStarted(0, 100),
    TranscriptDelta(0, "hello"),
    SpeechStopped(0, 1350),
    TurnCommitted(0, 100, 1350),
    TranscriptDelta(0, " there."),
    DONE,
    SpeechStarted(1, 2000),
    SpeechStopped(1, 2500),
    TurnCommitted(1, 2000, 2500),
    TranscriptFailed(1, "the model failed"),
    TurnCleared(),
    SessionEnding("session_expired", "Your session hit the maximum duration."),
]


def connect(strict: bool = False, transcriber: TranscriberProfile | None = None, **opening: Any) -> Gathered:
    count = itertools.count()
    context = Context(
        models=ModelNames(("whisper-base",), strict),
        steady_s=lambda: 0.0,
        now_s=lambda: 1_700_000_000.0,
        new_id=lambda prefix: f"{prefix}{next(count)}",
        knows_language=("en", "de").__contains__,
        max_append_bytes=64_000,
        transcriber=transcriber,
        tuning_caps=TuningCaps(max_audio_s=300, max_prefix_tokens=1024, max_tokens=512),
    )
    connection = Gathered(RealtimeConnection(Opening(**opening), context))
    connection.open()
    return connection


def frames(connection: Gathered) -> list[dict[str, Any]]:
    return [json.loads(f.encode()) for f in connection.frames()]


def exchange(connection: Gathered, **event: Any) -> list[dict[str, Any]]:
    connection.receive(json.dumps(event))
    return frames(connection)


def pcm(num_bytes: int) -> str:
    return base64.b64encode(bytes(num_bytes)).decode()


def trace(
    name: str, connection: Gathered, events: list[dict[str, Any]], outputs: list[TranscriptionEvent]
) -> list[dict[str, Any]]:
    """Play a session, and compare the frames with tests/traces/NAME.jsonl. ANTIPHON_TEST_TRACES=write rewrites it."""
    got = frames(connection)
    for event in events:
        got += exchange(connection, **event)
    for output in outputs:
        connection.send(output)
        got += frames(connection)
    path = TRACES / f"{name}.jsonl"
    text = "".join(json.dumps(f, ensure_ascii=False) + "\n" for f in got)
    if os.environ.get("ANTIPHON_TEST_TRACES") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    return got
