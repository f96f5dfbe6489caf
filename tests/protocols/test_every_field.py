"""Sends every JSON type in every field of the realtime dialects' messages. Errors name the field; nothing raises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from antiphon.protocols.bridge import BridgeConnection
from antiphon.protocols.bridges.minicpmo_worker import (
    MinicpmoWorkerBridge,
    WorkerChunk,
    WorkerPause,
    WorkerPrepare,
    WorkerResume,
    WorkerStop,
)
from antiphon.protocols.bridges.omni import OmniBridge, OmniConfig, OmniInputDone
from antiphon.protocols.bridges.openbmb import OpenbmbAppend, OpenbmbBridge, OpenbmbClose, OpenbmbInit
from antiphon.protocols.connection import Context
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.duplex.messages import SIGNALLED, DuplexMessage
from antiphon.protocols.duplex.session_fields import DuplexUpdateFields
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.openai.conversation import ConversationInput, OpenAIConversation
from antiphon.protocols.openai.transcription import OpenAITranscription, TranscriptionMessage
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.beta_session import BetaFields
from antiphon.protocols.realtime.items import (
    FunctionCallFields,
    FunctionCallOutputFields,
    InputAudioPart,
    InputImagePart,
    ItemReference,
    MessageFields,
    OutputAudioPart,
    ResponseFields,
    TextPart,
    ToolFields,
)
from antiphon.protocols.realtime.session_fields import GaFields
from antiphon.protocols.vllm.dialect import VllmDialect
from antiphon.protocols.vllm.messages import VllmMessage
from antiphon.protocols.wire import Received
from tests.protocols.struct_values import fields_of_every_type, has_wrong_type

AUDIO = "AAAA"


def context() -> Context:
    count = iter(range(10**9))
    return Context(
        models=ModelNames(("whisper-base",)),
        conversation_models=ModelNames(("qwen",)),
        voices=("heart",),
        now_s=lambda: 1.0,
        steady_s=lambda: 0.0,
        new_id=lambda prefix: f"{prefix}{next(count)}",
    )


def opened_duplex() -> DuplexConnection:
    wire = DuplexConnection(Opening(duplex=True), context())
    wire.open()
    wire.feed('{"type": "session.heartbeat"}')
    return wire


def begun_vllm() -> VllmDialect:
    wire = VllmDialect(context())
    wire.feed('{"type": "session.update", "model": "default"}')
    return wire


DIALECTS: dict[str, Any] = {
    "openai": lambda: OpenAIConversation(context(), "sess-1", 1, "qwen", beta=False, server_plays=True),
    "transcription": lambda: OpenAITranscription(context(), "sess-1", 1, "whisper-base", beta=False),
    "duplex": opened_duplex,
    "vllm": begun_vllm,
    "omni": lambda: BridgeConnection(Opening(), context(), OmniBridge),
    "openbmb": lambda: BridgeConnection(Opening(), context(), OpenbmbBridge),
    "minicpmo": lambda: BridgeConnection(Opening(), context(), MinicpmoWorkerBridge),
}
MESSAGES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "openai": get_args(ConversationInput),
    "transcription": get_args(TranscriptionMessage),
    "duplex": get_args(DuplexMessage),
    "vllm": get_args(VllmMessage),
    "omni": (OmniConfig, OmniInputDone),
    "openbmb": (OpenbmbInit, OpenbmbAppend, OpenbmbClose),
    "minicpmo": (WorkerPrepare, WorkerChunk, WorkerPause, WorkerResume, WorkerStop),
}
# Objects inside messages: the dialect, the surrounding message (`...` marks the object's place), and the object's path.
INSIDE: tuple[tuple[str, type[msgspec.Struct], dict[str, Any], str], ...] = (
    ("openai", GaFields, {"type": "session.update", "session": ...}, "session"),
    ("openai", BetaFields, {"type": "session.update", "session": ...}, "session"),
    ("openai", ToolFields, {"type": "session.update", "session": {"tools": [...]}}, "session.tools[0]"),
    ("openai", ResponseFields, {"type": "response.create", "response": ...}, "response"),
    ("openai", ItemReference, {"type": "response.create", "response": {"input": [...]}}, "response.input[0]"),
    *(
        ("openai", kind, {"type": "conversation.item.create", "item": ...}, "item")
        for kind in (MessageFields, FunctionCallFields, FunctionCallOutputFields)
    ),
    *(
        ("openai", kind, message, "item.content[0]")
        for kind, role, part in (
            (TextPart, "user", "input_text"),
            (InputAudioPart, "user", "input_audio"),
            (InputImagePart, "user", "input_image"),
            (TextPart, "assistant", "output_text"),
            (OutputAudioPart, "assistant", "output_audio"),
        )
        for message in (
            {
                "type": "conversation.item.create",
                "item": {"type": "message", "role": role, "content": [{"type": part, "...": ...}]},
            },
        )
    ),
    ("duplex", DuplexUpdateFields, {"type": "session.update", "session": ...}, "session"),
    ("duplex", DuplexUpdateFields, {"type": "session.update", "...": ...}, ""),
    *(
        ("duplex", kind, {"type": "turn.signal", "event": name, "payload": ...}, "payload")
        for name, kind in SIGNALLED.items()
    ),
)


def errors(received: Received[Any]) -> list[Any]:
    answers = [json.loads(frame.encode()) for frame in received.answers]
    return [answer["error"] for answer in answers if answer["type"] == "error"]


def placed(around: Any, fields: dict[str, Any]) -> Any:
    """Return `around` with the fields in place of `...`: as an object, or merged into the fields next to it."""
    if around is ...:
        return fields
    if isinstance(around, list):
        return [placed(value, fields) for value in around]
    if isinstance(around, dict):
        if "..." in around:
            return {k: v for k, v in around.items() if k != "..."} | fields
        return {key: placed(value, fields) for key, value in around.items()}
    return around


def wrong_and_right(kind: type[msgspec.Struct], around: Any) -> Iterator[tuple[str, dict[str, Any], bool]]:
    config = kind.__struct_config__
    tagged = {config.tag_field: config.tag} if config.tag_field else {}
    for path, fields in fields_of_every_type(kind):
        yield path, placed(around, tagged | fields), has_wrong_type(kind, fields)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in MESSAGES.items() for kind in kinds])
def test_a_field_of_another_type_is_an_error_that_names_it(name: str, kind: type[msgspec.Struct]) -> None:
    for path, message, is_wrong in wrong_and_right(kind, ...):
        found = errors(DIALECTS[name]().feed(json.dumps(message)))
        if is_wrong:
            assert found, (path, message)
            if isinstance(found[0], dict) and "param" in found[0]:
                assert found[0]["param"].startswith(path)


@pytest.mark.parametrize(("name", "kind", "around", "where"), INSIDE)
def test_a_field_of_an_object_inside_a_message_is_named_by_its_path(
    name: str, kind: type[msgspec.Struct], around: dict[str, Any], where: str
) -> None:
    for path, message, is_wrong in wrong_and_right(kind, around):
        found = errors(DIALECTS[name]().feed(json.dumps(message)))
        if is_wrong:
            assert found, (path, message)
            # The path in the error may be inside the field.
            assert found[0]["param"].startswith(".".join(filter(None, (where, path)))), (path, message)
