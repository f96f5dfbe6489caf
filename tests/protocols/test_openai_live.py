"""Tests OpenAI Live's messages in both directions, and that the transcript of a response follows what is played."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from openai.types.live.server_event import ServerEvent
from pydantic import TypeAdapter

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDone,
    CommandRejected,
    ConfigureConversation,
    ContentPosition,
    CreateItem,
    CreateResponse,
    Item,
    ItemTruncated,
    Response,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import ConversationPaused, ConversationResumed, PauseConversation
from antiphon.events.tools import Tool
from antiphon.events.transcription import AppendAudio, SessionEnding, SpeechStarted, TranscriptDelta
from antiphon.protocols.connection import Context
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.items import take_tools
from tests.protocols.gathered import Gathered

TYPES: TypeAdapter[Any] = TypeAdapter(ServerEvent)
AT = ContentPosition("resp_1", "item_1", 0)
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
RANDOM = np.random.default_rng(1)
# A tenth of a second of a room, and of speech.
QUIET, LOUD = (b64encode(RANDOM.normal(0, level, 2400).astype("<i2").tobytes()).decode() for level in (30, 3000))
CALL = ArgumentsDone(AT, "call_1", "f", "{}")


def refuse(tools: Sequence[Tool], param: str) -> None:
    raise RemoteProtocolError("invalid_value", "No.", param)


class Client:
    """A connection and its clock."""

    def __init__(self, strict: bool = False, schemas: bool = True, **session: Any) -> None:
        count = iter(range(10**6))
        self.now_s = 0.0
        # Names of models that stood for the loaded one, and fields without an effect.
        self.logged: list[str] = []
        context = Context(
            models=ModelNames(("whisper-base",)),
            conversation_models=ModelNames(("qwen",), strict=strict),
            voices=("heart",),
            now_s=lambda: 1.0,
            steady_s=lambda: self.now_s,
            new_id=lambda prefix: f"{prefix}{next(count)}",
            check_tools=take_tools if schemas else refuse,
            log_alias=lambda name, _: self.logged.append(name),
            log_ignored=lambda names, _: self.logged.extend(names),
        )
        opening = Opening(path="/v1/live/sessions")
        self.wire = Gathered(dialect_of(opening).connect(opening, context))
        self.wire.open()
        self.session = {"model": "gpt-live-1", **session}

    def begun(self) -> Client:
        self.say("session.start", session=self.session)
        return self

    def say(self, type: str, **fields: Any) -> None:
        self.wire.receive(json.dumps({"type": type} | fields))

    def events(self) -> list[Any]:
        """Return what the client was sent. Each event is of a type that OpenAI's client knows."""
        return [self.checked(frame) for frame in self.wire.frames()]

    def checked(self, frame: Any) -> Any:
        event = json.loads(frame.encode())
        TYPES.validate_python(event)
        return event

    def spoken(self, num_samples: int, num_spoken: int) -> list[Any]:
        pcm = np.zeros(num_samples, np.float32)
        return [self.checked(frame) for frame in self.wire.wire.spoken(pcm, num_spoken)]


def begin_response(client: Client) -> None:
    for text in ("One. ", "Two."):
        client.wire.send(ResponseTextDelta(AT, text, True))
        client.wire.send(ResponseAudioDelta(AT, np.full(2400, 0.25, np.float32), 24_000))


def said(events: list[Any]) -> list[str]:
    return [event["delta"] for event in events if event["type"] == "session.output_transcript.delta"]


def test_a_start_configures_the_conversation_and_its_history() -> None:
    backend = {"instructions": "Use tools.", "tools": [FUNCTION], "tool_choice": "required", "reasoning": {}}
    said = [("developer", "Be kind."), ("user", "Hi."), ("assistant", "Hello.")]
    client = Client(
        instructions="Be brief.",
        delegation={"type": "responses", "responses": backend},
        input=[*({"role": role, "content": [{"text": text}]} for role, text in said), {"role": "user", "content": []}],
    ).begun()
    configure, *items = client.wire.commands()
    assert isinstance(configure, ConfigureConversation)
    config = configure.config
    assert (config.instructions, config.tool_choice) == ("Be brief.\n\nUse tools.", "required")
    assert [tool.name for tool in config.tools] == ["f"]
    assert [(new.item.role, new.item.parts[0].kind, new.item.text) for new in items] == [
        ("system", "input_text", "Be kind."),
        ("user", "input_text", "Hi."),
        ("assistant", "output_text", "Hello."),
    ]
    (started,) = client.events()
    assert started["session"]["instructions"] == "Be brief."
    assert started["session"]["delegation"]["responses"]["model"] == "gpt-live-1"
    assert started["session"].keys().isdisjoint({"safety_identifier", "idle_timeout_s", "wake_policy"})
    assert client.logged == ["gpt-live-1", "session.delegation.responses.reasoning"]


