"""A language model on another server, in a real server's conversations: truncation, faults, and a secret key."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from tests.conftest import SMALL, VOICE, Process, Recording, Serve
from tests.remote.chat.scripted_server import Answer, Script, ScriptedServer, fails, hangs, says, scripted_server
from tests.server.collector import collector
from tests.server.conversations import TEXT_ONLY, ConversationClient, talk

KEY = "sk-not-to-be-seen"
LINE = "Sorry, I was not there for a moment."
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def backend() -> Iterator[ScriptedServer]:
    """Yield a scripted model's server in its own thread. A test sets its `scripts`."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(scripted_server(hangs)) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def spans() -> Iterator[tuple[str, list[Any]]]:
    """Yield the URL for traces, and the list of received traces."""
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def server(serve: Serve, backend: ScriptedServer, folder: Path, spans: tuple[str, list[Any]]) -> Iterator[Process]:
    """Yield a server with a voice, and with its language model at the scripted server. It traces all turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("ANTIPHON_REMOTE_KEY", KEY)
        process = serve(
            *("--language-model", f"{backend.url}#clever", "--synthesizer", VOICE, "--failure-line", LINE),
            *("--remote-first-token-s", "0.6", "--remote-token-s", "0.6", "--record", str(folder)),
            *("--otel-endpoint", spans[0], "--otel-sample", "1"),
            clean=False,
        )
    with process.popen:
        yield process
        process.terminate()


@asynccontextmanager
async def conversation(
    server: Process, backend: ScriptedServer, scripts: Sequence[Script], **session: Any
) -> AsyncIterator[ConversationClient]:
    backend.begin(scripts)
    async with talk(server, "?model=clever", **session) as wire:
        yield wire


async def response(wire: ConversationClient, text: str = "", **options: Any) -> dict[str, Any]:
    """Send a text and request a response. Returns the finished response."""
    if text:
        await wire.text(text)
    await wire.say("response.create", **({"response": options} if options else {}))
    done: dict[str, Any] = (await wire.until("response.done"))["response"]
    return done


def sent(backend: ScriptedServer) -> list[tuple[str, str]]:
    """Return the role and the text of each message in the last request."""
    return [(m["role"], m["content"]) for m in backend.asked[-1].body["messages"]]


def test_turns_are_answered_with_the_servers_words_and_usage(server: Process, backend: ScriptedServer) -> None:
    async def first(answer: Answer) -> None:
        await answer.head()
        await answer.words("It ", "is ", "noon.")
        details = {"cached_tokens": 20}
        await answer.end(usage={"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": details})

    async def main() -> None:
        async with conversation(server, backend, [first, says("Yes.")], instructions="Be brief.", **TEXT_ONLY) as wire:
            done = await response(wire, "What time is it?")
            assert done["status"] == "completed"
            assert done["output"][0]["content"][0]["text"] == "It is noon."
            usage = done["usage"]
            assert (usage["input_tokens"], usage["output_tokens"]) == (30, 4)
            assert usage["input_token_details"]["cached_tokens"] == 20
            await response(wire, "Sure?")
            assert sent(backend)[1:] == [
                ("user", "What time is it?"),
                ("assistant", "It is noon."),
                ("user", "Sure?"),
            ]
            assert "Be brief." in sent(backend)[0][1]
            assert backend.asked[-1].headers["authorization"] == f"Bearer {KEY}"

    asyncio.run(main())


def test_a_spoken_turn_is_one_trace_with_the_request_to_the_models_server(
    server: Process, backend: ScriptedServer, spans: tuple[str, list[Any]], recordings: dict[str, Recording]
) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and r.seconds < 8)

    async def main() -> str:
        async with conversation(server, backend, [says("Yes."), says("No.")], **TEXT_ONLY) as wire:
            await response(wire, "Written, not said.")
            # No spoken turn is under way.
            assert "traceparent" not in backend.asked[-1].headers
            await wire.sound(recording.pcm, 2.0)
            await wire.until("response.done")
            return backend.asked[-1].headers["traceparent"]

    version, trace_id, span_id, flags = asyncio.run(main()).split("-")
    assert (version, flags) == ("00", "01")
    until_s = time.monotonic() + 20
    while not (roots := [s for s in spans[1] if s.name == "antiphon.turn" and s.trace_id.hex() == trace_id]):
        assert time.monotonic() < until_s, "the turn was not traced"
        time.sleep(0.05)
    assert roots[0].span_id.hex() == span_id


def test_what_a_client_says_of_its_trace_is_not_told_to_the_models_server(
    server: Process, backend: ScriptedServer
) -> None:
    """Baggage and trace state may contain personal data. They are for the client's own services."""
    theirs = {
        "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01",
        "tracestate": "vendor=private-value",
        "baggage": "user=private-value",
        **dict.fromkeys(
            ("b3", "x-b3-traceid", "uber-trace-id", "x-datadog-trace-id", "x-amzn-trace-id"), "private-value"
        ),
    }
    backend.begin([says("Yes.")])
    body = {"model": "clever", "messages": [{"role": "user", "content": "Hello."}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=theirs, timeout=30)
    assert answer.status_code == 200, answer.text
    asked = backend.asked[-1].headers
    assert not set(theirs) & set(asked)
    assert "private-value" not in str(asked)


def test_an_interrupted_answer_is_sent_back_as_it_was_heard(server: Process, backend: ScriptedServer) -> None:
    story = says("Once upon a time there was a small town by the sea. ", "Nobody knew who had built it, or when.")

    async def main() -> None:
        async with conversation(server, backend, [story, says("Yes.")]) as wire:
            item = (await response(wire, "Tell me a story."))["output"][0]
            await wire.say("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=1200)
            await wire.until("conversation.item.truncated")
            await response(wire, "Go on.", output_modalities=["text"])
            said = sent(backend)[-2]
            assert said[0] == "assistant"
            assert said[1].startswith("Once upon")
            assert "Nobody" not in said[1]

    asyncio.run(main())


def test_a_cancelled_answer_ends_at_the_server_too(server: Process, backend: ScriptedServer) -> None:
    async def endless(answer: Answer) -> None:
        await answer.head()
        while not answer.gone.is_set():
            await answer.words("and ")
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with conversation(server, backend, [endless, says("Yes.")], **TEXT_ONLY) as wire:
            await wire.text("Count.")
            await wire.say("response.create")
            await wire.until("response.output_text.delta")
            await wire.say("response.cancel")
            assert (await wire.until("response.done"))["response"]["status"] == "cancelled"
            await backend.client_left()
            assert (await response(wire, "Well?"))["status"] == "completed"

    asyncio.run(main())


def test_a_function_is_called_and_its_result_answered(server: Process, backend: ScriptedServer) -> None:
    async def calls(answer: Answer) -> None:
        await answer.head()
        for piece in ('{"city"', ': "Paris"}'):
            function = {"name": "get_weather" if piece.startswith("{") else None, "arguments": piece}
            delta = {"tool_calls": [{"index": 0, "id": "c1", "function": function}]}
            await answer.event({"choices": [{"index": 0, "delta": delta}]})
        await answer.end("tool_calls")

    async def main() -> None:
        scripts = [calls, says("It is clear.")]
        async with conversation(server, backend, scripts, **TEXT_ONLY, tools=[WEATHER], tool_choice="required") as wire:
            (call,) = (await response(wire, "How is Paris?"))["output"]
            assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
            assert backend.asked[0].body["tool_choice"] == "required"
            item = {"type": "function_call_output", "call_id": call["call_id"], "output": "clear"}
            await wire.say("conversation.item.create", item=item)
            assert (await response(wire, tool_choice="none"))["output"][0]["content"][0]["text"] == "It is clear."
            assert sent(backend)[-1] == ("tool", "clear")
            assert backend.asked[-1].body["messages"][-2]["tool_calls"][0]["id"] == call["call_id"]

    asyncio.run(main())


async def closes(answer: Answer) -> None:
    answer.writer.close()


async def garbage(answer: Answer) -> None:
    await answer.head()
    await answer.event("}{")


async def stops(answer: Answer) -> None:
    await answer.head()
    await answer.words("There ", "is ")
    await answer.gone.wait()


async def dies(answer: Answer) -> None:
    await answer.head()
    await answer.words("There ", "is ")


FAULTS = {
    "refuses": closes,
    "hangs": hangs,
    "garbage": garbage,
    "stops in the middle": stops,
    "dies in the middle": dies,
    "fails": fails(500),
    "is full for long": fails(429, retry_after="2.5"),
    "knows no such model": fails(404, "no such model"),
    "does not take the key": fails(401),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_one_response_and_the_next_one_works(
    server: Process, backend: ScriptedServer, fault: str
) -> None:
    async def main() -> None:
        async with conversation(server, backend, [FAULTS[fault]], **TEXT_ONLY) as wire:
            done = await response(wire, "Hello?")
            assert done["status"] == "failed"
            assert done["status_details"]["error"]
            backend.scripts = [says("Here.")]
            while (again := await response(wire, "And now?"))["status"] == "failed":
                # The server has asked not to be called for a while.
                assert fault == "is full for long"
                await asyncio.sleep(0.1)
            assert again["output"][0]["content"][0]["text"] == "Here."

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["fails", "stops in the middle"])
def test_a_fault_is_said_aloud_and_no_word_comes_twice(server: Process, backend: ScriptedServer, fault: str) -> None:
    async def main() -> None:
        async with conversation(server, backend, [FAULTS[fault]]) as wire:
            done = await response(wire, "Hello?")
            assert done["status"] == "failed"
            said = wire.joined("response.output_audio_transcript.delta")
            assert said == (LINE if fault == "fails" else f"There is {LINE}")
            assert len(wire.spoken()) > 24_000
            backend.scripts = [says("Here.")]
            assert (await response(wire, "And now?"))["status"] == "completed"

    asyncio.run(main())


def test_one_late_word_is_asked_for_again_and_no_word_comes_twice(server: Process, backend: ScriptedServer) -> None:
    async def main() -> None:
        async with conversation(server, backend, [hangs, says("Here ", "I am.")], **TEXT_ONLY) as wire:
            assert (await response(wire, "Hello?"))["output"][0]["content"][0]["text"] == "Here I am."
            assert len(backend.asked) == 2

    asyncio.run(main())


def test_a_server_that_hangs_for_one_slows_no_other(server: Process, backend: ScriptedServer) -> None:
    async def main() -> None:
        async with (
            conversation(server, backend, [stops, says("Here.")], **TEXT_ONLY) as first,
            talk(server, "?model=clever", **TEXT_ONLY) as second,
        ):
            await first.text("Hello?")
            await first.say("response.create")
            await first.until("response.output_text.delta")
            assert (await response(second, "And you?"))["status"] == "completed"
            assert (await first.until("response.done"))["response"]["status"] == "failed"

    asyncio.run(main())


def test_a_spoken_turn_is_answered_and_nothing_is_asked_before_the_turn_is_over(
    server: Process, backend: ScriptedServer, recordings: dict[str, Recording]
) -> None:
    recording = next(r for r in recordings.values() if r.language == "en" and r.seconds < 8)

    async def main() -> None:
        audio = {"input": {"transcription": {"model": "whisper-base"}}}
        async with conversation(server, backend, [says("Here.")], output_modalities=["text"], audio=audio) as wire:
            await wire.sound(recording.pcm, 2.0)
            done = (await wire.until("response.done"))["response"]
            assert done["output"][0]["content"][0]["text"] == "Here."
            heard = next(
                e["transcript"]
                for e in wire.seen
                if e["type"] == "conversation.item.input_audio_transcription.completed"
            )
            assert sent(backend)[-1] == ("user", heard)
            assert len(backend.asked) == sum(e["type"] == "response.created" for e in wire.seen)

    asyncio.run(main())


def test_the_rest_endpoint_answers_with_it_too(server: Process, backend: ScriptedServer) -> None:
    backend.begin([says("Here.")])
    body = {"model": "clever", "messages": [{"role": "user", "content": "Hello?"}], "top_p": 0.5}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == "Here."
    assert backend.asked[0].body["top_p"] == 0.5
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert "clever" in {m["id"] for m in models}


def test_the_key_is_in_no_log_no_recording_no_metric_and_no_page(server: Process, folder: Path) -> None:
    texts = [server.log.read_text()]
    texts += [httpx.get(f"{server.url}{path}").text for path in ("/metrics", "/health", "/v1/models", "/")]
    texts += [f.read_bytes().decode("latin-1") for f in folder.rglob("*") if f.is_file()]
    assert len(texts) > 5
    assert not any(KEY in text for text in texts)


def test_a_model_of_another_antiphon_says_what_it_says_there(serve: Serve, talker: Process) -> None:
    front = serve("--language-model", f"{talker.url}/v1#{SMALL}")
    body = {
        "model": SMALL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 20,
    }
    there, here = (
        httpx.post(f"{s.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        for s in (talker, front)
    )
    assert here["choices"][0]["message"] == there["choices"][0]["message"]
    assert here["usage"]["prompt_tokens"] == there["usage"]["prompt_tokens"]

    async def main() -> None:
        async with talk(front, f"?model={SMALL}", **TEXT_ONLY) as wire:
            for text in ("Say hello.", "Say it again."):
                done = await response(wire, text)
                assert done["status"] in ("completed", "incomplete")
                assert done["output"][0]["content"][0]["text"]

    asyncio.run(main())
