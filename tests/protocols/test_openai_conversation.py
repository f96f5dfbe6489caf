"""Tests OpenAI's conversation dialect: its commands, and that its frames are valid for OpenAI's types."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from antiphon.audio.line.g711 import from_alaw, from_ulaw, to_alaw, to_ulaw
from antiphon.audio.pcm import to_pcm16
from antiphon.contracts import AudioPart
from antiphon.events.conversation import (
    ConfigureConversation,
    ContentPart,
    ContentPartAdded,
    ContentPartDone,
    ContentPosition,
    CreateItem,
    CreateResponse,
    Item,
    Response,
    ResponseAudioDelta,
    ResponseDone,
    Usage,
)
from antiphon.events.playback import PlaybackHoldChanged
from antiphon.events.transcription import LanguageDetected, TranscriptDelta, TranscriptionConfig
from antiphon.events.words import TokenLogprob, Word
from antiphon.protocols.connection import Context
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.openai.conversation import INPUT, OpenAIConversation
from antiphon.protocols.realtime.transcript_events import LANGUAGE, LOGPROBS, WORDS
from antiphon.server.live.open_wire import check_tools
from tests.protocols.gathered import Gathered
from tests.protocols.json_values import JSON, KEYS

# A schema that cannot be enforced on a call.
REFERS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}}
EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)


def dialect(voices: tuple[str, ...] = ("heart",), *, beta: bool = False) -> Gathered:
    count = iter(range(10**6))
    context = Context(
        models=ModelNames(("whisper-base",)),
        steady_s=lambda: 0.0,
        now_s=lambda: 1.0,
        new_id=lambda prefix: f"{prefix}{next(count)}",
        max_append_bytes=1 << 20,
        voices=voices,
        knows_language=("en", "de").__contains__,
        check_tools=check_tools,
    )
    return Gathered(OpenAIConversation(context, "sess-1", 1, "gpt-realtime", beta=beta))


def frames_of(wire: Gathered) -> list[dict[str, Any]]:
    frames = [json.loads(f.encode()) for f in wire.frames()]
    for frame in frames:
        EVENT.validate_python(frame)
    return frames


def updated(wire: Gathered, **session: Any) -> dict[str, Any]:
    wire.receive(json.dumps({"type": "session.update", "session": {"type": "realtime"} | session}))
    (frame,) = frames_of(wire)
    assert frame["type"] == "session.updated", frame
    return dict(frame["session"])


def test_when_a_client_of_speech_to_speech_names_no_format_then_it_is_16_khz_both_ways() -> None:
    wire = dialect()

    def rates(**session: Any) -> tuple[int, int]:
        """Update the session, and return the rates of its input and output."""
        wire.receive(json.dumps({"type": "session.update", "session": {"type": "realtime"} | session}))
        # OpenAI's types do not have PCM at 16 kHz.
        (frame,) = [json.loads(f.encode()) for f in wire.frames()]
        audio = frame["session"]["audio"]
        reported = audio["input"]["transcription"] is not None
        assert reported is ("speech_to_speech" in str(session["extensions"]))
        return audio["input"]["format"]["rate"], audio["output"]["format"]["rate"]

    mine = ["speech_to_speech.input_audio_transcription.snapshot"]
    assert rates(extensions=["another.one"]) == (24000, 24000)
    assert rates(extensions=mine, audio={"input": {}, "output": {}}) == (16000, 16000)
    hosted = {"format": {"type": "audio/pcm", "rate": 24000}}
    assert rates(extensions=mine, audio={"input": hosted, "output": hosted}) == (24000, 24000)


def test_ducking_is_told_to_a_client_that_asks_for_it() -> None:
    wire = dialect()
    assert "ducking" not in updated(wire)["audio"]["output"]
    assert updated(wire, audio={"output": {"ducking": True}})["audio"]["output"]["ducking"] is True
    first, second = wire.commands()
    assert isinstance(first, ConfigureConversation)
    assert isinstance(second, ConfigureConversation)
    assert (first.config.reports_ducking, second.config.reports_ducking) == (False, True)
    wire.frames()
    for held in (True, False):
        wire.send(PlaybackHoldChanged(held))
    # OpenAI's types do not have these events.
    assert [json.loads(frame.encode())["type"] for frame in wire.frames()] == [
        "output_audio_buffer.ducked",
        "output_audio_buffer.unducked",
    ]


def test_an_update_changes_the_fields_it_has_and_shows_the_whole_session() -> None:
    wire = dialect()
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    session = updated(
        wire,
        instructions="Be brief.",
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        max_output_tokens=7,
        audio={
            "input": {"turn_detection": {"type": "semantic_vad", "eagerness": "low"}},
            "output": {"voice": "marin", "speed": 1.5},
        },
    )
    assert session["audio"]["output"] == {
        "format": {"type": "audio/pcm", "rate": 24000},
        "voice": "marin",
        "speed": 1.5,
    }
    (item,) = wire.commands()
    assert isinstance(item, ConfigureConversation)
    config = item.config
    assert (config.instructions, config.tool_choice, config.max_tokens, config.voice, config.speed) == (
        "Be brief.",
        "f",
        7,
        None,
        1.5,
    )
    assert config.transcription.vad
    assert (config.transcription.vad.silence_duration_ms, config.transcription.vad.eagerness) == (8000, "low")
    again = updated(wire, audio={"input": {"turn_detection": {"type": "server_vad", "create_response": False}}})
    assert again["instructions"] == "Be brief."
    assert again["audio"]["input"]["turn_detection"]["interrupt_response"] is True
    (item,) = wire.commands()
    assert isinstance(item, ConfigureConversation)
    assert not item.config.create_response
    cleared = updated(wire, instructions="", tools=[], audio={"input": {"turn_detection": None}})
    assert cleared["tools"] == []
    (item,) = wire.commands()
    assert isinstance(item, ConfigureConversation)
    assert item.config.transcription.vad is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_audio_format": ["pcm16"]}, "session.input_audio_format"),
        ({"output_audio_format": {"type": ["pcm16"]}}, "session.output_audio_format"),
        ({"input_audio_format": "mp3"}, "session.input_audio_format"),
        ({"input_audio_transcription": {"language": "xx"}}, "session.input_audio_transcription.language"),
        ({"modalities": ["text"], "voice": "nobody"}, "session.voice"),
        ({"modalities": ["text"], "speed": 9}, "session.speed"),
        ({"modalities": ["text"], "turn_detection": {"type": "x"}}, "session.turn_detection.type"),
        ({"max_response_output_tokens": 0}, "session.max_response_output_tokens"),
        ({"modalities": 5}, "session.modalities"),
    ],
)
def test_when_a_beta_field_is_wrong_then_the_update_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    wire = dialect()
    wire.receive(json.dumps({"type": "session.update", "session": fields}))
    (error,) = frames_of(wire)
    assert (error["type"], error["error"]["param"]) == ("error", param)
    assert "session.audio" not in error["error"]["message"]
    assert wire.commands() == []


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"audio": {"input": {"format": "g711_ulaw"}}},
            "session.audio.input.format",
            'expected an object, {"type": "audio/pcmu"}',
        ),
        (
            {"tools": [{"type": "function", "name": "a"}, {"type": "function", "name": "b", "parameters": REFERS}]},
            "session.tools[1].parameters",
            "Invalid schema of tool 'b': Pointer '/$defs/x' does not exist",
        ),
    ],
)
def test_an_update_that_is_refused_says_what_to_write(fields: dict[str, Any], param: str, message: str) -> None:
    wire = dialect()
    wire.receive(json.dumps({"type": "session.update", "event_id": "mine", "session": {"type": "realtime", **fields}}))
    (error,) = frames_of(wire)
    assert (error["error"]["param"], error["error"]["event_id"]) == (param, "mine")
    assert message in error["error"]["message"]
    assert wire.commands() == []


def test_a_bound_is_told_in_full() -> None:
    wire = dialect()
    wire.receive(
        json.dumps({"type": "conversation.item.truncate", "item_id": "i", "content_index": -1, "audio_end_ms": -1})
    )
    (error,) = frames_of(wire)
    assert error["error"]["message"].endswith("expected 0 to 2147483648.")


def test_tools_of_one_response_are_checked_when_it_is_asked_for() -> None:
    wire = dialect()
    tools = [{"type": "function", "name": "b", "parameters": REFERS}]
    wire.receive(json.dumps({"type": "response.create", "response": {"tools": tools}}))
    (error,) = frames_of(wire)
    assert (error["error"]["code"], error["error"]["param"]) == ("invalid_value", "response.tools[0].parameters")
    assert wire.commands() == []


def test_when_no_voice_is_loaded_then_responses_are_text() -> None:
    wire = dialect(())
    assert wire.session().output_modalities == ["text"]
    assert updated(wire, output_modalities=["audio"])["output_modalities"] == ["text"]


def test_items_and_responses_of_a_client_become_commands() -> None:
    wire = dialect()
    content = [{"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    wire.receive(
        json.dumps(
            {
                "type": "conversation.item.create",
                "previous_item_id": "root",
                "event_id": "e",
                "item": {"type": "message", "id": "mine", "role": "user", "content": content},
            }
        )
    )
    reference = {"type": "item_reference", "id": "mine"}
    wire.receive(
        json.dumps(
            {
                "type": "response.create",
                "response": {
                    "conversation": "none",
                    "input": [reference],
                    "output_modalities": ["text"],
                    "metadata": {"a": "b"},
                    "max_output_tokens": "inf",
                },
            }
        )
    )
    created, asked = wire.commands()
    assert isinstance(created, CreateItem)
    assert (created.item.id, created.after, created.event_id) == ("mine", "root", "e")
    assert [p.kind for p in created.item.parts] == ["input_text", "input_image"]
    assert isinstance(asked, CreateResponse)
    assert (asked.stored, asked.items, asked.audio_output, asked.metadata, asked.max_tokens) == (
        False,
        ("mine",),
        False,
        {"a": "b"},
        None,
    )


def part(**fields: Any) -> dict[str, Any]:
    return {"item": {"type": "message", "role": "user", "content": [fields]}}


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        *(
            ({"type": "conversation.item.create"} | part(**IMAGE, detail=d), None)
            for d in ("low", "high", "auto", None)
        ),
        ({"type": "conversation.item.create"} | part(**IMAGE, detail="tiny"), "item.content[0].detail"),
        ({"type": "conversation.item.create"} | part(type="input_audio"), "item.content[0].audio"),
        ({"type": "conversation.item.create"} | part(type="input_audio", transcript="Hi."), None),
        (
            {
                "type": "conversation.item.create",
                "item": {"type": "function_call_output", "call_id": "to_come", "output": "1"},
            },
            None,
        ),
        (
            {"type": "conversation.item.create", "item": {"type": "function_call", "name": "", "arguments": "{}"}},
            "item.name",
        ),
        ({"type": "session.update", "session": {"tools": [{"type": "function", "name": ""}]}}, "session.tools[0].name"),
        ({"type": "session.update", "session": {"tool_choice": {"name": " "}}}, "session.tool_choice.name"),
        ({"type": "response.create", "response": {"tools": [{"name": ""}]}}, "response.tools[0].name"),
        # A request that real clients send: a text response outside of the conversation, without input.
        ({"type": "response.create", "response": {"input": [], "conversation": "none", "metadata": {"a": "b"}}}, None),
        ({"type": "response.create", "response": {"output_modalities": ["text"], "instructions": None}}, None),
        (
            {
                "type": "response.create",
                "response": {"audio": {"output": {"format": {"type": "audio/pcmu"}, "voice": "heart"}}},
            },
            "response.audio.output.format",
        ),
        ({"type": "response.create", "response": {"audio": {"output": {"voice": "heart"}}}}, None),
        ({"type": "conversation.item.create", "previous_item_id": None} | part(type="input_text", text="Hi."), None),
        ({"type": "response.cancel", "response_id": None}, None),
        ({"type": "session.update", "session": {"audio": {"input": None, "output": None}, "tools": None}}, None),
        ({"type": "session.update", "session": {"audio": {"input": {"noise_reduction": None}}}}, None),
        (
            {
                "type": "session.update",
                "session": {
                    "max_output_tokens": None,
                    "tracing": None,
                    "audio": {"output": {"format": None, "voice": None, "speed": None}},
                },
            },
            None,
        ),
    ],
)
def test_what_programs_send_is_taken_or_refused_by_name(message: dict[str, Any], param: str | None) -> None:
    wire = dialect()
    wire.commands()
    wire.receive(json.dumps(message | {"event_id": "mine"}))
    errors = [f["error"] for f in frames_of(wire) if f["type"] == "error"]
    assert [(e["param"], e["event_id"]) for e in errors] == ([(param, "mine")] if param else [])
    assert len(wire.commands()) == (0 if param else 1)


def test_audio_in_an_item_is_read_in_the_sessions_format() -> None:
    tone = (0.5 * np.sin(np.arange(24000) / 10)).astype(np.float32)

    def create(wire: Gathered, data: str, **more: Any) -> None:
        content = [{"type": "input_audio", "audio": data, **more}]
        item = {"type": "message", "role": "user", "content": content}
        wire.receive(json.dumps({"type": "conversation.item.create", "item": item}))

    for form, encoded, seconds in (("audio/pcm", to_pcm16(tone), 1.0), ("audio/pcmu", to_ulaw(tone[::3]), 1.0)):
        wire = dialect()
        updated(
            wire, audio={"input": {"format": {"type": form, "rate": 24000} if "pcmu" not in form else {"type": form}}}
        )
        wire.commands()
        create(wire, base64.b64encode(encoded).decode(), transcript="A tone.")
        (created,) = wire.commands()
        assert isinstance(created, CreateItem)
        (part,) = created.item.parts
        assert part.text == "A tone."
        assert isinstance(part.media, AudioPart)
        assert len(part.media.pcm) == pytest.approx(16_000 * seconds, abs=2)
        assert 0.4 < np.abs(part.media.pcm[2000:-2000]).max() < 0.6
    wire = dialect()
    for wrong in ("*", base64.b64encode(b"odd").decode()):
        create(wire, wrong)
        assert not wire.commands()
        (frame,) = (json.loads(f.encode()) for f in wire.frames())
        assert (frame["error"]["code"], frame["error"]["param"]) == ("invalid_value", "item.content[0].audio")


def test_audio_goes_out_in_the_sessions_format_and_none_is_lost() -> None:
    tone = (0.5 * np.sin(np.arange(24000) / 10)).astype(np.float32)
    for form, decode, rate in (("audio/pcmu", from_ulaw, 8000), ("audio/pcma", from_alaw, 8000)):
        wire = dialect()
        updated(wire, audio={"output": {"format": {"type": form}}})
        at, part = ContentPosition("r", "i", 0), ContentPart("output_audio")
        wire.send(ContentPartAdded(at, part))
        for k in range(0, 24000, 777):
            wire.send(ResponseAudioDelta(at, tone[k : k + 777], 24000))
        wire.send(ContentPartDone(at, part))
        import base64

        frames = frames_of(wire)
        data = b"".join(base64.b64decode(f["delta"]) for f in frames if f["type"] == "response.output_audio.delta")
        assert len(data) == pytest.approx(rate, abs=8)
        assert np.abs(decode(data)).max() == pytest.approx(0.5, abs=0.03)
        kinds = [f["type"] for f in frames]
        assert kinds.index("response.output_audio.done") > max(
            k for k, x in enumerate(kinds) if x.endswith("audio.delta")
        )


def test_when_two_responses_are_spoken_at_once_then_their_audio_is_not_mixed() -> None:
    tone = (0.5 * np.sin(np.arange(24000) / 10)).astype(np.float32)

    def heard(*items: str) -> dict[str, str]:
        wire = dialect()
        updated(wire, audio={"output": {"format": {"type": "audio/pcmu"}}})
        places = [ContentPosition("r", item, 0) for item in items]
        for at in places:
            wire.send(ContentPartAdded(at, ContentPart("output_audio")))
        for k in range(0, 24000, 800):
            for at in places:
                wire.send(ResponseAudioDelta(at, tone[k : k + 800] if at.item_id == "a" else -tone[k : k + 800], 24000))
        for at in places:
            wire.send(ContentPartDone(at, ContentPart("output_audio")))
        out: dict[str, str] = {}
        for frame in frames_of(wire):
            if frame["type"] == "response.output_audio.delta":
                out[frame["item_id"]] = out.get(frame["item_id"], "") + frame["delta"].rstrip("=")
        return out

    assert heard("a", "b")["a"] == heard("a")["a"]


@pytest.mark.parametrize(("encode", "decode"), [(to_ulaw, from_ulaw), (to_alaw, from_alaw)])
def test_g711_encodes_each_sample_as_the_nearest_code(encode: Any, decode: Any) -> None:
    every = bytes(range(256))
    values = decode(every)
    # Each value is decoded to itself. Only the two zeros of µ-law become one.
    assert np.array_equal(decode(encode(values)), values)
    pcm = np.linspace(-1, 1, 5001).astype(np.float32)
    assert np.abs(decode(encode(pcm)) - pcm).max() < 0.035


def test_when_a_response_failed_or_was_cut_off_then_its_status_says_why() -> None:
    wire = dialect()
    for status, reason in (("failed", ""), ("cancelled", "turn_detected"), ("incomplete", "max_output_tokens")):
        item = Item("i", "message", "assistant", "incomplete", [ContentPart("output_audio", "Hi")])
        response = Response("r", True, None, None, reason=reason, error="boom", output=[item])
        response.status = status  # type: ignore[assignment]
        response.usage = Usage(3, 1, 2)
        wire.send(ResponseDone(response))
        done = frames_of(wire)[0]["response"]
        assert done["status"] == status
        assert done["status_details"]["type"] == status
        failure = {"type": "server_error", "code": "server_error", "message": "boom"}
        assert done["status_details"].get("error") == (failure if status == "failed" else None)
        assert done["usage"]["total_tokens"] == 5


@given(st.sampled_from(INPUT.tags), st.dictionaries(KEYS, JSON, max_size=5))
def test_whatever_fields_an_event_has_nothing_raises(kind: str, fields: dict[str, Any]) -> None:
    wire = dialect()
    wire.receive(json.dumps(fields | {"type": kind}))
    frames_of(wire)
    wire.configured()


@given(st.binary(max_size=100) | st.text(max_size=100))
def test_whatever_a_frame_holds_nothing_raises(raw: bytes | str) -> None:
    wire = dialect()
    wire.receive(raw)
    frames_of(wire)


def test_when_json_is_nested_too_deeply_then_it_is_an_error() -> None:
    wire = dialect()
    wire.receive("[" * 100_000)
    assert frames_of(wire)[0]["error"]["code"] == "invalid_event"


def test_include_adds_to_the_users_transcripts_where_they_are_sent() -> None:
    connection = dialect()

    def frames() -> list[dict[str, Any]]:
        # Extensions are not in OpenAI's types. They are sent only on request.
        return [json.loads(f.encode()) for f in connection.frames()]

    def config(**audio_input: Any) -> TranscriptionConfig:
        session = {"type": "realtime", "include": [LOGPROBS, WORDS, LANGUAGE], "audio": {"input": audio_input}}
        connection.receive(json.dumps({"type": "session.update", "session": session}))
        (shown,) = frames()
        assert shown["session"]["include"] == [LOGPROBS, WORDS, LANGUAGE]
        command = connection.commands()[-1]
        assert isinstance(command, ConfigureConversation)
        return command.config.transcription

    silent = config(transcription=None)
    assert (silent.logprobs, silent.word_times, silent.reports_language) == (False, False, False)
    asked = config(transcription={"model": "whisper-1", "languages": ["de", "en"]})
    assert (asked.logprobs, asked.word_times, asked.reports_language) == (True, True, True)
    assert asked.languages == ("de", "en")
    connection.send(TranscriptDelta(0, "Hi", (Word("Hi", 0.5, 0.75, 0.9),), (TokenLogprob(b"Hi", -0.5),)))
    connection.send(LanguageDetected(0, "de", 0.9))
    delta, language = frames()
    assert delta["words"] == [{"word": "Hi", "start": 0.5, "end": 0.75, "confidence": 0.9}]
    assert delta["logprobs"] == [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}]
    assert (language["language"], language["item_id"]) == ("de", delta["item_id"])


GA, BETA = {"output_modalities": ["text"]}, {"modalities": ["text"]}


@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize(
    ("updates", "shown"),
    [
        # A beta name does not turn a GA session into a beta session, neither in an update with GA names nor after it.
        ([{"type": "realtime", "modalities": ["text"]}], ["session.modalities: output_modalities"]),
        ([{"type": "realtime"}, BETA], ["ga", "session.modalities: output_modalities"]),
        ([GA, {"voice": "heart"}], ["ga", "session.voice: audio.output.voice"]),
        ([{"type": "realtime", "turn_detection": None}], ["session.turn_detection: audio.input.turn_detection"]),
        ([{"type": "realtime", "speed": 1.2}], ["session.speed: audio.output.speed"]),
        # A client that first sends shared names and then beta names is a beta client. GA names are then refused.
        ([{"instructions": "Hi."}, BETA, GA], ["ga", "beta", "session.output_modalities: modalities"]),
        ([BETA, {"audio": {"output": {"voice": "heart"}}}], ["beta", "session.audio: voice"]),
        # A refused update does not decide between GA and beta.
        ([{"type": "realtime", "tracing": 1}, BETA], ["session.tracing", "beta"]),
    ],
)
def test_a_session_keeps_the_names_that_its_client_uses(
    updates: list[dict[str, Any]], shown: list[str], beta: bool
) -> None:
    wire = dialect(beta=beta)
    found = []
    for session in updates:
        wire.receive(json.dumps({"type": "session.update", "session": session}))
        (frame,) = [json.loads(f.encode()) for f in wire.frames()]
        if frame["type"] == "error":
            meant = frame["error"]["message"].partition("Did you mean '")[2].removesuffix("'?")
            found.append(": ".join(filter(None, (frame["error"]["param"], meant))))
        else:
            found.append("beta" if "modalities" in frame["session"] else "ga")
    if not beta:
        assert found == shown
    else:
        # With the header, the session always has beta names.
        assert "ga" not in found
