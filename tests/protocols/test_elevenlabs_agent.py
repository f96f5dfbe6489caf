"""ElevenLabs' agents, with the session's events made by hand. tests/traces has whole conversations."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from antiphon.events.conversation import (
    ArgumentsDone,
    ConfigureConversation,
    ContentPart,
    ContentPartDone,
    ContentPosition,
    CreateItem,
    CreateResponse,
    ItemTruncated,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
)
from antiphon.events.duplex import BargeIn, EpochRaised
from antiphon.events.transcription import SessionEnding
from antiphon.events.words import Word
from antiphon.protocols.connection import Command, Context, Event
from antiphon.protocols.elevenlabs.agent import ConvaiConnection
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening

BEGIN = "conversation_initiation_client_data"
SECOND = np.zeros(16_000, np.float32)


class Client:
    """The client of a conversation. `now_s` is the time of the server's clock."""

    def __init__(self, *, strict: bool = False, **override: Any) -> None:
        self.now_s = 0.0
        ids = iter(range(1000))
        context = Context(
            models=ModelNames(("whisper-base",)),
            conversation_models=ModelNames(("qwen",), strict=strict),
            voices=("one", "two"),
            now_s=lambda: 1.0,
            steady_s=lambda: self.now_s,
            new_id=lambda prefix: f"{prefix}{next(ids)}",
        )
        self.wire = ConvaiConnection(Opening(path="/v1/convai/conversation"), context)
        assert self.wire.open() == []
        self.began = self.said(BEGIN, conversation_config_override=override) if override else ([], [])

    def said(self, type: str = "", **fields: Any) -> tuple[list[Command], list[Any]]:
        """Send a message. Return its commands, and the answers."""
        received = self.wire.feed(json.dumps(fields | ({"type": type} if type else {})))
        return [*received.commands], [json.loads(frame.encode()) for frame in received.answers]

    def sent(self, *events: Event) -> list[Any]:
        return [json.loads(frame.encode()) for event in events for frame in self.wire.send(event)]


def at(response: str) -> ContentPosition:
    return ContentPosition(response, f"item_{response}", 0)


def created(response: str) -> ResponseCreated:
    return ResponseCreated(Response(response, True, None, None))


def spoken(response: str, text: str) -> ContentPartDone:
    return ContentPartDone(at(response), ContentPart("output_audio", text))


def sound(response: str, *words: Word) -> ResponseAudioDelta:
    return ResponseAudioDelta(at(response), SECOND, 16_000, words)


def test_audio_has_a_later_number_than_each_interruption_before_it() -> None:
    client = Client(agent={"prompt": {"prompt": "Be brief."}})
    first = client.sent(created("a"), sound("a"))
    cut = client.sent(EpochRaised(1), sound("a"), spoken("a", "One two."), ItemTruncated("item_a", 0, 500, "One"))
    second = client.sent(created("b"), sound("b"))
    assert [frame["audio_event"]["event_id"] for frame in first + second] == [1, 2]
    assert [frame["type"] for frame in cut] == ["interruption", "agent_response", "agent_response_correction"]
    assert cut[0]["interruption_event"] == {"event_id": 1}
    assert cut[2]["agent_response_correction_event"] == {
        "original_agent_response": "One two.",
        "corrected_agent_response": "One",
        "event_id": 1,
    }
    # An answer of which all words were heard needs no correction.
    client.sent(spoken("b", "Three."))
    assert client.sent(ItemTruncated("item_b", 0, 900, "Three.")) == []


def test_the_end_of_an_answer_is_sent_and_not_after_an_interruption() -> None:
    client = Client(tts={"agent_output_audio_format": "ulaw_8000"})
    done = ResponseDone(Response("a", True, None, None, status="completed"))
    frames = client.sent(created("a"), sound("a"), done)
    assert sum(len(b64decode(frame["audio_event"]["audio_base_64"])) for frame in frames) == pytest.approx(8000, abs=8)
    assert {frame["audio_event"]["event_id"] for frame in frames} == {1}
    done = ResponseDone(Response("b", True, None, None, status="cancelled"))
    assert len(client.sent(created("b"), sound("b"))) == 1
    assert [frame["type"] for frame in client.sent(EpochRaised(1), done)] == ["interruption"]


def test_characters_have_their_times_in_the_piece_of_audio_they_begin_in() -> None:
    client = Client(agent={"language": "en"})
    client.sent(created("a"), sound("a"))
    (frame,) = client.sent(sound("a", Word("ab", 1.2, 1.4, 1.0), Word("c", 1.5, 1.6, 1.0)))
    aligned = frame["audio_event"]["alignment"]
    assert aligned["chars"] == ["a", "b", " ", "c", " "]
    assert aligned["char_start_times_ms"] == [200, 300, 400, 500, 600]
    assert aligned["char_durations_ms"] == [100, 100, 100, 100, 400]


def test_a_call_that_is_never_answered_does_not_hold_up_those_of_later_answers() -> None:
    client = Client(agent={"prompt": {"tools": [{"name": "look"}]}})
    client.sent(created("a"), ArgumentsDone(at("a"), "call_1", "look", "{}"))
    calls = client.sent(
        created("b"),
        ArgumentsDone(at("b"), "call_2", "look", "not an object"),
        ArgumentsDone(at("b"), "call_3", "look", '{"x": 1}'),
    )
    assert [call["client_tool_call"]["parameters"] for call in calls] == [{}, {"x": 1}]
    commands, _ = client.said("client_tool_result", tool_call_id="call_2", result={"y": 2}, is_error=False)
    assert [type(command) for command in commands] == [CreateItem]
    commands, _ = client.said("client_tool_result", tool_call_id="call_3", result="lost", is_error=True)
    assert [type(command) for command in commands] == [CreateItem, CreateResponse]
    results = [command.item.output for command in commands if isinstance(command, CreateItem)]
    assert results == ["The tool failed: lost"]
    # A second result of a call, and one of another vendor's call.
    for call_id in ("call_3", "nobody"):
        commands, (error,) = client.said("client_tool_result", tool_call_id=call_id, result="", is_error=False)
        assert (commands, error["error_event"]["error_type"]) == ([], "invalid_message")