@pytest.mark.parametrize(
    ("voice", "chosen"), [("heart", "heart"), ({"id": "heart"}, "heart"), ("marin", None), ({"id": "voice_1"}, None)]
)
def test_a_loaded_voice_speaks_and_any_other_name_stands_for_the_default_voice(voice: Any, chosen: Any) -> None:
    (configure,) = Client(audio={"output": {"voice": voice}}).begun().wire.commands()
    assert configure.config.voice == chosen


def test_a_session_starts_once() -> None:
    client = Client().begun()
    client.events()
    client.wire.commands()
    client.begun()
    assert [event["error"]["code"] for event in client.events()] == ["invalid_event"]
    assert client.wire.commands() == []


def test_functions_whose_schemas_cannot_be_enforced_are_refused() -> None:
    client = Client(schemas=False, delegation={"type": "responses", "responses": {"tools": [FUNCTION]}}).begun()
    assert [event["error"]["param"] for event in client.events()] == ["session.delegation.responses.tools"]


def test_the_backend_may_call_one_function_only_and_one_at_a_time() -> None:
    backend = {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False}
    client = Client(delegation={"type": "responses", "responses": backend}).begun()
    (configure,) = client.wire.commands()
    assert (configure.config.tool_choice, configure.config.parallel_tool_calls) == ("f", False)


def test_with_strict_names_only_a_loaded_model_is_served() -> None:
    client = Client(strict=True).begun()
    assert [event["error"]["code"] for event in client.events()] == ["invalid_model"]
    client.session["model"] = "qwen"
    client.begun()
    assert [event["type"] for event in client.events()] == ["session.started"]
    assert client.logged == []


@pytest.mark.parametrize(
    ("session", "code"),
    [
        ({"speed": 1}, "unknown_parameter"),
        ({"audio": {"format": {"type": "audio/ogg"}}}, "invalid_value"),
        ({"delegation": {"type": "decisions"}}, "unsupported_parameter"),
        ({"delegation": {"type": "responses", "responses": {"tools": [{"type": "mcp"}]}}}, "unsupported_server_tool"),
        ({"triggers": [{}]}, "unsupported_parameter"),
        ({"idle_timeout_s": 0.5}, "invalid_value"),
        ({"instructions": "a" * (1 << 20)}, "string_above_max_length"),
    ],
)
def test_a_start_that_cannot_be_served_is_refused_and_may_be_sent_again(session: Any, code: str) -> None:
    client = Client(**session).begun()
    assert [event["error"]["code"] for event in client.events()] == [code]
    assert client.wire.commands() == []
    client.say("session.start", session={"model": "gpt-live-1"})
    assert [event["type"] for event in client.events()] == ["session.started"]


@pytest.mark.parametrize("frame", ["{", "[]", '{"type": "session.nothing"}', '{"type": "session.close"}', b"\xff"])
def test_an_invalid_message_is_answered_with_an_error(frame: Any) -> None:
    client = Client()
    client.wire.receive(frame)
    assert [event["type"] for event in client.events()] == ["error"]


@pytest.mark.parametrize(
    ("form", "size"), [({"type": "audio/pcm", "rate": 16_000}, 32_000), ({"type": "audio/pcmu"}, 8000)]
)
def test_a_format_holds_in_both_directions(form: Any, size: int) -> None:
    client = Client(audio={"format": form}).begun()
    client.wire.commands()
    client.say("session.input_audio.append", audio=b64encode(bytes(size)).decode())
    assert abs(sum(len(command.pcm) for command in client.wire.commands()) - 16_000) < 2000
    client.events()
    sent = [b64decode(event["delta"]) for _ in range(10) for event in client.spoken(2400, 0)]
    assert abs(sum(map(len, sent)) - size) < size / 8


