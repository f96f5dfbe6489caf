"""A ConversationModel on other servers, over OpenAI's Realtime API: vLLM-Omni, another antiphon, a hosted service.

The conversation itself stays here: turns, what was heard, resume and recordings. A server has a copy of it. If a
server fails, another one makes the next response. It gets the whole conversation, with older turns as text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from antiphon.contracts import AudioPart, ConversationProfile, Message, ReplyOptions, ResponseChunk, VoiceOptions
from antiphon.errors import Refused, RemoteError
from antiphon.events.tools import Tool
from antiphon.remote.address import ServerAddress, split_api
from antiphon.remote.conversation.items import WIRE_HZ
from antiphon.remote.conversation.session import SERVER, RealtimeSession
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.synthesizer.voices import ServerVoices, ask_voices
from antiphon.remote.websocket import open_websocket
from antiphon.settings import RemoteSettings

log = logging.getLogger(__name__)

PATH = "/realtime"
# The audio of an open turn is sent in pieces of this length, in milliseconds.
AHEAD_MS = 300
# The name that stands for a server's own voice, which is not sent to it.
SERVERS_VOICE = "default"


class RemoteConversationModel:
    """A ConversationModel that other servers run.

    The constructor asks the servers for their voices, which takes up to some seconds. A server that does not answer yet
    is logged and is not an error. Raises ModelError if a server does not accept the key.
    """

    native = None

    def __init__(self, address: ServerAddress, key: str, remote: RemoteSettings) -> None:
        self._model, self.next_s = address.model, remote.remote_token_s
        # The servers that take no images, and those that take no audio of an open turn.
        self.blind, self.late = set[Endpoint](), set[Endpoint]()
        self.pool = Pool(
            "conversation_model",
            [Endpoint(_base(url)) for url in address.urls],
            key,
            max_s=remote.remote_first_token_s,
            measures=False,
            look=self._look,
        )
        listed = self._listed()
        self._lists_default = SERVERS_VOICE in listed.voices
        self.profile = ConversationProfile(
            address.model,
            WIRE_HZ,
            listed.voices or (SERVERS_VOICE,),
            accepts_media=True,
            max_preemptive=remote.remote_preemptive,
            audio_window_ms=AHEAD_MS,
        )

    async def open(self, owner: Hashable | None = None) -> RemoteConversationStream:
        """Open a conversation. A connection is opened with the first spoken turn, or else with the first response."""
        return RemoteConversationStream(self, owner)

    async def connect(self, endpoint: Endpoint) -> RealtimeSession:
        """Open a session at a server. Raises RemoteError, Refused and ModelError."""
        url = f"ws{endpoint.url.removeprefix('http')}{PATH}?model={self._model}"
        socket = await open_websocket(SERVER, url, self.pool.headers(), self.pool.tls)
        session = RealtimeSession(socket, can_see=endpoint not in self.blind, can_hear=endpoint not in self.late)
        try:
            await session.begin()
        except BaseException:
            session.close()
            raise
        return session

    def sent_voice(self, voice: VoiceOptions | None) -> VoiceOptions | None:
        """Return a voice as it is sent to a server: without the name that stands for the server's own."""
        if voice and voice.voice == SERVERS_VOICE and not self._lists_default:
            return replace(voice, voice="")
        return voice

    def close(self) -> None:
        """Do nothing: each conversation closes its own connection."""

    async def _look(self, endpoint: Endpoint) -> str:
        """Return what a server is, in words. Raises ModelError if it does not work."""
        found = await ask_voices(endpoint.url, self.pool.key)
        if found.models and self._model not in found.models:
            raise RemoteError(f"has no model {self._model}; it has {', '.join(found.models[:20])}")
        return f"serves {self._model}"

    def _listed(self) -> ServerVoices:
        """Return the first list of voices of a server. Notes which servers are away."""
        found = list[ServerVoices]()
        for endpoint in self.pool.all:
            try:
                found.append(asyncio.run(ask_voices(endpoint.url, self.pool.key)))
            except RemoteError as error:
                log.warning("%s does not list its models: %s", endpoint.url, error)
                endpoint.is_away = True
                continue
            if found[-1].models and self._model not in found[-1].models:
                known = ", ".join(found[-1].models[:20])
                log.warning("%s has no model %s; it has %s", endpoint.url, self._model, known)
        return next((one for one in found if one.voices), ServerVoices())


