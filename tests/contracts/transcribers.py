"""Transcribers for the suite of their contract: the scripted one, and the same one behind each kind of server.

All of them hear the words that the audio encodes (`tests/scripted.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from antiphon import wyoming
from antiphon.contracts import Transcriber
from antiphon.remote.address import TRANSCRIBER, parse_address
from antiphon.remote.transcriber.sockets import OpenAiWire, StreamingServer, VllmWire
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from antiphon.settings import RemoteSettings
from tests.remote.transcriber.faults import on_a_port
from tests.scripted import ScriptedTranscriber, heard
from tests.server.scripted import serving


def remote(*urls: str, model: str = "default", key: str = "", answer_s: float = 10.0) -> RemoteTranscriber:
    """Return a transcriber at these URLs. Asks the servers, on an event loop of its own."""
    address = parse_address(f"{','.join(urls)}#{model}", "--transcriber", schemes=TRANSCRIBER)
    made = list[RemoteTranscriber | Exception]()

    def make() -> None:
        try:
            made.append(RemoteTranscriber(address, key, RemoteSettings(remote_answer_s=answer_s)))
        except Exception as error:
            made.append(error)

    # The constructor runs an event loop, and callers may be in one.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


class ScriptedWyoming:
    """A Wyoming server in a thread of this process, for words that the audio encodes."""

    def __init__(self, model: str = "scripted") -> None:
        self.model = model
        self.transcribed: list[wyoming.WyomingEvent] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder, audio = wyoming.WyomingDecoder(), bytearray()
        try:
            while data := await reader.read(1 << 16):
                for event in decoder.feed(data):
                    await self.answer(event, audio, writer)
        finally:
            writer.close()

    async def answer(self, event: wyoming.WyomingEvent, audio: bytearray, writer: asyncio.StreamWriter) -> None:
        match event.kind:
            case "describe":
                writer.write(INFO % (len(INFO_DATA % self.model.encode()), INFO_DATA % self.model.encode()))
            case "transcribe":
                audio.clear()
                self.transcribed.append(event)
            case "audio-chunk":
                audio += event.payload
            case "audio-stop":
                pcm = np.frombuffer(bytes(audio), "<i2").astype(np.float32) / 32768
                said = " ".join(f"w{n}" for n, a, b in heard(pcm) if b - a >= 2560)
                body = b'{"text": "%s"}' % said.encode()
                writer.write(b'{"type": "transcript", "data_length": %d}\n%s' % (len(body), body))
        await writer.drain()


INFO = b'{"type": "info", "data_length": %d}\n%s'
INFO_DATA = b'{"asr": [{"name": "scripted", "models": [{"name": "%s", "languages": ["en"]}]}], "tts": []}'


@contextmanager
def scripted() -> Iterator[Transcriber]:
    yield ScriptedTranscriber()  # type: ignore[misc]


@contextmanager
def another_antiphon() -> Iterator[Transcriber]:
    with serving() as (url, _, _):
        yield remote(url.replace("ws://", "http://") + "/v1")


@contextmanager
def vllm_realtime() -> Iterator[Transcriber]:
    """The vLLM wire of a real server."""
    with serving() as (url, _, _):
        found = remote(f"{url}/v1/realtime")
        (endpoint,) = found.pool.all
        endpoint.server = StreamingServer(found.pool, endpoint, f"{url}/v1/realtime", "default", VllmWire())
        yield found


@contextmanager
def openai_sessions() -> Iterator[Transcriber]:
    """A real server that is not recognised as antiphon: it gets no fields of antiphon, and audio at 24 kHz."""
    with serving() as (url, _, _):
        found = remote(f"{url}/v1/realtime")
        (endpoint,) = found.pool.all
        url = f"{url}/v1/realtime?intent=transcription"
        wire = OpenAiWire(is_antiphon=False)
        endpoint.server = StreamingServer(found.pool, endpoint, url, "default", wire)
        yield found


@contextmanager
def rest() -> Iterator[Transcriber]:
    with serving() as (url, _, _):
        yield remote(url.replace("ws://", "http://") + "/v1/audio/transcriptions")


@contextmanager
def wyoming_server() -> Iterator[Transcriber]:
    with on_a_port(ScriptedWyoming().serve) as port:
        yield remote(f"tcp://127.0.0.1:{port}", model="scripted")


ALL = {
    made.__name__: made for made in (scripted, another_antiphon, vllm_realtime, openai_sessions, rest, wyoming_server)
}
