"""Tests languages that no loaded voice speaks, in requests and sessions, and voices with other names."""

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
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.session_fields import OutputFields, SessionOutput, apply_output
from antiphon.protocols.speech import rest
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.speech.stream import SpeechDialect
from antiphon.protocols.vllm.dialect import VllmDialect

REMEDY = "for another language the server needs eSpeak NG (apt install espeak-ng) or another --synthesizer"


def context(spoken: tuple[str, ...] = ("en",)) -> Context:
    return Context(
        models=ModelNames(("ears",)),
        conversation_models=ModelNames(("writer",)),
        voices=("heart", "emma"),
        spoken_languages=spoken,
        knows_language=("en", "de").__contains__,
        now_s=lambda: 1.0,
        steady_s=lambda: 0.0,
        new_id=lambda prefix: prefix,
    )


def duplex(made: Context) -> Any:
    wire = DuplexConnection(Opening(duplex=True), made)
    wire.open()
    return wire


def updated(wire: Any, fields: dict[str, Any]) -> dict[str, Any]:
    answers = wire.feed(json.dumps({"type": "session.update"} | fields)).answers
    (frame,) = [json.loads(frame.encode()) for frame in answers]
    return dict(frame)


def german(name: str, language: str = "de") -> dict[str, Any]:
    transcription = {"model": "ears", "language": language}
    return {
        "ga": {"session": {"type": "realtime", "audio": {"input": {"transcription": transcription}}}},
        "beta": {"session": {"input_audio_transcription": transcription}},
        "duplex": {"session": {"input_audio_transcription": transcription}},
        "vllm": {"model": "writer", "language": language},
    }[name]


WIRES: dict[str, Callable[[Context], Any]] = {
    "ga": lambda made: OpenAIConversation(made, "s", 1, "writer", beta=False),
    "beta": lambda made: OpenAIConversation(made, "s", 1, "writer", beta=True),
    "duplex": duplex,
    "vllm": VllmDialect,
}


@pytest.mark.parametrize("name", WIRES)
def test_a_session_in_a_language_that_no_voice_speaks_is_warned(name: str) -> None:
    (warning,) = updated(WIRES[name](context()), german(name))["warnings"]
    assert warning["code"] == "language_not_spoken"
    assert warning["param"].endswith("language")
    assert warning["message"] == f"No loaded voice speaks 'de'; there are: en; {REMEDY}."
    for made, language in ((context(("en", "de")), "de"), (context(()), "de"), (context(), "en")):
        assert "warnings" not in updated(WIRES[name](made), german(name, language))


@pytest.mark.parametrize("name", ["ga", "beta", "duplex"])
def test_a_language_by_its_name_is_refused_with_its_code(name: str) -> None:
    assert updated(WIRES[name](context()), german(name, "German"))["error"]["message"] == (
        "Invalid value: 'German' is no language of this model. Write 'de'."
    )
    message = updated(WIRES[name](context()), german(name, "Klingon"))["error"]["message"]
    assert message == "Invalid value: 'Klingon' is no language of this model."


def test_speech_in_a_language_that_no_voice_speaks_is_refused_with_what_to_do() -> None:
    catalog = SpeechCatalog(
        ModelNames(("voice",)), ("heart",), ("en",), False, lambda _: None, lambda *_: None, lambda *_: None
    )
    expected = f"Invalid value for 'language': the loaded model speaks en; {REMEDY}."
    with pytest.raises(RemoteProtocolError) as refused:
        rest.parse(b'{"input": "Hallo", "language": "German"}', catalog)
    assert (refused.value.message, refused.value.param) == (expected, "language")
    answers = SpeechDialect(catalog).feed(json.dumps({"type": "session.config", "language": "de"})).answers
    assert expected in b"".join(frame.encode().encode() for frame in answers).decode()


def test_the_same_voice_in_capitals_is_no_change_once_it_has_spoken() -> None:
    output = SessionOutput(voice="heart")
    for name in ("Heart", "HEART"):
        assert apply_output(output, OutputFields(voice=name), context(), has_spoken=True).voice == name
    for name in ("emma", "alloy"):
        with pytest.raises(RemoteProtocolError, match="Cannot update"):
            apply_output(output, OutputFields(voice=name), context(), has_spoken=True)