@dataclass(slots=True)
class _Call:
    """The arguments of a response. `has_failed`: whether it failed, so that no session of it is used again."""

    messages: Sequence[Message]
    options: ReplyOptions
    voice: VoiceOptions | None
    has_failed: bool = False


class RemoteConversationStream:
    """One conversation with a model on other servers. A ConversationStream, used from one event loop."""

    def __init__(self, model: RemoteConversationModel, owner: Hashable | None) -> None:
        self._model, self._owner = model, owner
        # The server that has the conversation, and the session there. None: no server has it.
        self._endpoint: Endpoint | None = None
        self._session: RealtimeSession | None = None
        self._is_closed = self._is_connecting = False
        # The attempts at a response that are under way.
        self._num_attempts = 0

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Send the audio so far of the last message, if its turn is still open. Raises ModelError."""
        last = messages[-1].parts[-1] if messages and messages[-1].parts else None
        part = last if isinstance(last, AudioPart) and last.grows else None
        session = self._session if self._session and self._session.is_open else None
        if session is None and part:
            session = await self._connected()
        if session:
            try:
                await session.hear(part)
            except RemoteError as error:
                log.info("a turn is not sent while it is spoken: %s", error)
                session.close()

    async def _connected(self) -> RealtimeSession | None:
        """Connect to a server before a response needs it. None: that failed, or a response is under way."""
        if self._is_connecting or self._num_attempts:
            return None
        self._is_connecting, pool = True, self._model.pool
        try:
            endpoint = pool.choose(self._owner, self._endpoint)
            session = await self._model.connect(endpoint)
        except (RemoteError, Refused) as error:
            log.info("a turn is not sent while it is spoken: %s", error)
            return None
        finally:
            self._is_connecting = False
        if self._is_closed or self._num_attempts:
            session.close()
            return None
        self._endpoint, self._session = endpoint, session
        return session

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Respond to the last message. Closing the generator cancels the response at the server.

        Raises RemoteError, Refused and ModelError.
        """
        call = _Call(messages, options, self._model.sent_voice(voice))
        request = partial(self._attempt, call=call)
        try:
            chunks = self._model.pool.stream(request, self._owner, next_s=self._model.next_s, bound=self._endpoint)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except RemoteError:
            call.has_failed = True
            raise

    def close(self) -> None:
        """End the conversation, and its session at the server."""
        self._is_closed = True
        if self._session:
            self._session.close()
            self._session = None

    async def _attempt(self, endpoint: Endpoint, call: _Call) -> AsyncGenerator[ResponseChunk, None]:
        self._num_attempts += 1
        session: RealtimeSession | None = None
        is_usable = False
        try:
            if endpoint is self._endpoint:
                session, self._session = self._session, None
            if session is None or not session.is_open:
                session = await self._model.connect(endpoint)
            async with aclosing(session.respond(call.messages, call.options, call.voice)) as chunks:
                async for chunk in chunks:
                    yield chunk
            is_usable = True
        except asyncio.CancelledError:
            # The response was cancelled, and the session goes on, unless the server was silent for too long.
            is_usable = not call.has_failed
            raise
        finally:
            self._num_attempts -= 1
            if session and not session.can_see:
                self._model.blind.add(endpoint)
            if session and not session.can_hear:
                self._model.late.add(endpoint)
            if session and is_usable and session.is_open and self._session is None and not self._is_closed:
                self._endpoint, self._session = endpoint, session
            elif session:
                session.close()


def _base(url: str) -> str:
    """Return the base of a server's API as an http:// URL: without the path of conversations."""
    base, _ = split_api(url, (PATH,))
    return "http" + base.removeprefix("ws") if base.startswith("ws") else base