def test_muted_audio_is_silence() -> None:
    client = Client().begun()
    client.wire.commands()
    loud = b64encode(np.full(2400, 9000, "<i2").tobytes()).decode()
    client.say("session.input_audio.mute", event_id="m")
    client.say("session.input_audio.append", audio=loud)
    (silent,) = client.wire.commands()
    assert not silent.pcm.any()
    client.say("session.input_audio.unmute")
    client.say("session.input_audio.append", audio=loud)
    (heard,) = client.wire.commands()
    assert heard.pcm.any()
    assert [(e["type"], e.get("client_event_id")) for e in client.events()[1:]] == [
        ("session.input_audio.muted", "m"),
        ("session.input_audio.unmuted", None),
    ]


def test_texts_for_the_model_become_items_and_a_commentary_is_spoken() -> None:
    client = Client().begun()
    client.wire.commands()
    for kind, kinds in (("instructions", 1), ("thinking", 1), ("commentary", 2)):
        client.say(f"session.{kind}.append", content="x", delegation_id=None, event_id="e")
        commands = client.wire.commands()
        assert [type(command) for command in commands[:1]] == [CreateItem]
        assert commands[1:] == [CreateResponse(when_busy="wait")][: kinds - 1]
        assert ("Say this" in commands[0].item.text) == (kind == "commentary")
        assert client.events()[-1]["type"] == f"session.{kind}.appended"
    client.say("session.thinking.append", content="x", delegation_id="item_1")
    assert client.events()[0]["error"]["param"] == "delegation_id"


def test_a_call_is_a_delegation_and_the_model_goes_on_when_it_has_an_output() -> None:
    client = Client().begun()
    client.events()
    client.wire.commands()
    client.wire.send(CALL)
    output = Item("item_1", kind="function_call", call_id="call_1")
    client.wire.send(ResponseDone(Response("resp_1", True, None, None, status="completed", output=[output])))
    created, *wrapped = client.events()
    assert created["delegation"]["target"] == "responses"
    kinds = [event["event"]["type"] for event in wrapped]
    assert kinds == ["response.created", "response.output_item.done", "response.completed"]
    client.say("response.create")
    assert client.events()[0]["error"]["code"] == "function_call_outputs_required"
    item = {"type": "function_call_output", "call_id": "call_1", "output": {"a": 1}}
    client.say("response.item.create", item=item)
    client.say("response.create")
    result, ask = client.wire.commands()
    assert (result.item.call_id, result.item.output) == ("call_1", '{"a":1}')
    assert ask == CreateResponse(when_busy="wait")
    client.say("response.item.create", item=item)
    assert client.events()[0]["type"] == "error"


def test_calls_of_one_response_are_one_delegation_and_those_of_servers_are_not_shown() -> None:
    client = Client().begun()
    client.events()
    for number in (1, 2):
        client.wire.send(ArgumentsDone(AT, f"call_{number}", "f", "{}"))
    client.wire.send(ArgumentsDone(AT, "call_3", "f", "{}", server="home"))
    kinds = [event["type"] for event in client.events()]
    assert kinds == ["session.delegation.created", *["response.event"] * 3]
    of_server = Item("item_1", kind="function_call", call_id="call_3", server="home")
    client.wire.send(ResponseDone(Response("resp_1", True, None, None, status="completed", output=[of_server])))
    assert client.events() == []


def test_functions_can_change_and_the_kind_of_delegation_cannot() -> None:
    client = Client(delegation={"type": "responses", "responses": {"instructions": "Use tools."}}).begun()
    client.wire.commands()
    changes = {"delegation": {"type": "responses", "responses": {"tools": [FUNCTION]}}}
    client.say("session.update", session=changes)
    (configure,) = client.wire.commands()
    assert (configure.config.instructions, len(configure.config.tools)) == ("Use tools.", 1)
    client.events()
    client.say("session.update", session={"delegation": {"type": "client"}})
    assert client.events()[0]["error"]["param"] == "session.delegation.type"


def test_the_transcript_of_a_response_follows_what_is_played() -> None:
    client = Client().begun()
    client.events()
    begin_response(client)
    assert client.events() == []
    assert said(client.spoken(960, 960)) == ["One. "]
    assert said(client.spoken(960, 960)) == []
    assert said(client.spoken(960, 960)) == ["Two."]


