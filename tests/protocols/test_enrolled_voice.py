"""Tests which values of `primary_speaker` and `enrolled_voice` are accepted, shown, refused and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConfigureConversation
from antiphon.events.transcription import AppendAudio, EnrolledVoice, TranscriptionConfig
from antiphon.protocols.connection import Context, no_voice
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.input_fields import MAX_NAMED, named_voices
from tests.protocols.gathered import Gathered

SPEAKER, VOICE = "session.audio.input.primary_speaker", "session.audio.input.enrolled_voice"


class Voices:
    """The uploaded voices of a client, by name. Each look-up of a voice returns a different vector."""

    def __init__(self, *names: str) -> None:
        self.names = {*names}

    def __call__(self, name: str, param: str) -> tuple[EnrolledVoice, ...]:
        if name not in self.names:
            return no_voice(name, param)
        return (EnrolledVoice(np.zeros(2, np.float32), 4.0),)


def context(voices: Voices, *, tells_voices: bool = True, unit_ms: int = 0) -> Context:
    return Context(
        models=ModelNames(("whisper-base",)),
        conversation_models=ModelNames(("qwen",), unit_ms=unit_ms),
        steady_s=lambda: 0.0,
        now_s=lambda: 1.0,
        voices=("heart",),
        tells_voices=tells_voices,
        enrolled_voices=voices,
    )


def conversation(voices: Voices, **options: Any) -> Gathered:
    wire = Gathered(RealtimeConnection(Opening(dialect="openai"), context(voices, **options)))
    wire.open()
    return wire


def duplex(voices: Voices, **options: Any) -> Gathered:
    wire = Gathered(DuplexConnection(Opening(duplex=True), context(voices, **options)))
    wire.open()
    wire.receive('{"type": "session.heartbeat"}')
    return wire


Connect = Callable[..., Gathered]
both = pytest.mark.parametrize("connect", [conversation, duplex])


def update(wire: Gathered, **audio_input: Any) -> tuple[dict[str, Any], TranscriptionConfig | None]:
    """Return the answer to an update of `audio.input`, and the session's configuration from then on."""
    wire.commands(), wire.frames()
    wire.receive(json.dumps({"type": "session.update", "session": {"audio": {"input": audio_input}}}))
    (answer,) = [json.loads(frame.encode()) for frame in wire.frames()]
    configured = [c.config.transcription for c in wire.commands() if isinstance(c, ConfigureConversation)]
    return answer, configured[-1] if configured and answer["type"] != "error" else None


def error(wire: Gathered, **audio_input: Any) -> tuple[str, str]:
    answer, _ = update(wire, **audio_input)
    assert answer["type"] == "error", answer
    return answer["error"]["message"], answer["error"]["param"]


@both
def test_when_a_voice_is_enrolled_then_the_session_has_it_and_shows_its_name(connect: Connect) -> None:
    wire = connect(Voices("Ann", "Bea"))
    answer, config = update(wire, primary_speaker="enrolled", enrolled_voice="Ann")
    shown = answer["session"]["audio"]["input"]
    assert (shown["primary_speaker"], shown["enrolled_voice"]) == ("enrolled", "Ann")
    assert config
    assert config.primary_speaker == "enrolled"
    assert len(config.enrolled_voices) == 1
    # Fields that are missing in later updates do not change, and neither does the vector. A new voice has a new vector.
    _, kept = update(wire)
    assert kept
    assert kept.enrolled_voices == config.enrolled_voices
    answer, other = update(wire, enrolled_voice="Bea")
    assert answer["session"]["audio"]["input"]["enrolled_voice"] == "Bea"
    assert other
    assert other.enrolled_voices != config.enrolled_voices
    for mode in ("auto", "off", None):
        update(wire, primary_speaker="enrolled", enrolled_voice="Ann")
        answer, left = update(wire, primary_speaker=mode)
        shown = answer["session"]["audio"]["input"]
        assert "enrolled_voice" not in shown
        assert shown.get("primary_speaker") == mode
        assert left
        assert (left.primary_speaker, left.enrolled_voices) == (mode or "off", ())