def test_a_ping_comes_every_two_seconds_with_the_time_of_the_last_answer() -> None:
    client = Client(agent={"language": "en"})
    assert client.said(user_audio_chunk="AAAA")[1] == []
    client.now_s = 2.0
    (ping,) = client.said(user_audio_chunk="AAAA")[1]
    assert ping == {"type": "ping", "ping_event": {"event_id": 1, "ping_ms": None}}
    client.now_s = 2.1
    assert client.said("pong", event_id=1) == ([], [])
    client.now_s = 4.5
    (ping,) = client.said("user_activity")[1]
    assert ping["ping_event"] == {"event_id": 2, "ping_ms": 100}


def test_a_client_that_lists_messages_gets_no_others() -> None:
    client = Client(conversation={"client_events": ["audio", "nonsense"]})
    assert [frame["type"] for frame in client.began[1]] == ["conversation_initiation_metadata"]
    frames = client.sent(created("a"), sound("a"), spoken("a", "One."), EpochRaised(1))
    assert [frame["type"] for frame in frames] == ["audio"]
    client.now_s = 9.0
    assert client.said("nonsense")[1][0]["type"] == "error"


def test_placeholders_are_filled_in_and_those_without_a_value_stay() -> None:
    client = Client()
    agent = {"prompt": {"prompt": "{{a}} {{ b }} {{c}} {{d}}"}, "first_message": "Hi {{a}}."}
    commands, _ = client.said(
        BEGIN, conversation_config_override={"agent": agent}, dynamic_variables={"a": "Ann", "b": 2, "c": True}
    )
    configured, greeting = commands
    assert isinstance(configured, ConfigureConversation)
    assert isinstance(greeting, CreateResponse)
    assert configured.config.instructions == "Ann 2 true {{d}}"
    assert (greeting.instructions or "").endswith("Hi Ann.")


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ({"agent": {"prompt": {"tools": [{"type": "webhook", "name": "far"}]}}}, "override_error"),
        ({"agent": {"prompt": {"tools": [{"type": "client"}]}}}, "override_error"),
        ({"agent": {"prompt": {"llm": "gpt-4o"}}}, "override_error"),
        ({"tts": {"agent_output_audio_format": "mp3_44100_128"}}, "override_error"),
        ({"asr": {"keywords": ["x" * 1000]}}, "override_error"),
        ({"tts": {"speed": 9}}, "invalid_message"),
        ({"agent": {"first_message": 1}}, "invalid_message"),
    ],
)
def test_an_agent_that_cannot_be_served_is_refused_and_the_reason_is_in_the_close_frame(
    override: dict[str, Any], kind: str
) -> None:
    client = Client(strict=True)
    commands, (error,) = client.said(BEGIN, conversation_config_override=override)
    assert (commands, error["error_event"]["error_type"]) == ([], kind)
    assert client.wire.finishing
    code, reason = client.wire.finishing
    assert code == 1008
    assert error["error_event"]["message"].startswith(reason)


def test_values_that_would_make_a_text_huge_are_refused() -> None:
    client = Client()
    agent = {"prompt": {"prompt": "{{a}}" * 50_000}}
    commands, (error,) = client.said(
        BEGIN, conversation_config_override={"agent": agent}, dynamic_variables={"a": "x" * 200_000}
    )
    assert (commands, error["error_event"]["reason"]) == ([], "string_above_max_length")


@pytest.mark.parametrize(
    "frame",
    [
        "{",
        "[]",
        b"\0\0",
        '{"user_audio_chunk": 1}',
        '{"user_audio_chunk": "?"}',
        '{"type": "Settings", "audio": {}}',
        '{"type": "session.update", "session": {"type": "realtime"}}',
        '{"type": "contextual_update"}',
        '{"type": "conversation_initiation_client_data"}',
        '{"type": "enclave_setup_config"}',
        '{"type": "multimodal_message", "file": {"type": "file_input", "file_id": "a"}}',
    ],
)
def test_a_message_that_cannot_be_read_changes_nothing_in_a_conversation(frame: str | bytes) -> None:
    client = Client(agent={"prompt": {"prompt": "Be brief."}})
    received = client.wire.feed(frame)
    (error,) = [json.loads(answer.encode()) for answer in received.answers]
    assert received.commands == []
    assert error["error_event"]["error_type"] in ("invalid_message", "missing_fields")
    assert client.wire.finishing is None
    commands, _ = client.said("user_message", text="Hello.")
    assert [type(command) for command in commands] == [BargeIn, CreateItem, CreateResponse]


def test_the_end_of_a_session_is_said_in_their_words() -> None:
    client = Client(agent={"language": "en"})
    (error,) = client.sent(SessionEnding("session_expired", "An hour is over."))
    assert (error["error_event"]["error_type"], client.wire.finishing) == ("max_duration_exceeded", None)
    client.sent(SessionEnding("idle_timeout", "Nobody is there."))
    assert client.wire.finishing == (1000, "idle_timeout")
