"""Tests Gemini Live's messages in both directions, what a setup configures, and when the model's turn is complete."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode, urlsafe_b64encode
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
    Item,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    Usage,
    UserTurnCommitted,
)
from antiphon.events.duplex import AppendFrames, BargeIn, EpochRaised, PlayoutEnded
from antiphon.events.transcription import AppendAudio, CommitAudio, ServerVad, SpeechStarted, TranscriptDelta
from antiphon.protocols.connection import Context
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.gemini.setup import json_schema
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from antiphon.protocols.resume import DrainNotice
from tests.protocols.gathered import Gathered
from tests.traces.harness import image

PATH = "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
AT = ContentPosition("resp_1", "item_1", 0)
# The first second of base64 for URLs, as the client for Python writes it, has letters of that alphabet.
SECOND = urlsafe_b64encode(np.full(16_000, -257, "<i2").tobytes()).decode()
CALL = ArgumentsDone(AT, "call_1", "f", '{"a": 1}')


class Client:
    """A connection, and what it logs."""

    def __init__(self, unit_ms: int = 0, *, strict: bool = False, **setup: Any) -> None:
        count = iter(range(10**6))
        self.logged: list[str] = []
        self.context = Context(
            models=ModelNames(("whisper-base",)),
            conversation_models=ModelNames(("qwen",), strict=strict, unit_ms=unit_ms),
            voices=("heart",),
            now_s=lambda: 1.0,
            steady_s=lambda: 0.0,
            new_id=lambda prefix: f"{prefix}{next(count)}",
            knows_language=lambda code: code in ("en", "de"),
            log_alias=lambda name, _: self.logged.append(name),
            log_ignored=lambda names, _: self.logged.extend(names),
            resume_token="token",
        )
        opening = Opening(path=PATH)
        self.wire = Gathered(dialect_of(opening).connect(opening, self.context))
        self.wire.open()
        self.setup = setup

    def begun(self) -> Client:
        self.say(setup=self.setup)
        return self

    def say(self, **message: Any) -> None:
        self.wire.receive(json.dumps(message))

    def config(self) -> Any:
        (command,) = self.begun().wire.commands()
        assert isinstance(command, ConfigureConversation)
        return command.config

    def frames(self) -> list[Any]:
        return [json.loads(frame.encode()) for frame in self.wire.frames()]

    def closes(self, data: str) -> tuple[int, str] | None:
        self.wire.wire.feed(data)
        found: tuple[int, str] | None = self.wire.finishing
        return found


def respond(client: Client, status: Any = "completed") -> None:
    client.wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    client.wire.send(ResponseTextDelta(AT, "Hello.", True))
    client.wire.send(ResponseAudioDelta(AT, np.full(2400, 0.25, np.float32), 24_000))
    client.wire.send(ResponseDone(Response("resp_1", True, None, None, status=status, usage=Usage(9, 0, 3))))


def contents(client: Client) -> list[Any]:
    return [frame["serverContent"] for frame in client.frames() if "serverContent" in frame]


# --- the setup


def test_a_setup_configures_the_conversation() -> None:
    function = {
        "name": "f",
        "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}}},
    }
    config = Client(
        systemInstruction={"parts": [{"text": "Be"}, {"text": "brief."}]},
        generationConfig={"maxOutputTokens": 5, "temperature": 1, "speechConfig": {"languageCode": "de-DE"}},
        tools=[{"functionDeclarations": [function]}],
        inputAudioTranscription={},
        contextWindowCompression={"triggerTokens": "1000", "slidingWindow": {"targetTokens": 500}},
    ).config()
    assert (config.instructions, config.max_tokens, config.truncation) == ("Be\nbrief.", 5, 0.5)
    assert config.transcription.language == "de"
    assert config.reports_transcripts
    assert config.audio_output
    (tool,) = config.tools
    assert tool.parameters == {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}
    assert config.duplex.sampling.temperature == 1


@pytest.mark.parametrize(
    ("detection", "eagerness", "silence_ms"),
    [
        ({}, "auto", 4000),
        ({"endOfSpeechSensitivity": "END_SENSITIVITY_HIGH"}, "high", 2500),
        ({"end_of_speech_sensitivity": "END_SENSITIVITY_LOW"}, "low", 8000),
        ({"silenceDurationMs": 700}, None, 700),
        ({"silenceDurationMs": 0}, None, 32),
    ],
)
def test_a_setup_chooses_how_turns_end(detection: Any, eagerness: Any, silence_ms: int) -> None:
    vad = Client(realtimeInputConfig={"automaticActivityDetection": detection}).config().transcription.vad
    assert (vad.eagerness, vad.silence_duration_ms) == (eagerness, silence_ms)


def test_low_sensitivity_needs_clearer_speech_to_begin_a_turn() -> None:
    low = {"automaticActivityDetection": {"startOfSpeechSensitivity": "START_SENSITIVITY_LOW"}}
    assert Client(realtimeInputConfig=low).config().transcription.vad.threshold > ServerVad().threshold


def test_without_interruption_no_speech_ends_a_response() -> None:
    config = Client(realtimeInputConfig={"activityHandling": "NO_INTERRUPTION"}).config()
    assert (config.interrupt_response, config.duplex.policy) == (False, "listen_only")


def test_a_schema_of_google_becomes_a_json_schema() -> None:
    given = {"type": "ARRAY", "items": {"any_of": [{"type": "INTEGER"}]}, "min_items": "2", "propertyOrdering": ["a"]}
    assert json_schema(given) == {"type": "array", "items": {"anyOf": [{"type": "integer"}]}, "minItems": 2}


def test_unknown_fields_are_logged_and_have_no_effect() -> None:
    client = Client(proactivity={"x": 1}, generation_config={"thinking_config": {}}).begun()
    assert client.logged == ["setup.proactivity", "setup.generationConfig.thinkingConfig"]


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ({"tools": [{"googleSearch": {}}]}, "google_search"),
        ({"tools": [{"functionDeclarations": [{"name": "f"}, {"name": "f"}]}]}, "same name"),
        ({"generationConfig": {"topP": 2}}, "topP"),
        ({"contextWindowCompression": {"triggerTokens": "x", "slidingWindow": {}}}, "contextWindowCompression"),
        ({"systemInstruction": 5}, "systemInstruction"),
    ],
)
def test_a_setup_that_cannot_be_served_closes_the_connection(setup: Any, reason: str) -> None:
    closing = Client().closes(json.dumps({"setup": setup}))
    assert closing
    assert closing[0] == 1007
    assert reason in closing[1]


def test_with_strict_names_only_a_loaded_model_is_served() -> None:
    assert Client(strict=True).closes('{"setup": {"model": "models/gemini-live"}}')
    for setup in ('{"model": "models/qwen"}', "{}"):
        assert not Client(strict=True).closes(f'{{"setup": {setup}}}')


def test_any_name_of_a_model_or_a_voice_stands_for_the_loaded_one_and_is_logged() -> None:
    voice = {"voiceConfig": {"prebuiltVoiceConfig": {"voiceName": "Puck"}}}
    client = Client(model="models/gemini-live", generationConfig={"speechConfig": voice})
    assert client.config().voice is None
    assert client.logged == ["gemini-live", "voice Puck"]


def test_answers_in_text_have_no_audio() -> None:
    assert not Client(generationConfig={"responseModalities": ["TEXT"]}).config().audio_output


def test_hints_of_languages_and_words_reach_the_transcriber() -> None:
    hints = {"languageCodes": ["en-US", "de-DE", "tlh"], "customVocabulary": ["Antiphon"], "adaptationPhrases": ["ok"]}
    heard = Client(inputAudioTranscription=hints).config().transcription
    assert (heard.language, heard.languages, heard.keyterms) == (None, ("en", "de"), ("Antiphon", "ok"))


@pytest.mark.parametrize("data", ["{", "[]", '{"realtimeInput": {"text": "Hi."}}', b"\xff", '{"setup": {"tools": 1}}'])
def test_an_invalid_message_closes_the_connection(data: Any) -> None:
    closing = Client().closes(data)
    assert closing
    assert closing[0] == 1007
    assert len(closing[1].encode()) <= 123


# --- from the client


@pytest.mark.parametrize(
    "audio",
    [
        {"audio": {"data": SECOND, "mimeType": "audio/pcm;rate=16000"}},
        {"audio": {"data": SECOND, "mime_type": "audio/pcm"}},
        {"audio": {"data": SECOND, "mime_type": "Audio/L16;Rate=16000"}},
        {"mediaChunks": [{"data": SECOND, "mimeType": "audio/pcm; rate=16000"}]},
        {"media_chunks": [{"data": SECOND, "mime_type": "audio/pcm;rate=16000"}]},
    ],
)
@pytest.mark.parametrize("spelling", ["realtimeInput", "realtime_input"])
def test_audio_is_read_in_every_spelling(spelling: str, audio: Any) -> None:
    client = Client().begun()
    client.wire.commands()
    client.say(**{spelling: audio})
    (command,) = client.wire.commands()
    assert len(command.pcm) == 16_000
    assert set(SECOND) & set("-_")


def test_a_change_of_the_sample_rate_loses_no_audio() -> None:
    client = Client().begun()
    for rate_hz in (24_000, 16_000):
        data = b64encode(bytes(2 * rate_hz)).decode()
        client.say(realtimeInput={"audio": {"data": data, "mimeType": f"audio/pcm;rate={rate_hz}"}})
    samples = sum(len(c.pcm) for c in client.wire.commands() if isinstance(c, AppendAudio))
    assert abs(samples - 32_000) <= 1


@pytest.mark.parametrize("kind", ["audio/pcm;rate=4000", "audio/pcm;rate=96000", "audio/ogg", "image/png"])
def test_audio_and_images_that_cannot_be_read_close_the_connection(kind: str) -> None:
    closing = Client().begun().closes(json.dumps({"realtimeInput": {"audio": {"data": SECOND, "mimeType": kind}}}))
    assert closing
    assert closing[0] == 1007


def test_the_end_of_an_activity_comes_after_all_its_audio_and_its_image_once() -> None:
    client = Client(realtimeInputConfig={"automaticActivityDetection": {"disabled": True}}).begun()
    client.wire.commands()
    client.say(realtimeInput={"audio": {"data": ""}})
    client.say(realtimeInput={"activityEnd": {}})
    assert client.wire.commands() == []
    client.say(realtimeInput={"video": {"data": b64encode(image(3)).decode(), "mimeType": "image/png"}})
    data = b64encode(bytes(48_000)).decode()
    for _ in range(2):
        client.say(realtimeInput={"audio": {"data": data, "mimeType": "audio/pcm;rate=24000"}})
    client.say(realtimeInput={"activityEnd": {}})
    commands = client.wire.commands()
    assert sum(len(c.pcm) for c in commands if isinstance(c, AppendAudio)) == 32_000
    assert [type(c) for c in commands if not isinstance(c, AppendAudio)] == [CreateItem, CommitAudio, CreateResponse]
    client.say(realtimeInput={"activityEnd": {}})
    assert client.wire.commands() == []


def test_the_client_begins_and_ends_a_turn() -> None:
    client = Client(realtimeInputConfig={"automaticActivityDetection": {"disabled": True}}).begun()
    client.wire.commands()
    client.say(realtimeInput={"activityEnd": {}})
    assert client.wire.commands() == []
    client.say(realtimeInput={"activityStart": {}})
    client.say(realtimeInput={"audio": {"data": SECOND}})
    client.say(realtimeInput={"activityEnd": {}})
    kinds = [type(command) for command in client.wire.commands()]
    assert kinds == [BargeIn, AppendAudio, CommitAudio, CreateResponse]


def test_the_end_of_the_stream_ends_an_open_turn_only() -> None:
    client = Client().begun()
    client.wire.commands()
    client.say(realtimeInput={"audioStreamEnd": True})
    assert client.wire.commands() == []
    client.wire.send(SpeechStarted(0, 0))
    client.say(realtimeInput={"audioStreamEnd": True})
    assert client.wire.commands() == [CommitAudio()]
    data = b64encode(bytes(48_000)).decode()
    client.say(realtimeInput={"audio": {"data": data, "mimeType": "audio/pcm;rate=24000"}, "audioStreamEnd": True})
    *audio, last = client.wire.commands()
    assert (sum(len(command.pcm) for command in audio), last) == (16_000, CommitAudio())


def test_a_native_model_gets_every_image_and_another_model_one_for_a_turn() -> None:
    picture = {"data": b64encode(image(3)).decode(), "mimeType": "image/png"}
    native = Client(200).begun()
    native.wire.commands()
    native.say(realtimeInput={"video": picture})
    assert [type(command) for command in native.wire.commands()] == [AppendFrames]
    client = Client().begun()
    client.wire.commands()
    client.say(realtimeInput={"video": picture})
    client.say(realtimeInput={"video": picture})
    client.say(realtimeInput={"audio": {"data": SECOND}})
    assert [type(command) for command in client.wire.commands()] == [AppendAudio]
    client.wire.send(SpeechStarted(0, 0))
    client.say(realtimeInput={"audio": {"data": SECOND}})
    item, _ = client.wire.commands()
    assert item.item.parts[0].image.startswith("data:image/png;base64,")
    client.say(realtimeInput={"audio": {"data": SECOND}})
    assert [type(command) for command in client.wire.commands()] == [AppendAudio]


def test_contents_join_the_history_and_end_a_response_when_the_turn_is_complete() -> None:
    client = Client().begun()
    client.wire.commands()
    turns = [{"role": "user", "parts": [{"text": "Hi."}]}, {"role": "model", "parts": [{"text": "Hello."}]}]
    client.say(clientContent={"turns": turns})
    items = [command.item for command in client.wire.commands()]
    assert [(item.role, item.parts[0].kind) for item in items] == [("user", "input_text"), ("assistant", "output_text")]
    client.say(client_content={"turns": turns, "turn_complete": True})
    *_, last = client.wire.commands()
    assert last == CreateResponse(when_busy="cut")


def test_a_history_may_have_calls_their_results_and_images() -> None:
    client = Client().begun()
    client.wire.commands()
    picture = {"data": urlsafe_b64encode(image(3)).decode(), "mimeType": "image/png"}
    turns = [
        {"role": "user", "parts": [{"text": "What is this?"}, {"inlineData": picture}]},
        {"role": "model", "parts": [{"inlineData": picture}, {"functionCall": {"name": "f", "args": {"x": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"y": 2}}}]},
    ]
    client.say(clientContent={"turns": turns})
    asked, call, result = [command.item for command in client.wire.commands()]
    assert [part.kind for part in asked.parts] == ["input_text", "input_image"]
    assert asked.parts[1].image == f"data:image/png;base64,{b64encode(image(3)).decode()}"
    assert (call.kind, call.call_id, call.name, call.arguments) == ("function_call", "f", "f", '{"x":1}')
    assert (result.kind, result.call_id, result.output) == ("function_call_output", "f", '{"y":2}')
    broken = {"data": SECOND, "mimeType": "image/png"}
    assert client.closes(json.dumps({"clientContent": {"turns": {"parts": [{"inlineData": broken}]}}}))


def test_an_initial_history_gets_no_response() -> None:
    client = Client(historyConfig={"initialHistoryInClientContent": True}).begun()
    client.wire.commands()
    for kinds in ([CreateItem], [BargeIn, CreateItem, CreateResponse]):
        client.say(clientContent={"turns": [{"parts": [{"text": "Hi."}]}], "turnComplete": True})
        assert [type(command) for command in client.wire.commands()] == kinds


@pytest.mark.parametrize(
    ("scheduling", "asked"),
    [(None, [CreateResponse(when_busy="wait")]), ("INTERRUPT", [CreateResponse(when_busy="cut")]), ("SILENT", [])],
)
def test_the_model_goes_on_when_all_calls_are_answered(scheduling: Any, asked: Any) -> None:
    client = Client().begun()
    client.wire.commands()
    client.wire.send(CALL)
    client.wire.send(ArgumentsDone(AT, "call_2", "g", "{}"))
    client.say(toolResponse={"functionResponses": [{"id": "call_2", "name": "g", "response": {}}]})
    assert [type(command) for command in client.wire.commands()] == [CreateItem]
    # An older client names the function only.
    client.say(tool_response={"function_responses": {"name": "f", "response": {"x": 1}, "scheduling": scheduling}})
    item, *rest = client.wire.commands()
    assert (item.item.call_id, item.item.output) == ("call_1", '{"x":1}')
    assert rest == asked


def test_results_of_calls_that_are_not_open_are_ignored_and_one_is_enough_to_speak() -> None:
    client = Client().begun()
    client.wire.commands()
    client.say(toolResponse={"functionResponses": {"id": "call_9", "name": "f", "response": {}}})
    assert client.wire.commands() == []
    client.wire.send(CALL)
    client.wire.send(ArgumentsDone(AT, "call_2", "g", "[]"))
    assert client.frames()[-1]["toolCall"]["functionCalls"][0]["args"] == {}
    results = [{"id": "call_1", "name": "f", "scheduling": "SILENT"}, {"id": "call_2", "name": "g"}]
    client.say(toolResponse={"functionResponses": results})
    assert [type(command) for command in client.wire.commands()] == [CreateItem, CreateItem, CreateResponse]


# --- to the client


def test_calls_of_tool_servers_and_responses_out_of_band_are_not_shown() -> None:
    client = Client().begun()
    client.frames()
    client.wire.send(ResponseCreated(Response("resp_2", True, None, None, stored=False)))
    client.wire.send(ArgumentsDone(AT, "call_1", "f", "{}", server="home"))
    client.wire.send(ResponseDone(Response("resp_2", True, None, None, stored=False, status="completed")))
    client.wire.send(PlayoutEnded("resp_2"))
    assert client.frames() == []


def test_an_answer_in_text_is_a_turn_of_the_model() -> None:
    client = Client().begun()
    client.frames()
    client.wire.send(ResponseTextDelta(AT, "Hi.", False))
    assert contents(client) == [{"modelTurn": {"role": "model", "parts": [{"text": "Hi."}]}}]


def test_the_end_of_a_voices_audio_is_sent() -> None:
    client = Client().begun()
    client.frames()
    client.wire.send(ResponseAudioDelta(AT, np.full(1600, 0.25, np.float32), 16_000))
    client.wire.send(ContentPartDone(AT, ContentPart("output_audio")))
    parts = [part["inlineData"]["data"] for content in contents(client) for part in content["modelTurn"]["parts"]]
    assert sum(len(b64decode(part)) for part in parts) == 2 * 2400


def test_a_new_response_cancels_the_calls_that_the_user_did_not_wait_for() -> None:
    client = Client().begun()
    client.wire.send(CALL)
    client.frames()
    for expected in ([{"toolCallCancellation": {"ids": ["call_1"]}}], []):
        client.wire.send(ResponseCreated(Response("resp_2", True, None, None)))
        assert client.frames() == expected


def test_a_response_is_complete_when_its_audio_has_been_played() -> None:
    client = Client(outputAudioTranscription={}).begun()
    client.frames()
    respond(client)
    text, audio, done = client.frames()
    assert text == {"serverContent": {"outputTranscription": {"text": "Hello."}}}
    assert audio["serverContent"]["modelTurn"]["parts"][0]["inlineData"]["mimeType"] == "audio/pcm;rate=24000"
    assert done == {"serverContent": {"generationComplete": True}}
    client.wire.send(PlayoutEnded("resp_1"))
    usage = {"promptTokenCount": 9, "responseTokenCount": 3, "totalTokenCount": 12}
    assert client.frames() == [{"serverContent": {"turnComplete": True}, "usageMetadata": usage}]
    client.wire.send(PlayoutEnded("resp_1"))
    assert client.frames() == []
    client.wire.send(ResponseCreated(Response("resp_2", True, None, None)))
    client.wire.send(PlayoutEnded("resp_2"))
    assert client.frames() == [{"serverContent": {"turnComplete": True}}]


def test_an_interruption_is_reported_once_with_the_end_of_the_turn() -> None:
    client = Client().begun()
    client.frames()
    client.wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    client.wire.send(EpochRaised(1))
    client.wire.send(ResponseDone(Response("resp_1", True, None, None, status="cancelled")))
    assert contents(client) == [{"interrupted": True}, {"turnComplete": True}]


def test_a_call_keeps_the_turn_open_and_an_interruption_cancels_it() -> None:
    client = Client().begun()
    client.frames()
    client.wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    client.wire.send(CALL)
    client.wire.send(ResponseDone(Response("resp_1", True, None, None, status="completed")))
    client.wire.send(PlayoutEnded("resp_1"))
    assert client.frames() == [{"toolCall": {"functionCalls": [{"id": "call_1", "name": "f", "args": {"a": 1}}]}}]
    client.wire.send(EpochRaised(1))
    assert client.frames()[0] == {"toolCallCancellation": {"ids": ["call_1"]}}


def test_transcripts_are_sent_only_if_they_were_asked_for() -> None:
    for setup, texts in (({}, []), ({"inputAudioTranscription": {}}, [{"inputTranscription": {"text": "Hi."}}])):
        client = Client(**setup).begun()
        client.frames()
        client.wire.send(TranscriptDelta(0, "Hi."))
        assert contents(client) == texts


def test_frames_are_binary_and_have_no_number() -> None:
    client = Client().begun()
    respond(client)
    for frame in client.wire.frames():
        assert isinstance(frame.encode(1), bytes)
        assert not frame.numbered


def test_the_client_hears_of_a_drain_and_of_nothing_else() -> None:
    assert Client().wire.notice(DrainNotice(8.0)) == []
    wire = Client().begun().wire
    wire.frames()
    assert [json.loads(frame.encode()) for frame in wire.notice(DrainNotice(8.0))] == [{"goAway": {"timeLeft": "8s"}}]
    for notice in ("replaced", "moving", "degraded", "stored"):
        assert wire.notice(notice) == []


# --- resuming


def test_a_handle_names_the_session_and_its_token() -> None:
    client = Client(sessionResumption={}).begun()
    handle = client.frames()[-1]["sessionResumptionUpdate"]["newHandle"]
    first = dialect_of(Opening(path=PATH)).first_frame(
        json.dumps({"setup": {"session_resumption": {"handle": handle}}})
    )
    assert first.resumes
    assert (first.resumes.session_id, first.resumes.resume_token) == (client.wire.id, "token")
    assert first.is_read


def test_a_new_handle_comes_after_each_turn_and_after_a_resume() -> None:
    client = Client(sessionResumption={}).begun()
    client.frames()
    client.wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    client.wire.send(PlayoutEnded("resp_1"))
    assert client.frames()[-1]["sessionResumptionUpdate"]["newHandle"].endswith(".token")
    assert json.loads(client.wire.wire.resumed("fresh").encode()) == {"setupComplete": {"sessionId": client.wire.id}}
    client.begun()
    assert client.frames()[-1]["sessionResumptionUpdate"]["newHandle"] == f"{client.wire.id}.fresh"


@pytest.mark.parametrize(("setup", "resumable"), [({}, False), ({"sessionResumption": {}}, True)])
def test_only_a_session_with_handles_outlives_its_connection(setup: Any, resumable: bool) -> None:
    first = dialect_of(Opening(path=PATH)).first_frame(json.dumps({"setup": setup}))
    assert (first.resumes, first.resumable) == (None, resumable)


def test_a_stored_session_keeps_its_setup_and_its_open_calls() -> None:
    client = Client(sessionResumption={}, systemInstruction="Sing.").begun()
    client.wire.send(CALL)
    client.wire.send(EpochRaised(3))
    client.wire.send(ResponseCreated(Response("resp_1", True, None, None)))
    client.wire.send(CALL)
    kept = client.wire.snapshot()
    other = Client()
    other.wire.wire.restore(kept)
    assert (other.wire.id, other.wire.epoch) == (client.wire.id, 4)
    other.say(toolResponse={"functionResponses": [{"id": "call_1", "name": "f", "response": {}}]})
    configure, *rest = other.wire.commands()
    assert configure.config.instructions == "Sing."
    assert [type(command) for command in rest] == [CreateItem, CreateResponse]


def test_a_turn_without_a_snapshot_is_not_stored() -> None:
    assert Client().wire.snapshot() is None


def test_a_committed_turn_is_no_longer_open() -> None:
    client = Client().begun()
    client.wire.commands()
    client.wire.send(SpeechStarted(0, 0))
    client.wire.send(UserTurnCommitted(0, Item("item_9"), None))
    client.say(realtimeInput={"audioStreamEnd": True})
    assert client.wire.commands() == []