def test_what_is_cut_off_does_not_come_into_the_transcript() -> None:
    client = Client().begun()
    begin_response(client)
    client.spoken(960, 960)
    client.wire.send(ItemTruncated("item_1", 0, 40))
    assert said(client.spoken(2400, 0)) == []
    begin_response(client)
    assert said(client.spoken(960, 960)) == ["One. "]


def test_what_a_cancelled_response_has_not_said_does_not_come_into_the_transcript() -> None:
    client = Client().begun()
    begin_response(client)
    client.spoken(960, 960)
    client.wire.send(ResponseDone(Response("resp_1", True, None, None, status="cancelled")))
    assert said(client.spoken(2400, 0)) == []


def test_text_that_is_not_spoken_comes_at_once() -> None:
    client = Client().begun()
    client.wire.send(ResponseTextDelta(AT, "Hi.", False))
    assert said(client.spoken(2400, 0)) == ["Hi."]


def test_a_response_that_is_done_is_still_heard_to_its_end() -> None:
    client = Client().begun()
    begin_response(client)
    client.wire.send(ResponseDone(Response("resp_1", True, None, None, status="completed")))
    (event, _) = client.spoken(960, 960)
    assert (event["delta"], event["start_ms"], event["end_ms"]) == ("One. ", 0, 40)


def test_the_end_of_a_text_comes_when_the_response_is_done() -> None:
    client = Client().begun()
    begin_response(client)
    client.wire.send(ResponseTextDelta(AT, "...", True))
    client.spoken(4800, 4800)
    assert said(client.spoken(2400, 0)) == []
    client.wire.send(ResponseDone(Response("resp_1", True, None, None, status="completed")))
    assert said(client.spoken(2400, 0)) == ["..."]


def test_before_the_start_nothing_is_played_and_no_end_is_reported() -> None:
    client = Client()
    assert client.spoken(2400, 0) == []
    client.wire.closed()
    assert client.events() == []


def test_an_error_quotes_only_the_message_that_is_read() -> None:
    client = Client().begun()
    client.events()
    client.say("session.input_audio.append", audio="A", event_id="e")
    client.wire.send(CommandRejected("conversation_too_large", "Too large.", None, None))
    quoted = [event["error"].get("client_event_id") for event in client.events()]
    assert quoted == ["e", None]


def test_the_users_words_have_times_of_the_session() -> None:
    client = Client().begun()
    client.events()
    client.now_s = 1.0
    client.wire.send(SpeechStarted(0, 900))
    for now_s in (1.5, 2.0):
        client.now_s = now_s
        client.wire.send(TranscriptDelta(0, "a"))
    times = [(event["start_ms"], event["end_ms"]) for event in client.events()]
    assert times == [(1000, 1500), (1500, 2000)]


def test_usage_is_reported_while_audio_comes() -> None:
    client = Client().begun()
    client.events()
    for now_s in (1.0, 16.0, 17.0, 32.0):
        client.now_s = now_s
        client.say("session.input_audio.append", audio="")
    assert [event["usage"]["seconds"] for event in client.events()] == [16.0, 32.0]


def test_the_end_of_a_session_is_reported_with_its_reason() -> None:
    client = Client().begun()
    client.events()
    client.say("session.close")
    assert client.wire.closing
    client.wire.closed()
    assert [event["reason"] for event in client.events()] == ["close_requested"]
    for code, reason in (("session_expired", "expired"), ("server_shutting_down", "connection_lost")):
        other = Client().begun()
        other.wire.send(SessionEnding(code, "x"))
        assert other.events()[-1]["reason"] == reason


class PausingClient(Client):
    """A client whose session may be paused."""

    def hear(self, audio: str, count: int = 1) -> int:
        """Send messages of audio. Returns the number of samples at 16 kHz that are listened to."""
        for _ in range(count):
            self.say("session.input_audio.append", audio=audio)
        return sum(len(command.pcm) for command in self.wire.commands() if isinstance(command, AppendAudio))

    def kinds(self) -> list[str]:
        return [frame.payload["type"] for frame in self.wire.frames()]

    def paused(self) -> PausingClient:
        self.begun()
        self.wire.commands()
        self.wire.send(ConversationPaused())
        return self


