"""Tests the messages of the bridges in both directions, and that nothing from an old epoch is sent."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
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
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    CommitRefused,
    SessionEnding,
    TranscriptDone,
    TranscriptFailed,
)
from antiphon.protocols.bridge import BridgeConnection, BridgeDialect, BridgeSession
from antiphon.protocols.bridges.minicpmo_worker import MinicpmoWorkerBridge
from antiphon.protocols.bridges.omni import OmniBridge
from antiphon.protocols.bridges.openbmb import OpenbmbBridge
from antiphon.protocols.connection import Context
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from tests.protocols.gathered import Gathered
from tests.protocols.json_values import JSON, KEYS

AT = ContentPosition("resp_1", "item_1", 0)
Kind = Callable[[BridgeSession], BridgeDialect]
QWEN = ModelNames(("qwen",))
SECOND = np.full(24_000, 0.25, np.float32)


def opened_bridge(kind: Kind, conversation_models: ModelNames | None = QWEN) -> Any:
    count = iter(range(10**6))
    context = Context(
        models=ModelNames(("whisper-base",)),
        now_s=lambda: 1.0,
        conversation_models=conversation_models,
        voices=("heart",),
        new_id=lambda prefix: f"{prefix}{next(count)}",
        max_append_bytes=1 << 20,
        steady_s=lambda: 0.0,
    )
    wire = Gathered(BridgeConnection(Opening(), context, kind))
    wire.open()
    return wire


def frames_of(wire: Gathered) -> list[Any]:
    return [data if isinstance(data := f.encode(), bytes) else json.loads(data) for f in wire.frames()]


def receive_event(wire: Gathered, type: str, **fields: Any) -> None:
    wire.receive(json.dumps({"type": type} | fields))


def f32(samples: int = 16_000) -> str:
    return b64encode(np.zeros(samples, "<f4").tobytes()).decode()


def send_response(wire: Gathered, seconds: float = 1.0) -> None:
    wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    wire.send(ResponseTextDelta(AT, "Hello.", True))
    wire.send(ResponseAudioDelta(AT, SECOND[: int(24_000 * seconds)], 24_000))


def end_response(wire: Gathered) -> None:
    wire.send(ContentPartDone(AT, ContentPart("output_audio", "Hello.")))
    wire.send(ResponseDone(Response("resp_1", True, None, None, status="completed", usage=Usage(9, 0, 3))))


@pytest.mark.parametrize("kind", [OmniBridge, OpenbmbBridge, MinicpmoWorkerBridge])
def test_when_no_conversation_model_is_loaded_then_a_bridge_does_not_open(kind: Kind) -> None:
    with pytest.raises(RemoteProtocolError):
        opened_bridge(kind, None)


def errors_of(wire: Gathered) -> list[str]:
    """Return the codes of the errors that were sent, in the format of any bridge."""
    sent = [f for f in frames_of(wire) if not isinstance(f, bytes) and f["type"] == "error"]
    return [f["code"] if "code" in f else f["error"]["code"] for f in sent]


@pytest.mark.parametrize("kind", [OmniBridge, OpenbmbBridge, MinicpmoWorkerBridge])
def test_when_something_fails_or_is_refused_then_the_client_of_a_bridge_is_told(kind: Kind) -> None:
    wire = opened_bridge(kind)
    # A turn without new audio was ended, so no turn.done follows.
    wire.send(CommitRefused(0, 1))
    assert errors_of(wire) == ["input_audio_buffer_commit_empty"]
    wire.send(TranscriptFailed(0, "the model failed"))
    assert errors_of(wire) == ["transcription_failed"]
    failed = Response("resp_1", True, None, None, status="failed", error="the model failed")
    wire.send(ResponseCreated(failed))
    wire.send(ResponseDone(failed))
    assert errors_of(wire) == ["processing_error"]
    failed.code = "context_length_exceeded"
    wire.send(ResponseDone(failed))
    assert errors_of(wire) == ["context_length_exceeded"]


# --- openbmb-realtime -------------------------------------------------------------------------------------------------


def test_openbmb_a_session_from_its_begin_to_its_close() -> None:
    wire = opened_bridge(OpenbmbBridge)
    assert frames_of(wire) == [{"type": "session.queue_done"}]
    receive_event(wire, "input.append", input={"audio": f32()})
    assert frames_of(wire)[0]["error"]["code"] == "bad_event"
    receive_event(wire, "session.init", payload={"system_prompt": "Be brief."})
    assert frames_of(wire) == [{"type": "session.created", "session_id": wire.id}]
    (configured,) = wire.commands()
    assert isinstance(configured, ConfigureConversation)
    assert configured.config.instructions == "Be brief."
    receive_event(wire, "input.append", input={"audio": f32(), "force_listen": True})
    asked, appended = wire.commands()
    assert isinstance(asked, BargeIn)
    assert len(appended.pcm) == 16_000
    wire.send(TranscriptDone(0, "Hi.", "Hi.", (), "en", 1.0, 0, 0))
    send_response(wire)
    end_response(wire)
    heard, text, sound, done, listen = frames_of(wire)
    assert heard["transcript"] == "Hi."
    assert (text["type"], text["text"], text["end_of_turn"]) == ("response.output_text.delta", "Hello.", False)
    assert len(b64decode(sound["audio"])) == 24_000 * 4
    assert done["response"]["usage"] == {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12}
    assert listen["type"] == "response.listen"
    receive_event(wire, "session.close", reason="user_stop")
    assert wire.closing
    wire.closed()
    assert frames_of(wire)[0]["type"] == "session.closed"


# --- the demo's worker ------------------------------------------------------------------------------------------------


def exchange_chunk(wire: Gathered, **fields: Any) -> dict[str, Any]:
    receive_event(wire, "audio_chunk", audio_base64=f32(), **fields)
    (result,) = frames_of(wire)
    return result  # type: ignore[no-any-return]


def audio_of(result: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(b64decode(result["audio_data"]), "<f4")


def test_worker_each_second_of_audio_gets_one_result() -> None:
    wire = opened_bridge(MinicpmoWorkerBridge)
    assert frames_of(wire) == []
    receive_event(wire, "prepare", system_prompt="Be kind.", ref_audio_base64=f32())
    assert frames_of(wire) == [{"type": "prepared", "prompt_length": 8}]
    first = exchange_chunk(wire)
    assert (first["type"], first["is_listen"], first["current_time"]) == ("result", True, 0)
    assert not audio_of(first).any()
    send_response(wire, 1.0)
    wire.send(ResponseAudioDelta(AT, SECOND[:12_000], 24_000))
    second = exchange_chunk(wire)
    assert (second["is_listen"], second["text"], second["end_of_turn"]) == (False, "Hello.", False)
    assert audio_of(second).all()
    # Half a second of audio is available and more will follow, so this audio is at the end of its second.
    third = exchange_chunk(wire)
    assert (third["is_listen"], third["end_of_turn"]) == (False, False)
    assert not audio_of(third)[:12_000].any()
    assert audio_of(third)[12_000:].all()
    wire.send(ResponseAudioDelta(AT, SECOND[:6_000], 24_000))
    end_response(wire)
    last = exchange_chunk(wire)
    assert (last["is_listen"], last["end_of_turn"], last["kv_cache_length"]) == (False, True, 12)
    assert len(audio_of(last)) == 6_000
    assert exchange_chunk(wire)["is_listen"] is True
    configured, *rest = wire.commands()
    assert [type(i) for i in rest] == [AppendAudio] * 5
    assert isinstance(configured, ConfigureConversation)
    # The recording of the voice is passed on as an audio file.
    assert configured.config.duplex is not None
    assert configured.config.duplex.voice_reference.startswith(b"RIFF")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_worker_a_player_whose_only_clock_are_the_results_plays_all_and_never_runs_dry(seed: int) -> None:
    wire, chance = opened_bridge(MinicpmoWorkerBridge), np.random.default_rng(seed)
    receive_event(wire, "prepare")
    frames_of(wire)
    num_sent = num_heard = num_responses = num_ends = 0
    is_open, heard_text = False, ""
    for _ in range(600):
        if not is_open and chance.random() < 0.3:
            wire.send(ResponseCreated(Response("resp_1", True, None, None)))
            wire.send(ResponseTextDelta(AT, f"w{num_responses} ", True))
            is_open, num_responses = True, num_responses + 1
        elif is_open and chance.random() < 0.8:
            piece = SECOND[: int(chance.integers(1, 24_000))]
            wire.send(ResponseAudioDelta(AT, piece, 24_000))
            num_sent += len(piece)
        elif is_open:
            end_response(wire)
            is_open = False
        result = exchange_chunk(wire)
        audio = audio_of(result)
        assert len(audio) == 24_000 or (result["end_of_turn"] and len(audio))
        # Within the second, the response's audio is at the end and has no gap.
        assert (np.diff(audio.astype(bool).astype(int)) >= 0).all()
        assert result["is_listen"] is not bool(audio.any() or result["text"] or result["end_of_turn"])
        num_heard += np.count_nonzero(audio)
        num_ends += result["end_of_turn"]
        heard_text += result["text"]
    if is_open:
        end_response(wire)
        last = exchange_chunk(wire)
        num_heard, num_ends = num_heard + np.count_nonzero(audio_of(last)), num_ends + last["end_of_turn"]
        heard_text += last["text"]
    assert num_heard == num_sent
    assert num_ends == num_responses > 10
    assert heard_text.split() == [f"w{n}" for n in range(num_responses)]


def test_worker_pauses_stops_and_interrupts() -> None:
    wire = opened_bridge(MinicpmoWorkerBridge)
    receive_event(wire, "audio_chunk", audio_base64=f32())
    assert frames_of(wire)[0]["type"] == "error"
    receive_event(wire, "prepare")
    receive_event(wire, "pause")
    assert frames_of(wire)[-1] == {"type": "paused"}
    exchange_chunk(wire)
    assert [type(i) for i in wire.commands()] == [ConfigureConversation]
    receive_event(wire, "resume")
    assert frames_of(wire)[-1] == {"type": "resumed"}
    send_response(wire, 3.0)
    assert exchange_chunk(wire)["is_listen"] is False
    # The answer to a message with `force_listen` contains none of the response's audio that was still to be sent.
    forced = exchange_chunk(wire, force_listen=True)
    assert (forced["text"], forced["end_of_turn"]) == ("", True)
    assert not np.frombuffer(b64decode(forced["audio_data"]), "<f4").any()
    assert isinstance(wire.commands()[1], BargeIn)
    wire.send(EpochRaised(1))
    wire.send(ResponseAudioDelta(AT, SECOND, 24_000))
    assert exchange_chunk(wire)["is_listen"] is True
    receive_event(wire, "stop")
    assert wire.closing
    wire.closed()
    assert frames_of(wire)[-1] == {"type": "stopped"}


# --- omni -------------------------------------------------------------------------------------------------------------


def test_omni_a_session_of_two_turns() -> None:
    wire = opened_bridge(OmniBridge)
    receive_event(wire, "session.config", instructions="Be brief.", voice="heart", language="en")
    wire.receive(np.zeros(1600, "<i2").tobytes())
    receive_event(wire, "input.done")
    configured, appended, committed = wire.commands()
    assert (configured.config.voice, configured.config.transcription.language) == ("heart", "en")
    assert len(appended.pcm) == 1600
    assert committed == CommitAudio()
    send_response(wire)
    end_response(wire)
    start, delta, audio, wav, done, turn = frames_of(wire)
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
    assert frames_of(wire)[0]["status"] == "listening"
    wire.receive(b"abc")
    assert frames_of(wire)[0]["error"]["code"] == "bad_audio"


def test_when_the_epoch_is_raised_then_nothing_of_the_old_response_is_sent() -> None:
    for kind in (OmniBridge, OpenbmbBridge):
        wire = opened_bridge(kind)
        wire.frames()
        send_response(wire)
        waiting = [f for f in wire.frames() if f.epoch is not None]
        assert {f.epoch for f in waiting} == {0}
        wire.send(EpochRaised(1))
        wire.send(ResponseAudioDelta(AT, SECOND, 24_000))
        wire.send(ResponseTextDelta(AT, "more", True))
        assert frames_of(wire) == []


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
def test_whatever_fields_an_event_has_nothing_raises(kind: Kind, name: str, fields: dict[str, Any]) -> None:
    wire = opened_bridge(kind)
    for _ in range(2):
        wire.receive(json.dumps(fields | {"type": name}))
    wire.receive("{")
    wire.receive(b"\xff")
    wire.send(SessionEnding("server_shutting_down", "bye"))
    frames_of(wire)
