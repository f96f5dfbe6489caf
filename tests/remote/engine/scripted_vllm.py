"""A vLLM server on a real socket, without a model: the token after a row is that row's id + 1, or set by a test.

Its answers have the form of the answers in `recorded/`, which come from a real vLLM 0.32. A test sets its faults.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from antiphon.engine.api import Grammar
from antiphon.engine.grammar import GrammarCompiler
from antiphon.remote.engine.answer import allowed_tokens

RECORDED = Path(__file__).parent / "recorded"


def recorded_events(name: str) -> list[dict[str, Any]]:
    """Return the events of a recorded answer, without the closing [DONE]."""
    lines = (RECORDED / name).read_text().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class ScriptedVllm:
    """One server, which runs in its own thread from `start` until `stop`. `url`: its root.

    - `vocabulary`: the number of its tokens. Its `eos` ends a text unless a request says otherwise.
    - `takes_grammars`: `structured_outputs` are enforced; otherwise requests with them are refused. A request whose
      grammar contains a text of `refuses` is always refused.
    - `says`: bodies, by path, that replace its own answers.
    - `generates`: it offers /inference/v1/generate.
    - `requests`: the bodies of all requests for tokens, in the form of /v1/completions.
    - `aborted`: the number of requests that their client closed.
    - `faults`: the faults of the next requests for more than one token: ("refuse", status), ("hang", n), ("cut", n),
      ("garbage", n), ("miscount", n), ("error", n), ("no ids", n) after n tokens, or ("fine", 0). With ("events", n),
      the first of `events` is sent unchanged.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: int,
        *,
        context_rows: int = 4096,
        takes_grammars: bool = True,
        generates: bool = False,
        eos: int | None = None,
    ) -> None:
        self.vocabulary, self.context_rows = vocabulary, context_rows
        self.eos = vocabulary - 1 if eos is None else eos
        # Returns the token that follows some rows, if it is allowed.
        self.following: Callable[[list[int]], int] = lambda rows: (rows[-1] + 1) % vocabulary
        self.takes_grammars, self.generates = takes_grammars, generates
        self.tokenizer = tokenizer
        self.model = "smollm2"
        self.key = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        # Off in benchmarks that send requests for hours.
        self.keeps_bodies = True
        self.refuses: set[str] = set()
        self.says: dict[str, bytes] = {}
        self.aborted = 0
        self.faults: deque[tuple[str, int]] = deque()
        self.events: deque[bytes] = deque()
        self.retry_after = "0"
        self.token_s = 0.0
        # The computed blocks, as (salt, rows of the block and of the blocks before it).
        self.blocks: set[tuple[str, tuple[int, ...]]] = set()
        self._compiler = GrammarCompiler(tokenizer, vocabulary)
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_listening(self) -> bool:
        return self._server is not None and self._server.is_serving()

    def start(self) -> None:
        """Listen, on the same port as before if it was started before."""

        async def listen() -> None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(10)

    def restart(self, model: str) -> None:
        """Serve this model from now on, without the blocks computed before."""
        self.model = model
        self.blocks.clear()

    def kill(self) -> None:
        """Close every connection, even in the middle of an answer, and stop listening."""

        async def kill() -> None:
            assert self._server
            # When asyncio's server closes, it leaks accepted connections that have no transport yet. Let these start
            # first.
            for listening in self._server.sockets:
                self._loop.remove_reader(listening.fileno())
            for _ in range(5):
                await asyncio.sleep(0)
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(kill(), self._loop).result(10)

    def stop(self) -> None:
        """Stop the server and its thread for good."""
        self.kill()

        async def wait() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for writer in list(self._writers):
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def prompts(self) -> list[list[int]]:
        """The rows of each request for more than one token."""
        return [body["prompt"] for body in self.requests if body["max_tokens"] > 1]

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not in the task, because a task that is cancelled before its first step would leave the connection open.
        self._writers.add(writer)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines) if k}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            _, path, _ = first.split(" ")
            answering = asyncio.create_task(self._answer(path, headers, body, writer))
            leaving = asyncio.create_task(reader.read(1))
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.aborted += 1
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self._writers.discard(writer)

    async def _answer(self, path: str, headers: dict[str, str], data: bytes, writer: asyncio.StreamWriter) -> None:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            await send(writer, 401, {"error": {"message": "Unauthorized"}})
        elif path in self.says:
            await send(writer, 200, self.says[path].decode("latin-1"))
        elif path == "/v1/models":
            found = json.loads((RECORDED / "models.json").read_text())
            found["data"][0] |= {"id": self.model, "max_model_len": self.context_rows}
            found["data"] = found["data"] if self.model else []
            await send(writer, 200, found)
        elif path == "/metrics":
            await send(writer, 200, (RECORDED / "metrics.txt").read_text())
        elif path == "/tokenize":
            ids = self.tokenizer.encode(json.loads(data)["prompt"], add_special_tokens=False).ids
            await send(writer, 200, json.loads((RECORDED / "tokenize.json").read_text()) | {"tokens": ids})
        elif path == "/inference/v1/generate" and self.generates:
            body = json.loads(data)
            if not body:
                await send(writer, 400, {"error": {"message": "token_ids"}})
            else:
                flat = {key: value for key, value in body.items() if key != "sampling_params"}
                await self._tokens(flat | body["sampling_params"] | {"prompt": body["token_ids"]}, headers, writer)
        elif path == "/v1/completions":
            await self._tokens(json.loads(data), headers, writer)
        else:
            await send(writer, 404, {"detail": "Not Found"})

    # --- tokens -------------------------------------------------------------------------------------------------------

    async def _tokens(self, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        if body["model"] != self.model:
            await send(writer, 404, json.loads((RECORDED / "not_found.json").read_text()))
            return
        assert body["prompt"]
        assert all(0 <= token < self.vocabulary for token in body["prompt"])
        assert len(body["prompt"]) + body["max_tokens"] <= self.context_rows
        if self.keeps_bodies:
            self.requests.append(body)
            self.headers.append(headers)
        kind, number = self.faults.popleft() if self.faults and body["max_tokens"] > 1 else ("fine", 0)
        if kind == "refuse":
            await send(writer, number, {"error": {"message": "busy"}}, f"retry-after: {self.retry_after}\r\n")
            return
        wanted = body.get("structured_outputs")
        if wanted and (not self.takes_grammars or any(text in json.dumps(wanted) for text in self.refuses)):
            await send(writer, 400, json.loads((RECORDED / "bad_grammar.json").read_text()))
            return
        await self._stream(body, kind, number, writer)

    async def _stream(self, body: dict[str, Any], kind: str, number: int, writer: asyncio.StreamWriter) -> None:
        chat = recorded_events("generate.sse" if "token_ids" in body else "completions.sse")
        rows, stop = list(body["prompt"]), set(body["stop_token_ids"])
        if not body["ignore_eos"]:
            stop.add(self.eos)
        cached = self._cached(body["cache_salt"], rows)
        follower, wanted = None, body.get("structured_outputs")
        if wanted:
            (grammar_kind, text), *_ = wanted.items()
            grammar = Grammar("json_schema" if grammar_kind == "json" else "lark", text)
            follower = self._compiler.compile(grammar, frozenset(stop))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for count in range(body["max_tokens"] + 1):
            if kind != "fine" and count == number:
                await self._fail(kind, chat, writer)
                return
            if count == body["max_tokens"]:
                break
            if self.token_s:
                await asyncio.sleep(self.token_s)
            mask = follower.allowed() if follower else None
            token = self._next(rows, body, None if mask is None else allowed_tokens(mask).tolist())
            if follower:
                follower.accept(token)
            rows.append(token)
            ends = "stop" if token in stop else "length" if count + 1 == body["max_tokens"] else None
            await write(writer, self._event(chat, body, rows, ends))
            if ends:
                break
        self._compute(body["cache_salt"], rows[:-1])
        if last := self._last(chat, body, rows, cached):
            await write(writer, last)
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    def _event(self, chat: list[dict[str, Any]], body: dict[str, Any], rows: list[int], ends: str | None) -> Any:
        """Return a recorded event with the newest row. `ends`: why it is the last one; None if more follow."""
        found = copy.deepcopy(chat[-2] if ends else chat[0])
        found["choices"][0] |= {"token_ids": rows[-1:], "finish_reason": ends}
        return found

    def _last(self, chat: list[dict[str, Any]], body: dict[str, Any], rows: list[int], cached: int) -> Any:
        """Return the event after the tokens: their counts."""
        usage = copy.deepcopy(chat[-1])
        usage["usage"] |= {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(rows) - len(body["prompt"])}
        usage["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    async def _fail(self, kind: str, chat: list[dict[str, Any]], writer: asyncio.StreamWriter) -> None:
        """Simulate the fault. Nothing follows it."""
        match kind:
            case "hang":
                await asyncio.Event().wait()
            case "cut":
                # In the middle of an event.
                writer.write(f"data: {json.dumps(chat[0])}"[:40].encode())
                await writer.drain()
                writer.transport.abort()
            case "garbage":
                writer.write(b'data: {"choices": [\n\n')
                await writer.drain()
            case "miscount":
                usage = copy.deepcopy(chat[-1])
                usage["usage"]["prompt_tokens"] = 1_000_000
                await write(writer, usage)
            case "error":
                await write(writer, {"error": {"message": f"no, {self.key}", "code": 500}})
            case "no ids":
                found = copy.deepcopy(chat[0])
                found["choices"][0] |= {"token_ids": "12"}
                await write(writer, found)
            case "events":
                writer.write(self.events.popleft())
                await writer.drain()

    def _next(self, rows: Sequence[int], body: dict[str, Any], allowed: list[int] | None) -> int:
        """Return the next number, or the first allowed one above it."""
        if body.get("allowed_token_ids") is not None:
            mine = body["allowed_token_ids"]
            allowed = [token for token in mine if allowed is None or token in allowed]
        bias = {int(token): value for token, value in (body.get("logit_bias") or {}).items()}
        wanted = self.following(list(rows))
        if allowed is None and not bias:
            return wanted
        candidates = range(self.vocabulary) if allowed is None else allowed
        return max(candidates, key=lambda token: (bias.get(token, 0.0), -((token - wanted) % self.vocabulary)))

    # --- the prefix cache ---------------------------------------------------------------------------------------------

    def _cached(self, salt: str, rows: Sequence[int]) -> int:
        count = 0
        while count + 32 < len(rows) and (salt, tuple(rows[: count + 32])) in self.blocks:
            count += 32
        return count

    def _compute(self, salt: str, rows: Sequence[int]) -> None:
        for end in range(32, len(rows) + 1, 32):
            self.blocks.add((salt, tuple(rows[:end])))


async def send(writer: asyncio.StreamWriter, status: int, body: Any, more: str = "") -> None:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    head = f"HTTP/1.1 {status} -\r\ncontent-length: {len(data)}\r\nconnection: close\r\n{more}\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


async def write(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(f"data: {json.dumps(event)}\n\n".encode())
    await writer.drain()
