"""The server in memory, with scripted models, and clients whose frames are written to a trace.

Call `clock.install()` before importing this module. Of antiphon, it uses only the application, its state, its settings
and the table of loaded models. Scenarios use nothing of antiphon.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import anyio

from antiphon.loading.loaded import LoadedModels
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.server.app import build
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.traces import models
from tests.traces.clock import CLOCK, EPOCH_S, idle

Frame = dict[str, Any]
Play = Callable[["Stage"], Coroutine[Any, Any, None]]
SCENARIOS: dict[str, Callable[[Trace], Coroutine[Any, Any, None]]] = {}
# Virtual seconds that a client waits for a frame before it raises TimeoutError.
PATIENCE_S = 60.0
# Seconds that a draining server gives its sessions.
DRAIN_S = 8.0
# Length above which a base64 string is written as its size and hash.
LONG = 96
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


# --- what is written down


def dumps(value: Any) -> str:
    """Return compact JSON, as the server writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def digest(data: bytes) -> str:
    """Return the size and hash of bytes, which a trace has instead of long data."""
    return f"<{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:32]}>"


def shortened(value: Any) -> Any:
    """Return `value` with each long base64 string replaced by a digest."""
    if isinstance(value, dict):
        return {k: shortened(v) for k, v in value.items()}
    if isinstance(value, list):
        return [shortened(v) for v in value]
    if isinstance(value, str):
        head, comma, body = value.rpartition(";base64,")
        if len(body) > LONG and len(body) % 4 == 0 and BASE64.fullmatch(body):
            return head + comma + digest(base64.b64decode(body))
    return value


def shown(text: str) -> Frame:
    """Return a text frame as a trace shows it: its JSON object, marked if its JSON is not compact; else its text."""
    try:
        frame = json.loads(text)
    except ValueError:
        return {"text": text}
    if not isinstance(frame, dict) or frame.keys() & {"at", "from", "socket"}:
        return {"text": text}
    if dumps(frame) == text:
        return dict(shortened(frame))
    if json.dumps(frame) == text:
        return {"spaced": True, **shortened(frame)}
    return {"text": text}


