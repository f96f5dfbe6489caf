"""Tests updates that have only a part of an object: every dialect merges the parts field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.events.conversation import ConfigureConversation
from antiphon.events.transcription import ConfigureTranscription, ServerVad
from antiphon.protocols.connection import Context
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.openai.conversation import OpenAIConversation
from antiphon.protocols.openai.transcription import OpenAITranscription
from antiphon.protocols.opening import Opening
from antiphon.turns.end_of_turn import semantic_vad
from tests.protocols.gathered import Gathered

# The default of a field that is missing or null, by the object type to which the field belongs; "" for all types.
FLAGS = {"create_response": True, "interrupt_response": True}
SERVER = {"threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 200, "idle_timeout_ms": None}
VAD: dict[str, dict[str, Any]] = {"": FLAGS, "server_vad": SERVER, "semantic_vad": {"eagerness": "auto"}}
PCM: dict[str, dict[str, Any]] = {"": {}, "audio/pcm": {"rate": 24000}, "audio/pcmu": {}, "audio/pcma": {}}


def parts(types: list[str], **leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with any of the fields in `leaves`. Their `type` is in `types` or missing."""
    return st.fixed_dictionaries({}, optional={"type": st.sampled_from(types)} | leaves)


NULL = st.none()
UPDATE = st.fixed_dictionaries(
    {},
    optional={
        "turn_detection": NULL
        | parts(
            ["server_vad", "semantic_vad"],
            create_response=st.sampled_from([False, None]),
            interrupt_response=st.booleans(),
            eagerness=st.sampled_from(["low", "high", None]),
        )
        | parts(
            ["server_vad", "semantic_vad"],
            threshold=st.sampled_from([0.25, 0.75, None]),
            prefix_padding_ms=st.sampled_from([100, 400]),
            silence_duration_ms=st.sampled_from([500, 700, None]),
            idle_timeout_ms=st.sampled_from([5000, 9000.0, None]),
        ),
        "format": parts([*PCM][1:], rate=st.sampled_from([8000, 16000, 24000, None])),
        "noise_reduction": NULL | parts(["near_field", "far_field"], strength=st.sampled_from([1, 2])),
        "transcription": NULL
        | st.fixed_dictionaries(
            {},
            optional={
                "model": st.sampled_from(["whisper-1", "default"]),
                "language": st.sampled_from(["en", "de", None]),
                "prompt": st.sampled_from(["Ada", "", None]),
            },
        ),
        "tool_choice": st.sampled_from(["auto", "required"]) | parts(["function"], name=st.sampled_from(["a", "b"])),
        "truncation": st.sampled_from(["auto", "disabled"])
        | parts(["retention_ratio"], retention_ratio=st.sampled_from([0.5, 1])),
    },
)
INPUT = ("turn_detection", "format", "noise_reduction", "transcription")


class Refused(Exception):
    """Raised for an update that is refused as a whole."""


def merged(before: Any, change: Any, leaves: dict[str, dict[str, Any]], *, strict: bool) -> Any:
    """Merge a change into an object with a type, as docs/wire describes it. This reference uses no code of the server.

    `strict`: a field of another type is an error.
    """
    if change is None:
        return None
    kept = before or {}
    kind = change.get("type") or kept.get("type") or "server_vad"
    own = leaves[""] | leaves[kind]
    others = {name for other in leaves if other not in ("", kind) for name in leaves[other]}
    if strict and any(change.get(name) is not None for name in others):
        raise Refused
    found = {name: change.get(name, kept.get(name, own[name])) for name in own}
    return {"type": kind} | {name: own[name] if value is None else value for name, value in found.items()}


