"""Tests that every field of the client events in the `openai` package's realtime types has an effect or is refused.

The test walks the types. If a new version adds a field, `test_every_field_of_the_types_is_known` fails. A field has an
effect if it changes the session's command or the format of the audio.
"""

from __future__ import annotations

import collections.abc
import json
import re
import typing
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typing_extensions
from openai.types.realtime.realtime_client_event_param import RealtimeClientEventParam

from antiphon.protocols.openai.conversation import OpenAIConversation
from antiphon.protocols.openai.transcription import OpenAITranscription
from tests.protocols.test_every_field import context

Wire = OpenAIConversation | OpenAITranscription
WRAPPERS = (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated)
SEQUENCES = (list, collections.abc.Iterable, collections.abc.Sequence)

SESSION = "<session.update>.session"
TALK, HEAR = f"{SESSION}<realtime>", f"{SESSION}<transcription>"
ITEM, ANSWER = "<conversation.item.create>.item", "<response.create>.response"
INPUT = f"{ANSWER}.input[]"
PNG = "data:image/png;base64,AAAA"
LOGPROBS = ["item.input_audio_transcription.logprobs"]

# Fields that a tested field requires next to it, by the path of their object.
NEEDED: dict[str, dict[str, Any]] = {
    "<conversation.item.create>": {"item": {"type": "message", "role": "user"}},
    f"{ITEM}<function_call>": {"name": "f", "arguments": "{}", "call_id": "call-1", "id": "item-1"},
    f"{ITEM}<function_call_output>": {"call_id": "call-1", "output": "x", "id": "item-1"},
    f"{ITEM}<mcp_approval_response>": {"approval_request_id": "item-3", "approve": True, "id": "item-1"},
    "<conversation.item.truncate>": {"item_id": "item-1", "content_index": 0, "audio_end_ms": 5},
    f"{TALK}.tools[]<function>": {"name": "f"},
    f"{ANSWER}.tools[]<function>": {"name": "f"},
    f"{TALK}.tools[]<mcp>": {"server_label": "x"},
    f"{ANSWER}.tools[]<mcp>": {"server_label": "x"},
    f"{TALK}.tool_choice<function>": {"name": "f"},
    f"{ANSWER}.tool_choice<function>": {"name": "f"},
}
CONTENT = {
    "<message><system>": {"content[]<input_text>.text": "hello"},
    "<message><user>": {
        "content[].text": {"type": "input_text", "text": "hello"},
        "content[].audio": {"type": "input_audio", "audio": "AAAAAAAA"},
        "content[].transcript": {"type": "input_audio", "transcript": "hello"},
        "content[].image_url": {"type": "input_image", "image_url": PNG},
    },
    "<message><assistant>": {
        "content[].text": {"type": "output_text", "text": "hello"},
        "content[].transcript": {"type": "output_audio", "transcript": "hello"},
    },
}
AUDIO_INPUT = {
    "format<audio/pcm>.rate": 16000,
    "transcription.keywords": ["antiphon"],
    "transcription.language": "de",
    "transcription.languages": ["de", "en"],
    "transcription.prompt": "music",
    "turn_detection<server_vad>.threshold": 0.7,
    "turn_detection<server_vad>.prefix_padding_ms": 100,
    "turn_detection<server_vad>.silence_duration_ms": 700,
    "turn_detection<semantic_vad>.eagerness": "low",
}
DONE: dict[str, Any] = {
    **{f"{TALK}.audio.input.{name}": value for name, value in AUDIO_INPUT.items()},
    **{f"{HEAR}.audio.input.{name}": value for name, value in AUDIO_INPUT.items()},
    f"{TALK}.audio.input.turn_detection<server_vad>.create_response": False,
    f"{TALK}.audio.input.turn_detection<server_vad>.interrupt_response": False,
    f"{TALK}.audio.input.turn_detection<server_vad>.idle_timeout_ms": 5000,
    f"{HEAR}.audio.input.turn_detection<server_vad>.idle_timeout_ms": 5000,
    f"{TALK}.audio.input.turn_detection<semantic_vad>.create_response": False,
    f"{TALK}.audio.input.turn_detection<semantic_vad>.interrupt_response": False,
    f"{TALK}.audio.output.format<audio/pcm>.rate": 16000,
    f"{TALK}.audio.output.speed": 1.2,
    f"{TALK}.audio.output.voice": "nova",
    f"{TALK}.audio.output.voice.id": "nova",
    f"{TALK}.instructions": "be brief",
    f"{TALK}.max_output_tokens": 7,
    f"{TALK}.output_modalities": ["text"],
    f"{TALK}.parallel_tool_calls": False,
    f"{TALK}.tool_choice": "required",
    f"{TALK}.tool_choice<function>.name": "g",
    f"{TALK}.tools[]<function>.name": "g",
    f"{TALK}.tools[]<function>.description": "does it",
    f"{TALK}.tools[]<function>.parameters": {"properties": {}},
    f"{TALK}.truncation": "disabled",
    f"{TALK}.truncation<retention_ratio>.retention_ratio": 0.5,
    f"{HEAR}.include": LOGPROBS,
    f"{ANSWER}.audio.output.voice": "nova",
    f"{ANSWER}.audio.output.voice.id": "nova",
    f"{ANSWER}.conversation": "none",
    f"{ANSWER}.instructions": "be brief",
    f"{ANSWER}.max_output_tokens": 7,
    f"{ANSWER}.metadata": {"a": "b"},
    f"{ANSWER}.output_modalities": ["text"],
    f"{ANSWER}.parallel_tool_calls": False,
    f"{ANSWER}.tool_choice": "required",
    f"{ANSWER}.tool_choice<function>.name": "g",
    f"{ANSWER}.tools[]<function>.name": "g",
    f"{ANSWER}.tools[]<function>.description": "does it",
    f"{ANSWER}.tools[]<function>.parameters": {"properties": {}},
    **{
        f"{where}{role}.{name}": value
        for where in (ITEM, INPUT)
        for role, parts in CONTENT.items()
        for name, value in parts.items()
    },
    f"{ITEM}<function_call>.arguments": '{"a": 1}',
    f"{ITEM}<function_call>.name": "g",
    f"{ITEM}<function_call>.call_id": "call-2",
    f"{ITEM}<function_call_output>.call_id": "call-2",
    f"{ITEM}<function_call_output>.output": "y",
    f"{ITEM}<mcp_approval_response>.approval_request_id": "item-4",
    f"{ITEM}<mcp_approval_response>.approve": False,
    f"{ITEM}<mcp_approval_response>.reason": "not now",
    f"{ITEM}<mcp_approval_response>.id": "item-2",
    f"{TALK}.tools[]<mcp>.server_url": "https://tools.example/mcp",
    **{
        f"{where}.tools[]<mcp>.{name}": value
        for where in (TALK, ANSWER)
        for name, value in (
            ("server_label", "y"),
            ("allowed_tools", ["a"]),
            ("allowed_tools.read_only", True),
            ("allowed_tools.tool_names", ["a"]),
            ("require_approval", "always"),
            ("require_approval.always", {"read_only": True}),
            ("require_approval.always.read_only", True),
            ("require_approval.always.tool_names", ["a"]),
            ("require_approval.never", {"read_only": True}),
            ("require_approval.never.read_only", True),
            ("require_approval.never.tool_names", ["a"]),
        )
    },
    **{f"{ITEM}{role}.id": "item-2" for role in (*CONTENT, "<function_call>", "<function_call_output>")},
    "<conversation.item.create>.previous_item_id": "root",
    "<conversation.item.truncate>.audio_end_ms": 9,
    "<conversation.item.truncate>.content_index": 1,
    "<conversation.item.truncate>.item_id": "item-2",
    "<response.cancel>.response_id": "resp-1",
}
# Fields that are refused by name: the sent value, and the beginning of the error's path within the message's field.
PROMPT, MCP_TOOL = {"id": "pmpt_1"}, {"type": "mcp", "server_label": "x"}
REFUSED: dict[str, tuple[Any, str]] = {
    f"{TALK}.prompt": (PROMPT, "session.prompt"),
    f"{TALK}.reasoning": ({"effort": "low"}, "session.reasoning"),
    f"{TALK}.tracing": ({"workflow_name": "x"}, "session.tracing"),
    **{
        f"{where}.tools[]<mcp>.{name}": (value, f"{param}.tools[0].{name}")
        for where, param in ((TALK, "session"), (ANSWER, "response"))
        for name, value in (("connector_id", "connector_gmail"), ("tunnel_id", "t"), ("defer_loading", True))
    },
    **{
        f"{ANSWER}.tools[]<mcp>.{name}": (value, f"response.tools[0].{name}")
        for name, value in (("server_url", "https://a.example"), ("authorization", "x"), ("headers", {"X-Key": "x"}))
    },
    **{
        f"{where}.tools[]<mcp>.allowed_callers": (["programmatic"], f"{param}.tools[0].allowed_callers")
        for where, param in ((TALK, "session"), (ANSWER, "response"))
    },
    f"{TALK}.tool_choice<mcp>": (MCP_TOOL, "session.tool_choice.type"),
    f"{TALK}.truncation<retention_ratio>.token_limits": ({"post_instructions": 9}, "session.truncation.token_limits"),
    f"{TALK}.audio.input.transcription.delay": ("low", "session.audio.input.transcription.delay"),
    f"{HEAR}.audio.input.transcription.delay": ("low", "session.audio.input.transcription.delay"),
    **{
        f"{HEAR}.audio.input.turn_detection<{kind}>.create_response": (
            True,
            "session.audio.input.turn_detection.create_response",
        )
        for kind in ("server_vad", "semantic_vad")
    },
    f"{ANSWER}.prompt": (PROMPT, "response.prompt"),
    f"{ANSWER}.reasoning": ({"effort": "low"}, "response.reasoning"),
    f"{ANSWER}.tool_choice<mcp>": (MCP_TOOL, "response.tool_choice.type"),
    f"{ANSWER}.audio.output.format": ({"type": "audio/pcmu"}, "response.audio.output.format"),
    **{
        f"{where}<message><user>.content[].detail": (
            {"type": "input_image", "image_url": PNG, "detail": "tiny"},
            f"{param}.content[0].detail",
        )
        for where, param in ((ITEM, "item"), (INPUT, "response.input[0]"))
    },
    **{
        f"{where}<{kind}>": ({"type": kind}, f"{param}.type")
        for where, param in ((ITEM, "item"), (INPUT, "response.input[0]"))
        for kind in ("mcp_list_tools", "mcp_call", "mcp_approval_request")
    },
}
# Fields that are accepted but have no effect, with the reason for each.
WITHOUT_EFFECT: dict[str, str] = {
    r".*<realtime>\.tools\[\]<mcp>\.(authorization|headers)": "secrets, which no command shows: test_tool_servers",
    r".*<mcp>\.server_description": "the tools have descriptions of their own",
    r".*\.(type|role|event_id|object)": "says what the object is",
    r".*\.status": "of an item that a client creates; the API itself says that it has no effect",
    r".*\.noise_reduction(\.type|\.strength)?": "the one exception, docs/design/hearing.md: it makes hearing worse",
    r".*<message><assistant>\.content\[\]\.audio": "the model reads what it said, not how it sounded",
    r".*<transcription>.*\.interrupt_response": "there is no response to interrupt",
    r".*\.session<realtime>\.model|.*\.transcription\.model": "one model is loaded; a name that is unknown is logged",
    r".*<realtime>\.include": "only together with `transcription`: test_include_adds_to_the_users_transcripts…",
    rf"{re.escape(INPUT)}.*": "read by the code that reads items, whose fields are sent one by one",
    r"<conversation\.item\.(delete|retrieve)>\.item_id|<input_audio_buffer\.append>\.audio": "the event itself",
}


