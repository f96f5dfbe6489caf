"""Voices and conversation models on other servers: what they add to the first sound, and what is known as heard.

    antiphon bench remote_voices [--sections scripted,antiphon,heard] [--texts 200] [--cuts 50]

- scripted: a server that answers at once. The time to its first sound, for a plain client and for antiphon's own
  clients, in turns: over HTTP, over a WebSocket, and in a conversation over OpenAI's Realtime API.
- antiphon: the same with a second antiphon that speaks with hibari, and with a whole front before it.
- heard: answers of three sentences, spoken by hibari on a second antiphon, are cut at random. Compares the words that
  the history keeps with those whose sound had ended, by the word times of the same voice in this process.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench.common import beside, measured, options, percentile, server, show

from antiphon.audio.playback_clock import PlaybackClock
from antiphon.contracts import (
    Message,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    SpeechChunk,
    Synthesizer,
    Urgency,
    VoiceOptions,
)
from antiphon.events.words import Word
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import SPEECH_ROLES
from antiphon.pipelines.reading import ReadingVoice
from antiphon.pipelines.sentences import speak_sentences
from antiphon.remote.address import CONVERSATION_MODEL, SYNTHESIZER, parse_address
from antiphon.remote.conversation.model import RemoteConversationModel
from antiphon.remote.synthesizer.synthesizer import RemoteSynthesizer
from antiphon.settings import RemoteSettings, SpeechSettings
from antiphon.settings import load as load_settings

ROOT = Path(__file__).resolve().parents[1]
TEXT, WARM = "Good morning, how are you today?", 5
First = Callable[[], Awaitable[float]]
# The default models, and no voice, language model or detectors where they are not needed.
ONLY_VOICE = ("--language-model", "none", "--fallback-voice", "off", "--turn-detector", "none")


async def until_sound(chunks: AsyncGenerator[Any, None]) -> float:
    """Return the seconds to the first audio, then take the rest."""
    since_s, first_s = time.perf_counter(), 0.0
    async with aclosing(chunks):
        async for chunk in chunks:
            if not first_s and isinstance(chunk, SpeechChunk | ResponseAudio) and len(chunk.pcm):
                first_s = time.perf_counter() - since_s
    return first_s


def plain(client: httpx.AsyncClient, base: str, model: str, voice: str) -> First:
    """A client that asks for a streamed WAV, and waits for the bytes after its header."""
    body = {"model": model, "input": TEXT, "response_format": "wav", "stream": True, "voice": voice}

    async def first() -> float:
        since_s, found_s, size = time.perf_counter(), 0.0, 0
        async with client.stream("POST", f"{base}/audio/speech", json=body) as answer:
            answer.raise_for_status()
            async for chunk in answer.aiter_raw():
                size += len(chunk)
                if not found_s and size > 44:
                    found_s = time.perf_counter() - since_s
        return found_s

    return first


def spoken(base: str, model: str, **speech: Any) -> First:
    """A RemoteSynthesizer at a URL."""
    address = parse_address(f"{base}#{model}", "--synthesizer", schemes=SYNTHESIZER)
    voice = RemoteSynthesizer(address, "", SpeechSettings(**speech), RemoteSettings())
    options = VoiceOptions(voice.profile.voices[0])
    return lambda: until_sound(voice.speak(TEXT, options, lambda: Urgency.FINAL))


async def in_turns(ways: dict[str, First], count: int) -> dict[str, list[float]]:
    """Return the milliseconds of each way. They take turns, in a new order in each round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    chance, order = random.Random(7), list(ways)
    for number in range(count + WARM):
        chance.shuffle(order)
        for name in order:
            took_s = await ways[name]()
            if number >= WARM:
                found[name].append(1000 * took_s)
    return found


