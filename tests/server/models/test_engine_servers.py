"""A language model on engine servers (`--engine vllm:URL,URL`) in a real server's conversations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import SMALL, VOICE, Process, Serve
from tests.engine.local.smollm2 import checkpoint
from tests.remote.engine.scripted_vllm import ScriptedVllm
from tests.server.conversations import TEXT_ONLY, talk

KEY = "sk-not-to-be-seen"
STORY = "Once upon a time there was a small town by the sea. Nobody knew who had built it, or when it was built."
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the small model's configuration and tokenizer, without weights."""
    model, tokenizer = checkpoint()
    found = tmp_path_factory.mktemp("engine") / SMALL
    tokenizer.save_pretrained(found)
    model.config.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ScriptedVllm]]:
    _, tokenizer = checkpoint()
    words, size = tokenizer.backend_tokenizer, len(tokenizer)
    made = [ScriptedVllm(words, size, context_rows=2048, eos=tokenizer.eos_token_id) for _ in range(2)]
    for one in made:
        one.key = KEY
    yield made
    for one in made:
        one.stop()


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def server(serve: Serve, engines: list[ScriptedVllm], folder: Path, records: Path) -> Iterator[Process]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTIPHON_REMOTE_KEY", KEY)
        process = serve(
            *("--engine", "vllm:" + ",".join(one.url for one in engines), "--language-model", str(folder)),
            *("--synthesizer", VOICE, "--remote-first-token-s", "4", "--remote-token-s", "1"),
            *("--record", str(records)),
            clean=False,
        )
    with process.popen:
        yield process
        process.terminate()


@pytest.fixture
def says(engines: list[ScriptedVllm]) -> Iterator[Callable[[str], None]]:
    """Make the engines answer with a text. A resubmitted request continues from where it was."""
    _, tokenizer = checkpoint()
    opening = tokenizer.encode("<|im_start|>assistant\n")

    def set_text(text: str) -> None:
        answer = [*tokenizer.encode(text), tokenizer.eos_token_id]

        def following(rows: list[int]) -> int:
            starts = [i for i in range(len(rows)) if rows[i : i + len(opening)] == opening]
            begun = rows[starts[-1] + len(opening) :] if starts else []
            return answer[min(len(begun), len(answer) - 1)]

        for one in engines:
            one.following = following

    yield set_text
    for one in engines:
        one.faults.clear()
        one.requests.clear()
        one.token_s = 0.0
        if not one.is_listening:
            one.start()


def text_of(rows: list[int]) -> str:
    return str(checkpoint()[1].decode(rows))


def newest(engines: list[ScriptedVllm]) -> str:
    """Return the rows of the last request as text."""
    (one,) = (one for one in engines if one.prompts)
    return text_of(one.prompts[-1])


async def response(wire: Any, text: str = "", **options: Any) -> dict[str, Any]:
    if text:
        await wire.text(text)
    await wire.say("response.create", **({"response": options} if options else {}))
    done: dict[str, Any] = (await wire.until("response.done"))["response"]
    return done


def written(done: dict[str, Any]) -> str:
    return str(done["output"][0]["content"][0]["text"])


def test_an_interrupted_answer_is_in_the_rows_as_it_was_heard(
    server: Process, engines: list[ScriptedVllm], says: Callable[[str], None]
) -> None:
    says(STORY)

    async def main() -> None:
        async with talk(server, instructions="Be brief.") as wire:
            item = (await response(wire, "Tell me a story."))["output"][0]
            await wire.say("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=1200)
            await wire.until("conversation.item.truncated")
            says("Yes.")
            done = await response(wire, "Go on.", output_modalities=["text"])
            assert written(done) == "Yes."
            said = newest(engines)
            assert "Once upon" in said
            assert "Nobody" not in said
            assert "Be brief." in said
            # The engine still has the rows that were heard, and did not compute them again.
            usage = done["usage"]
            assert usage["input_token_details"]["cached_tokens"] > usage["input_tokens"] / 2, usage

    asyncio.run(main())


def test_when_an_engine_is_killed_in_mid_answer_then_the_other_goes_on_and_no_word_is_lost_or_doubled(
    server: Process, engines: list[ScriptedVllm], says: Callable[[str], None]
) -> None:
    says(STORY)
    for one in engines:
        one.token_s = 0.02

    async def main() -> None:
        async with talk(server, **TEXT_ONLY | {"max_output_tokens": 100}) as wire:
            await wire.text("Tell me a story.")
            await wire.say("response.create")
            for _ in range(4):
                await wire.until("response.output_text.delta")
            (busy,) = (one for one in engines if one.prompts)
            busy.kill()
            done = (await wire.until("response.done"))["response"]
            assert (done["status"], written(done)) == ("completed", STORY)
            assert wire.joined("response.output_text.delta") == STORY
            says("Yes.")
            assert written(await response(wire, "Well?")) == "Yes."

    asyncio.run(main())


def test_when_all_engines_are_gone_then_the_response_fails_and_the_session_lives(
    server: Process, engines: list[ScriptedVllm], says: Callable[[str], None]
) -> None:
    says("Here.")

    async def main() -> None:
        async with talk(server, **TEXT_ONLY) as wire:
            for one in engines:
                one.kill()
            done = await response(wire, "Hello?")
            assert done["status"] == "failed"
            for one in engines:
                one.start()
            async with asyncio.timeout(60):
                while (done := await response(wire, "And now?"))["status"] == "failed":
                    # The circuit breaker is open for a moment.
                    assert "does not answer" in done["status_details"]["error"]["message"]
                    await asyncio.sleep(0.1)
            assert written(done) == "Here."

    asyncio.run(main())


def test_a_function_is_called_in_the_form_that_its_schema_asks_for(
    server: Process, engines: list[ScriptedVllm], says: Callable[[str], None]
) -> None:
    # The engine enforces the grammar, whatever the model would generate.
    says('<tool_call>\n{"name": "get_whether", "arguments": {"city": "Roma"}}\n</tool_call>')

    async def main() -> None:
        async with talk(server, **TEXT_ONLY | {"max_output_tokens": 80}, tools=[WEATHER], tool_choice="required") as w:
            (call,) = (await response(w, "How is Paris?"))["output"]
            assert call["name"] == "get_weather"
            assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")
        assert any("structured_outputs" in body for one in engines for body in one.requests)

    asyncio.run(main())


def test_a_conversation_that_outgrows_the_context_is_cut_here_and_never_there(
    server: Process, engines: list[ScriptedVllm], says: Callable[[str], None]
) -> None:
    says("Yes.")

    async def main() -> None:
        async with talk(server, **TEXT_ONLY, instructions="Remember the sea.") as wire:
            for number in range(8):
                done = await response(wire, f"{number}: " + "and so on and on " * 60)
                assert done["status"] == "completed"
        prompts = [p for one in engines for p in one.prompts]
        # The scripted engine has checked that each prompt fits.
        assert max(map(len, prompts)) > 1000
        assert "Remember the sea." in text_of(prompts[-1])
        assert " 0: " not in text_of(prompts[-1])

    asyncio.run(main())


def test_the_key_is_in_no_log_no_recording_no_metric_and_no_page(server: Process, records: Path) -> None:
    texts = [server.log.read_text()]
    texts += [httpx.get(f"{server.url}{path}").text for path in ("/metrics", "/health", "/v1/models", "/")]
    texts += [f.read_bytes().decode("latin-1") for f in records.rglob("*") if f.is_file()]
    assert len(texts) > 5
    assert not any(KEY in text for text in texts)
