"""One session of a client over any number of connections: a broken connection is replaced without losing messages."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self, TypedDict, cast
from urllib.parse import urlencode, urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from antiphon.client.held_session import END, CannotResume, fields_of
from antiphon.client.held_speech import held_for, resume_over
from antiphon.client.in_process import AppSocket
from antiphon.client.network import CLOSE_S, CONNECT_S, connect_over_network
from antiphon.errors import AntiphonError

log = logging.getLogger(__name__)
# Limit on the client's unsent frames, in bytes; above it, `send` waits.
MAX_UNSENT_BYTES = 1 << 20
# Backoff between attempts to reconnect, in seconds: the wait before the second attempt, and the longest wait.
FIRST_WAIT_S, MAX_WAIT_S = 0.05, 2.0
# A connection that lasts longer than this resets the backoff, even if no message arrived. In seconds.
SETTLED_S = 5.0
# Limit on received messages that the application has not taken, in bytes; above it, no more are read.
MAX_INCOMING_BYTES = 64 << 20
# Close codes that end a session for good.
FINAL_CLOSE_CODES = frozenset({1000, 1002, 1003, 1007, 1008, 1009, 1011})
# Close reason that a door sends if it has not found a host for the session yet: the key of the dead host may not have
# expired in the store yet. The client tries again, whatever the close code.
HOST_LOST = "host_lost"
# Close reasons that end a session for good, whatever the close code. A speech stream starts again after the second.
FINAL_REASONS = frozenset({"idle_timeout", "server_shutting_down", "session_expired"})
# HTTP statuses of refused upgrades that are worth another attempt.
TEMPORARY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
# Messages about the connection, which only this module sends. The server does not count them.
OF_THE_LINK = frozenset({"session.event_ack", "session.end", "session.resume"})

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
JsonObject = Mapping[str, Json]


class ServerWarning(TypedDict):
    """A field of the client's request that the server ignored: the code, the field's path, and a message."""

    code: str
    param: str
    message: str


class _Error(TypedDict, total=False):
    code: str
    message: str
    param: str | None


class _Metadata(TypedDict, total=False):
    reason: str


class _Response(TypedDict, total=False):
    status: str
    metadata: _Metadata


class _Word(TypedDict):
    word: str
    start: float
    end: float


class ServerMessage(TypedDict, total=False):
    """A message of any of the server's protocols. It is not validated: other server versions may send other fields."""

    # The name of the message. Every message has this field.
    type: str
    # The fields of the client's request that the server ignored.
    warnings: list[ServerWarning]
    # Errors: an object with code and text; in captions, only the text.
    error: _Error
    # Errors of the protocols without an error object: the code.
    code: str
    # Errors of the protocols without an error object: the text.
    message: str
    # Conversations: the name of a `turn.event`.
    event: str
    # Conversations: how a session was resumed (docs/wire/index.md).
    how: str
    # Conversations: the item that the message is about.
    item_id: str
    # Conversations: the response that the message is about.
    response_id: str
    # Conversations: the id of a tool call.
    call_id: str
    # Conversations: the name of the called tool.
    name: str
    # Conversations: the arguments of a tool call, as JSON.
    arguments: str
    # Conversations: the whole transcript of a user's turn.
    transcript: str
    # Conversations: how much of a truncated item's audio stays in the history.
    audio_end_ms: int
    # Conversations: the sample rate of `delta` in Hz, if `delta` is audio.
    sample_rate_hz: int
    # Conversations: the response, when it is created and when it is done.
    response: _Response
    # The next piece of a transcript or a response: text, or audio as base64.
    delta: str
    # The whole text of a transcript or of an answer.
    text: str
    # Captions: the words of `delta` with their times.
    words: list[_Word]
    # Speech: the sentence whose audio follows.
    sentence_text: str
    # Speech: the sample rate of the audio that follows, in Hz.
    sample_rate: int


Connect = Callable[[str, Mapping[str, str]], Awaitable[ClientConnection | AppSocket]]


