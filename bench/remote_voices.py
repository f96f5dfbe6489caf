"""Voices and conversation models on other servers: what they add to the first sound, and what is known as heard.

    antiphon bench remote_voices [--sections scripted,antiphon,heard] [--texts 200] [--cuts 50]

- scripted: a server that answers at once. The time to its first sound, for a plain client and for antiphon's own
  clients, in turns: over HTTP, over a WebSocket, and in a conversation over OpenAI's Realtime API.
- antiphon: the same with a second antiphon that speaks with hibari, and with a whole front before it.
- heard: answers of a front whose voice is on a second antiphon are cut at random. Compares the history with the words
  whose sound had ended, as `antiphon bench talk --sections heard` does for a voice in the same process.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from bench.common import beside, measured, options, percentile, server, show
from bench.talk import heard

from antiphon.contracts import Message, ReplyOptions, ResponseAudio, SpeechChunk, Urgency, VoiceOptions
from antiphon.remote.address import CONVERSATION_MODEL, SYNTHESIZER, parse_address
from antiphon.remote.conversation.model import RemoteConversationModel
from antiphon.remote.synthesizer.synthesizer import RemoteSynthesizer
from antiphon.settings import RemoteSettings, SpeechSettings

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


def heard_remote(cuts: int) -> dict[str, Any]:
    with (
        server("--synthesizer", "hibari-heart", *ONLY_VOICE) as back,
        server("--synthesizer", f"{back.url}/v1#hibari-heart", "--fallback-voice", "off") as front,
    ):
        return asyncio.run(heard(front, cuts))


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
            "heard": lambda: heard_remote(args.cuts),
        },
        commit=commit,
    )


if __name__ == "__main__":
    main()
