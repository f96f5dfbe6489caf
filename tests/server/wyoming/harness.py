"""A Wyoming port with scripted models on a real socket, and a client that sends and reads single events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import msgspec
import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.contracts import (
    LanguageProfile,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    SpeechChunk,
    SynthesizerProfile,
    TextDelta,
    Urgency,
    VoiceOptions,
)
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.server.drain import drain
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.server.wyoming.listening import open_wyoming
from antiphon.settings import Settings
from antiphon.wyoming import WyomingDecoder, WyomingEvent
from tests.scripted import ScriptedTranscriber
from tests.server.scripted import Echo, scripted_models

RATE_HZ, WORD_SAMPLES = 24_000, 2400
LIMIT_S = 20.0


class Voice:
    """A synthesizer: each word is 0.1 s of audio. It fails on the word `fail`, and records what it spoke."""

    def __init__(self) -> None:
        self.profile = SynthesizerProfile(
            "scripted-voice",
            RATE_HZ,
            ("one", "zwei"),
            ("de", "en"),
            (1.0, 1.0),
            word_times=False,
            voice_languages={"zwei": ("de",)},
        )
        self.spoken: list[tuple[str, str]] = []

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.spoken.append((options.voice, text))
        if "fail" in text:
            raise RemoteProtocolError("invalid_value", "nothing can be spoken")
        for _ in text.split():
            await anyio.lowlevel.checkpoint()
            yield SpeechChunk(np.full(WORD_SAMPLES, 0.5, np.float32))


class Language:
    """A language model that says how many messages it got, and repeats the last. It fails on the text `fail`."""

    def __init__(self) -> None:
        self.profile = LanguageProfile("scripted-language", 4096)
        self.asked: list[list[str]] = []

    async def open(self, owner: object = None) -> Language:
        return self

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        self.asked.append([m.text for m in messages])
        if messages[-1].text == "fail":
            raise ModelError("it failed")
        for word in f"{len(messages)} {messages[-1].text}".split():
            await anyio.lowlevel.checkpoint()
            yield TextDelta(f"{word} ")
        yield ReplyDone("stop", 1, 0, 1)

    def close(self, *, keep: bool = False) -> None:
        return


@dataclass(slots=True)
class Port:
    """A running Wyoming port: its number, its server's state, and the scripted models."""

    number: int
    state: ServerState
    voice: Voice = field(default_factory=Voice)
    language: Language = field(default_factory=Language)
    transcriber: ScriptedTranscriber = field(default_factory=ScriptedTranscriber)

    async def drain(self, seconds: float = 5.0) -> None:
        await drain(self.state, seconds)


def settings(**values: Any) -> Settings:
    """Return settings with a Wyoming port that the system chooses. Values with a server's name are the server's."""
    base = Settings()
    own = {name: value for name, value in values.items() if name.startswith("wyoming")}
    other = {name: value for name, value in values.items() if name not in own}
    wyoming = replace(base.wyoming, **{"wyoming": "127.0.0.1:0", **own})
    return replace(base, wyoming=wyoming, server=replace(base.server, headroom=False, **other))


@asynccontextmanager
async def port(transcriber: ScriptedTranscriber | None = None, **values: Any) -> AsyncIterator[Port]:
    """Serve a Wyoming port while the block runs, and drain it then."""
    voice, language, heard = Voice(), Language(), transcriber or ScriptedTranscriber()
    models = replace(scripted_models(Echo(), heard), synthesizer=voice, language_model=language)
    state = ServerState(settings(**values), Metrics(), models)
    open_wyoming(state)
    number = state.listeners.ports["wyoming"]
    async with anyio.create_task_group() as state.group:
        await state.group.start(state.listeners.serve)
        try:
            yield Port(number, state, voice, language, heard)
        finally:
            with anyio.CancelScope(shield=True):
                await drain(state, 1.0)
            state.listeners.close()
            state.group.cancel_scope.cancel()


class Client:
    """A connection that sends single events, also invalid ones, and reads the answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = WyomingDecoder()
        self._events: list[WyomingEvent] = []
        self.seen: list[str] = []

    def say(self, kind: str, payload: bytes = b"", *, inline: bool = False, **data: Any) -> None:
        """Send one event. `inline`: its data are in its first line."""
        body = b"" if inline else msgspec.json.encode(data)
        head = {"type": kind, "data_length": len(body), "payload_length": len(payload)}
        if inline:
            head["data"] = data
        self.writer.write(msgspec.json.encode(head) + b"\n" + body + payload)

    def sound(self, pcm: Pcm, chunk: int = 1024) -> None:
        """Send audio at 16 kHz in chunks, without its start and end."""
        for at in range(0, len(pcm), chunk):
            self.say("audio-chunk", to_pcm16(pcm[at : at + chunk]), rate=16_000, width=2, channels=1)

    async def read(self) -> WyomingEvent | None:
        """Return the next event; None when the server has closed the connection."""
        while not self._events:
            async with asyncio.timeout(LIMIT_S):
                data = await self.reader.read(1 << 16)
            if not data:
                return None
            self._events += self._decoder.feed(data)
        self.seen.append(self._events[0].kind)
        return self._events.pop(0)

    async def until(self, kind: str) -> dict[str, Any]:
        """Read until an event of this type, and return its data."""
        while event := await self.read():
            if event.kind == kind:
                found: dict[str, Any] = msgspec.json.decode(event.data or b"{}")
                return found
        raise AssertionError(f"closed before {kind}: {self.seen}")

    async def closed(self) -> bool:
        """Return whether the server closes the connection. Reads and drops all events before."""
        try:
            while await self.read():
                pass
        except ConnectionResetError:
            pass
        return True


@asynccontextmanager
async def connect(port: Port) -> AsyncIterator[Client]:
    """Open a connection while the block runs."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