def _json_object(data: bytes) -> Frame | None:
    """Return the JSON object in a binary frame; None for other bytes, such as audio."""
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Trace:
    """The lines of one run, in the order in which things happened."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self.num_sockets = 0

    def add(self, side: str, socket: int, frame: Mapping[str, Any]) -> None:
        """Add a frame of a socket. HTTP requests have number 0."""
        named = {"socket": socket} if socket > 1 else {}
        self._lines.append(
            json.dumps({"at": round(CLOCK.now_s, 3), "from": side, **named, **frame}, ensure_ascii=False)
        )

    def text(self) -> str:
        """Return the trace as JSON lines.

        Each random id is replaced by its prefix and its number among ids of that prefix.
        """
        names: dict[str, str] = {}
        counts: dict[str, int] = {}

        def name(found: re.Match[str]) -> str:
            prefix, token = found.groups()
            if token not in CLOCK.tokens:
                return found[0]
            if token not in names:
                kind = prefix or "token_"
                counts[kind] = counts.get(kind, 0) + 1
                names[token] = f"{kind}{counts[kind]}"
            return names[token]

        joined = "".join(f"{line}\n" for line in self._lines)
        return re.sub(r"((?:[A-Za-z][A-Za-z0-9]*[-_])*)([0-9a-f]{16,})", name, joined)


# --- clients


class Closed(Exception):
    """The server closed the socket. `args` has the close code and the reason."""


class Socket:
    """One WebSocket client.

    It acts when the server has nothing left to do at the current time, and keeps all frames.
    """

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self._number = number
        self.to_server: asyncio.Queue[Frame] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._read = 0
        self.status = 0
        self.closed: tuple[int, str] | None = None
        # JSON frames as objects, others as bytes or str.
        self.seen: list[Any] = []
        self.task: asyncio.Task[None]
        self._reads = asyncio.Event()
        self._reads.set()

    # --- what the application calls

    async def asgi_receive(self) -> Frame:
        return await self.to_server.get()

    async def asgi_send(self, message: Frame) -> None:
        await self._reads.wait()
        kind = message["type"]
        if self.closed and kind != "websocket.http.response.body":
            raise OSError("the client is gone")
        if kind == "websocket.accept":
            self.status = 101
            self._note({"accepts": message.get("subprotocol")})
        elif kind == "websocket.send":
            text, data = message.get("text"), message.get("bytes")
            if text is not None:
                self._note(shown(text))
                try:
                    self.seen.append(json.loads(text))
                except ValueError:
                    self.seen.append(text)
            elif (frame := _json_object(data)) is not None:
                self._note({"in": "a binary frame", **shortened(frame)})
                self.seen.append(frame)
            else:
                self._note({"binary": digest(data)})
                self.seen.append(data)
        elif kind == "websocket.close":
            self.closed = (message.get("code", 1000), message.get("reason") or "")
            self._note({"closes": list(self.closed)})
        elif kind == "websocket.http.response.start":
            self.status = message["status"]
            self._note({"status": message["status"], "headers": _headers(message)})
        else:
            self.closed = (1006, "")
            self._note({"body": shown(message.get("body", b"").decode())})
        self._changed.set()

    def _note(self, frame: Mapping[str, Any]) -> None:
        self._stage.trace.add("server", self._number, frame)

    # --- what a scenario calls

    async def send(self, frame: Frame | str | bytes) -> None:
        """Send one frame. An object is sent as JSON."""
        await idle()
        if isinstance(frame, bytes):
            self._stage.trace.add("client", self._number, {"binary": digest(frame)})
            message = {"type": "websocket.receive", "bytes": frame}
        else:
            text = frame if isinstance(frame, str) else dumps(frame)
            self._stage.trace.add("client", self._number, shown(text))
            message = {"type": "websocket.receive", "text": text}
        self.to_server.put_nowait(message)
        await idle()

    async def say(self, type: str, **fields: Any) -> None:
        """Send a JSON frame of this type."""
        await self.send({"type": type, **fields})

    def stop_reading(self) -> None:
        """Stop reading, so that the server cannot send the next frame."""
        self._reads.clear()

    async def read_on(self) -> None:
        """Read again, beginning with the frames that wait."""
        self._reads.set()
        await idle()

    async def leave(self, code: int = 1000) -> None:
        """Close the socket as the client; with code 1006, lose the connection."""
        await idle()
        self._stage.trace.add("client", self._number, {"leaves": code})
        self.closed = self.closed or (code, "")
        self.to_server.put_nowait({"type": "websocket.disconnect", "code": code})
        await idle()

    async def until(self, type: str, count: int = 1, **fields: Any) -> Frame:
        """Read up to the `count`th frame from here on that has this type and these fields.

        Raises Closed or TimeoutError.
        """
        while True:
            frame = await self.next()
            if isinstance(frame, dict) and frame.get("type") == type and fields.items() <= frame.items():
                count -= 1
                if not count:
                    return frame

    async def next(self) -> Any:
        """Return the next frame. Raises Closed or TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while self._read == len(self.seen):
                if self.closed:
                    raise Closed(*self.closed)
                self._changed.clear()
                await self._changed.wait()
        await idle()
        self._read += 1
        return self.seen[self._read - 1]

    async def end(self) -> tuple[int, str]:
        """Read until the server closes the socket. Return the close code and the reason."""
        try:
            while True:
                await self.next()
        except Closed as closed:
            return closed.args  # type: ignore[return-value]

    def of(self, type: str, **fields: Any) -> list[Frame]:
        """Return all frames so far that have this type and these fields."""
        return [f for f in self.seen if isinstance(f, dict) and f.get("type") == type and fields.items() <= f.items()]

    @property
    def kinds(self) -> list[str]:
        """The types of all frames so far. Consecutive frames of the same type count once."""
        out: list[str] = []
        for frame in self.seen:
            kind = frame["type"] if isinstance(frame, dict) else "binary"
            if out[-1:] != [kind]:
                out.append(kind)
        return out

    def joined(self, type: str, field: str = "delta", **fields: Any) -> str:
        """Return the joined texts of all frames so far that have this type."""
        return "".join(f[field] for f in self.of(type, **fields))

    def num_bytes(self, type: str, field: str = "delta", **fields: Any) -> int:
        """Return the number of bytes of audio in all frames so far that have this type."""
        return sum(len(base64.b64decode(f[field])) for f in self.of(type, **fields))


