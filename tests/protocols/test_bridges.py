"""The small duplex dialects: what they take, what they say, and that nothing old is said."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ConfigureConversation,
    ContentPart,
    ContentPartDone,
    ContentPosition,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    Usage,
)
from antiphon.events.duplex import BargeIn, EpochRaised, ListenStepTaken
from antiphon.events.transcription import AppendAudio, CommitAudio, SessionEnding, TranscriptDone
from antiphon.protocols.bridges.base import Bridge
from antiphon.protocols.bridges.minicpmo_worker import MinicpmoWorkerBridge
from antiphon.protocols.bridges.omni import OmniBridge
from antiphon.protocols.bridges.openbmb import OpenbmbBridge
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import BinaryFrame
from tests.protocols.test_openai_conversation import JSON, KEYS

AT = ContentPosition("resp_1", "item_1", 0)
SECOND = np.full(24_000, 0.25, np.float32)


def made(kind: type[Bridge], conversation_models: ModelNames | None = ModelNames(("qwen",))) -> Any:  # noqa: B008
    count = iter(range(10**6))
    wire = kind(
        Opening(), conversation_models, ("heart",), lambda prefix: f"{prefix}{next(count)}", 1 << 20, lambda: 0.0
    )
    wire.open()
    return wire


def told(wire: Bridge) -> list[Any]:
    return [f.data if isinstance(f, BinaryFrame) else json.loads(f) for f in wire.frames()]


def say(wire: Bridge, type: str, **fields: Any) -> None:
    wire.receive(json.dumps({"type": type} | fields))


def f32(samples: int = 16_000) -> str:
    return b64encode(np.zeros(samples, "<f4").tobytes()).decode()


def answer(wire: Bridge, seconds: float = 1.0) -> None:
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    wire.send(ResponseTextDelta(AT, "Hello.", True))
    wire.send(ResponseAudioDelta(AT, SECOND[: int(24_000 * seconds)], 24_000))


def end(wire: Bridge) -> None:
    wire.send(ContentPartDone(AT, ContentPart("output_audio", "Hello.")))
    wire.send(ResponseDone(Response("resp_1", True, None, None, status="completed", usage=Usage(9, 0, 3))))


@pytest.mark.parametrize("kind", [OmniBridge, OpenbmbBridge, MinicpmoWorkerBridge])
def test_without_a_partner_there_is_no_session(kind: type[Bridge]) -> None:
    with pytest.raises(RemoteProtocolError):
        made(kind, None)


# --- openbmb-realtime -------------------------------------------------------------------------------------------------


def test_the_sdks_dialect() -> None:
    wire = made(OpenbmbBridge)
    assert told(wire) == [{"type": "session.queue_done"}]
    say(wire, "input.append", input={"audio": f32()})
    assert told(wire)[0]["error"]["code"] == "bad_event"
    say(wire, "session.init", payload={"system_prompt": "Be brief."})
    assert told(wire) == [{"type": "session.created", "session_id": wire.id}]
    (configured,) = wire.commands()
    assert isinstance(configured, ConfigureConversation)
    assert configured.config.instructions == "Be brief."
    say(wire, "input.append", input={"audio": f32(), "force_listen": True})
    asked, appended = wire.commands()
    assert isinstance(asked, BargeIn)
    assert len(appended.pcm) == 16_000
    wire.send(TranscriptDone(0, "Hi.", "Hi.", (), "en", 1.0, 0, 0))
    answer(wire)
    end(wire)
    heard, text, sound, done, listen = told(wire)
    assert heard["transcript"] == "Hi."
    assert (text["type"], text["text"], text["end_of_turn"]) == ("response.output_text.delta", "Hello.", False)
    assert len(b64decode(sound["audio"])) == 24_000 * 4
    assert done["response"]["usage"] == {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12}
    assert listen["type"] == "response.listen"
    say(wire, "session.close", reason="user_stop")
    assert wire.closing
    wire.closed()
    assert told(wire)[0]["type"] == "session.closed"


# --- the demo's worker ------------------------------------------------------------------------------------------------


def chunk(wire: Bridge, **fields: Any) -> dict[str, Any]:
    say(wire, "audio_chunk", audio_base64=f32(), **fields)
    (result,) = told(wire)
    return result  # type: ignore[no-any-return]


def test_each_second_of_sound_gets_one_result() -> None:
    wire = made(MinicpmoWorkerBridge)
    assert told(wire) == []
    say(wire, "prepare", system_prompt="Be kind.", ref_audio_base64=f32())
    assert told(wire) == [{"type": "prepared", "prompt_length": 8}]
    first = chunk(wire)
    assert (first["type"], first["is_listen"], first["current_time"], first["audio_data"]) == ("result", True, 0, None)
    answer(wire, 1.0)
    wire.send(ResponseAudioDelta(AT, SECOND[:12_000], 24_000))
    second = chunk(wire)
    assert (second["is_listen"], second["text"], second["end_of_turn"]) == (False, "Hello.", False)
    assert len(b64decode(second["audio_data"])) == 24_000 * 4
    # Half a second is there, and more is to come: it waits.
    assert chunk(wire)["is_listen"] is True
    end(wire)
    last = chunk(wire)
    assert (last["is_listen"], last["end_of_turn"], last["kv_cache_length"]) == (False, True, 12)
    assert len(b64decode(last["audio_data"])) == 12_000 * 4
    assert chunk(wire)["is_listen"] is True
    configured, *rest = wire.commands()
    assert [type(i) for i in rest] == [AppendAudio] * 5
    assert isinstance(configured, ConfigureConversation)
    # The voice to speak with, as a file.
    assert configured.config.duplex is not None
    assert configured.config.duplex.voice_reference.startswith(b"RIFF")


def test_the_demo_pauses_stops_and_interrupts() -> None:
    wire = made(MinicpmoWorkerBridge)
    say(wire, "audio_chunk", audio_base64=f32())
    assert told(wire)[0]["type"] == "error"
    say(wire, "prepare")
    say(wire, "pause")
    assert told(wire)[-1] == {"type": "paused"}
    chunk(wire)
    assert [type(i) for i in wire.commands()] == [ConfigureConversation]
    say(wire, "resume")
    assert told(wire)[-1] == {"type": "resumed"}
    answer(wire, 3.0)
    assert chunk(wire, force_listen=True)["is_listen"] is False
    assert isinstance(wire.commands()[0], BargeIn)
    wire.send(EpochRaised(1))
    wire.send(ResponseAudioDelta(AT, SECOND, 24_000))
    assert chunk(wire)["is_listen"] is True
    say(wire, "stop")
    assert wire.closing
    wire.closed()
    assert told(wire)[-1] == {"type": "stopped"}


# --- the simplest door ------------------------------------------------------------------------------------------------


def test_the_simplest_door() -> None:
    wire = made(OmniBridge)
    say(wire, "session.config", instructions="Be brief.", voice="heart", language="en")
    wire.receive(np.zeros(1600, "<i2").tobytes())
    say(wire, "input.done")
    configured, appended, committed = wire.commands()
    assert (configured.config.voice, configured.config.transcription.language) == ("heart", "en")
    assert len(appended.pcm) == 1600
    assert committed == CommitAudio()
    answer(wire)
    end(wire)
    start, delta, audio, wav, done, turn = told(wire)
    assert (start["type"], delta["delta"], audio["format"], audio["sample_rate"]) == (
        "turn.start",
        "Hello.",
        "wav_chunk",
        24_000,
    )
    assert wav[:4] == b"RIFF"
    assert len(wav) == 44 + 48_000
    assert (done["type"], turn["type"], turn["text"]) == ("audio.done", "turn.done", "Hello.")
    assert turn["usage"] == {"prompt_tokens": 9, "completion_tokens": 3}
    wire.send(ListenStepTaken("nothing_said"))
    assert told(wire)[0]["status"] == "listening"
    assert wire.receive(b"abc") is None
    assert told(wire)[0]["error"]["code"] == "bad_audio"


def test_after_an_interruption_nothing_old_is_said() -> None:
    for kind in (OmniBridge, OpenbmbBridge):
        wire = made(kind)
        wire.frames()
        answer(wire)
        waiting = [f for f in wire.frames() if hasattr(f, "epoch")]
        assert {f.epoch for f in waiting} == {0}
        wire.send(EpochRaised(1))
        wire.send(ResponseAudioDelta(AT, SECOND, 24_000))
        wire.send(ResponseTextDelta(AT, "more", True))
        assert told(wire) == []


@given(
    st.sampled_from((OmniBridge, OpenbmbBridge, MinicpmoWorkerBridge)),
    st.sampled_from(
        (
            "session.config",
            "input.done",
            "session.init",
            "input.append",
            "session.close",
            "prepare",
            "audio_chunk",
            "pause",
            "stop",
            "x",
        )
    ),
    st.dictionaries(
        KEYS | st.sampled_from(("payload", "input", "audio_base64", "system_prompt", "instructions")), JSON, max_size=4
    ),
)
def test_no_event_raises(kind: type[Bridge], name: str, fields: dict[str, Any]) -> None:
    wire = made(kind)
    for _ in range(2):
        wire.receive(json.dumps(fields | {"type": name}))
    wire.receive("{")
    wire.receive(b"\xff")
    wire.send(SessionEnding("server_shutting_down", "bye"))
    told(wire)