def test_without_speech_for_the_idle_timeout_a_pause_is_tried_again_and_again() -> None:
    client = PausingClient(idle_timeout_s=2)
    client.begun()
    client.wire.commands()
    tried = []
    for now_s in (1.0, 1.9, 2.1, 3.9, 4.2):
        client.now_s = now_s
        client.say("session.input_audio.append", audio=QUIET)
        tried += [now_s for command in client.wire.commands() if isinstance(command, PauseConversation)]
    assert tried == [2.1, 4.2]


@pytest.mark.parametrize("kind", ["the user's words", "a response", "a resume", "a pause"])
def test_the_idle_timeout_counts_from_the_last_speech(kind: str) -> None:
    client = PausingClient(idle_timeout_s=2)
    client.begun()
    client.now_s = 1.9
    if kind == "the user's words":
        client.wire.send(TranscriptDelta(0, "a"))
    elif kind == "a response":
        client.spoken(960, 960)
    else:
        client.wire.send(ConversationPaused())
        if kind == "a resume":
            client.wire.send(ConversationResumed())
    client.wire.commands()
    client.now_s = 3.8
    client.say("session.input_audio.append", audio=QUIET)
    assert not any(isinstance(command, PauseConversation) for command in client.wire.commands())
    client.now_s = 4.0
    client.say("session.input_audio.append", audio=QUIET)
    pauses = [command for command in client.wire.commands() if isinstance(command, PauseConversation)]
    # A session that is paused is not paused again.
    assert len(pauses) == (kind != "a pause")


def test_a_session_without_an_idle_timeout_is_only_paused_by_the_client() -> None:
    client = PausingClient()
    client.begun()
    client.wire.commands()
    client.now_s = 10_000.0
    assert client.hear(QUIET, 10) > 0
    client.say("session.pause", event_id="p")
    assert client.wire.commands() == [PauseConversation("p")]


def test_a_paused_session_sends_nothing_and_listens_from_a_second_before_a_sound_on() -> None:
    client = PausingClient(idle_timeout_s=2).paused()
    assert client.kinds() == ["session.started", "session.paused"]
    assert client.spoken(2400, 0) == []
    assert client.hear(QUIET, 50) == 0
    # Eleven tenths of a second. The resampler holds back up to 0.1 s.
    assert 16_000 <= client.hear(LOUD) <= 17_600
    assert client.hear(LOUD, 10) >= 16_000
    client.wire.send(ConversationResumed())
    assert client.kinds() == ["session.resumed"]
    assert client.hear(QUIET, 30) >= 46_000
    assert [event["type"] for event in client.spoken(2400, 0)] == ["session.output_audio.delta"]


def test_a_session_that_a_message_resumes_listens_from_a_second_before_on() -> None:
    client = PausingClient(idle_timeout_s=2).paused()
    assert client.hear(QUIET, 50) == 0
    client.say("session.wake")
    assert [type(command) for command in client.wire.commands()] == [ConfigureConversation]
    client.wire.send(ConversationResumed())
    assert 16_000 <= client.hear(QUIET) <= 17_600
    assert client.hear(QUIET, 30) >= 46_000


def test_with_a_manual_wake_no_sound_of_the_pause_is_listened_to() -> None:
    client = PausingClient(idle_timeout_s=2, wake_policy="manual").paused()
    assert client.hear(LOUD, 50) == 0
    client.wire.send(ConversationResumed())
    assert client.hear(LOUD, 10) <= 16_000


def test_muted_audio_wakes_nobody() -> None:
    client = PausingClient(idle_timeout_s=2).paused()
    client.say("session.input_audio.mute")
    assert client.hear(LOUD, 50) == 0
    client.say("session.input_audio.unmute")
    assert client.hear(LOUD) > 0


def test_audio_of_a_pause_is_checked() -> None:
    client = PausingClient(idle_timeout_s=2).paused()
    client.kinds()
    client.hear("A")
    assert client.kinds() == ["error"]


def test_a_pause_follows_a_pause() -> None:
    client = PausingClient(idle_timeout_s=2).paused()
    client.wire.send(ConversationResumed())
    assert client.hear(LOUD, 10) > 0
    client.wire.send(ConversationPaused())
    assert client.hear(QUIET, 50) == 0
    assert client.hear(LOUD) >= 16_000
