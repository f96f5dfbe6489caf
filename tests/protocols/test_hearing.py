"""What the dialects of other vendors' live transcription have in common: the first frame, the audio, and the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from antiphon.events.transcription import AppendAudio, ConfigureTranscription
from antiphon.protocols.assemblyai.connection import AssemblyConnection
from antiphon.protocols.cartesia.hearing import CartesiaManual, CartesiaTurns
from antiphon.protocols.connection import Context
from antiphon.protocols.deepgram.flux import FluxConnection
from antiphon.protocols.deepgram.listen import ListenConnection
from antiphon.protocols.elevenlabs.scribe import ScribeConnection
from antiphon.protocols.hearing import HearingConnection
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening

CONTEXT = Context(
    models=ModelNames(("whisper-base",)),
    now_s=lambda: 1.0,
    steady_s=lambda: 0.0,
    new_id=lambda prefix: f"{prefix}id",
    max_append_bytes=200_000,
)
SECOND = bytes(2 * 48_000)
DEEPGRAM = {"encoding": "linear16", "sample_rate": "48000"}
# Each kind of connection, its query for PCM16 at 48 kHz, and the message that ends it.
KINDS: list[tuple[Callable[[Opening, Context], HearingConnection], dict[str, str], str]] = [
    (ListenConnection, DEEPGRAM, '{"type": "CloseStream"}'),
    (FluxConnection, DEEPGRAM, '{"type": "CloseStream"}'),
    (AssemblyConnection, {"sample_rate": "48000"}, '{"type": "Terminate"}'),
    (CartesiaTurns, {"sample_rate": "48000"}, '{"type": "close"}'),
    (CartesiaManual, {"sample_rate": "48000"}, "close"),
]
each_kind = pytest.mark.parametrize(("kind", "query", "end"), KINDS)


def opened(kind: Callable[[Opening, Context], HearingConnection], query: dict[str, str]) -> Any:
    wire = kind(Opening(query=tuple(query.items())), CONTEXT)
    wire.open()
    return wire


def num_samples(commands: list[Any]) -> int:
    return sum(len(command.pcm) for command in commands if isinstance(command, AppendAudio))


@each_kind
def test_a_session_begins_with_its_first_frame_and_ends_with_all_of_its_audio(
    kind: Callable[[Opening, Context], HearingConnection], query: dict[str, str], end: str
) -> None:
    wire = opened(kind, query)
    first, *audio = wire.feed(SECOND).commands
    assert isinstance(first, ConfigureTranscription)
    last = wire.feed(end).commands
    assert num_samples(audio) < 16_000, "the resampler has kept nothing back"
    assert num_samples([*audio, *last]) == 16_000
    assert wire.received_s == 1.0
    assert wire.finishing == (1000, "")
    assert not wire.feed(SECOND).commands


@each_kind
def test_a_frame_with_too_much_audio_is_refused(
    kind: Callable[[Opening, Context], HearingConnection], query: dict[str, str], end: str
) -> None:
    wire = opened(kind, query)
    received = wire.feed(SECOND * 3)
    assert num_samples(received.commands) == 0
    (error,) = [json.loads(frame.encode()) for frame in received.answers]
    assert "200000 bytes" in json.dumps(error)


def test_the_audio_of_a_message_in_base64_is_bounded_too() -> None:
    wire = opened(ScribeConnection, {"audio_format": "pcm_48000"})
    received = wire.feed(json.dumps({"message_type": "input_audio_chunk", "audio_base_64": "AAAA" * 70_000}))
    assert num_samples(received.commands) == 0
    assert wire.finishing == (1008, "input_error")


@pytest.mark.parametrize("kind", [ListenConnection, FluxConnection])
def test_a_change_before_the_first_audio_is_part_of_the_first_configuration(kind: type[HearingConnection]) -> None:
    wire = opened(kind, DEEPGRAM)
    (first,) = wire.feed('{"type": "Configure", "keyterms": ["cromlech"]}').commands
    assert first.config.keyterms == ("cromlech",)
    (second,) = wire.feed('{"type": "Configure", "keyterms": []}').commands
    assert second.config == replace(first.config, keyterms=())
