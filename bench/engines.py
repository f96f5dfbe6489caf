"""What antiphon adds to the first word of a language model on another server, by the kind of request.

    antiphon bench engines [--rounds 100] [--turns 1,20] [--backend URL#MODEL]
    antiphon bench engines --sections kept,streams,added,killed,hundred [--vllm URL] [--folder FOLDER]

The second form is about engine servers (`--engine vllm:URL`): bench/engine_servers.py.

Without `--backend`, the other server is a process of this benchmark that answers at once, twenty words at the speed of
a fast GPU, so that what is measured is antiphon. A round asks the server itself, then antiphon's chat completions and
a conversation of /v1/realtime in text. Each request has its share of the cores: client, server and antiphon run on the
same ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import websockets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import HERE, Server, machine, percentile, save, server, table
from engine_servers import REAL, SECTIONS

from antiphon.loading.loader import prepare, store_of
from antiphon.settings import load
from antiphon.store import MODELS

WORDS, WORDS_A_S, WARM_UP = 20, 100, 20
QUESTION = "What is the weather like in Paris today?"


async def answering(text: str) -> None:
    """Serve Chat Completions: every request is answered at once, by `text` or else by WORDS words. Prints the port."""

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
    """The address of a server that answers at once, with `text` where it is given, in a process of its own."""
    command = [sys.executable, str(HERE / "engines.py"), "--answer", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1#clever"
        finally:
            process.terminate()


def history(turns: int) -> list[dict[str, str]]:
    """A conversation of so many turns, the last of which is not answered yet."""
    said = "It was sunny in the morning, and it is going to rain in the afternoon, so take an umbrella."
    pair = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": said}]
    return [*pair * (turns - 1), pair[0]]


def has_word(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


async def first_word(client: httpx.AsyncClient, url: str, model: str, turns: int) -> float:
    """Seconds from a request for chat completions to its first word. The answer is read to its end."""
    body = {"model": model, "messages": history(turns), "stream": True}
    begun, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not first_s and has_word(line):
                first_s = time.perf_counter() - begun
    return first_s


class Talk:
    """A conversation in text over /v1/realtime."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket

    async def say(self, type: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": type} | fields))

    async def until(self, kind: str) -> None:
        while (event := json.loads(await self._socket.recv()))["type"] != kind:
            if event["type"] == "error":
                raise RuntimeError(event)

    async def add(self, role: str, text: str) -> None:
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": text}]
        await self.say("conversation.item.create", item={"type": "message", "role": role, "content": content})
        await self.until("conversation.item.done")

    async def first_word(self) -> float:
        """Seconds from a response.create to the first word. The answer leaves the conversation as it was."""
        begun = time.perf_counter()
        await self.say("response.create", response={"conversation": "none"})
        await self.until("response.output_text.delta")
        first_s = time.perf_counter() - begun
        await self.until("response.done")
        return first_s


async def talked(server: Server, turns: int) -> AsyncIterator[Talk]:
    async with websockets.connect(f"{server.ws}/v1/realtime?model=clever", max_size=None) as socket:
        talk = Talk(socket)
        await talk.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        await talk.until("session.updated")
        for message in history(turns):
            await talk.add(message["role"], message["content"])
        yield talk


async def measured(front: Server, address: str, turns: int, rounds: int) -> dict[str, list[float]]:
    """First words in milliseconds, by who was asked; each round asks all of them."""
    url, _, model = address.partition("#")
    found: dict[str, list[float]] = {"the server itself": [], "chat completions": [], "conversation": []}
    async with httpx.AsyncClient(timeout=60) as client:
        async for talk in talked(front, turns):
            for _ in range(WARM_UP + rounds):
                found["the server itself"].append(await first_word(client, url, model, turns) * 1000)
                found["chat completions"].append(await first_word(client, f"{front.url}/v1", model, turns) * 1000)
                found["conversation"].append(await talk.first_word() * 1000)
    return {name: values[WARM_UP:] for name, values in found.items()}


def run(address: str, turns: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    with server("--language-model", address, "--synthesizer", "none") as front:
        for count in turns:
            found = asyncio.run(measured(front, address, count, rounds))
            itself = found["the server itself"]
            for name, values in found.items():
                added = [b - a for a, b in zip(itself, values, strict=True)]
                rows.append(
                    {"turns": count, "asked": name, "rounds": rounds}
                    | {f"first_word_p{q}_ms": percentile(values, q) for q in (50, 95)}
                    | {f"added_p{q}_ms": percentile(added, q) for q in (50, 95)}
                )
    return rows


def run_sections(names: list[str], vllm: str, folder: Path | None, packed: Path | None, rounds: int) -> None:
    """Measure engine servers. `folder`: of the default language model's, prepared, where it is not given."""
    if folder is None:
        settings = load({}, os.environ)
        folder = prepare(settings, store_of(settings.models), MODELS["qwen2.5-coder-0.5b-instruct"])
    for name in names:
        rows = SECTIONS[name](vllm, folder, packed, rounds) if name in REAL else SECTIONS[name](folder, rounds)
        table(name, list(rows[0]), [list(row.values()) for row in rows])
        print(f"written: {save('engine-servers-' + name, {'machine': machine(), name: rows})}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", default="1,20", help="lengths of the conversation")
    parser.add_argument("--backend", default="", help="URL#MODEL of a server to measure with")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--sections", default="", help=", ".join(SECTIONS))
    parser.add_argument("--vllm", default="", help="URL of a vLLM server, for " + " and ".join(REAL))
    parser.add_argument("--folder", type=Path, help="the checkpoint that it serves; for others, one with a tokenizer")
    parser.add_argument("--packed", type=Path, help="the same checkpoint packed as int8, for the local engine")
    args = parser.parse_args()
    if args.sections:
        run_sections(args.sections.split(","), args.vllm, args.folder, args.packed, args.rounds)
        return
    if args.answer is not None:
        asyncio.run(answering(args.answer))
        return
    turns = [int(t) for t in args.turns.split(",")]
    if args.backend:
        rows = run(args.backend, turns, args.rounds)
    else:
        with backend() as address:
            rows = run(address, turns, args.rounds)
    head = list(rows[0])
    table("the first word of a model on another server, and what antiphon adds", head, [list(r.values()) for r in rows])
    print(f"\nwritten: {save('engines', {'machine': machine(), 'first_word': rows})}")


if __name__ == "__main__":
    main()