def fields_of(kind: Any, path: str, found: set[str], inside: tuple[Any, ...] = ()) -> set[str]:
    """Return the paths of all fields of a type, including unions and lists. `<tag>`: an object's `type` or `role`."""
    while get_origin(kind) in WRAPPERS:
        kind = get_args(kind)[0]
    if typing_extensions.is_typeddict(kind):
        if kind in inside:
            return found
        hints = get_type_hints(kind)
        for name in ("type", "role"):
            values = get_args(hints.get(name)) if name in hints else ()
            path += f"<{values[0]}>" if len(values) == 1 and isinstance(values[0], str) else ""
        for name, hint in hints.items():
            found.add(f"{path}.{name}")
            fields_of(hint, f"{path}.{name}", found, (*inside, kind))
    elif get_origin(kind) not in (Literal, typing_extensions.Literal):
        for argument in get_args(kind):
            fields_of(argument, path + "[]" * (get_origin(kind) in SEQUENCES), found, inside)
    return found


FIELDS = fields_of(RealtimeClientEventParam, "", set())


def is_known(path: str) -> bool:
    if path in DONE or any(path == r or re.match(rf"{re.escape(r)}[.<\[]", path) for r in REFUSED):
        return True
    is_object = any(other.startswith((f"{path}.", f"{path}[", f"{path}<")) for other in FIELDS)
    return is_object or any(re.fullmatch(pattern, path) for pattern in WITHOUT_EFFECT)