@both
def test_when_the_fields_are_wrong_then_the_update_is_refused_by_their_name(connect: Connect) -> None:
    wire = connect(Voices("Ann"))
    assert error(wire, primary_speaker="television") == (
        "Invalid value: 'television'. Supported values are: 'off', 'auto', 'enrolled'.",
        SPEAKER,
    )
    for fields in ({}, {"enrolled_voice": None}, {"enrolled_voice": ""}):
        message, param = error(wire, primary_speaker="enrolled", **fields)
        assert message.startswith(f"Missing required parameter: '{VOICE}'")
        assert param == VOICE
    assert error(wire, primary_speaker="enrolled", enrolled_voice="Cyd") == ("No voice `Cyd` was uploaded.", VOICE)
    assert error(wire, enrolled_voice="Ann") == ("A voice is enrolled with 'primary_speaker' 'enrolled'.", VOICE)
    assert error(wire, primary_speaker="auto", enrolled_voice="Ann")[1] == VOICE
    assert error(wire, primary_speaker="enrolled", enrolled_voice=7)[1] == VOICE
    # No field of the refused updates was applied.
    _, config = update(wire)
    assert config
    assert config.primary_speaker == "off"


@both
def test_when_voices_cannot_be_told_apart_then_nobody_is_enrolled(connect: Connect) -> None:
    message, param = error(connect(Voices("Ann"), tells_voices=False), primary_speaker="enrolled", enrolled_voice="Ann")
    assert ("--speaker-model" in message, param) == (True, SPEAKER)
    message, param = error(connect(Voices("Ann"), unit_ms=1000), primary_speaker="enrolled", enrolled_voice="Ann")
    assert ("native" in message, param) == (True, SPEAKER)


@both
def test_when_the_voice_is_deleted_then_the_session_keeps_it_until_it_is_named_again(connect: Connect) -> None:
    voices = Voices("Ann")
    wire = connect(voices)
    _, before = update(wire, primary_speaker="enrolled", enrolled_voice="Ann")
    voices.names.clear()
    _, after = update(wire, noise_reduction=None)
    assert before
    assert after
    assert after.enrolled_voices == before.enrolled_voices
    assert error(wire, enrolled_voice="Ann")[1] == VOICE
    assert update(wire)[1] == after


@both
def test_when_a_session_is_restored_then_its_voice_is_looked_up_again(connect: Connect) -> None:
    voices = Voices("Ann")
    wire = connect(voices)
    update(wire, primary_speaker="enrolled", enrolled_voice="Ann")
    kept = wire.snapshot()
    restored = connect(voices)
    restored.commands()
    restored.restore(kept)
    restored.wire.feed(AppendAudio(np.zeros(0, np.float32)))
    answer, config = update(restored)
    assert answer["session"]["audio"]["input"]["enrolled_voice"] == "Ann"
    assert config
    assert len(config.enrolled_voices) == 1
    voices.names.clear()
    with pytest.raises(RemoteProtocolError) as refused:
        connect(voices).restore(kept)
    assert (refused.value.code, refused.value.param) == ("voice_not_found", VOICE)


def test_a_transcription_has_no_primary_speaker() -> None:
    wire = Gathered(RealtimeConnection(Opening(intent="transcription"), context(Voices("Ann"))))
    wire.open()
    for field in ({"primary_speaker": "enrolled"}, {"enrolled_voice": "Ann"}):
        wire.frames()
        session = {"type": "transcription", "audio": {"input": field}}
        wire.receive(json.dumps({"type": "session.update", "session": session}))
        (answer,) = [json.loads(frame.encode()) for frame in wire.frames()]
        assert answer["error"]["param"] == f"session.audio.input.{next(iter(field))}"


def test_the_voices_that_a_message_names_are_found_wherever_they_are() -> None:
    session = {"audio": {"input": {"enrolled_voice": "Ann"}}}
    for message in (
        {"type": "session.update", "session": session},
        {"type": "session.update"} | session,
        {"type": "turn.signal", "payload": [{"session": session}]},
    ):
        text = json.dumps(message)
        assert named_voices(text) == named_voices(text.encode()) == ["Ann"]
    for other in (
        "",
        "enrolled_voice",
        '{"enrolled_voice": 1}',
        '{"enrolled_voice',
        '{"text": "enrolled_voice"}',
        b"\xff",
    ):
        assert named_voices(other) == []
    assert len(named_voices(json.dumps([{"enrolled_voice": str(k)} for k in range(99)]))) == MAX_NAMED
