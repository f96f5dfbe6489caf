"""Tests how bodies of HTTP requests are read, and that errors name the field at fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.contracts import (
    FileInfo,
    Message,
    ReplyDone,
    ReplyOptions,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    TranscriptSegment,
    speaker_label,
)
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import Tool, ToolCall
from antiphon.events.transcription import ServerVad
from antiphon.events.words import Word
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.rest import chat, transcriptions
from antiphon.protocols.rest.chat import ChatBody, ChatCompletion
from antiphon.protocols.rest.transcription_form import FileRequest, TranscriptFormat, parse_form
from antiphon.protocols.speech import rest as speech
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.speech.rest import BatchResults, SpeechBody, SpeechRequest
from tests.protocols.struct_values import JSON_TYPES, fields_of_every_type, has_wrong_type

CATALOG = SpeechCatalog(
    ModelNames(("hibari-heart",)),
    ("heart", "emma"),
    ("en",),
    clones=False,
    uploaded=lambda name: None,
    check_url=lambda url, param: None,
    log_alias=lambda name, model: None,
)
BODIES: dict[type[msgspec.Struct], Callable[[bytes], object]] = {
    SpeechBody: lambda body: speech.parse(body, CATALOG),
    ChatBody: chat.parse,
}
JSON = st.recursive(
    st.sampled_from([value for value in JSON_TYPES if not isinstance(value, list | dict)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def spoken(**fields: Any) -> SpeechRequest:
    return speech.parse(json.dumps(fields).encode(), CATALOG)


def refusal(read: Callable[[bytes], object], body: bytes) -> RemoteProtocolError | None:
    try:
        read(body)
    except RemoteProtocolError as error:
        return error
    return None


def refused(read: Callable[[bytes], object], body: bytes) -> RemoteProtocolError:
    error = refusal(read, body)
    assert error
    return error


# --- any body


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_when_a_field_has_another_type_then_the_error_names_it(body: type[msgspec.Struct]) -> None:
    for name, fields in fields_of_every_type(body):
        error = refusal(BODIES[body], json.dumps(fields).encode())
        if has_wrong_type(body, fields):
            assert error
            assert (error.param or "").startswith(name), (fields, error.param)
        assert error is None or error.param


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_when_a_body_is_no_json_object_then_it_is_refused(body: type[msgspec.Struct]) -> None:
    for data in (b"", b"{", b"\xff\xfe", b'{"a":1,}', b'{"a":' + b"[" * 50_000):
        assert refused(BODIES[body], data).code == "invalid_json"
    for value in JSON_TYPES:
        if not isinstance(value, dict):
            assert refused(BODIES[body], json.dumps(value).encode()).param in (None, "body")


@given(st.sampled_from(list(BODIES)), st.data())
def test_whatever_a_body_holds_nothing_but_a_refusal_is_raised(body: type[msgspec.Struct], data: st.DataObject) -> None:
    names = st.sampled_from([f.encode_name for f in msgspec.structs.fields(body)])
    fields = data.draw(st.dictionaries(names, JSON, max_size=5))
    error = refusal(BODIES[body], json.dumps({"input": "Hi.", "model": "default"} | fields).encode())
    assert error is None or error.param


# --- speech


def test_a_request_for_speech_says_how_it_is_answered() -> None:
    plain = spoken(input="Hi.")
    assert (plain.text, plain.config.format, plain.config.stream, plain.sse, plain.whole) == (
        "Hi.", "mp3", True, False, False,
    )  # fmt: skip
    assert plain.config.granularity == "none"
    wav = spoken(input="Hi.", response_format="wav", split_granularity="clause")
    assert (wav.whole, wav.config.stream, wav.config.granularity) == (True, False, "none")
    assert not spoken(input="Hi.", response_format="wav", stream=True).whole
    assert spoken(input="Hi.", response_format="wav", stream_format="sse").sse
    assert spoken(input="Hi.", voice={"id": "Emma"}, speed=2, unknown=1).config.voice == "emma"


@pytest.mark.parametrize("value", JSON_TYPES, ids=repr)
def test_what_was_always_taken_for_missing_still_is(value: object) -> None:
    assert spoken(input="Hi.", voice="emma", speaker=value, type=value) == spoken(input="Hi.", voice="emma")
    if not value:
        assert spoken(input="Hi.", stream_format=value, response_format=value) == spoken(input="Hi.")


def test_an_item_of_a_batch_has_its_own_fields_before_the_shared_ones() -> None:
    body = {
        "items": [
            {"input": "One."},
            {"input": "Two.", "speed": 2, "voice": None},
            {"speed": 1},
            {"speed": 1, "input": 5},
        ],
        "speed": "fast",
        "voice": "emma",
        "response_format": "wav",
        "stream_format": "sse",
    }
    first, second, third, fourth = speech.parse_batch(json.dumps(body).encode(), CATALOG)
    # The shared speed is wrong, which does not affect items with their own.
    assert isinstance(first, RemoteProtocolError)
    assert first.param == "speed"
    assert isinstance(second, SpeechRequest)
    assert (second.config.speed, second.config.voice, second.config.format) == (2.0, None, "wav")
    assert (second.whole, second.sse, second.config.stream) == (True, False, False)
    assert isinstance(third, RemoteProtocolError)
    assert (third.code, third.param) == ("missing_required_parameter", "input")
    assert isinstance(fourth, RemoteProtocolError)
    assert (fourth.code, fourth.param) == ("invalid_type", "input")


@pytest.mark.parametrize("value", JSON_TYPES, ids=repr)
def test_when_the_items_of_a_batch_are_none_then_the_error_names_them(value: object) -> None:
    error = refused(lambda body: speech.parse_batch(body, CATALOG), json.dumps({"items": value}).encode())
    assert (error.param or "").startswith("items")
    if not isinstance(value, dict):
        items = json.dumps({"items": [{"input": "Hi."}, value]}).encode()
        assert refused(lambda body: speech.parse_batch(body, CATALOG), items).param == "items[1]"


def test_results_of_a_batch_are_written_in_the_order_of_the_items() -> None:
    words = [Word("Hi.", 0.0, 0.25, 1.0)]
    results = BatchResults.of(
        [
            speech.batch_item(0, "wav", b"abc", words, "你"),
            speech.batch_failure(1, RemoteProtocolError("invalid_value", "no", "input")),
            speech.batch_failure(2, "the model failed"),
            speech.batch_item(3, "pcm", b"", None, ""),
        ]
    )
    assert msgspec.json.encode(results) == (
        b'{"results":['
        b'{"index":0,"status":"success","audio_data":"YWJj","format":"wav",'
        b'"words":[{"word":"Hi.","start_ms":0,"end_ms":250}],"skipped":"\xe4\xbd\xa0"},'
        b'{"index":1,"status":"error","error":'
        b'{"message":"no","type":"invalid_request_error","param":"input","code":"invalid_value"}},'
        b'{"index":2,"status":"error","error":'
        b'{"message":"the model failed","type":"server_error","param":null,"code":"processing_error"}},'
        b'{"index":3,"status":"success","audio_data":"","format":"pcm"}'
        b'],"total":4,"succeeded":2,"failed":2}'
    )


# --- chat


def test_a_chat_request_is_read_with_its_messages_and_tools() -> None:
    asked = chat.parse(
        json.dumps(
            {
                "model": "default",
                "messages": [
                    {
                        "role": "developer",
                        "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
                    },
                    {"role": "user", "content": "Hi.", "name": None},
                ],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}},
                "stop": "\n",
                "stream_options": {"include_usage": True},
                "n": None,
            }
        ).encode()
    )
    assert asked.messages == (Message("system", "Be brief."), Message("user", "Hi."))
    assert [tool.name for tool in asked.options.tools] == ["f"]
    assert asked.options.schema == {"type": "string"}
    assert (asked.options.stop, asked.stream, asked.include_usage) == (("\n",), False, True)


def test_a_completion_with_a_call_is_written_whole_and_in_chunks() -> None:
    completion = ChatCompletion("id", "model", 7, include_usage=True)
    replies = (
        ToolCallStarted("call", "f"),
        ToolCallDelta('{"a":'),
        ToolCallDelta("1}"),
        ReplyDone("tool_calls", 9, 2, 3),
    )
    chunks = [completion.begin(), *(chunk for reply in replies for chunk in completion.feed(reply))]
    head = b'data: {"id":"id","object":"chat.completion.chunk","created":7,"model":"model","choices":'
    usage = (
        b'"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}'
    )

    def choice(delta: bytes, reason: bytes = b"null") -> bytes:
        return head + b'[{"index":0,"delta":' + delta + b',"logprobs":null,"finish_reason":' + reason + b"}]}\n\n"

    assert chunks == [
        choice(b'{"role":"assistant","content":""}'),
        choice(b'{"tool_calls":[{"index":0,"id":"call","type":"function","function":{"name":"f","arguments":""}}]}'),
        choice(b'{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\":"}}]}'),
        choice(b'{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}'),
        choice(b"{}", b'"tool_calls"'),
        head + b"[]," + usage + b"\n\n",
        b"data: [DONE]\n\n",
    ]
    assert completion.body() == (
        b'{"id":"id","object":"chat.completion","created":7,"model":"model","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":null,"refusal":null,"tool_calls":[{"id":"call","type":"function",'
        b'"function":{"name":"f","arguments":"{\\"a\\":1}"}}]},"logprobs":null,"finish_reason":"tool_calls"}],' + usage
    )


@pytest.mark.parametrize("text", ["", "Hi."])
def test_a_completion_without_a_call_has_its_text_even_if_there_is_none(text: str) -> None:
    completion = ChatCompletion("id", "model", 7)
    completion.feed(TextDelta(text))
    completion.feed(ReplyDone("stop", 1, 0, 1))
    message = json.loads(completion.body())["choices"][0]["message"]
    assert message == {"role": "assistant", "content": text, "refusal": None}


def test_a_seed_has_at_most_64_bits() -> None:
    body: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "x"}]}
    parsed = [chat.parse(json.dumps(body | {"seed": seed}).encode()).options.seed for seed in (7, -1, None)]
    assert parsed == [7, 2**64 - 1, None]
    for seed in (2**63, -(2**63) - 1, 10**400):
        with pytest.raises(RemoteProtocolError) as refused:
            chat.parse(json.dumps(body | {"seed": seed}).encode())
        assert refused.value.param == "seed"


# --- transcriptions


def form(**fields: str) -> FileRequest:
    named = {k.replace("__", "[") + ("]" if "__" in k else ""): [v] for k, v in fields.items()}
    return parse_form({"model": ["whisper-1"], **named}, ("en",))


LANGUAGES = ("en", "zh", "yue", "no", "he", "haw")


def parsed(fields: dict[str, list[str]]) -> FileRequest:
    return parse_form({"model": ["whisper-1"], "response_format": ["verbose_json"], **fields}, LANGUAGES)


@pytest.mark.parametrize(
    "fields",
    [
        {"timestamp_granularities[]": ["word", "segment"]},
        {"timestamp_granularities": ["word", "segment"]},
        {"timestamp_granularities[0]": ["word"], "timestamp_granularities[1]": ["segment"]},
        {"timestamp_granularities.0": ["segment"], "timestamp_granularities.1": ["word"]},
        {"timestamp_granularities": ['["word", "segment"]']},
        {"timestamp_granularities[]": ["word,segment"]},
        {"timestamp_granularities": ["segment, word"]},
        {"timestamp_granularities[][]": ["word", "segment"]},
    ],
    ids=str,
)
def test_a_list_comes_in_every_spelling(fields: dict[str, list[str]]) -> None:
    asked = parsed(fields)
    assert (asked.words, asked.segments) == (True, True)


def test_a_list_in_another_spelling_is_checked_as_well() -> None:
    assert not parsed({"timestamp_granularities[0]": ["word"]}).segments
    with pytest.raises(RemoteProtocolError) as error:
        parsed({"timestamp_granularities[0]": ["phoneme"]})
    assert error.value.param == "timestamp_granularities"


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (("true", "True", "1", "yes", "YES", " on "), True),
        (("false", "False", "0", "no", "off", "", "null"), False),
    ],
)
def test_stream_is_taken_in_every_spelling(texts: tuple[str, ...], value: bool) -> None:
    assert {form(stream=text).stream for text in texts} == {value}


def test_a_stream_that_is_neither_yes_nor_no_is_refused_with_the_form() -> None:
    with pytest.raises(RemoteProtocolError, match="'true', 'false'") as error:
        form(stream="maybe")
    assert error.value.param == "stream"


@pytest.mark.parametrize(
    ("texts", "code"),
    [
        (("en", "EN", "en-US", "en_GB", "English", " english "), "en"),
        (("zh", "zh-CN", "zh-Hant-TW", "ZH_cn", "Chinese", "mandarin", "cmn"), "zh"),
        (("yue", "Cantonese"), "yue"),
        (("nb", "nb-NO", "Norwegian"), "no"),
        (("iw", "Hebrew"), "he"),
        (("haw",), "haw"),
        (("auto", "AUTO", "detect", "", "null", "undefined"), None),
    ],
)
def test_a_language_is_taken_in_every_clear_form(texts: tuple[str, ...], code: str | None) -> None:
    assert {parsed({"language": [text]}).language for text in texts} == {code}


@pytest.mark.parametrize("value", ["tlh", "e", "engl", "de", "en,zh", "-", "\N{REGIONAL INDICATOR SYMBOL LETTER U}"])
def test_a_language_that_is_not_clear_is_refused_with_the_form(value: str) -> None:
    with pytest.raises(RemoteProtocolError, match="ISO 639-1 code such as 'en'") as error:
        parsed({"language": [value]})
    assert error.value.param == "language"


@pytest.mark.parametrize("value", ["", "auto", '"auto"'])
def test_speech_is_detected_in_files_by_default(value: str) -> None:
    assert form().speech_detection == "auto"
    assert form(chunking_strategy=value).speech_detection == "auto"


def test_a_chunking_strategy_comes_as_json_and_as_fields() -> None:
    dotted = {"chunking_strategy.type": ["server_vad"], "chunking_strategy.threshold": ["0.4"]}
    assert parsed(dotted).speech_detection == ServerVad(0.4, 300, 200)
    strategy = {"type": "server_vad", "threshold": 0.4, "silence_duration_ms": 700}
    vad = ServerVad(threshold=0.4, prefix_padding_ms=300, silence_duration_ms=700)
    assert form(chunking_strategy=json.dumps(strategy)).speech_detection == vad
    # OpenAI's client library sends an object as separate form fields.
    fields = {f"chunking_strategy__{name}": str(value) for name, value in strategy.items()}
    assert form(**fields).speech_detection == vad
    assert form(chunking_strategy="null").speech_detection is None


@pytest.mark.parametrize(
    "value",
    [
        "none",
        "[]",
        "{}",
        '{"type": "semantic_vad"}',
        '{"type": "server_vad", "threshold": 1.1}',
        '{"type": "server_vad", "prefix_padding_ms": -1}',
        '{"type": "server_vad", "silence_duration_ms": 0}',
        '{"type": "server_vad", "eagerness": "low"}',
        "[" * 100_000,
        "\ud800",
    ],
)
def test_when_a_chunking_strategy_is_wrong_then_the_error_names_it(value: str) -> None:
    with pytest.raises(RemoteProtocolError) as error:
        form(chunking_strategy=value)
    assert (error.value.code, error.value.param) == ("invalid_value", "chunking_strategy")
    with pytest.raises(RemoteProtocolError):
        form(chunking_strategy__type="server_vad", chunking_strategy__threshold="nan")


CALLED: Any = {"role": "assistant", "content": None, "refusal": None, "function_call": None}
USER: Any = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "fields",
    [
        {
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "u",
            "tools": [],
            "tool_ids": [],
            "params": {},
        },
        {"n": 1, "logit_bias": {}, "stop": None, "seed": None, "top_p": None, "max_tokens": -1, "frequency_penalty": 0},
        {"messages": [{"role": "developer", "content": "x"}, {**USER, "name": "bob", "tool_call_id": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
        {"store": None, "reasoning_effort": None, "metadata": None, "service_tier": "auto", "logprobs": None},
        {"stream_options": None, "tool_choice": None, "tools": None, "functions": None, "n": None, "timeout": 600},
        {"response_format": {"type": "text", "json_schema": None}, "stop": [], "modalities": ["text"]},
    ],
)
def test_what_frameworks_send_beside_a_question_is_taken(fields: dict[str, Any]) -> None:
    asked = chat.parse(json.dumps({"model": "m", "messages": [USER]} | fields).encode())
    assert asked.messages[-1].text == "hi"
    assert asked.options == ReplyOptions()


@pytest.mark.parametrize("parameters", [{}, {"parameters": {}}, {"parameters": None}, {"description": None}])
@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, "auto"),
        ("any", "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "function", "function": {"name": "look"}}, "look"),
        ({"type": "function", "name": "look"}, "look"),
        ({"function": {"name": "look"}}, "look"),
    ],
)
def test_tools_and_their_choice_are_read_in_every_form(parameters: dict[str, Any], choice: object, read: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "strict": True, **parameters}}
    body = {"model": "m", "messages": [USER], "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    options = chat.parse(json.dumps(body).encode()).options
    assert (options.tools, options.tool_choice, options.parallel_tool_calls) == ((Tool("look"),), read, False)


@pytest.mark.parametrize(
    ("arguments", "read"), [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a":1}'), ({}, "{}"), (None, "{}")]
)
def test_arguments_of_past_calls_are_read_as_text_or_as_objects(arguments: object, read: str) -> None:
    call = {"id": "a", "type": "function", "index": 0, "function": {"name": "look", "arguments": arguments}}
    messages = [USER, {**CALLED, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "sky"}]
    asked = chat.parse(json.dumps({"model": "m", "messages": messages}).encode())
    assert asked.messages[1].tool_calls == (ToolCall("a", "look", read),)


def test_functions_of_the_oldest_form_are_refused_by_name() -> None:
    with pytest.raises(RemoteProtocolError, match="'tools'") as refused:
        chat.parse(json.dumps({"model": "m", "messages": [USER], "functions": [{"name": "look"}]}).encode())
    assert refused.value.param == "functions"


def said(number: int, speaker: str) -> TranscriptSegment:
    word = Word("Hello.", number, number + 0.5, 0.9)
    return TranscriptSegment(number, 0, number, number + 0.5, " Hello.", (), 0.0, 0.0, 1.0, 0.0, (word,), (), speaker)


def test_speakers_are_in_every_format_that_has_a_place_for_them() -> None:
    segments, info = [said(0, "A"), said(1, "Q & <b>")], FileInfo("en", 2.0)

    def written(form: TranscriptFormat, speakers: Sequence[TranscriptSegment] = segments) -> str:
        return transcriptions.body(FileRequest("m", form, words=True), "transcribe", info, speakers)[1]

    assert "\nA: Hello.\n" in written("srt")
    assert "\n<v A>Hello.\n" in written("vtt")
    assert "\n<v Q &amp; &lt;b&gt;>Hello.\n" in written("vtt")
    verbose = json.loads(written("verbose_json"))
    assert [part["speaker"] for part in verbose["segments"]] == ["A", "Q & <b>"]
    assert [word["speaker"] for word in verbose["words"]] == ["A", "Q & <b>"]
    diarized = json.loads(written("diarized_json"))
    assert diarized["segments"][1] == {
        "type": "transcript.text.segment",
        "id": "seg_002",
        "start": 1.0,
        "end": 1.5,
        "text": "Hello.",
        "speaker": "Q & <b>",
    }
    assert "speaker" not in written("verbose_json", [said(0, "")])
    assert "<v" not in written("vtt", [said(0, "")])


def test_labels_go_on_after_z() -> None:
    assert [speaker_label(number) for number in (0, 1, 25, 26, 27, 52, 701, 702)] == [
        *("A", "B", "Z", "AA", "AB", "BA", "ZZ", "AAA")
    ]
