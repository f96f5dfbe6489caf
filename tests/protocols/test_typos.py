"""Tests unknown names in every dialect: mistyped names are reported to the client, and other names are accepted.

An unknown voice has the same error code in all dialects.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.connection import Context
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.openai.conversation import OpenAIConversation
from antiphon.protocols.openai.transcription import OpenAITranscription
from antiphon.protocols.opening import Opening
from antiphon.protocols.rest import chat, transcription_form
from antiphon.protocols.speech import rest as speech
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.speech.stream import SpeechDialect
from antiphon.protocols.video.stream import VideoDialect
from antiphon.protocols.vllm.dialect import VllmDialect

VOICES = ("heart", "emma")


def context(*, strict: bool = False) -> Context:
    count = iter(range(10**9))
    return Context(
        models=ModelNames(("whisper-base",), strict),
        conversation_models=ModelNames(("qwen",), strict),
        voices=VOICES,
        now_s=lambda: 1.0,
        steady_s=lambda: 0.0,
        new_id=lambda prefix: f"{prefix}{next(count)}",
    )


def catalog(*, strict: bool = False) -> SpeechCatalog:
    names = ModelNames(("hibari-heart",), strict)
    return SpeechCatalog(names, VOICES, ("en",), False, lambda _: None, lambda *_: None, lambda *_: None)


def duplex(*, strict: bool = False) -> Any:
    wire = DuplexConnection(Opening(duplex=True), context(strict=strict))
    wire.open()
    return wire


WIRES: dict[str, Callable[..., Any]] = {
    "ga": lambda **of: OpenAIConversation(context(**of), "s", 1, "qwen", beta=False),
    "beta": lambda **of: OpenAIConversation(context(**of), "s", 1, "qwen", beta=True),
    "transcription": lambda **of: OpenAITranscription(context(**of), "s", 1, "whisper-base", beta=False),
    "vllm": lambda **of: VllmDialect(context(**of)),
    "duplex": duplex,
    "speech": lambda **of: SpeechDialect(catalog(**of)),
    "video": lambda strict=False: VideoDialect(lambda: 0.0, voices=VOICES, strict=strict),
}
# The first message of each dialect.
BEGINS = {
    "vllm": {"type": "session.update", "model": "qwen"},
    "duplex": {"type": "session.heartbeat"},
    "speech": {"type": "session.config"},
    "video": {"type": "session.config"},
}


def noted(wire: Any, message: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(frame.encode()) for frame in wire.feed(json.dumps(message)).answers]


def begun(name: str) -> Any:
    wire = WIRES[name]()
    if name in BEGINS:
        noted(wire, BEGINS[name])
    return wire


APPEND, COMMIT = "input_audio_buffer.append", "input_audio_buffer.commit"


@pytest.mark.parametrize(
    ("name", "message", "meant"),
    [
        ("ga", {"type": APPEND, "audio": "AAAA", "sample_rate": 16000}, ""),
        ("ga", {"type": "response.create", "responce": {}}, "response"),
        ("ga", {"type": "session.update", "session": {"type": "realtime"}, "sesion": {}}, "session"),
        ("ga", {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "rol": "x"}}, "role"),
        (
            "ga",
            {
                "type": "conversation.item.create",
                "item": {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "x", "txet": "y"}],
                },
            },
            "text",
        ),
        ("beta", {"type": "session.update", "session": {}, "sesion": {}}, "session"),
        ("transcription", {"type": APPEND, "audio": "AAAA", "adio": ""}, "audio"),
        ("vllm", {"type": COMMIT, "finall": True}, "final"),
        ("vllm", {"type": APPEND, "audio": "AAAA", "audo": ""}, "audio"),
        ("duplex", {"type": APPEND, "audio": "AAAA", "sample_rat_hz": 8000}, "sample_rate_hz"),
        ("duplex", {"type": COMMIT, "finl": False}, "final"),
        ("speech", {"type": "session.config", "voce": "emma"}, "voice"),
        ("speech", {"type": "input.text", "txt": "x"}, "text"),
        ("video", {"type": "video.frame", "data": "", "frame_idd": 1}, "frame_id"),
        ("video", {"type": "video.query", "txt": "x"}, "text"),
    ],
)
def test_a_name_that_is_nearly_one_is_an_error_that_says_which(name: str, message: dict[str, Any], meant: str) -> None:
    wire = begun(name)
    received = wire.feed(json.dumps(message))
    assert list(received.commands) == []
    (answer,) = [json.loads(frame.encode()) for frame in received.answers]
    assert answer["type"] == "error"
    said = json.dumps(answer)
    assert "Unknown parameter" in said
    assert not meant or f"Did you mean '{meant}'?" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", {"type": COMMIT, "final": True, "priority": 3}),
        ("duplex", {"type": APPEND, "audio": "AAAAAAAA", "client_clock": 3}),
        ("speech", {"type": "session.config", "speaker_id": 4, "batch": 1}),
        ("video", {"type": "video.frame", "data": "/9j/4AAQ", "camera": 1}),
    ],
)
def test_a_name_that_is_nothing_like_ours_is_a_vendors_own(name: str, message: dict[str, Any]) -> None:
    assert [frame for frame in noted(begun(name), message) if frame["type"] == "error"] == []


def test_an_update_tells_in_its_answer_what_it_has_not_read() -> None:
    (frame,) = noted(WIRES["vllm"](), {"type": "session.update", "model": "default", "languge": "de", "mood": 1})
    assert (frame["type"], frame["model"]) == ("session.updated", "default")
    assert [(w["code"], w["param"]) for w in frame["warnings"]] == [
        ("unknown_parameter", "languge"),
        ("unknown_parameter", "mood"),
    ]
    assert frame["warnings"][0]["message"] == "Unknown parameter: 'languge'. Did you mean 'language'?"
    assert noted(WIRES["vllm"](), {"type": "session.update", "model": "default"}) == [
        {"type": "session.updated", "model": "default"}
    ]
    wire = duplex()
    session = {"instrctions": "x", "audio": {"input": {"formt": "pcm16"}}}
    (created,) = noted(wire, {"type": "session.update", "session": session, "sesion": {}})
    assert created["type"] == "session.created"
    assert [w["param"] for w in created["warnings"]] == ["sesion", "session.instrctions", "session.audio.input.formt"]
    (updated,) = noted(wire, {"type": "session.update", "event_id": "a", "instructions": "x", "tempo": 2})
    assert [w["param"] for w in updated["warnings"]] == ["tempo"]
    # Null turns a setting off, so a null field is reported if its name resembles a known name.
    fields = {"turn_detecton": None, "mood": None}
    (updated,) = noted(wire, {"type": "session.update", "event_id": "a", "session": fields})
    assert [w["param"] for w in updated["warnings"]] == ["session.turn_detecton"]
    (updated,) = noted(wire, {"type": "session.update", "event_id": "a", "session": {"instructions": "x"}})
    assert "warnings" not in updated


@pytest.mark.parametrize(
    ("read", "body", "meant"),
    [
        (lambda body: speech.parse(body, catalog()), {"input": "x", "response_fromat": "pcm"}, "response_format"),
        (chat.parse, {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokns": 1}, "max_tokens"),
        (chat.parse, {"model": "m", "messages": [{"role": "user", "contnt": "x", "content": ""}]}, "content"),
    ],
)
def test_a_body_with_a_name_that_is_nearly_one_is_refused(read: Any, body: dict[str, Any], meant: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"Did you mean '{meant}'") as error:
        read(json.dumps(body).encode())
    assert error.value.code == "unknown_parameter"


def test_a_form_with_a_name_that_is_nearly_one_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="Did you mean 'language'"):
        transcription_form.parse_form({"model": ["m"], "languge": ["de"]}, ["de"])
    read = transcription_form.parse_form({"model": ["m"], "user": ["x"], "timestamp_granularities[]": []}, [])
    assert read.model == "m"


def test_what_clients_of_other_servers_send_is_no_slip() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "top_logprobs": 1, "min_tokens": 2}
    assert chat.parse(json.dumps(body).encode()).model == "m"


# --- voices -----------------------------------------------------------------------------------------------------------


def chosen(name: str, voice: str) -> dict[str, Any]:
    """Return the message with which a client of this dialect chooses a voice."""
    return {
        "ga": {
            "type": "session.update",
            "session": {"type": "realtime", "audio": {"output": {"voice": voice}}},
        },
        "beta": {"type": "session.update", "session": {"voice": voice}},
        "vllm": {"type": "session.update", "model": "qwen", "voice": voice},
        "duplex": {"type": "session.update", "session": {"voice": voice}},
        "speech": {"type": "session.config", "voice": voice},
        "video": {"type": "session.config", "voice": voice},
    }[name]


@pytest.mark.parametrize("name", ["ga", "beta", "vllm", "duplex", "speech", "video"])
def test_a_voice_that_there_is_not_is_refused_with_those_that_there_are(name: str) -> None:
    def refusals(voice: str, *, strict: bool = False) -> list[str]:
        frames = noted(WIRES[name](strict=strict), chosen(name, voice))
        return [json.dumps(frame) for frame in frames if frame["type"] == "error"]

    (error,) = refusals("nosuch")
    assert "The voice `nosuch` does not exist; there are: heart, emma." in error
    # Clients send one of OpenAI's voices if their user has not chosen a voice.
    assert refusals("Emma") == refusals("alloy") == []
    (error,) = refusals("alloy", strict=True)
    assert "The voice `alloy` does not exist" in error


def test_what_a_client_gives_back_of_an_answer_is_read() -> None:
    # A message from `message.model_dump()` of OpenAI's clients.
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "function_call": None,
        "audio": None,
        "annotations": [],
    }
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, answer], "functions": None}
    assert len(chat.parse(json.dumps(body).encode()).messages) == 2