def compared(title: str, times: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    rows = {}
    for name, found in times.items():
        row = {"first_p50_ms": percentile(found, 50), "first_p95_ms": percentile(found, 95)}
        for q in (50, 95):
            row[f"added_p{q}_ms"] = percentile(found, q) - percentile(times[base], q)
        rows[name] = row
    show(title, rows)
    return rows


def scripted(count: int) -> dict[str, Any]:
    with beside("bench.scripted_voices") as (base, _):
        ws = base.replace("http", "ws", 1)
        clients = {
            "antiphon over HTTP, WAV": spoken(base, "scripted"),
            "antiphon over a WebSocket": spoken(f"{ws}/audio/speech/stream", "scripted"),
        }
        address = parse_address(f"{ws}#scripted", "--conversation-model", schemes=CONVERSATION_MODEL)
        partner = RemoteConversationModel(address, "", RemoteSettings())

        async def main() -> dict[str, list[float]]:
            stream = await partner.open()
            said = [Message("user", "Hello.")]

            async def answered() -> float:
                chunks = stream.respond(said, ReplyOptions(), VoiceOptions("default"))
                took_s = await until_sound(chunks)
                said.extend((Message("assistant", "One."), Message("user", "And?")))
                del said[:-40]
                return took_s

            async with httpx.AsyncClient() as client:
                ways = {"a plain client": plain(client, base, "scripted", "")}
                ways |= clients | {"antiphon in a conversation": answered}
                try:
                    return await in_turns(ways, count)
                finally:
                    stream.close()

        return compared("a server that answers at once", asyncio.run(main()), "a plain client")


def behind(count: int) -> dict[str, Any]:
    with server("--synthesizer", "hibari-heart", *ONLY_VOICE) as back:
        base, model = f"{back.url}/v1", "hibari-heart"
        with server("--synthesizer", f"{base}#{model}", *ONLY_VOICE) as front:
            clients = {
                "antiphon's client, WAV": spoken(base, model),
                "antiphon's client, WebSocket": spoken(f"{back.ws}/v1/audio/speech/stream", model),
            }

            async def main() -> dict[str, list[float]]:
                async with httpx.AsyncClient() as client:
                    ways = {
                        "a plain client": plain(client, base, model, "heart"),
                        **clients,
                        "a front before it": plain(client, f"{front.url}/v1", model, "heart"),
                    }
                    return await in_turns(ways, count)

            return compared("a second antiphon with hibari", asyncio.run(main()), "a plain client")


async def spoken_words(voice: Synthesizer, sentences: Sequence[str]) -> tuple[list[Word], float]:
    """Speak sentences as a cascade does. Return the words with their times, and the seconds of audio."""
    words, seconds = list[Word](), 0.0

    async def take(chunk: ResponseChunk) -> None:
        nonlocal seconds
        if isinstance(chunk, ResponseAudio):
            words.extend(chunk.words)
            seconds += len(chunk.pcm) / voice.profile.sample_rate_hz

    async def texts() -> AsyncGenerator[str, None]:
        for sentence in sentences:
            yield sentence

    options = VoiceOptions(voice.profile.voices[0], seed=0)
    async with aclosing(texts()) as given:
        await speak_sentences(voice, options, given, take, Left(PlaybackClock(time.monotonic), len(sentences)))
    return words, seconds


@dataclass(slots=True)
class Left:
    """The audio that is left for a listener that plays it at once."""

    playback: PlaybackClock
    num_waiting: int


def heard(cuts: int) -> dict[str, Any]:
    """Compare the words of a voice on a second antiphon with those of the same voice here, which tells their times."""
    settings = load_settings({}, {})
    models = load(settings, store_of(settings.models), None, SPEECH_ROLES)
    lines = (ROOT / "bench" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    chance, off = random.Random(7), list[int]()
    with server("--synthesizer", "hibari-heart", *ONLY_VOICE) as back:
        address = parse_address(f"{back.url}/v1#hibari-heart", "--synthesizer")
        there = ReadingVoice(RemoteSynthesizer(address, "", SpeechSettings(), RemoteSettings()))

        async def main() -> None:
            for number in range(cuts):
                answer = [lines[(3 * number + k) % len(lines)] for k in range(3)]
                true, seconds = await spoken_words(models.required_synthesizer, answer)
                found, also = await spoken_words(there, answer)
                assert abs(seconds - also) < 0.01, (seconds, also)
                cut_s = chance.uniform(0, seconds)
                off.append(sum(w.end_s <= cut_s for w in found) - sum(w.end_s <= cut_s for w in true))

        asyncio.run(main())
    models.close()
    row = {"cuts": len(off), "exact": off.count(0), "within_one_word": sum(abs(x) <= 1 for x in off)}
    row["worst"] = max(map(abs, off))
    show("heard only, with a voice on a second antiphon", [row])
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = options("antiphon bench remote_voices", __doc__, ("scripted", "antiphon", "heard"))
    parser.add_argument("--texts", type=int, default=200, help="texts of each way [%(default)s]")
    parser.add_argument("--cuts", type=int, default=50, help="answers that are cut [%(default)s]")
    args = parser.parse_args(argv)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    measured(
        "remote-voices",
        args.sections,
        {
            "scripted": lambda: scripted(args.texts),
            "antiphon": lambda: behind(args.texts),
            "heard": lambda: heard(args.cuts),
        },
        commit=commit,
    )


if __name__ == "__main__":
    main()