class Response:
    """An HTTP response.

    `events` has the data of its server-sent events. `broken`: the server closed the connection early.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.broken = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        found = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [e if e == "[DONE]" else json.loads(e) for e in found]


def _headers(message: Frame) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in message.get("headers", ())}


def _body(data: bytes) -> Frame:
    """Return a body as a trace shows it."""
    if not data:
        return {"body": ""}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"body": digest(data)}
    found = shown(text)
    if found.keys() == {"text"}:
        return {"body": text if len(text) < 4096 else digest(data)}
    return {"body": found}


class Kept:
    """An in-memory store for the conversations that outlive their server. Each write is done at once."""

    def __init__(self, before: Kept | None = None) -> None:
        self.rows: dict[str, Any] = dict(before.rows) if before else {}
        self.tails: dict[str, list[Any]] = dict(before.tails) if before else {}

    def put(self, row: Any, *, turn_kept: bool = False) -> futures.Future[None]:
        self.rows[row.id] = row
        if turn_kept:
            self.tails.pop(row.id, None)
        written: futures.Future[None] = futures.Future()
        written.set_result(None)
        return written

    def get(self, session_id: str) -> Any:
        return self.rows.get(session_id)

    def claim(self, session_id: str, new_owner: str, seen_fence: int) -> Any:
        row = self.rows[session_id]
        self.rows[session_id] = replace(row, owner=new_owner, fence=seen_fence + 1, restores=row.restores + 1)
        return self.rows[session_id]

    def append_tail(self, hold: Any, chunk: Any) -> None:
        self.tails.setdefault(hold.session_id, []).append(chunk)

    def tail(self, session_id: str) -> tuple[Any, ...]:
        return tuple(self.tails.get(session_id, ()))

    def host(self, name: str) -> None:
        """Return None, because no other host is alive."""

    def release(self, hold: Any) -> futures.Future[None]:
        self.rows[hold.session_id] = replace(self.rows[hold.session_id], owner="")
        released: futures.Future[None] = futures.Future()
        released.set_result(None)
        return released

    def forget(self, hold: Any) -> None:
        self.rows.pop(hold.session_id, None)


class Stage:
    """One server and all clients that a scenario connects to it."""

    def __init__(self, trace: Trace, serve: Callable[[Kept], ServerState]) -> None:
        self.trace = trace
        self._serve = serve
        self._state, self._kept = serve(kept := Kept()), kept
        self._app = build(self._state)
        self._sockets: list[Socket] = []

    @property
    def now_s(self) -> float:
        """Virtual seconds since the beginning of the run."""
        return CLOCK.now_s

    def _scope(self, kind: str, url: str, headers: Mapping[str, str]) -> Frame:
        path, query = urlsplit(url).path, urlsplit(url).query
        given = [(b"host", b"localhost"), *((k.lower().encode(), v.encode()) for k, v in headers.items())]
        return {
            "type": kind,
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": given,
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
            "state": {},
        }

    async def connect(
        self, url: str, headers: Mapping[str, str] | None = None, subprotocols: Sequence[str] = ()
    ) -> Socket:
        """Open a WebSocket. If the server refuses it, the returned socket is closed, and its `status` is set."""
        await idle()
        self.trace.num_sockets += 1
        number = self.trace.num_sockets
        more = {"headers": dict(headers)} if headers else {}
        more |= {"subprotocols": list(subprotocols)} if subprotocols else {}
        self.trace.add("client", number, {"opens": url, **more})
        socket = Socket(self, number)
        headers = {**(headers or {}), **({"sec-websocket-protocol": ", ".join(subprotocols)} if subprotocols else {})}
        scope = self._scope("websocket", url, headers) | {
            "scheme": "ws",
            "subprotocols": list(subprotocols),
            "extensions": {"websocket.http.response": {}},
        }
        await socket.to_server.put({"type": "websocket.connect"})
        socket.task = asyncio.create_task(self._app(scope, socket.asgi_receive, socket.asgi_send))
        self._sockets.append(socket)
        await idle()
        return socket

    async def request(
        self,
        method: str,
        url: str,
        json: Any = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send an HTTP request, and read the response to its end."""
        await idle()
        asked = {"headers": dict(headers)} if headers else {}
        if json is not None:
            body = dumps(json).encode()
        self.trace.add("client", 0, {"requests": f"{method} {url}", **asked, **_body(body)})
        given = {"content-type": "application/json"} if json is not None else {}
        given |= {"content-length": str(len(body)), **(headers or {})}
        scope = self._scope("http", url, given) | {"scheme": "http", "method": method}
        response, asked_for, ended = Response(), False, False

        async def receive() -> Frame:
            nonlocal asked_for
            if asked_for:
                await asyncio.Event().wait()
            asked_for = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Frame) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                response.status, response.headers = message["status"], _headers(message)
                self.trace.add("server", 0, {"status": response.status, "headers": response.headers})
                return
            data, ended = message.get("body", b""), not message.get("more_body", False)
            response.body += data
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                self.trace.add("server", 0, _body(data))
                return
            for event in data.decode().split("\n\n"):
                whole = event.startswith("data: {")
                if event:
                    self.trace.add("server", 0, {"data": shown(event[6:])} if whole else {"line": event})

        await self._app(scope, receive, send)
        if not ended:
            # The application returned without a complete response, so the server closes the connection.
            response.broken = True
            self.trace.add("server", 0, {"breaks": True})
        await idle()
        return response

    async def wait(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)
        await idle()

    async def kill(self) -> None:
        """End the server without warning, and start another with the sessions that the first one stored."""
        await idle()
        self._kept = Kept(self._kept)
        self._state = self._serve(self._kept)
        for socket in self._sockets:
            if not socket.closed:
                await socket.leave(1006)
        self._app = build(self._state)

    def drain(self) -> None:
        """Make the server drain, as SIGTERM does."""
        self._state.admission.draining = True
        for live in list(self._state.sessions.live):
            live.drain(DRAIN_S)

    async def finish(self) -> None:
        """Close all sockets that are still open, and wait for the end of every connection."""
        await idle()
        for socket in self._sockets:
            if not socket.closed:
                await socket.leave()
        for socket in self._sockets:
            async with asyncio.timeout(600):
                await socket.task


