"""A spoken or written conversation: sends audio and text, yields events, calls tools and acknowledges playback."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.client.audio import Audio, encoded
from antiphon.client.events import (
    AudioToPlay,
    ConversationEvent,
    Ducked,
    Heard,
    Interrupted,
    NothingSaid,
    Reconnected,
    ResponseBegins,
    ResponseEnds,
    ResponseWords,
    ServerError,
    ToolCalled,
    UserSaid,
    UserSpeaks,
    UserWords,
)
from antiphon.client.link import Json, JsonObject, LinkedSession, ResumingLink, ServerMessage, SessionEnded
from antiphon.client.tools import FunctionTool

log = logging.getLogger(__name__)
PATH = "/v1/duplex"
# The message that keeps a session alive while its user is silent.
HEARTBEAT = {"type": "session.heartbeat"}
# Limit on consecutive rounds of tool calls, after which the model has to respond. Small models may call forever.
MAX_CALL_ROUNDS = 4
# Limit on events that the application has not taken. Above it, no further messages are read.
MAX_EVENTS = 10_000


@dataclass(slots=True)
class _ResponseUnderWay:
    """What has arrived of a response: its text, the duration of each item's audio, and its running tool calls."""

    text: str = ""
    audio_ms: dict[str, float] = field(default_factory=dict)
    calls: list[tuple[str, asyncio.Task[str]]] = field(default_factory=list)


