"""/v1/chat/completions with the stock client, and with clients that send invalid requests."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.conftest import SMALL, Process

# The small model is quantized to int8. Its choice between two nearly equal tokens depends on the CPU's last bit, so the
# answers to these questions have tokens that are far likelier than all others.
ASK: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Complete the sentence: The capital of France is"},
]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def stock(talker: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(talker: Process, **body: Any) -> httpx.Response:
    return httpx.post(f"{talker.url}/v1/chat/completions", json=body, timeout=60)


def test_when_a_completion_is_streamed_then_it_is_the_same_as_whole(stock: openai.OpenAI) -> None:
    whole = stock.chat.completions.create(model="default", messages=ASK, temperature=0, max_tokens=60)
    assert whole.object == "chat.completion"
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = stock.chat.completions.create(
        model="gpt-4o-mini",
        messages=ASK,
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {c.id for c in chunks} == {chunks[0].id}


def test_when_a_conversation_goes_on_then_its_kv_is_found(stock: openai.OpenAI) -> None:
    messages: list[Any] = [*ASK]
    ask = stock.chat.completions
    first = ask.create(model="default", messages=messages, temperature=0, max_tokens=40)
    assert first.usage is not None
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Complete the sentence: The capital of Italy is"},
    ]
    second = ask.create(model="default", messages=messages, temperature=0, max_tokens=40)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    kept = second.usage.prompt_tokens_details.cached_tokens or 0
    assert kept >= first.usage.prompt_tokens + first.usage.completion_tokens - 2
    assert "Rome" in (second.choices[0].message.content or "")


def test_when_a_tool_is_required_then_the_stock_client_gets_a_call(stock: openai.OpenAI) -> None:
    done = stock.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Weather in Oslo?"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=100,
    )
    choice = done.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call: Any = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) >= {"city"}
    with stock.chat.completions.stream(
        model="default",
        messages=[{"role": "user", "content": "Weather in Oslo?"}],
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
        max_tokens=100,
    ) as stream:
        final = stream.get_final_completion()
    streamed: Any = (final.choices[0].message.tool_calls or [None])[0]
    assert streamed.function.arguments == call.function.arguments
    assert re.fullmatch(r"call_[0-9a-f]{24}", streamed.id)


def test_when_a_tool_refers_to_itself_then_it_is_called(talker: Process) -> None:
    schema = {"type": "object", "properties": {"to": {"$ref": "#/$defs/City"}}, "required": ["to"]}
    schema["$defs"] = {"City": {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}}
    tool = {"type": "function", "function": {"name": "fly", "parameters": schema}}
    answer = post(
        talker, model="m", messages=[{"role": "user", "content": "Fly to Oslo."}], tools=[tool], tool_choice="any"
    )
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"to": {"city": "Oslo"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/a"}}}]},
            "tools[1].function.parameters",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "any"}}}},
            "response_format",
        ),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused(
    talker: Process, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = post(talker, model="m", messages=ASK, stream=stream, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_when_a_schema_is_given_then_the_text_fits_it(stock: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }
    fitting = 0
    for seed in range(6):
        done = stock.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "A number?"}],
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            max_tokens=40,
            seed=seed,
        )
        if done.choices[0].finish_reason == "stop":
            # Other answers are cut off: a small model may put any number of line breaks between two tokens of JSON.
            assert 0 <= json.loads(done.choices[0].message.content or "")["n"] <= 9
            fitting += 1
    assert fitting


def test_when_the_seed_is_the_same_then_so_is_the_text(stock: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        done = stock.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Tell a story."}],
            temperature=1.5,
            seed=seed,
            max_tokens=16,
        )
        return done.choices[0].message.content

    # All requests then find the prompt's rows in the KV. Rows that are computed one by one are rounded differently than
    # rows of a batch.
    ask(6)
    assert ask(7) == ask(7)
    assert ask(7) != ask(8)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(10**400)}, "seed"),
        ({"n": 2}, "n"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e308}}, "logit_bias"),
        ({"logit_bias": {"1": -101}}, "logit_bias"),
        ({"logit_bias": {str(k): 1 for k in range(1025)}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_when_a_field_is_wrong_then_the_400_names_it_streamed_or_not(
    talker: Process, change: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        answer = post(talker, **{"model": "default", "messages": ASK, "stream": stream} | change)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_when_a_body_is_not_a_request_then_it_is_refused(talker: Process) -> None:
    url = f"{talker.url}/v1/chat/completions"
    assert httpx.post(url, content=b"{").status_code == 400
    assert httpx.post(url, content=b"\xff\xfe").status_code == 400
    assert httpx.post(url, json={"messages": ASK}).json()["error"]["param"] == "model"
    refused = httpx.get(url)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["message"] == "This path takes POST, not GET."


def test_when_no_language_model_is_loaded_then_it_is_a_404(server: Process) -> None:
    answer = post(server, model="default", messages=ASK)
    assert answer.status_code == 404
    assert "No language model" in answer.json()["error"]["message"]


def test_when_models_are_listed_then_the_language_model_is_among_them(talker: Process) -> None:
    listed = [m["id"] for m in httpx.get(f"{talker.url}/v1/models").json()["data"]]
    assert listed == ["whisper-base", SMALL, "default"]


def running(talker: Process) -> float:
    text = httpx.get(f"{talker.url}/metrics").text
    found = re.search(r"^antiphon_kv_generating (\S+)$", text, re.M)
    assert found, text
    return float(found[1])


def test_when_a_client_disconnects_then_its_generation_ends(talker: Process) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "Count to a million."}], "max_tokens": 4000}
    body["logit_bias"] = {"0": -100, "2": -100}

    async def main() -> None:
        async with httpx.AsyncClient(timeout=30) as http:
            async with http.stream("POST", f"{talker.url}/v1/chat/completions", json=body | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if "content" in line:
                        break
                assert running(talker) >= 1
            with pytest.raises(httpx.TimeoutException):
                await http.post(f"{talker.url}/v1/chat/completions", json=body, timeout=1.0)

    asyncio.run(main())
    deadline = time.monotonic() + 10
    while running(talker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(talker) == 0


def test_when_many_ask_at_once_then_each_gets_its_own_text(talker: Process) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as ask:
            done = await asyncio.gather(
                *(
                    ask.chat.completions.create(
                        model="default",
                        messages=[{"role": "user", "content": f"Repeat after me: {token}"}],
                        # Each request's own token is far likelier than any other.
                        logit_bias={str(token): 100},
                        temperature=0,
                        max_tokens=12,
                    )
                    for token in TOKENS
                )
            )
        return [d.choices[0].message.content or "" for d in done]

    together = asyncio.run(main())
    # Each answer is one token repeated twelve times, and no two answers are equal.
    assert all(len(text) % 12 == 0 and text == text[: len(text) // 12] * 12 for text in together)
    assert len(set(together)) == len(TOKENS)


@contextmanager
def stopped_trials(talker: Process) -> Iterator[None]:
    """Stop the process that compiles the clients' schemas during the test."""
    tries = [p for p in psutil.Process(talker.popen.pid).children() if "antiphon.engine.grammar_trial" in p.cmdline()]
    assert tries
    for process in tries:
        process.suspend()
    try:
        yield
    finally:
        for process in tries:
            process.resume()