def settings_of(**sections: Mapping[str, Any]) -> Settings:
    """Return the default settings with these values, by section."""
    settings = Settings()
    changed = {name: replace(getattr(settings, name), **values) for name, values in sections.items()}
    return replace(settings, **changed)  # type: ignore[arg-type]


def scenario(*, native: bool = False, speaks: bool = True, **sections: Mapping[str, Any]) -> Callable[[Play], Play]:
    """Register a scenario under the name of its function. Its trace is recorded/NAME.jsonl.

    With `native`, the conversation model takes turns by itself. With `speaks`, it has a voice. `sections` has the
    settings that differ from the defaults, by section.
    """

    def register(play: Play) -> Play:
        assert play.__name__ not in SCENARIOS

        async def run(trace: Trace) -> None:
            partner = NativeConversationModel(models.Native(voice=speaks)) if native else None
            voice = models.Voice() if speaks else None
            loaded = LoadedModels(
                models.Ears(),
                models.Detector(),
                models.Judge(),
                models.Writer(),
                voice,
                models.Reader(),
                partner,
                None,
                ("ears", "writer", "voice"),
                (),
            )
            async with anyio.create_task_group() as group:

                def serve(kept: Kept) -> ServerState:
                    state = ServerState(settings_of(**sections), Metrics(), loaded, started_s=EPOCH_S)
                    state.group, state.sessions.store = group, kept  # type: ignore[assignment]
                    return state

                stage = Stage(trace, serve)
                await play(stage)
                await stage.finish()
                group.cancel_scope.cancel()

        SCENARIOS[play.__name__] = run
        return play

    return register


# --- sound that clients send


def b64(data: bytes) -> str:
    """Return the data as base64 text."""
    return base64.b64encode(data).decode()


def pcm16(text: str, silence_s: float = 0.0, rate_hz: int = 24_000) -> bytes:
    """Return these words, 320 ms each, then silence, as 16-bit samples."""
    return (models.said(text, silence_s, rate_hz) * 32768).round().astype("<i2").tobytes()


def f32(text: str, silence_s: float = 0.0, rate_hz: int = 16_000) -> bytes:
    """Return the same audio as `pcm16`, as 32-bit floats."""
    return models.said(text, silence_s, rate_hz).astype("<f4").tobytes()


def pieces(data: bytes, size: int) -> list[bytes]:
    """Return `data` in pieces of `size` bytes."""
    return [data[at : at + size] for at in range(0, len(data), size)]


def image(grey: int, side: int = 64) -> bytes:
    """Return a PNG of a single grey. It is written without a library, so its bytes are the same everywhere."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes([grey] * side) for _ in range(side))
    stored = b"\x78\x01\x01" + struct.pack("<HH", len(rows), len(rows) ^ 0xFFFF) + rows
    stored += struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", stored) + chunk(b"IEND", b"")


def wav(text: str, silence_s: float = 0.0, rate_hz: int = 16_000) -> bytes:
    """Return the same audio as `pcm16`, as a WAV file."""
    data = pcm16(text, silence_s, rate_hz)
    form = struct.pack("<IHHIIHH", 16, 1, 1, rate_hz, 2 * rate_hz, 2, 16)
    sizes = (struct.pack("<I", size) for size in (36 + len(data), len(data)))
    return b"RIFF" + next(sizes) + b"WAVEfmt " + form + b"data" + next(sizes) + data
