"""A NativeModel on other servers, behind the full-duplex dialect: antiphon's `/v1/duplex`, which vLLM-Omni has too.

Units of audio go to the server as they are complete, and what it says comes back while it is made. The dialect does not
say which unit an answer belongs to, so a step returns what has arrived since the last one. If a server fails, another
one begins a conversation with what was said and heard so far; what was not said yet is lost. While no server can be
reached, the model listens. With `has_fallback`, its steps then say that it is away, and another model answers.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.contracts import (
    AwayStep,
    ListenStep,
    NativeLoad,
    NativeOptions,
    NativeProfile,
    NativeStep,
    SpeakStep,
    Unit,
)
from antiphon.errors import ModelError, Refused, RemoteError
from antiphon.remote.address import ServerAddress, split_api
from antiphon.remote.conversation.events import ServerEvent, read
from antiphon.remote.conversation.session import SERVER, TEXT, pcm_of
from antiphon.remote.http import CONNECT_TIMEOUT_S, list_models
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.websocket import abort, broken, open_websocket
from antiphon.settings import RemoteSettings

log = logging.getLogger(__name__)

PATH = "/duplex"
UNIT_S, VOICE_HZ = 1.0, 24_000
# Seconds for which a step waits for more of what a server says, after its first part has arrived.
TOGETHER_S = 0.05
# Maximum number of parts of answers that wait for their steps.
MAX_PARTS = 4096
# Seconds between attempts to reach a server while all of them fail.
RETRY_S = 2.0
NO_AUDIO: Pcm = np.zeros(0, np.float32)


class _Extra(msgspec.Struct, omit_defaults=True):
    force_listen_count: int | None = None


class _Session(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The configuration of a session. Fields that are None are not sent."""

    # The model's name at the server.
    model: str
    # What the model gets first.
    instructions: str | None = None
    # The name of the voice; None: the server's own.
    voice: str | None = None
    # A WAV file with the voice, as base64.
    ref_audio: str | None = None
    # The temperature of the text.
    temperature: float | None = None
    # Parameters of the model.
    extra_body: _Extra | None = None


class _Update(msgspec.Struct, tag="session.update"):
    session: _Session


class _Append(msgspec.Struct, tag="input_audio_buffer.append", omit_defaults=True):
    """A unit of audio. `video_frames`: images, as base64."""

    audio: str
    format: str = ""
    sample_rate_hz: int = 0
    video_frames: list[str] | None = None


class _Content(msgspec.Struct):
    text: str
    type: str = "input_text"


class _Typed(msgspec.Struct):
    content: list[_Content]
    type: str = "message"
    role: str = "user"


class _Create(msgspec.Struct, tag="conversation.item.create"):
    item: _Typed


class _Respond(msgspec.Struct, tag="response.create"):
    pass


class _BargeIn(msgspec.Struct, tag="barge_in"):
    pass