def test_while_schemas_take_for_ever_to_compile_others_are_answered(talker: Process) -> None:
    # More schemas than a default executor has threads.
    new = [{"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": f"x{i}"}}} for i in range(12)]
    body = {"model": "default", "messages": ASK, "temperature": 0, "max_tokens": 8}

    async def main() -> list[int]:
        async with httpx.AsyncClient(base_url=talker.url, timeout=60) as http:
            with stopped_trials(talker):
                waiting = [
                    asyncio.create_task(http.post("/v1/chat/completions", json={**body, "response_format": one}))
                    for one in new
                ]
                plain = await http.post("/v1/chat/completions", json=body)
                assert plain.status_code == 200
                assert not any(task.done() for task in waiting)
                # The schemas of clients that leave are dropped.
                for task in waiting[2:]:
                    task.cancel()
                await asyncio.wait(waiting[2:])
            return [(await task).status_code for task in waiting[:2]]

    assert asyncio.run(main()) == [200, 200]


def test_a_schema_that_wants_the_machine_is_refused_by_name(talker: Process) -> None:
    patterns = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"]
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": patterns}}}
    answer = post(talker, model="default", messages=ASK, response_format=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "26 patterns at once" in answer.json()["error"]["message"]


TOKENS = range(1000, 1008)