def message(path: str, value: Any = None) -> dict[str, Any]:
    """Return the smallest message with `value` at `path`; without a value, the smallest one with the field's object."""
    segments = re.findall(r"(?:<[^>]*>|[^.<])+", path)
    found: dict[str, Any] = _object(segments, 0, value)
    return found


def _object(segments: list[str], i: int, value: Any) -> Any:
    is_last = i == len(segments) - 1
    tags = re.findall(r"<([^>]*)>", segments[i])
    is_list = "[]" in segments[i]
    # A content part is replaced as a whole, because its type decides which fields it has.
    if is_last or (is_list and i == len(segments) - 2 and isinstance(value, dict) and "type" in value):
        return [value] if is_list else value
    whole = {**dict(zip(("type", "role"), tags, strict=False)), **NEEDED.get(".".join(segments[: i + 1]), {})}
    below = _object(segments, i + 1, value)
    if below not in (None, [None]):
        whole[re.split(r"[<\[]", segments[i + 1])[0]] = below
    return [whole] if is_list else whole


def wire_for(path: str) -> Wire:
    loaded = replace(context(), voices=("heart", "nova"), check_server=lambda server, param: None)
    if path.startswith(HEAR):
        return OpenAITranscription(loaded, "sess-1", 1, "whisper-base", beta=False)
    return OpenAIConversation(loaded, "sess-1", 1, "qwen", beta=False, server_plays=True)