def after(session: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a conversation after an update."""
    changed = dict(session)
    for name, change in update.items():
        before = session[name]
        kept = before if isinstance(before, dict) else {}
        match name:
            case "turn_detection":
                changed[name] = merged(before, change, VAD, strict=True)
            case "format":
                changed[name] = merged(before, change, PCM, strict=False)
            case "transcription" if change is not None:
                changed[name] = {k: v for k, v in (kept | change).items() if v}
            case _:
                changed[name] = kept | change if isinstance(change, dict) else change
        if name == "tool_choice" and isinstance(change, dict) and "name" not in changed[name]:
            raise Refused
        if name == "truncation" and isinstance(change, dict) and changed[name].keys() != {"type", "retention_ratio"}:
            raise Refused
    return changed


def context() -> Context:
    count = iter(range(10**6))
    return Context(
        models=ModelNames(("whisper-base",)),
        conversation_models=ModelNames(("qwen",)),
        steady_s=lambda: 0.0,
        now_s=lambda: 1.0,
        new_id=lambda prefix: f"{prefix}{next(count)}",
        knows_language=("en", "de").__contains__,
        max_append_bytes=1 << 20,
        voices=("heart",),
    )


FIRST = {
    "turn_detection": {"type": "server_vad"} | SERVER | FLAGS,
    "format": {"type": "audio/pcm", "rate": 24000},
    "noise_reduction": None,
    "transcription": None,
    "tool_choice": "auto",
    "truncation": "auto",
}


def sent(wire: Gathered, update: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the answer to an update, and the configuration that the session gets with it."""
    wire.commands(), wire.frames()
    wire.receive(json.dumps(update))
    (answer,) = [json.loads(f.encode()) for f in wire.frames()]
    found = [c.config for c in wire.commands() if isinstance(c, ConfigureConversation | ConfigureTranscription)]
    return answer, (found or [None])[-1]


def in_force(vad: dict[str, Any] | None) -> ServerVad | None:
    """Return the turn detection that the session should have, from the fields that it shows."""
    if vad is None:
        return None
    if vad["type"] == "semantic_vad":
        return semantic_vad(vad["eagerness"])
    return ServerVad(vad["threshold"], vad["prefix_padding_ms"], vad["silence_duration_ms"])


def ga(update: dict[str, Any]) -> dict[str, Any]:
    own = {k: v for k, v in update.items() if k not in INPUT}
    return {"type": "realtime", "audio": {"input": {k: v for k, v in update.items() if k in INPUT}}} | own


def beta(update: dict[str, Any]) -> dict[str, Any]:
    names = {"format": "input_audio_format", "transcription": "input_audio_transcription"}
    names["noise_reduction"] = "input_audio_noise_reduction"
    return {names.get(k, k): v for k, v in update.items() if k != "truncation"}


def check_conversation(update: Callable[[dict[str, Any]], dict[str, Any]], changes: list[dict[str, Any]]) -> None:
    """Send updates to a conversation, and compare the shown fields and the configuration with the reference."""
    is_beta = update is beta
    wire = Gathered(OpenAIConversation(context(), "sess-1", 1, "gpt-realtime", beta=is_beta))
    session: dict[str, Any] = dict(FIRST)
    for change in changes:
        if is_beta:
            change = {k: v for k, v in change.items() if k not in ("truncation", "format")}
        answer, config = sent(wire, {"type": "session.update", "session": update(change)})
        try:
            session = after(session, change)
        except Refused:
            assert (answer["type"], config) == ("error", None), change
            continue
        assert answer["type"] == "session.updated", answer
        shown = answer["session"]
        if is_beta:
            names = dict(zip([k for k in session if k != "truncation"], beta(session), strict=True))
            assert {k: shown[names[k]] for k in names if k != "format"} == {
                k: session[k] for k in names if k != "format"
            }
        else:
            keys = shown["audio"]["input"] | {k: shown[k] for k in ("tool_choice", "truncation")}
            assert keys == session
        vad = session["turn_detection"] or FLAGS
        assert config.transcription.vad == in_force(session["turn_detection"])
        assert (config.create_response, config.interrupt_response) == (
            vad["create_response"],
            vad["interrupt_response"],
        )
        assert config.idle_timeout_ms == vad.get("idle_timeout_ms")
        texts = session["transcription"] or {}
        assert config.transcription.language == texts.get("language")
        assert config.transcription.prompt == texts.get("prompt", "")
        choice, cut = session["tool_choice"], session["truncation"]
        assert config.tool_choice == (choice["name"] if isinstance(choice, dict) else choice)
        assert config.truncation == (cut["retention_ratio"] if isinstance(cut, dict) else cut)


@settings(max_examples=100)
@given(st.lists(UPDATE, min_size=2, max_size=3))
def test_the_updates_of_a_conversation_are_merged_leaf_by_leaf(changes: list[dict[str, Any]]) -> None:
    check_conversation(ga, changes)


@settings(max_examples=40)
@given(st.lists(UPDATE, min_size=2, max_size=3))
def test_the_updates_of_a_beta_conversation_are_merged_leaf_by_leaf(changes: list[dict[str, Any]]) -> None:
    check_conversation(beta, changes)


@settings(max_examples=40)
@given(st.lists(UPDATE, min_size=2, max_size=3), st.booleans())
def test_the_updates_of_a_transcription_are_merged_leaf_by_leaf(changes: list[dict[str, Any]], is_beta: bool) -> None:
    wire = Gathered(OpenAITranscription(context(), "sess-1", 1, "whisper-1", beta=is_beta))
    session: dict[str, Any] = FIRST | {"transcription": {"model": "whisper-1"}}
    for change in changes:
        given = {k: v for k, v in change.items() if k in INPUT}
        if is_beta:
            given.pop("format", None)
            message = {"type": "transcription_session.update", "session": beta(given)}
        else:
            message = {"type": "session.update", "session": {"type": "transcription", "audio": {"input": given}}}
        answer, config = sent(wire, message)
        # Null changes nothing: a transcription session always transcribes.
        given = {k: v for k, v in given.items() if (k, v) != ("transcription", None)}
        try:
            session = after(session, given)
        except Refused:
            assert (answer["type"], config) == ("error", None), change
            continue
        assert answer["type"].endswith("session.updated"), answer
        vad = session["turn_detection"]
        # A transcription has no responses to request, and shows an idle timeout only if it is set.
        kept = vad and {k: v for k, v in vad.items() if k not in FLAGS and (k, v) != ("idle_timeout_ms", None)}
        names = beta(dict.fromkeys(INPUT)) if is_beta else dict.fromkeys(INPUT)
        shown = answer["session"] if is_beta else answer["session"]["audio"]["input"]
        shown = dict(zip(INPUT, [shown[name] for name in names], strict=True))
        expected = {k: session[k] for k in INPUT} | {"turn_detection": kept}
        assert shown | ({"format": None} if is_beta else {}) == expected | ({"format": None} if is_beta else {})
        assert config.vad == in_force(vad)
        assert config.idle_timeout_ms == (vad or {}).get("idle_timeout_ms")
        assert config.language == session["transcription"].get("language")


@settings(max_examples=40)
@given(st.lists(UPDATE, min_size=2, max_size=3), st.booleans())
def test_the_updates_of_full_duplex_are_merged_leaf_by_leaf(changes: list[dict[str, Any]], nested: bool) -> None:
    wire = Gathered(DuplexConnection(Opening(duplex=True), context()))
    wire.open()
    wire.receive(json.dumps({"type": "session.update", "session": {}}))
    session: dict[str, Any] = FIRST | {"turn_detection": None}
    for change in changes:
        given = {k: v for k, v in change.items() if k in ("turn_detection", "transcription", "tool_choice")}
        if nested:
            own = {k: given[k] for k in given if k in INPUT}
            update = {"audio": {"input": own}} | {k: v for k, v in given.items() if k not in INPUT}
        else:
            update = beta(given)
        answer, config = sent(wire, {"type": "session.update", "session": update})
        try:
            session = after(session, given)
        except Refused:
            assert (answer["type"], config) == ("error", None), change
            continue
        assert answer["type"] == "session.updated", answer
        shown = answer["session"]
        vad = session["turn_detection"]
        least = {"min_speech_duration_ms": 96} if vad and vad["type"] == "server_vad" else {}
        assert shown["turn_detection"] == (vad and vad | least)
        assert shown["input_audio_transcription"] == session["transcription"]
        assert shown["tool_choice"] == session["tool_choice"]
        # Without turn detection, a cascade ends turns as with semantic_vad.
        assert config.transcription.vad == in_force(vad or {"type": "semantic_vad", "eagerness": "auto"})
        assert config.create_response == (vad or FLAGS)["create_response"]
        assert config.interrupt_response == (vad or FLAGS)["interrupt_response"]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        # Fields that the new type does not have are dropped; fields that both types have stay.
        (
            [
                {"type": "server_vad", "create_response": False, "idle_timeout_ms": 9000},
                {"type": "semantic_vad", "eagerness": "low"},
                {"eagerness": "high"},
            ],
            {"type": "semantic_vad", "eagerness": "high", "create_response": False, "interrupt_response": True},
        ),
        (
            [{"type": "semantic_vad", "interrupt_response": False}, {"type": "server_vad", "idle_timeout_ms": 9000}],
            {"type": "server_vad"}
            | SERVER
            | {"create_response": True, "interrupt_response": False, "idle_timeout_ms": 9000},
        ),
        # Turn detection is turned off and on again, so no earlier field is left.
        ([{"type": "semantic_vad", "create_response": False}, None, {}], {"type": "server_vad"} | SERVER | FLAGS),
    ],
)
def test_turn_detection_keeps_what_both_types_have(changes: list[dict[str, Any]], shown: dict[str, Any]) -> None:
    wire = Gathered(OpenAIConversation(context(), "sess-1", 1, "gpt-realtime", beta=False))
    for change in changes:
        answer, _ = sent(wire, {"type": "session.update", "session": ga({"turn_detection": change})})
    found = answer["session"]["audio"]["input"]["turn_detection"]
    assert found == shown
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in shown.items()}


def test_the_extras_of_full_duplex_are_merged_by_their_names() -> None:
    wire = Gathered(DuplexConnection(Opening(duplex=True), context()))
    wire.open()
    extras = []
    for extra in ({"auto_response": False}, {"top_k": 5}, {"top_p": 0.5, "top_k": None}, {"full_duplex": True}):
        wire.receive(json.dumps({"type": "session.update", "session": {"extra_body": extra}}))
        answer = [json.loads(f.encode()) for f in wire.frames()][-1]
        config: Any = wire.commands()[-1]
        top_k = config.config.duplex.sampling.top_k
        extras.append((answer["session"]["extra_body"], config.config.create_response, top_k))
    assert extras == [
        ({"auto_response": False}, False, None),
        ({"auto_response": False, "top_k": 5}, False, 5),
        ({"auto_response": False, "top_k": None, "top_p": 0.5}, False, None),
        ({"top_k": None, "top_p": 0.5, "full_duplex": True}, True, None),
    ]
