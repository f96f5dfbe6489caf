"""The `wyoming` package, which Home Assistant uses: describe, transcription, speech, streamed speech, an answer.

Its own classes parse each event of the server, so a missing field fails here. In the end, 1,000 connections say
nothing, and the server still answers another client.
"""

import asyncio
import sys

import soundfile
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient, AsyncTcpClient
from wyoming.handle import Handled, HandledChunk, HandledStart, HandledStop
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

LIMIT_S, INFO_S = 60, 1.0
NUM_SILENT = 1000


async def described(uri: str) -> Info:
    async with AsyncClient.from_uri(uri) as client, asyncio.timeout(INFO_S):
        await client.write_event(Describe().event())
        event = await client.read_event()
        assert event
        return Info.from_event(event)


async def until(client: AsyncTcpClient, *kinds: type) -> list:
    """Parse events up to the first of the last kind. All of them have to be of one of these kinds."""
    found: list = []
    async with asyncio.timeout(LIMIT_S):
        while event := await client.read_event():
            kind = next((kind for kind in kinds if kind.is_type(event.type)), None)
            if kind:
                found.append(kind.from_event(event))
                if kind is kinds[-1]:
                    return found
    raise AssertionError(f"closed: {found}")


async def transcribed(uri: str, path: str) -> str:
    samples, rate = soundfile.read(path, dtype="int16")
    async with AsyncClient.from_uri(uri) as client:
        await client.write_event(Transcribe(language="en").event())
        await client.write_event(AudioStart(rate, 2, 1).event())
        for at in range(0, len(samples), 1024):
            await client.write_event(AudioChunk(rate, 2, 1, samples[at : at + 1024].tobytes()).event())
        await client.write_event(AudioStop().event())
        return (await until(client, Transcript))[-1].text


async def spoken(uri: str, voice: str) -> tuple[float, float]:
    """Return the seconds of a text that is spoken whole, and of the same text in pieces."""
    text, seconds = "The light in the kitchen is on. Good night.", []
    async with AsyncClient.from_uri(uri) as client:
        await client.write_event(Synthesize(text, SynthesizeVoice(name=voice)).event())
        seconds.append(length_s(await until(client, AudioStart, AudioChunk, AudioStop)))
        await client.write_event(SynthesizeStart(SynthesizeVoice(name=voice)).event())
        for word in text.split():
            await client.write_event(SynthesizeChunk(f"{word} ").event())
        await client.write_event(Synthesize(text, SynthesizeVoice(name=voice)).event())
        await client.write_event(SynthesizeStop().event())
        seconds.append(length_s(await until(client, AudioStart, AudioChunk, AudioStop, SynthesizeStopped)))
    return seconds[0], seconds[1]


def length_s(events: list) -> float:
    assert isinstance(events[0], AudioStart), events[0]
    return sum(event.seconds for event in events if isinstance(event, AudioChunk))


async def answered(uri: str, text: str, conversation: str) -> str:
    async with AsyncClient.from_uri(uri) as client:
        await client.write_event(Transcript(text, language="en", context={"conversation_id": conversation}).event())
        events = await until(client, HandledStart, HandledChunk, HandledStop, Handled)
        assert events[-1].context == {"conversation_id": conversation}
        return events[-1].text


async def held(host: str, port: int) -> None:
    """Hold NUM_SILENT connections that say nothing, as far as the server takes them, and be served beside them."""
    silent = [await asyncio.open_connection(host, port) for _ in range(NUM_SILENT)]
    for _, writer in silent[::2]:
        writer.close()
    await asyncio.sleep(0.5)
    await described(f"tcp://{host}:{port}")
    for _, writer in silent[1::2]:
        writer.close()


async def main(uri: str, path: str) -> None:
    info = await described(uri)
    voice = info.tts[0].voices[0]
    assert "en" in info.asr[0].models[0].languages
    assert "en" in voice.languages
    text = await transcribed(uri, path)
    assert "book" in text.lower() or len(text.split()) > 3, text
    whole_s, pieces_s = await spoken(uri, voice.name)
    assert whole_s > 1.5, whole_s
    assert 0.8 < whole_s / pieces_s < 1.25, (whole_s, pieces_s)
    first = await answered(uri, "My name is Ada. Answer in one short sentence.", "c1")
    second = await answered(uri, "What is my name?", "c1")
    assert "Ada" in second, (first, second)
    async with AsyncClient.from_uri(uri) as client:
        await client.write_event(Ping("here").event())
        assert (await until(client, Pong))[-1].text == "here"
    host, _, port = uri.removeprefix("tcp://").rpartition(":")
    await held(host, int(port))
    print(f"wyoming: {text!r}; {whole_s:.1f} s and {pieces_s:.1f} s of speech; {second!r}")


asyncio.run(main(sys.argv[1], sys.argv[2]))
