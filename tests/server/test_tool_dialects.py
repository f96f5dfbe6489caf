"""The tools of the operator's MCP servers in each dialect, over real sockets and with a real MCP server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from bench import carrier
from PIL import Image
from rich.console import Console
from websockets.asyncio.client import connect

from antiphon.cli.top import board, parsed
from antiphon.contracts import (
    LanguageLoad,
    LanguageProfile,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from antiphon.events.tools import DATA_MARK, Tool
from antiphon.loading.loaded import LoadedModels
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from antiphon.vision.images import EncodedImage
from tests.server.routes.test_telephone import answered, spoken
from tests.server.scripted import Echo, scripted_models, serving
from tests.server.wyoming.harness import Client, Voice

ROOT, LIMIT_S = Path(__file__).parents[2], 30
CALLS = 'call add {"a": 1, "b": 2}'
CALL = re.compile(r"call (\w+) (\{.*?\})")


@dataclass
class Calling:
    """A language model that calls the functions that the user's message names, as in `call add {"a": 1, "b": 2}`. It
    repeats results and all other messages.
    """

    profile: LanguageProfile = field(default_factory=lambda: LanguageProfile("calling", 4096))
    options: list[ReplyOptions] = field(default_factory=list)
    prefilled: list[Sequence[Tool]] = field(default_factory=list)
    # What it calls for each message of a user, if not what the message names.
    calls: str = ""

    async def open(self, owner: object = None) -> Calling:
        return self

    def load(self) -> LanguageLoad:
        return LanguageLoad(0, 0, 0, 0, 0, 0)

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        self.prefilled.append(tools)

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        self.options.append(options)
        last = messages[-1]
        calls = CALL.findall(self.calls or last.text) if last.role == "user" else []
        for number, (name, arguments) in enumerate(calls):
            yield ToolCallStarted(f"call_{number}", name)
            yield ToolCallDelta(arguments)
        if not calls:
            results = [m.text.removeprefix(DATA_MARK) for m in messages[-2:] if m.role == "tool"]
            for word in (f"It is {' and '.join(results)}." if results else last.text).split():
                await anyio.lowlevel.checkpoint()
                yield TextDelta(f"{word} ")
        yield ReplyDone("tool_calls" if calls else "stop", 10, 5, 2)

    def close(self, *, keep: bool = False) -> None:
        return


class NoText:
    """An image reader that finds no text."""

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        return ()


@dataclass
class Running:
    """A running server, with the tools of a demo MCP server and its models."""

    ws: str
    state: ServerState
    language: Calling

    @property
    def http(self) -> str:
        return self.ws.replace("ws", "http", 1)

    def num_calls(self) -> int:
        assert self.state.tool_servers
        return self.state.tool_servers.connections["demo"].counts.calls


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    demo = {"command": sys.executable, "args": ["-m", "tests.remote.mcp.demo_server", "stdio"], "cwd": str(ROOT)}
    demo["approval"] = ["fail"]
    file = tmp_path_factory.mktemp("mcp") / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"demo": demo}}))
    base = Settings()
    settings = replace(
        base,
        tools=replace(base.tools, mcp=str(file)),
        wyoming=replace(base.wyoming, wyoming="127.0.0.1:0"),
        server=replace(base.server, headroom=False),
    )
    language = Calling()
    models: LoadedModels = replace(
        scripted_models(Echo()),
        conversation_model=None,
        language_model=language,
        synthesizer=Voice(),
        image_reader=NoText(),
    )
    with serving(settings, models=models) as (ws, state, _):
        assert state.tool_servers
        end_s = time.monotonic() + LIMIT_S
        while not state.tool_servers.tools:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        yield Running(ws, state, language)


@pytest.fixture
def running(server: Running) -> Running:
    server.language.options.clear()
    server.language.calls = ""
    return server


def run(work: Any) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await work

    return asyncio.run(limited())


# --- chat completions -------------------------------------------------------------------------------------------------


def chat(running: Running, text: str, **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{running.http}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": text}]
        made: Any = client.chat.completions.create(model="default", messages=messages, **fields)
        return list(made) if fields.get("stream") else made


FUNCTION: Any = {"type": "function", "function": {"name": "own", "parameters": {"type": "object"}}}


def test_a_chat_completion_has_the_answer_and_not_the_call(running: Running) -> None:
    before = running.num_calls()
    made = chat(running, 'call add {"a": 1, "b": 2}')
    (choice,) = made.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is 3. ", None, "stop")
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (20, 4)
    assert running.num_calls() == before + 1
    names = [tool.name for tool in running.language.options[0].tools]
    # Nobody can approve a call of this one here.
    assert "add" in names
    assert "fail" not in names


def test_a_streamed_completion_has_the_answer_and_not_the_call(running: Running) -> None:
    chunks = chat(running, 'call add {"a": 1, "b": 2} call recite {"characters": 2}', stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "It is 3 and aa. "
    assert not any(c.choices[0].delta.tool_calls for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_call_of_the_clients_function_ends_the_completion_and_no_server_is_called(running: Running) -> None:
    before = running.num_calls()
    made = chat(running, 'call add {"a": 1, "b": 2} call own {"x": 1}', tools=[FUNCTION])
    (choice,) = made.choices
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [("own", '{"x": 1}')]
    assert choice.finish_reason == "tool_calls"
    assert running.num_calls() == before


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none", "tools": [FUNCTION]},
        {"tool_choice": "required", "tools": [FUNCTION]},
        {"tool_choice": {"type": "function", "function": {"name": "own"}}, "tools": [FUNCTION]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    ],
)
def test_where_the_client_decides_what_is_called_the_servers_have_no_tools(
    running: Running, fields: dict[str, Any]
) -> None:
    chat(running, "Hello!", **fields)
    assert not any(tool.server for tool in running.language.options[0].tools)


def test_a_model_that_calls_again_and_again_has_to_answer(running: Running) -> None:
    async def forever(messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        running.language.options.append(options)
        if options.tools:
            yield ToolCallStarted("call", "add")
            yield ToolCallDelta('{"a": 1, "b": 2}')
        else:
            yield TextDelta("Enough.")
        yield ReplyDone("stop", 1, 0, 1)

    running.language.reply = forever  # type: ignore[method-assign]
    try:
        assert chat(running, "Go.").choices[0].message.content == "Enough."
    finally:
        del running.language.reply  # type: ignore[method-assign]
    assert len(running.language.options) == 9


# --- the others -------------------------------------------------------------------------------------------------------


def test_a_wyoming_answer_has_the_result(running: Running) -> None:
    async def main() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.state.listeners.ports["wyoming"])
        client = Client(reader, writer)
        client.say("transcript", text='call add {"a": 1, "b": 2}')
        answer = await client.until("handled")
        writer.close()
        return str(answer["text"])

    assert run(main()) == "It is 3."


def test_full_duplex_answers_with_the_result_and_without_events_of_the_call(running: Running) -> None:
    async def main() -> list[dict[str, Any]]:
        async with connect(f"{running.ws}/v1/realtime?duplex=1&model=default") as socket:
            await socket.send(json.dumps({"type": "session.update", "session": {"modalities": ["text"]}}))
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": CALLS}]}
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await socket.send(json.dumps({"type": "response.create"}))
            seen = []
            while sum(f["type"] == "response.done" for f in seen) < 2:
                seen.append(json.loads(await socket.recv()))
            return seen

    seen = run(main())
    assert "It is 3" in json.dumps(seen)
    assert "mcp" not in json.dumps(seen)


def test_an_answer_about_video_has_the_result_even_if_the_notes_do_not_support_it(running: Running) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(file, "JPEG")

    async def main() -> str:
        async with connect(f"{running.ws}/v1/video/chat/stream") as socket:
            await socket.send(json.dumps({"type": "session.config", "modalities": ["text"]}))
            await socket.send(json.dumps({"type": "video.frame", "data": b64encode(file.getvalue()).decode()}))
            await socket.send(json.dumps({"type": "video.query", "text": CALLS}))
            text = ""
            while True:
                event = json.loads(await socket.recv())
                assert event["type"] != "error", event
                text += event.get("delta", "") if "text" in event["type"] and "delta" in event["type"] else ""
                if event["type"] == "response.text.done" or event["type"].endswith("session.done"):
                    return text

    before = running.num_calls()
    assert run(main()).strip() == "It is 3."
    assert running.num_calls() == before + 1


def test_a_telephone_caller_hears_the_answer_with_the_result(running: Running) -> None:
    running.language.calls = CALLS

    async def main() -> float:
        async with connect(f"{running.ws}/v1/telephone/media") as socket:
            await socket.send(carrier.start())
            for message in spoken(1, 2):
                await socket.send(message)
            played_s = await answered(socket)
            await socket.send(carrier.stop())
            return played_s

    before = running.num_calls()
    assert run(main()) > 0.2
    assert running.num_calls() == before + 1
    texts = [text for _, text in running.state.loaded().required_synthesizer.spoken]  # type: ignore[attr-defined]
    assert any("It is 3" in text for text in texts)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_metrics_and_top_have_the_figures_of_each_tool_server(running: Running) -> None:
    chat(running, "call recite {}")
    text = httpx.get(f"{running.http}/metrics").text
    now = parsed(text, 1.0)
    assert now.value("antiphon_tools", server="demo") == 8
    assert now.value("antiphon_tool_server_away", server="demo") == 0
    assert now.value("antiphon_tool_calls_total", server="demo") == running.num_calls()
    assert now.value("antiphon_tool_failures_total", server="demo") >= 1
    assert now.value("antiphon_tool_calls_running", server="demo") == 0
    assert now.value("antiphon_tool_seconds_count", server="demo") == running.num_calls()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(board("http://x", now, now))
    (line,) = [line for line in console.export_text().splitlines() if line.startswith("demo ")]
    assert line.split()[:3] == ["demo", "8", f"{running.num_calls()}"]