class SessionEnded(AntiphonError):
    """Raised when a session is over and cannot be resumed, or when a request fails.

    Attributes:
        code: The server's error code or close reason, or `connection_lost`.
        retry_after_s: If a later attempt may succeed, the time to wait before it, in seconds; otherwise None.
    """

    def __init__(self, code: str, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code, self.retry_after_s = code, retry_after_s


class ResumingLink:
    """One session at a WebSocket endpoint. It is used from one event loop: one task receives, any task may send.

    Args:
        url: The endpoint's URL, ws:// or wss://.
        headers: Headers of each connection's upgrade request.
        query: Query parameters; a connection that resumes adds `resume`.
        opening: The message that opens the session, for protocols in which the client sends first.
        give_up_s: How long a broken session tries to reconnect, in seconds.
        heartbeat: A message that is sent every `heartbeat_s` seconds, so that the session does not end as idle.
        heartbeat_s: The interval of heartbeats, in seconds.
        connect: Opens a WebSocket at a URL with headers; None: over the network, ws:// only.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        query: Mapping[str, str],
        opening: JsonObject | None = None,
        give_up_s: float = 30.0,
        heartbeat: JsonObject | None = None,
        heartbeat_s: float = 60.0,
        connect: Connect | None = None,
    ) -> None:
        self._connect = connect or partial(connect_over_network, None)
        self._url, self._headers, self._query, self._give_up_s = url, dict(headers), dict(query), give_up_s
        self._held = held_for(urlsplit(url).path)
        self._heartbeat, self._heartbeat_s = heartbeat, heartbeat_s
        # Received messages, each with its size in bytes. The last entry is the reason why the session ended.
        self._incoming: asyncio.Queue[tuple[ServerMessage | bytes | SessionEnded, int]] = asyncio.Queue()
        self._incoming_bytes = 0
        self._was_taken = asyncio.Event()
        # The first event is set when there are frames to send, the second one when the unsent frames shrink.
        self._to_send, self._has_room = asyncio.Event(), asyncio.Event()
        self._socket: ClientConnection | AppSocket | None = None
        self._ended: SessionEnded | None = None
        self._leaves = False
        self._tasks: list[asyncio.Task[None]] = []
        self.num_resumed = 0
        if opening is not None:
            self._keep(opening)

    @property
    def incoming_bytes(self) -> int:
        """The size of the received messages that the application has not taken, in bytes."""
        return self._incoming_bytes

    @property
    def session_id(self) -> str:
        """The session's id; "" until the server sends it."""
        return self._held.session_id

    def start(self) -> None:
        """Start connecting in the background. If that fails, `receive` raises SessionEnded."""
        self._tasks.append(asyncio.create_task(self._carry()))
        if self._heartbeat:
            self._tasks.append(asyncio.create_task(self._beat(self._heartbeat)))

    async def send(self, message: JsonObject) -> None:
        """Send a message. While the connection is broken, the message is kept and sent later.

        Waits while more than MAX_UNSENT_BYTES are unsent.

        Raises:
            SessionEnded: The session is over.
            ValueError: The message is one that only the client itself sends (OF_THE_LINK).
        """
        if message.get("type") in OF_THE_LINK:
            raise ValueError(f"{message['type']} is sent by the client itself")
        self._keep(message)
        # Yield to the writing task, even if the caller sends in a tight loop.
        await asyncio.sleep(0)
        while self._held.unsent_bytes > MAX_UNSENT_BYTES and not self._ended:
            self._has_room.clear()
            await self._has_room.wait()
        if self._ended:
            raise self._ended

    async def receive(self) -> ServerMessage | bytes:
        """Return the server's next message.

        Raises:
            SessionEnded: The session is over and all messages were received; every further call raises it again.
        """
        found, size = await self._incoming.get()
        if isinstance(found, SessionEnded):
            self._incoming.put_nowait((found, 0))
            raise found
        self._incoming_bytes -= size
        self._was_taken.set()
        return found

    async def close(self, last: JsonObject | None = None) -> None:
        """End the session. Waits at most CLOSE_S for the close.

        The server then discards the session, unless the connection is broken at this moment.

        Args:
            last: A message to send before the end.
        """
        self._leaves = True
        self._was_taken.set()
        if last is not None:
            self._keep(last)
        socket = self._socket
        try:
            with suppress(ConnectionClosed, TimeoutError):
                if socket and not self._ended:
                    async with asyncio.timeout(CLOSE_S):
                        while (frame := self._held.next_frame()) is not None:
                            await socket.send(frame)
                        await socket.send(END)
                        await socket.close()
        finally:
            for task in self._tasks:
                task.cancel()
            self.end(SessionEnded("closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cut(self) -> bool:
        """Abort the connection as a network failure does, for tests. Returns whether the session was connected."""
        if socket := self._socket:
            self._socket = None
            socket.transport.abort()
        return socket is not None

    def _keep(self, message: JsonObject) -> None:
        self._held.keep(msgspec.json.encode(message).decode())
        self._to_send.set()

    async def _beat(self, heartbeat: JsonObject) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._keep(heartbeat)

    async def _carry(self) -> None:
        lost_s: float | None = None
        wait_s = FIRST_WAIT_S
        while not self._ended:
            begun_s, num_received = time.monotonic(), self._held.num_received
            failure: Exception | None = None
            try:
                await self._connect_and_carry()
            except SessionEnded as ended:
                self.end(ended)
                return
            except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed, _TryAgain) as error:
                failure = error
            except Exception as error:
                # The application waits for this session, so it has to learn of any failure.
                log.exception("a session's connection failed")
                self.end(SessionEnded("client_error", repr(error)))
                return
            now_s = time.monotonic()
            if not failure and (self._held.num_received > num_received or now_s - begun_s > SETTLED_S):
                # The connection worked before it broke: reconnect at once.
                lost_s, wait_s = None, FIRST_WAIT_S
                continue
            lost_s = lost_s or now_s
            # If the first connection cannot be opened, fail at once.
            never = not self._held.can_resume and not isinstance(failure, _TryAgain | ConnectionClosed)
            if never or now_s - lost_s > self._give_up_s:
                code = failure.code if isinstance(failure, _TryAgain) else "connection_lost"
                self.end(SessionEnded(code, str(failure or "") or type(failure).__name__, 0.0))
                return
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    async def _connect_and_carry(self) -> None:
        """Open one connection and carry messages until it breaks.

        Raises SessionEnded if the session is over, _TryAgain if another attempt may help, and what connecting raises.
        """
        held = self._held
        resumes = held.can_resume and not held.is_lost
        query = {**self._query, "resume": held.session_id} if resumes else self._query
        try:
            socket = await self._connect(f"{self._url}?{urlencode(query)}" if query else self._url, self._headers)
        except InvalidStatus as refused:
            # For a new session, the caller decides what to do about a full server; a resuming session tries again.
            raise _refusal(refused, may_change=held.can_resume) from refused
        async with socket:
            if held.can_resume or held.is_lost:
                await self._resume(socket)
            else:
                held.restart()
            self._socket = socket
            writing = asyncio.create_task(self._write(socket))
            try:
                await self._read(socket)
            finally:
                self._socket = None
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _resume(self, socket: ClientConnection | AppSocket) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                answer = await resume_over(self._held, socket)
        except CannotResume as refused:
            if refused.code == "unknown_session" and self._held.starts_again:
                self._held.is_lost = True
            elif refused.is_final or refused.code in ("unknown_session", "restored_too_often"):
                raise SessionEnded(refused.code, refused.reason) from None
            raise _TryAgain(refused.code, refused.reason) from None
        self.num_resumed += 1
        self._put(_message_of(answer), len(answer))

    async def _read(self, socket: ClientConnection | AppSocket) -> None:
        """Receive until the connection breaks. Raises SessionEnded if it was closed for good."""
        last: ServerMessage = {}
        try:
            while True:
                frame = self._held.receive(await socket.recv())
                if isinstance(frame, bytes):
                    self._put(frame, len(frame))
                elif frame is not None:
                    last = _message_of(frame)
                    self._put(last, len(frame))
                while self._incoming_bytes > MAX_INCOMING_BYTES and not self._leaves:
                    self._was_taken.clear()
                    await self._was_taken.wait()
                if acknowledgement := self._held.acknowledgement():
                    await socket.send(acknowledgement)
        except ConnectionClosed as closed:
            code, reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (1006, "")
            is_final = (code in FINAL_CLOSE_CODES and reason != HOST_LOST) or reason in FINAL_REASONS
            self._held.is_lost = self._held.starts_again and reason == "server_shutting_down"
            if (is_final and not self._held.is_lost) or self._leaves:
                raise _ended_by(code, reason, last) from closed
            if not self._held.can_resume:
                raise _TryAgain("connection_lost", str(closed)) from closed
            log.info("the connection of session %s broke: %s", self.session_id, closed)

    async def _write(self, socket: ClientConnection | AppSocket) -> None:
        with suppress(ConnectionClosed):
            while True:
                self._to_send.clear()
                while (frame := self._held.next_frame()) is not None:
                    await socket.send(frame)
                    self._has_room.set()
                await self._to_send.wait()

    def _put(self, message: ServerMessage | bytes, size: int) -> None:
        self._incoming.put_nowait((message, size))
        self._incoming_bytes += size

    def end(self, ended: SessionEnded) -> None:
        """Mark the session as ended: `send` and `receive` raise `ended` from now on. `close` closes the connection."""
        if not self._ended:
            self._ended = ended
            self._incoming.put_nowait((ended, 0))
            self._has_room.set()


class LinkedSession(ABC):
    """The base class of all sessions. A session uses a ResumingLink, and is entered with `async with`."""

    def __init__(self, link: ResumingLink) -> None:
        self._link = link
        # The server's warnings: one for each requested field that it ignored.
        self.warnings = list[ServerWarning]()

    def _warn(self, message: ServerMessage) -> None:
        """Keep and log the warnings of a message of the server."""
        for warning in message.get("warnings") or ():
            self.warnings.append(warning)
            log.warning("the server ignored %s: %s", warning.get("param"), warning.get("message"))

    async def __aenter__(self) -> Self:
        """Connect, and wait until the session has begun.

        Raises:
            SessionEnded: The server refuses the session or cannot be reached.
        """
        self._link.start()
        try:
            await self._begin()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def link(self) -> ResumingLink:
        """The connection layer that carries the session."""
        return self._link

    @abstractmethod
    async def _begin(self) -> None:
        """Wait until the server has accepted the session. Called when the link has started to connect."""

    async def close(self) -> None:
        """End the session and close its connection. The server discards the session."""
        await self._link.close()


def _message_of(frame: str | bytes) -> ServerMessage:
    return cast(ServerMessage, fields_of(frame))


class _TryAgain(Exception):
    """The server cannot take the session now, but may later. `code`: its error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _refusal(refused: InvalidStatus, *, may_change: bool) -> Exception:
    """Return the exception for a refused upgrade. `may_change`: a temporary refusal becomes _TryAgain."""
    response = refused.response
    error = fields_of(bytes(response.body or b"")).get("error")
    error = error if isinstance(error, dict) else {}
    code, message = str(error.get("code") or response.status_code), str(error.get("message") or refused)
    if response.status_code not in TEMPORARY_STATUSES:
        return SessionEnded(code, message)
    if may_change:
        return _TryAgain(code, message)
    asked = response.headers.get("Retry-After", "")
    return SessionEnded(code, message, float(asked) if asked.isdigit() else 0.0)


def _ended_by(code: int, reason: str, last: ServerMessage) -> SessionEnded:
    """Return why a session ended, by the close code, the close reason and the server's `last` message."""
    error = last.get("error")
    if isinstance(error, dict):
        return SessionEnded(str(error.get("code") or reason), str(error.get("message") or ""))
    if last.get("type") == "error" and isinstance(last.get("message") or error, str):
        return SessionEnded(reason or str(code), str(last.get("message") or error))
    if code == 1000 and reason in ("", "session_closed", "client_close"):
        return SessionEnded("closed")
    return SessionEnded(reason or ("connection_lost" if code == 1006 else str(code)))
