"""Speech: time to first sound, clients in real time, gaps, cancelling, intelligibility, word times.

    antiphon bench tts [--data DIR] [--sections first,clients,gaps,cancel,quality,words,peers] [--clients N,N…]

It uses a real server process and real sockets. Clients and server share the machine's cores. A client plays the audio
in real time, and requests its next sentence when the last one has been played. `words` and `peers` need `make peers`:
PocketSphinx aligns words, and Piper is the peer. `--transports` measures connections instead; see transports.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from bench.common import (
    HERE,
    Server,
    machine,
    measured,
    numbers,
    options,
    peer,
    percentile,
    save,
    server,
    show,
    spread,
    together,
)
from bench.transports import transports
from bench.words import score

from antiphon.audio.containers import decode_all
from antiphon.audio.encode import Encoder
from antiphon.audio.pcm import from_pcm16
from antiphon.client import Client, ClientSpeech
from antiphon.contracts import FileOptions, TranscriptSegment, Urgency, VoiceOptions, one_slab
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import SPEECH_ROLES, TRANSCRIPTION_ROLES
from antiphon.settings import load as load_settings
from antiphon.text.sentences import SentenceSplitter

RATE_HZ = 24_000
SENTENCES = 200
# Sentences of twelve words each.
TWELVE = (
    "The weather will be mild tomorrow with some rain late in the evening.",
    "She sold her old piano to a teacher who lived across the street.",
    "We walked along the quiet river and talked about plans for the summer.",
    "Please remember to close every window before you leave the room this evening.",
)


def sentences(data: Path, count: int) -> list[str]:
    """Return distinct English sentences of 4 to 30 words, from sentences.txt and the recordings' transcripts."""
    found: dict[str, None] = dict.fromkeys((HERE / "sentences.txt").read_text(encoding="utf-8").splitlines())
    for line in (data / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("language") != "en" or not row.get("text"):
            continue
        splitter = SentenceSplitter()
        for unit in splitter.feed(row["text"]) + splitter.flush():
            if 4 <= len(unit.split()) <= 30:
                found[unit[0].upper() + unit[1:] + ("" if unit[-1] in ".!?" else ".")] = None
    mixed = sorted(found)
    random.Random(0).shuffle(mixed)
    return mixed[:count]


@dataclass(slots=True)
class Heard:
    """What one client received for one utterance, by its own clock.

    `late_s` has, for each chunk, the seconds during which the player had nothing to play. `slack_s` has the seconds of
    a sentence that were still to be played when the first chunk of the next sentence arrived.
    """

    first_s: float = 0.0
    audio_s: float = 0.0
    late_s: list[float] = field(default_factory=list)
    slack_s: list[float] = field(default_factory=list)
    played_until: float = 0.0


async def utter(speech: ClientSpeech, text: str, *, by_word: bool = False) -> Heard:
    """Send one utterance, and play the received audio in real time."""
    heard, began, sentence = Heard(), time.perf_counter(), ""
    for piece in [word + " " for word in text.split()] if by_word else [text]:
        await speech.say(piece)
    await speech.finish()
    async for audio in speech:
        now, seconds = time.perf_counter(), len(audio.pcm) / 2 / RATE_HZ
        if not heard.audio_s:
            heard.first_s, heard.played_until = now - began, now
        elif audio.text != sentence:
            heard.slack_s.append(heard.played_until - now)
        if now > heard.played_until:
            heard.late_s.append(now - heard.played_until)
            heard.played_until = now
        sentence = audio.text
        heard.played_until += seconds
        heard.audio_s += seconds
    return heard


async def speak_on(client: Client, index: int, until: float, out: list[Heard]) -> None:
    """Speak one sentence after another in real time, beginning after a delay."""
    chance = random.Random(index)
    await asyncio.sleep(chance.random() * 4.0)
    async with client.speech() as speech:
        while time.perf_counter() < until:
            heard = await utter(speech, TWELVE[chance.randrange(len(TWELVE))])
            out.append(heard)
            await asyncio.sleep(max(0.0, heard.played_until - time.perf_counter()) + 0.2 * chance.random())


async def first(client: Client, trials: int) -> dict[str, Any]:
    """Measure one client alone, then 32 clients that send their requests at the same moment."""
    alone, burst = list[float](), list[float]()
    async with client.speech() as speech:
        for k in range(trials):
            alone.append((await utter(speech, TWELVE[k % len(TWELVE)])).first_s * 1000)
            await asyncio.sleep(0.05)
    for _ in range(5):
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(client.speech()) for _ in range(32)]
            heard = await together(32, lambda k, all_of=opened: utter(all_of[k], TWELVE[k % len(TWELVE)]))
        burst += [h.first_s * 1000 for h in heard]
    out = spread(alone, "alone", "ms") | spread(burst, "burst_32", "ms")
    show("time to first sound over the socket, 12 words: one, and 32 at the same moment", [out])
    return out


