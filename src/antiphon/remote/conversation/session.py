"""One session at a server of OpenAI's Realtime API, whose items are kept equal to the conversation as it was heard.

The session's items are compared with the messages of each response. What differs is deleted and sent again: what was
not heard of an answer is not in the server's conversation either. The audio of the user's turn is sent while it is
spoken, and becomes an item when the turn is answered.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException
from websockets.protocol import State

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.contracts import (
    AudioPart,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    VoiceOptions,
)
from antiphon.errors import ModelError, RemoteError
from antiphon.remote.conversation import events
from antiphon.remote.conversation.items import WIRE_HZ, items_of, tools_of
from antiphon.remote.http import CONNECT_TIMEOUT_S
from antiphon.remote.websocket import abort, broken
from antiphon.text.word_timing import WordPacer

log = logging.getLogger(__name__)

SERVER = "the model's server"
# Seconds in which a cancelled response has to end. A session in which it does not is closed.
SETTLE_S = 2.0
# The least audio of a turn that is sent while it is spoken. Servers refuse to make an item of less than 0.1 s.
MIN_AHEAD_S = 0.2
# The beginnings of the ids of events. An error about a deletion is ignored: a server may remove items by itself.
_CREATES, _DELETES, _RESPONDS, _CANCELS = "create_", "delete_", "respond_", "cancel_"
_COMMITS, _CLEARS = "commit_", "clear_"
TEXT = ("response.output_audio_transcript.delta", "response.output_text.delta", "response.audio_transcript.delta",
         "response.text.delta")  # fmt: skip
_AUDIO = ("response.output_audio.delta", "response.audio.delta")


@dataclass(slots=True)
class _Known:
    """A message that the server has, and the ids of its items.

    `message`: None for an answer of the server, which is then known by its text and its calls.
    """

    message: Message | None
    ids: list[str] = field(default_factory=list)
    text: str = ""
    calls: list[str] = field(default_factory=list)
    # Whether the answer is complete. What the server kept of another one is unknown.
    is_whole: bool = True

    def equals(self, message: Message) -> bool:
        """Return whether the server has this message."""
        if self.message is not None:
            return self.message == message or _is_same_sound(self.message, message)
        said = message.role == "assistant" and not message.parts and message.text == self.text.strip()
        return self.is_whole and said and [call.id for call in message.tool_calls] == self.calls


class _Ahead:
    """The audio of a turn that was sent while it was spoken. `num_sent`: its samples so far."""

    def __init__(self, turn: object) -> None:
        self.turn, self.num_sent = turn, 0
        self._resampler = Resampler(SAMPLE_RATE_HZ, WIRE_HZ)

    def rest(self, pcm: Pcm, *, ends: bool = False) -> events.AudioAppend | None:
        """Return the event with the audio of the turn that was not sent yet, if there is any."""
        data = to_pcm16(self._resampler.feed(pcm[self.num_sent :]))
        self.num_sent = max(self.num_sent, len(pcm))
        if ends:
            data += to_pcm16(self._resampler.flush())
        return events.AudioAppend(base64.b64encode(data).decode()) if data else None


def _is_same_sound(sent: Message, message: Message) -> bool:
    """Return whether a message differs only in its transcript, or has lost its media, which the server still has."""
    if not sent.parts or sent.role != message.role:
        return False
    return sent.parts == message.parts or (not message.parts and sent.text in ("", message.text))


class RealtimeSession:
    """One session over an open connection. It makes one response at a time.

    - `can_see`: whether images are sent; set to False when the server refuses one.
    - `can_hear`: whether the audio of an open turn is sent; set to False when the server makes no item of it.
    """

    def __init__(self, socket: ClientConnection, *, can_see: bool = True, can_hear: bool = True) -> None:
        self._socket = socket
        self.can_see, self.can_hear = can_see, can_hear
        self._known: list[_Known] = []
        self._voice: tuple[str, float] | None = None
        self._num_sent = 0
        # The turn whose audio the server has got so far, and the message of the one that it makes an item of.
        self._ahead: _Ahead | None = None
        self._committed: _Known | None = None
        # Waits for the end of a cancelled response.
        self._settling: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether another response can be requested."""
        return self._socket.state is State.OPEN

    def close(self) -> None:
        """Close the connection at once, which ends the response under way."""
        if self._settling:
            self._settling.cancel()
        abort(self._socket)

    async def begin(self) -> None:
        """Wait until the server has created the session.

        Raises ModelError if it refuses the session, such as for a model that it does not have, and RemoteError if it is
        not a server of conversations.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                event = events.read(await self._socket.recv())
        except TimeoutError:
            raise RemoteError(f"{SERVER} created no session within {CONNECT_TIMEOUT_S:g} s") from None
        except WebSocketException as error:
            raise broken(SERVER, error) from None
        if event.type == "error" and event.error:
            raise ModelError(f"{SERVER} refuses a conversation: {event.error.message[:300]}")
        if event.type != "session.created":
            raise RemoteError(f"{SERVER} is none of OpenAI's Realtime API: it began with {event.type[:60]!r}")

    async def hear(self, part: AudioPart | None) -> None:
        """Send the audio of the user's open turn so far. None: there is no such turn any more. Raises RemoteError."""
        try:
            if self._ahead and (part is None or part.turn is not self._ahead.turn):
                self._ahead = None
                await self._send(events.AudioClear(self._event_id(_CLEARS)))
            is_short = part is not None and len(part.pcm) < MIN_AHEAD_S * SAMPLE_RATE_HZ
            if part is None or is_short or not self.can_hear:
                return
            await self._configure(None)
            self._ahead = self._ahead or _Ahead(part.turn)
            if append := self._ahead.rest(part.pcm):
                await self._send(append)
        except WebSocketException as error:
            raise broken(SERVER, error) from None

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the response to messages. Closing the generator cancels the response at the server.

        Raises RemoteError if the server fails, and ModelError if it does not accept the request.
        """
        instructions = "\n\n".join(m.text for m in messages if m.role == "system")
        answer, is_requested = _Known(None, is_whole=False), False
        try:
            await self._settled()
            await self._configure(voice)
            # A new server gets older turns as their transcripts, which is faster, and the last one as it was said.
            await self._send_messages([m for m in messages if m.role != "system"], hears=bool(self._known))
            await self._request(instructions, options, voice)
            self._known.append(answer)
            is_requested = True
            async for chunk in self._read(answer):
                yield chunk
        except WebSocketException as error:
            raise broken(SERVER, error) from None
        finally:
            if not is_requested:
                # It is unknown which items the server has.
                abort(self._socket)
            elif not answer.is_whole and self.is_open:
                self._settling = asyncio.create_task(self._settle(answer))

    async def _settled(self) -> None:
        """Wait for the end of a cancelled response. Raises RemoteError if it does not end."""
        if settling := self._settling:
            self._settling = None
            await settling
            if not self.is_open:
                raise RemoteError(f"{SERVER} did not end a cancelled response")

    async def _settle(self, answer: _Known) -> None:
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._send(events.ResponseCancellation(self._event_id(_CANCELS)))
                with suppress(RemoteError, ModelError):
                    async for _ in self._read(answer):
                        pass
        except (WebSocketException, TimeoutError):
            abort(self._socket)
        # Some servers keep what was said of a cancelled answer, others nothing.
        answer.is_whole = False

    async def _configure(self, voice: VoiceOptions | None) -> None:
        wanted = (voice.voice, voice.speed) if voice else (self._voice or ("", 1.0))
        if wanted != self._voice:
            self._voice = wanted
            await self._send(events.session_update(*wanted))

    async def _send_messages(self, messages: Sequence[Message], *, hears: bool) -> None:
        """Make the server's items equal to the messages."""
        same = 0
        for known, message in zip(self._known, messages, strict=False):
            if not known.equals(message):
                break
            same += 1
        for known in reversed(self._known[same:]):
            for item_id in reversed(known.ids):
                await self._send(events.ItemDeletion(self._event_id(_DELETES), item_id))
        del self._known[same:]
        ahead, self._ahead = self._ahead, None
        spoken = messages[-1].parts[0] if messages and len(messages[-1].parts) == 1 else None
        if ahead and not (same < len(messages) and isinstance(spoken, AudioPart) and spoken.turn is ahead.turn):
            await self._send(events.AudioClear(self._event_id(_CLEARS)))
            ahead = None
        for message in messages[same:]:
            if ahead and message is messages[-1] and isinstance(spoken, AudioPart):
                await self._commit(ahead, message, spoken)
                continue
            items = items_of(message, hears=hears or message is messages[-1], sees=self.can_see)
            for item in items:
                await self._send(events.ItemCreation(self._event_id(_CREATES), item))
            self._known.append(_Known(message, [item.id for item in items]))

    async def _commit(self, ahead: _Ahead, message: Message, part: AudioPart) -> None:
        """Make an item of the audio that was sent ahead. It may have more of the pause after the turn than `part`."""
        if append := ahead.rest(part.pcm, ends=True):
            await self._send(append)
        await self._send(events.AudioCommit(self._event_id(_COMMITS)))
        self._committed = _Known(message)
        self._known.append(self._committed)

    async def _request(self, instructions: str, options: ReplyOptions, voice: VoiceOptions | None) -> None:
        choice: str | dict[str, str] = options.tool_choice
        if choice not in ("auto", "none", "required"):
            choice = {"type": "function", "name": options.tool_choice}
        wanted = events.RequestedResponse(
            output_modalities=["audio"] if voice else ["text"],
            instructions=instructions or None,
            max_output_tokens=options.max_tokens,
            tools=tools_of(options.tools) or None,
            tool_choice=choice if options.tools else None,
        )
        await self._send(events.ResponseCreation(self._event_id(_RESPONDS), wanted))

    async def _send(self, event: msgspec.Struct) -> None:
        await self._socket.send(events.encode(event), text=True)

    def _event_id(self, kind: str) -> str:
        self._num_sent += 1
        return f"{kind}{self._num_sent}"

    async def _read(self, answer: _Known) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the response under way until its end. Notes its items, its text and its calls in `answer`."""
        pacer, called, has_audio = WordPacer(), dict[str, bool](), False
        while True:
            event = events.read(await self._socket.recv())
            match event.type:
                case "error":
                    self._check(event.error or events.ServerFault())
                case "input_audio_buffer.committed" if self._committed:
                    self._committed.ids.append(event.item_id)
                    self._committed = None
                case "response.output_item.added" if event.item:
                    answer.ids.append(event.item.id)
                    if event.item.type == "function_call":
                        called[event.item.id] = False
                        answer.calls.append(event.item.call_id or event.item.id)
                        yield ToolCallStarted(answer.calls[-1], event.item.name or "")
                case "response.function_call_arguments.delta" if event.item_id in called:
                    called[event.item_id] = True
                    yield ToolCallDelta(event.delta)
                case "response.output_item.done" if event.item and called.get(event.item.id) is False:
                    yield ToolCallDelta(event.item.arguments or "{}")
                case text if text in TEXT:
                    answer.text += event.delta
                    pacer.feed(event.delta)
                    yield TextDelta(event.delta)
                case sound if sound in _AUDIO:
                    pcm, has_audio = pcm_of(event.delta or event.audio), True
                    yield ResponseAudio(pcm, pacer.advance(len(pcm) / WIRE_HZ))
                case "response.done" if event.response:
                    if has_audio and (words := pacer.finish()):
                        yield ResponseAudio(from_pcm16(b""), words)
                    yield self._done(event.response, answer)
                    return

    def _check(self, error: events.ServerFault) -> None:
        """Raise the error that the server reports, unless it is about something that has no effect."""
        about = error.event_id or ""
        if about.startswith((_DELETES, _CANCELS, _CLEARS)) or error.code == "response_cancel_not_active":
            return
        said = error.message[:300] or error.code or "it failed"
        if about.startswith(_CREATES) and "image" in said.lower() and self.can_see:
            self.can_see = False
            raise RemoteError(f"{SERVER} takes no images: {said}")
        if self._committed and (not about or about.startswith(_COMMITS)):
            # Another connection gets the turn as an item.
            self.can_hear = False
            raise RemoteError(f"{SERVER} takes no audio of an open turn: {said}")
        if about.startswith((_CREATES, _RESPONDS)):
            raise ModelError(f"{SERVER} does not accept this: {said}")
        raise RemoteError(f"{SERVER} reports an error: {said}")

    def _done(self, response: events.ResponseState, answer: _Known) -> ReplyDone:
        if response.status == "failed":
            raise RemoteError(f"{SERVER} failed in its answer: {events.why_failed(response)}")
        answer.is_whole = response.status in ("completed", "incomplete", "")
        usage = response.usage
        cached = usage.input_token_details.cached_tokens if usage and usage.input_token_details else 0
        return ReplyDone(
            "length" if response.status == "incomplete" else "tool_calls" if answer.calls else "stop",
            (usage.input_tokens if usage else 0) or 0,
            cached or 0,
            (usage.output_tokens if usage else 0) or 0,
        )


def pcm_of(text: str) -> Pcm:
    """Return the audio in an event, base64 of PCM16, as float32 [num_samples]. Raises RemoteError if it is none."""
    try:
        return from_pcm16(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise RemoteError(f"{SERVER} sent no valid audio: {error}") from None