def outcome(path: str, sent: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the session's commands, and the error that is sent to the client (None without an error)."""
    wire = wire_for(path)
    received = wire.feed(json.dumps(sent))
    answers = [json.loads(frame.encode()) for frame in received.answers]
    errors = [answer["error"] for answer in answers if answer["type"] == "error"]
    formats = [
        (part or {}).get("format")
        for answer in answers
        if answer["type"] == "session.updated"
        for part in answer["session"]["audio"].values()
    ]
    voice = [a["session"]["audio"].get("output", {}).get("voice") for a in answers if a["type"] == "session.updated"]
    return f"{received.commands} {formats} {voice}", errors[0] if errors else None


def test_every_field_of_the_types_is_known() -> None:
    assert not [path for path in sorted(FIELDS) if not is_known(path)]


def test_no_field_is_listed_that_the_types_do_not_have() -> None:
    assert not [path for path in DONE if path not in FIELDS]
    assert not [path for path in REFUSED if path not in FIELDS and not any(f.startswith(f"{path}.") for f in FIELDS)]


@pytest.mark.parametrize("path", [p for p in DONE if not p.startswith(INPUT)])
def test_a_field_that_is_done_changes_what_the_session_is_told(path: str) -> None:
    reported, error = outcome(path, message(path, DONE[path]))
    assert error is None
    assert reported != outcome(path, message(path))[0]


@pytest.mark.parametrize("path", REFUSED)
def test_a_field_that_is_not_supported_is_refused_by_name(path: str) -> None:
    value, param = REFUSED[path]
    sent = message(path, value)
    reported, error = outcome(path, sent)
    assert error is not None
    assert error["param"] == param
    assert reported.startswith("[]")


@pytest.mark.parametrize(
    "session",
    [
        {"tracing": "auto"},
        {"tracing": None, "prompt": None, "reasoning": None, "include": None, "parallel_tool_calls": None},
        {"parallel_tool_calls": True, "reasoning": {}},
    ],
)
def test_defaults_that_released_clients_send_are_accepted(session: dict[str, Any]) -> None:
    wire = wire_for(TALK)
    (answer,) = wire.feed(json.dumps({"type": "session.update", "session": {"type": "realtime"} | session})).answers
    shown = json.loads(answer.encode())
    assert shown["type"] == "session.updated"
    assert shown["session"]["tracing"] is None