class ClientConversation(LinkedSession):
    """A conversation with a server. It is entered with `async with`, iterated for its events, and used from one event
    loop. `Client.conversation` opens one.

    It survives a broken connection, and ends with the `async with` block.
    """

    def __init__(self, link: ResumingLink, tools: Sequence[FunctionTool]) -> None:
        super().__init__(link)
        self._tools = {tool.name: tool for tool in tools}
        self._events: asyncio.Queue[ConversationEvent | SessionEnded] = asyncio.Queue()
        self._was_taken = asyncio.Event()
        self._ready: asyncio.Future[ServerMessage] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._background = set[asyncio.Task[None]]()
        # The responses under way, and an event that is set while there are none.
        self._responses, self._is_idle = dict[str, _ResponseUnderWay](), asyncio.Event()
        # Rounds of tool calls since the user's last turn.
        self._num_rounds = 0

    async def _begin(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())
        await self._ready

    @property
    def id(self) -> str:
        """The session's id on the server."""
        return self._link.session_id

    async def send_audio(self, audio: Audio) -> None:
        """Send audio of the user's microphone. Waits while the client's send buffer is full.

        Args:
            audio: Mono audio at the `rate_hz` that the conversation was opened with.

        Raises:
            SessionEnded: The conversation is over.
            ValueError: The audio ends in the middle of a sample.
        """
        await self._link.send({"type": "input_audio_buffer.append", "audio": encoded(audio)})

    async def send_text(self, text: str) -> None:
        """Send a written turn of the user; the model responds to it.

        Raises:
            SessionEnded: The conversation is over.
        """
        self._num_rounds = 0
        await self._link.send({"type": "push_text", "text": text})

    async def end_turn(self) -> None:
        """End the user's turn at the end of the audio sent so far, without waiting for a pause.

        Raises:
            SessionEnded: The conversation is over.
        """
        await self._link.send({"type": "input_audio_buffer.commit"})

    async def interrupt(self) -> None:
        """Cut off the response under way.

        Raises:
            SessionEnded: The conversation is over.
        """
        await self._link.send({"type": "barge_in"})

    async def respond(self, instructions: str | None = None) -> None:
        """Ask the model for a response without a new turn of the user.

        Args:
            instructions: Instructions for this response alone; None: those of the conversation.

        Raises:
            SessionEnded: The conversation is over.
        """
        self._num_rounds = 0
        response = {} if instructions is None else {"instructions": instructions}
        await self._link.send({"type": "response.create", "response": response})

    async def configure(
        self,
        *,
        voice: str | None = None,
        language: str | None = None,
        instructions: str | None = None,
        turn_detection: JsonObject | None = None,
    ) -> None:
        """Change the running conversation. Arguments that are None stay as they are.

        If the server refuses a change, such as another voice after one was heard, the iteration yields a `ServerError`.

        Args:
            voice: The voice of the responses.
            language: The user's language, ISO 639-1; "": the server detects it.
            instructions: The model's system prompt.
            turn_detection: How the server finds the end of a turn (docs/wire/duplex.md).

        Raises:
            SessionEnded: The conversation is over.
        """
        given = {"instructions": instructions, "voice": voice, "turn_detection": turn_detection}
        session: dict[str, Json] = {name: value for name, value in given.items() if value is not None}
        if language is not None:
            session |= heard_in(language)
        await self._link.send({"type": "session.update", "session": session})

    async def played(self, audio: AudioToPlay, *, part: float = 1.0) -> None:
        """Report that a response's audio was played up to this piece. If the response is cut off, the history keeps
        only what was played.

        Args:
            audio: The piece that was played last.
            part: The part of the piece that was played, from 0 to 1.

        Raises:
            SessionEnded: The conversation is over.
        """
        played_ms = int(audio.start_ms + (audio.end_ms - audio.start_ms) * part)
        message = {"type": "playback.ack", "response_id": audio.response_id, "item_id": audio.item_id}
        await self._link.send({**message, "played_ms": played_ms})

    async def send(self, message: JsonObject) -> None:
        """Send any message of docs/wire/duplex.md.

        Raises:
            SessionEnded: The conversation is over.
            ValueError: The message concerns the connection. The client sends such messages itself.
        """
        await self._link.send(message)

    async def __aiter__(self) -> AsyncIterator[ConversationEvent]:
        """Yield the conversation's events until it is closed.

        Raises:
            SessionEnded: The conversation ended before it was closed.
        """
        while True:
            event = await self._events.get()
            self._was_taken.set()
            if isinstance(event, SessionEnded):
                self._events.put_nowait(event)
                if event.code in ("closed", "client_close"):
                    return
                raise event
            yield event

    async def close(self) -> None:
        """End the conversation and close its connection. Cancels running tool calls."""
        try:
            await self._link.close()
        finally:
            await self._end_tasks()

    async def _end_tasks(self) -> None:
        tasks = [*self._background, *(task for response in self._responses.values() for _, task in response.calls)]
        tasks += [self._reading] if self._reading else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._events.put_nowait(SessionEnded("closed"))

    # --- messages of the server ---------------------------------------------------------------------------------------

    async def _read(self) -> None:
        assert self._ready
        try:
            while True:
                message = await self._link.receive()
                if isinstance(message, bytes):
                    continue
                self._warn(message)
                if not self._ready.done():
                    if message.get("type") == "session.created":
                        self._ready.set_result(message)
                    elif message.get("type") == "error":
                        # The server refused the configuration, and would now wait for another one.
                        raise SessionEnded(message["error"]["code"], message["error"]["message"])
                try:
                    for event in self._events_of(message):
                        self._events.put_nowait(event)
                except (KeyError, TypeError, ValueError):
                    log.exception("the server sent a %s that cannot be read", message.get("type"))
                while self._events.qsize() > MAX_EVENTS:
                    self._was_taken.clear()
                    await self._was_taken.wait()
        except SessionEnded as ended:
            if not self._ready.done():
                self._ready.set_exception(ended)
            self._events.put_nowait(ended)

    def _events_of(self, message: ServerMessage) -> Iterator[ConversationEvent]:
        """Yield the events that a message of the server results in. Starts tool calls."""
        response_id = str(message.get("response_id") or "")
        response = self._responses.get(response_id, _ResponseUnderWay())
        match message.get("type"):
            case "turn.event":
                yield from _turn(message.get("event"))
            case "conversation.item.input_audio_transcription.delta":
                yield UserWords(message["item_id"], message["delta"])
            case "conversation.item.input_audio_transcription.completed":
                self._num_rounds = 0
                yield UserSaid(message["item_id"], message["transcript"])
            case "response.listen":
                yield NothingSaid(str(message["response"]["metadata"].get("reason")))
            case "response.created":
                self._responses[response_id] = response
                self._is_idle.clear()
                yield ResponseBegins(response_id)
            case "response.output_text.delta" | "response.output_audio_transcript.delta":
                response.text += message["delta"]
                yield ResponseWords(response_id, message["delta"])
            case "response.output_audio.delta" if message["delta"]:
                item_id, pcm = message["item_id"], b64decode(message["delta"])
                start_ms = response.audio_ms.get(item_id, 0.0)
                audio = AudioToPlay(response_id, item_id, pcm, message["sample_rate_hz"], start_ms)
                response.audio_ms[item_id] = audio.end_ms
                yield audio
            case "response.function_call_arguments.done" if tool := self._tools.get(message["name"]):
                call = asyncio.create_task(self._call(tool, message["arguments"]))
                response.calls.append((message["call_id"], call))
            case "response.done":
                self._responses.pop(response_id, None)
                if not self._responses:
                    self._is_idle.set()
                if response.calls:
                    goes_on = message["response"]["status"] == "completed"
                    self._spawn(self._answer_calls(response.calls, goes_on=goes_on))
                yield ResponseEnds(response_id, message["response"]["status"], response.text)
            case "conversation.item.truncated":
                yield Heard(message["item_id"], message["audio_end_ms"])
            case "session.resumed":
                yield Reconnected(str(message.get("how")))
            case "error":
                error = message["error"]
                yield ServerError(str(error.get("code")), str(error.get("message")), str(error.get("param") or ""))

    async def _call(self, tool: FunctionTool, arguments: str) -> str:
        output = await tool.call(arguments)
        self._events.put_nowait(ToolCalled(tool.name, arguments, output))
        return output

    async def _answer_calls(self, calls: Sequence[tuple[str, asyncio.Task[str]]], *, goes_on: bool) -> None:
        """Send the model the outputs of its calls, and ask for a response unless the user has taken the floor."""
        try:
            for call_id, task in calls:
                item = {"type": "function_call_output", "call_id": call_id, "output": await task}
                await self._link.send({"type": "conversation.item.create", "item": item})
            self._num_rounds += 1
            if goes_on:
                # The user may have spoken meanwhile: wait until that response is done.
                await self._is_idle.wait()
                response = {"tool_choice": "none"} if self._num_rounds >= MAX_CALL_ROUNDS else {}
                await self._link.send({"type": "response.create", "response": response})
        except SessionEnded:
            return

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def heard_in(language: str) -> JsonObject:
    """Return the session field that sets the user's language; "": the server detects it."""
    return {"input_audio_transcription": {"language": language or None}}


def _turn(name: Any) -> Iterator[ConversationEvent]:
    match name:
        case "user_speech_started":
            yield UserSpeaks()
        case "barge_in":
            yield Interrupted()
        case "duck" | "unduck":
            yield Ducked(name == "duck")


def tools_of(functions: Sequence[Callable[..., Any]]) -> list[FunctionTool]:
    """Return each function as a tool. Raises TypeError as FunctionTool does."""
    return [FunctionTool(function) for function in functions]
