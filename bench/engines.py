"""The delay that antiphon adds to the first word of a language model on another server, by kind of request.

    antiphon bench engines [--rounds 100] [--turns 1,20] [--backend URL#MODEL]
    antiphon bench engines --sections kept,streams,added,killed,hundred [--vllm URL] [--folder FOLDER]

The second form measures engine servers (`--engine vllm:URL`); see bench/engine_servers.py.

Without `--backend`, the other server is a process of this benchmark. It answers at once, with twenty words at the speed
of a fast GPU, so only antiphon is measured. Each round asks that server directly, then antiphon's chat completions,
then a text conversation of /v1/realtime. Client, server and antiphon share the same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from bench.common import Server, beside, changed, machine, numbers, options, save, server, show, spread
from bench.realtime import TEXT_ALONE, talking

from antiphon.loading.loader import prepare, store_of
from antiphon.settings import load
from antiphon.store import MODELS

WORDS, WORDS_A_S, WARM_UP = 20, 100, 20
QUESTION = "What is the weather like in Paris today?"


async def answering(text: str) -> None:
    """Print the port, and serve chat completions that answer at once: with `text`, or else with WORDS words."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with_requests = True
        while with_requests:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            except (asyncio.IncompleteReadError, ConnectionResetError):
                break
            length = next((int(line.split(":")[1]) for line in head.split("\r\n") if "content-length" in line), 0)
            await reader.readexactly(length)
            if head.startswith("get"):
                body = b'{"data": [{"id": "clever", "max_model_len": 32768}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for piece in [text] if text else [f"word{n} " for n in range(WORDS)]:
                _chunk(writer, json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}))
                await writer.drain()
                await asyncio.sleep(1 / WORDS_A_S)
            _chunk(writer, json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
            _chunk(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
        writer.close()

    found = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(found.sockets[0].getsockname()[1], flush=True)
    await found.serve_forever()


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    data = f"data: {text}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def backend(text: str = "") -> Iterator[str]:
    """Run a server in a separate process that answers at once, with `text` if it is given. Yields its address."""
    with beside("bench.engines", "--answer", text) as (port, _):
        yield f"http://127.0.0.1:{port}/v1#clever"


def history(turns: int) -> list[dict[str, str]]:
    """Return a conversation of `turns` turns, the last of which is unanswered."""
    said = "It was sunny in the morning, and it is going to rain in the afternoon, so take an umbrella."
    pair = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": said}]
    return [*pair * (turns - 1), pair[0]]


async def first_event_ms(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> float:
    """Return the milliseconds from a request to the first event with a word. Reads the stream to its end."""
    begun, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", url, json={"stream": True} | body) as answer:
        async for line in answer.aiter_lines():
            if not first_s and line.startswith("data: {"):
                choice = (json.loads(line.removeprefix("data: ")).get("choices") or [{}])[0]
                if choice.get("text") or choice.get("token_ids") or choice.get("delta", {}).get("content"):
                    first_s = time.perf_counter() - begun
    return first_s * 1000


async def first_words(front: Server, address: str, turns: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds to the first word, by target. Each round asks all targets."""
    url, _, model = address.partition("#")
    body = {"model": model, "messages": history(turns)}
    found: dict[str, list[float]] = {"the server itself": [], "chat completions": [], "conversation": []}
    async with httpx.AsyncClient(timeout=60) as client, talking(front.ws, TEXT_ALONE) as talk:
        for message in body["messages"]:
            await talk.add(**{"role": message["role"], "text": message["content"]})
        for _ in range(WARM_UP + rounds):
            found["the server itself"].append(await first_event_ms(client, f"{url}/chat/completions", body))
            found["chat completions"].append(await first_event_ms(client, f"{front.url}/v1/chat/completions", body))
            # This answer is not added to the conversation.
            found["conversation"].append(await talk.first_word_ms(conversation="none"))
    return {name: values[WARM_UP:] for name, values in found.items()}


def beside_itself(what: str, turns: int, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each target, with its delay relative to the first target, which is the server itself."""
    itself = next(iter(found.values()))
    return [
        {"turns": turns, "asked": name, "rounds": len(values)}
        | spread(values, what, "ms")
        | spread(changed(itself, values), "added", "ms")
        for name, values in found.items()
    ]


def run(address: str, turns: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    with server("--language-model", address, "--synthesizer", "none") as front:
        for count in turns:
            rows += beside_itself("first_word", count, asyncio.run(first_words(front, address, count, rounds)))
    return rows


def run_sections(names: list[str], vllm: str, folder: Path | None, packed: Path | None, rounds: int) -> None:
    """Measure engine servers. Without `folder`, the default language model is prepared and its folder used."""
    from bench.engine_servers import REAL, SECTIONS

    if folder is None:
        settings = load({}, os.environ)
        folder = prepare(settings, store_of(settings.models), MODELS["qwen2.5-coder-0.5b-instruct"])
    for name in names:
        rows = SECTIONS[name](vllm, folder, packed, rounds) if name in REAL else SECTIONS[name](folder, rounds)
        show(name, rows)
        print(f"written: {save('engine-servers-' + name, {'machine': machine(), name: rows})}\n", flush=True)


def main() -> None:
    parser = options("antiphon bench engines", __doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", default="1,20", help="lengths of the conversation")
    parser.add_argument("--backend", default="", help="URL#MODEL of a server to measure with")
    parser.add_argument("--answer", help="serve answers of this text, or of twenty words, and print the port")
    parser.add_argument("--sections", default="", help="kept, streams, added, killed, hundred")
    parser.add_argument("--vllm", default="", help="URL of a vLLM server, for kept and streams")
    parser.add_argument("--folder", type=Path, help="the checkpoint that vLLM serves; for others, one with a tokenizer")
    parser.add_argument("--packed", type=Path, help="the same checkpoint packed as int8, for the local engine")
    args = parser.parse_args()
    if args.answer is not None:
        asyncio.run(answering(args.answer))
    elif args.sections:
        run_sections(args.sections.split(","), args.vllm, args.folder, args.packed, args.rounds)
    else:
        if args.backend:
            rows = run(args.backend, numbers(args.turns), args.rounds)
        else:
            with backend() as address:
                rows = run(address, numbers(args.turns), args.rounds)
        show("the first word of a model on another server, and what antiphon adds", rows)
        print(f"\nwritten: {save('engines', {'machine': machine(), 'first_word': rows})}")


if __name__ == "__main__":
    main()