async def clients(srv: Server, client: Client, counts: list[int], seconds: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for count in counts:
        heard = list[Heard]()
        cpu, began = srv.cpu_s(), time.perf_counter()
        await together(count, lambda k, until=began + 4.0 + seconds, into=heard: speak_on(client, k, until, into))
        firsts = [h.first_s * 1000 for h in heard]
        out[str(count)] = {"utterances": len(heard)} | spread(firsts, "first", "ms")
        out[str(count)] |= {
            "first_max_ms": max(firsts, default=float("nan")),
            "late_chunks": sum(len(h.late_s) for h in heard),
            "server_cores": (srv.cpu_s() - cpu) / (time.perf_counter() - began),
        }
    show("clients in real time, one sentence after another", out)
    return out


async def gaps(client: Client, counts: list[int]) -> dict[str, Any]:
    """Send five sentences word by word. Measures the least time left to play when the next sentence began to arrive."""
    out: dict[str, Any] = {}
    text = "Yes. " + " ".join(TWELVE) + " Good. Come in. " + TWELVE[0]

    async def one(index: int) -> Heard:
        await asyncio.sleep(index * 0.05)
        async with client.speech() as speech:
            return await utter(speech, text, by_word=True)

    for count in counts:
        heard = [h for _ in range(max(1, 16 // count)) for h in await together(count, one)]
        slack = [s for h in heard for s in h.slack_s]
        out[str(count)] = {
            "sentences": len(slack),
            "least_slack_s": min(slack),
            "p5_slack_s": percentile(slack, 5),
            "late": sum(len(h.late_s) for h in heard),
        }
    show("rest of a sentence to play when the next one's sound arrives, by clients", out)
    return out


async def cancel(client: Client, trials: int) -> dict[str, Any]:
    """Measure from `input.cancel` to the last sound, and to `session.done`: alone, and next to 32 clients."""
    out: dict[str, Any] = {}

    async def once(delay: float) -> tuple[float, float]:
        async with client.speech() as speech:
            await speech.say("This sentence goes on and on, " * 600)
            await speech.finish()
            sent, last, until = 0.0, 0.0, time.perf_counter() + delay
            async for _ in speech:
                now = time.perf_counter()
                if not sent and now > until:
                    sent = now
                    await speech.cancel()
                elif sent:
                    last = now
            return max(0.0, last - sent) * 1000, (time.perf_counter() - sent) * 1000

    for others in (0, 32):
        until, heard = time.perf_counter() + 8.0, list[Heard]()
        crowd = [asyncio.create_task(speak_on(client, k, until, heard)) for k in range(others)]
        await asyncio.sleep(1.0 if others else 0.0)
        last, done = zip(*[await once(0.1 + 0.01 * k) for k in range(trials)], strict=True)
        await asyncio.gather(*crowd)
        out[str(others)] = {"last_p50_ms": percentile(last, 50), "last_max_ms": max(last)}
        out[str(others)] |= {"done_p50_ms": percentile(done, 50)}
    show("cancel, by other speaking clients: last received sound (including sound in transit), and session.done", out)
    return out


async def spoken(client: Client, texts: list[str]) -> list[np.ndarray]:
    """Speak each text over the stream, with a seed."""
    out = []
    async with client.speech(config={"seed": 0, "split_granularity": "none"}) as speech:
        for text in texts:
            await speech.say(text)
            await speech.finish()
            out.append(from_pcm16(b"".join([audio.pcm async for audio in speech])))
    return out


async def transcripts(paths: list[np.ndarray]) -> list[str]:
    settings = load_settings({}, os.environ)
    models = load(settings, store_of(settings.models), roles=TRANSCRIPTION_ROLES)
    out = []
    for pcm in paths:
        parts = [s async for s in models.required_transcriber.transcribe(one_slab(pcm), FileOptions("en"))]
        out.append(" ".join(s.text.strip() for s in parts if isinstance(s, TranscriptSegment)))
    models.close()
    return out


def error_rate(texts: list[str], heard: list[str]) -> float:
    wrong = total = 0
    for text, other in zip(texts, heard, strict=True):
        mine, length = score(text, other)
        wrong, total = wrong + mine, total + length
    return 100 * wrong / total


def at_16k(pcm: np.ndarray, rate_hz: int = RATE_HZ) -> np.ndarray:
    return np.asarray(soxr.resample(pcm, rate_hz, 16_000), np.float32)


async def quality(client: Client, texts: list[str]) -> dict[str, Any]:
    streamed = await spoken(client, texts)
    heard = await transcripts([at_16k(p) for p in streamed])
    out = {
        "sentences": len(texts),
        "words": sum(len(t.split()) for t in texts),
        "audio_s": sum(map(len, streamed)) / RATE_HZ,
        "wer": error_rate(texts, heard),
    }
    show("intelligibility: word errors of the loaded Whisper, %", [out])
    return out


async def word_times(texts: list[str], folder: Path) -> dict[str, Any] | None:
    """Compare the voice's word times, and those of Whisper's alignment, with those of PocketSphinx.

    Whisper's alignment is for voices without word times.
    """
    settings = load_settings({}, os.environ)
    models = load(settings, store_of(settings.models), roles=(*TRANSCRIPTION_ROLES, *SPEECH_ROLES))
    voice = VoiceOptions(models.required_synthesizer.profile.voices[0], 1.0, 0)
    clips, own, attended = [], [], []
    for k, text in enumerate(texts):
        sounds = [s async for s in models.required_synthesizer.speak(text, voice, lambda: Urgency.BULK)]
        pcm = at_16k(np.concatenate([s.pcm for s in sounds]))
        encoder = Encoder("wav", 16_000, whole=True)
        encoder.feed(pcm)
        path = folder / f"{k}.wav"
        path.write_bytes(encoder.finish())
        clips.append({"path": str(path), "text": text})
        own.append([w for s in sounds for w in s.words])
        attended.append(await models.required_transcriber.align(pcm, text.split(), "en"))
    models.close()
    if (judged := peer("pocketsphinx", folder, clips=clips)) is None:
        return None
    out: dict[str, Any] = {}
    for name, mine in (("durations", own), ("whisper", attended)):
        starts, ends = [], []
        for words, spans in zip(mine, judged, strict=True):
            if not spans or len(words) != len(spans):
                continue
            starts += [abs(w.start_s - s[0]) * 1000 for w, s in zip(words, spans, strict=True)]
            ends += [abs(w.end_s - s[1]) * 1000 for w, s in zip(words, spans, strict=True)]
        out[name] = {"words": len(starts)}
        for end, values in (("start", starts), ("end", ends)):
            out[name] |= {f"{end}_median_ms": percentile(values, 50), f"{end}_p95_ms": percentile(values, 95)}
    show("word times: differences from forced alignment by PocketSphinx", out)
    return out


async def peers(client: Client, texts: list[str], folder: Path) -> dict[str, Any] | None:
    """Measure Piper in its own process, on one thread and without a socket; and antiphon, with a client on a socket."""
    if (found := peer("piper", folder, sentences=texts)) is None:
        return None
    theirs = found["results"]
    heard = await transcripts([decode_all(r["path"]) for r in theirs])
    ours = []
    async with client.speech(config={"split_granularity": "none"}) as speech:
        for text in texts:
            began = time.perf_counter()
            got = await utter(speech, text)
            ours.append({"first_s": got.first_s, "took_s": time.perf_counter() - began, "audio_s": got.audio_s})
    mine = await transcripts([at_16k(p) for p in await spoken(client, texts)])
    out = {
        name: {
            "first_p50_ms": percentile([r["first_s"] * 1000 for r in results], 50),
            "seconds_a_second": sum(r["took_s"] for r in results) / sum(r["audio_s"] for r in results),
            "wer": error_rate(texts, words),
        }
        for name, results, words in (("antiphon", ours, mine), ("piper", theirs, heard))
    }
    show("sentence by sentence: first sound, CPU seconds per second of sound, word errors of Whisper, %", out)
    return out


def measure(srv: Server, args: Any, folder: Path) -> None:
    texts = sentences(args.data, SENTENCES)

    def asked(work: Callable[[Client], Any]) -> Any:
        """Run `work` with a client of the server, and return its result."""

        async def main() -> Any:
            async with Client(srv.url) as client:
                return await work(client)

        return asyncio.run(main())

    sections = {
        "first": lambda: asked(lambda client: first(client, args.trials)),
        "gaps": lambda: asked(lambda client: gaps(client, [1, 8, 32])),
        "cancel": lambda: asked(lambda client: cancel(client, 20)),
        "clients": lambda: asked(lambda client: clients(srv, client, numbers(args.clients), args.seconds)),
        "quality": lambda: asked(lambda client: quality(client, texts)),
        "words": lambda: asyncio.run(word_times(texts, folder)),
        "peers": lambda: asked(lambda client: peers(client, texts[:60], folder)),
    }
    measured("tts", args.sections, sections, data=args.data.name)


def main() -> None:
    parser = options("antiphon bench tts", __doc__, ("first", "gaps", "cancel", "clients", "quality", "words", "peers"))
    recordings = HERE.parent / "tests" / "data"
    parser.add_argument("--data", type=Path, default=recordings, help="folder with a manifest.jsonl")
    parser.add_argument("--clients", default="1,8,32,64,96,128,160,192")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds for each number of clients")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--transports", action="store_true", help="measure only the transports")
    args = parser.parse_args()
    if args.transports:
        found = {"machine": machine(), "transports": transports(args.trials)}
        print(f"\nwritten: {save('tts-transports', found)}")
        return
    flags = ("--language-model", "none", "--max-sessions", "2000", "--sessions-per-key", "2000")
    with server(*flags) as srv, tempfile.TemporaryDirectory() as folder:
        measure(srv, args, Path(folder))


if __name__ == "__main__":
    main()