_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of what a server said. `kind`: "listen", "speak" or "end"."""

    kind: str
    text: str = ""
    pcm: Pcm | None = None


class RemoteNativeModel:
    """A NativeModel that other servers run, for all sessions of a process.

    - `line`: the text that is said when a server was lost in the middle of an answer; "": none.
    - `say`: returns the audio of a text, float32 [num_samples], mono, at VOICE_HZ; None: there is no voice for it.
    - `has_fallback`: whether another model answers while no server can be reached.
    """

    def __init__(
        self,
        address: ServerAddress,
        key: str,
        remote: RemoteSettings,
        line: str = "",
        say: Callable[[str], Awaitable[Pcm]] | None = None,
        *,
        has_fallback: bool = False,
    ) -> None:
        self.model, self.line, self.say, self.has_fallback = address.model, line, say, has_fallback
        self.pool = Pool(
            "conversation_model",
            [Endpoint(_base(url)) for url in address.urls],
            key,
            max_s=remote.remote_first_token_s,
            measures=False,
            look=self._look,
        )
        self.profile = NativeProfile(address.model, UNIT_S, VOICE_HZ, ("default",), 2, 1, (0, 0))
        self.num_open = 0

    async def open(self, options: NativeOptions) -> RemoteNativeStream:
        """Open a conversation at one of the servers. Raises ModelError and, without a fallback, Refused."""
        stream = RemoteNativeStream(self, options)
        try:
            await stream.connect()
        except (RemoteError, Refused) as error:
            if not self.has_fallback:
                raise
            log.warning("a conversation begins without the native model %s: %s", self.model, error)
        stream.begin()
        self.num_open += 1
        return stream

    def load(self) -> NativeLoad:
        """Return the open conversations. How many more the servers take is known when they refuse one."""
        return NativeLoad(self.num_open, 1)

    def close(self) -> None:
        """Do nothing: each conversation closes its own connection."""

    async def _look(self, endpoint: Endpoint) -> str:
        """Return what a server is, in words. Raises ModelError if it does not work."""
        models = [listed.id for listed in await list_models(endpoint.url, self.pool.key)]
        if models and self.model not in models:
            raise RemoteError(f"has no model {self.model}; it has {', '.join(sorted(models)[:20])}")
        return f"serves {self.model}"


class RemoteNativeStream:
    """One conversation with a native model on other servers. A NativeStream, used from one event loop."""

    def __init__(self, model: RemoteNativeModel, options: NativeOptions) -> None:
        self._model, self._options = model, options
        self._socket: ClientConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._parts: list[_Part] = []
        self._arrived = asyncio.Event()
        # The response whose events arrive, and the one that was interrupted, of which nothing more is used.
        self._response = self._cut = ""
        self._is_speaking = self._is_closed = self._was_lost = False
        self._resampler, self._resampled_hz = Resampler(VOICE_HZ, VOICE_HZ), VOICE_HZ

    async def connect(self) -> None:
        """Open a session at one of the servers. Raises Refused, RemoteError and ModelError."""
        self._socket = await self._model.pool.ask(self._opened)
        self._response = self._cut = ""

    def begin(self) -> None:
        """Read what the server says from now on, and connect to another one whenever it is lost."""
        self._reading = asyncio.create_task(self._read())

    async def append(self, unit: Unit) -> None:
        """Send a unit. While no server can be reached, units are lost, and the model listens."""
        if self._socket is None:
            await asyncio.sleep(0)
            return
        frames = [base64.b64encode(frame).decode() for frame in unit.frames] or None
        audio = base64.b64encode(to_pcm16(unit.pcm)).decode()
        if unit.text:
            await self._send(_Create(_Typed([_Content(unit.text)])))
        await self._send(_Append(audio, "pcm16", SAMPLE_RATE_HZ, frames))

    async def step(self, *, must_speak: bool = False) -> NativeStep:
        """Return what the server said since the last step. Waits for up to UNIT_S for it."""
        if must_speak:
            await self._send(_Respond())
        if self._socket is not None and not self._parts:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), UNIT_S)
        if any(part.kind == "speak" for part in self._parts):
            await asyncio.sleep(TOGETHER_S)
        if self._was_lost and (spoken := await self._lost()):
            return spoken
        if self._socket is None and self._model.has_fallback:
            return AwayStep()
        self._arrived.clear()
        return self._taken()

    def interrupt(self) -> None:
        """Tell the server that the user has the floor, and drop what it has said."""
        self._cut, self._is_speaking = self._response, False
        self._parts.clear()
        task = asyncio.create_task(self._send(_BargeIn()))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def close(self) -> None:
        """End the conversation at the server."""
        if not self._is_closed:
            self._is_closed = True
            self._model.num_open -= 1
            self._leave()

    def _leave(self) -> None:
        if self._reading:
            self._reading.cancel()
        if self._socket:
            abort(self._socket)
        self._socket = None

    def _taken(self) -> NativeStep:
        """Return the parts up to the end of a turn as one step."""
        text, sounds = "", list[Pcm]()
        while self._parts:
            part = self._parts.pop(0)
            if part.kind == "end":
                was_speaking, self._is_speaking = self._is_speaking or text or sounds, False
                if was_speaking:
                    self._arrived.set()
                    return SpeakStep(text, _joined(sounds), end_of_turn=True)
            elif part.kind == "speak":
                self._is_speaking = True
                text += part.text
                sounds += [part.pcm] if part.pcm is not None else []
        if text or sounds or self._is_speaking:
            return SpeakStep(text, _joined(sounds), end_of_turn=False)
        return ListenStep()

    async def _lost(self) -> SpeakStep | None:
        """End the turn of a server that was lost: say that it was. None if no turn was under way."""
        self._was_lost = False
        was_speaking = self._is_speaking or any(part.kind == "speak" for part in self._parts)
        self._is_speaking = False
        self._parts.clear()
        if not was_speaking:
            return None
        line, pcm = self._model.line, NO_AUDIO
        if line and self._model.say:
            with suppress(ModelError, Refused):
                pcm = await self._model.say(line)
        return SpeakStep(f" {line}" if line else "", pcm, end_of_turn=True)

    async def _opened(self, endpoint: Endpoint) -> ClientConnection:
        pool, options = self._model.pool, self._options
        url = f"ws{endpoint.url.removeprefix('http')}{PATH}?model={self._model.model}&autostart=0"
        socket = await open_websocket(SERVER, url, pool.headers(), pool.tls)
        try:
            instructions = "\n\n".join(filter(None, (options.instructions, options.recall())))
            reference = None
            if options.voice_reference is not None:
                pcm = to_pcm16(options.voice_reference)
                reference = base64.b64encode(wav_header(SAMPLE_RATE_HZ, len(pcm)) + pcm).decode()
            session = _Session(
                model=self._model.model,
                instructions=instructions or None,
                voice=options.voice if options.voice not in (None, "default") else None,
                ref_audio=reference,
                temperature=options.sampling.temperature,
                extra_body=None if options.listen_only_units is None else _Extra(options.listen_only_units),
            )
            await socket.send(_encode(_Update(session)), text=True)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                event = read(await socket.recv())
            if event.type == "error" and event.error:
                raise ModelError(f"{SERVER} refuses a conversation: {event.error.message[:300]}")
            if event.type != "session.created":
                raise RemoteError(f"{SERVER} is not one of full duplex: it began with {event.type[:60]!r}")
        except TimeoutError:
            abort(socket)
            raise RemoteError(f"{SERVER} created no session within {CONNECT_TIMEOUT_S:g} s") from None
        except WebSocketException as error:
            raise broken(SERVER, error) from None
        except BaseException:
            abort(socket)
            raise
        return socket

    async def _send(self, event: msgspec.Struct) -> None:
        if self._socket is not None:
            # The reader notes a broken connection.
            with suppress(WebSocketException):
                await self._socket.send(_encode(event), text=True)

    async def _read(self) -> None:
        """Read a server's events. Whenever it fails, connect to another one."""
        while not self._is_closed:
            if self._socket is None:
                try:
                    await self.connect()
                except (ModelError, Refused) as error:
                    log.info("no server of the native model %s: %s", self._model.model, error)
                    await asyncio.sleep(RETRY_S)
                continue
            try:
                while True:
                    self._take(read(await self._socket.recv()))
            except (WebSocketException, RemoteError) as error:
                log.warning("the server of the native model %s was lost: %s", self._model.model, error)
            abort(self._socket)
            self._socket, self._was_lost = None, True
            self._arrived.set()

    def _take(self, event: ServerEvent) -> None:
        """Note an event. Raises RemoteError if it is not valid."""
        response = event.response_id or (event.response.id if event.response else "")
        if response and response == self._cut:
            return
        self._response = response or self._response
        if event.type in TEXT:
            self._put(_Part("speak", event.delta))
        elif event.type in ("response.output_audio.delta", "response.audio.delta"):
            self._put(_Part("speak", "", self._resampled(pcm_of(event.delta or event.audio), event.sample_rate_hz)))
        elif event.type == "response.listen":
            self._put(_Part("listen"))
        elif event.type == "response.done":
            self._put(_Part("end"))
        elif event.type in ("session.closed", "session.expired"):
            raise RemoteError(f"{SERVER} ended the session ({event.type})")
        elif event.type == "error" and event.error:
            log.info("%s reports: %s", SERVER, event.error.message[:300])

    def _put(self, part: _Part) -> None:
        if len(self._parts) >= MAX_PARTS:
            raise RemoteError(f"{SERVER} says more than is taken")
        self._parts.append(part)
        self._arrived.set()

    def _resampled(self, pcm: Pcm, rate_hz: int) -> Pcm:
        if rate_hz and rate_hz != self._resampled_hz:
            try:
                self._resampler, self._resampled_hz = Resampler(rate_hz, VOICE_HZ), rate_hz
            except ValueError as error:
                raise RemoteError(f"{SERVER}: {error}") from None
        return self._resampler.feed(pcm)


def _joined(sounds: list[Pcm]) -> Pcm:
    return np.concatenate(sounds) if sounds else NO_AUDIO


def _base(url: str) -> str:
    """Return the base of a server's API as an http:// URL: without the path of full duplex."""
    base, _ = split_api(url, (PATH,))
    return "http" + base.removeprefix("ws") if base.startswith("ws") else base
