"""What speech costs: time to first sound, clients in real time, gaps, cancelling, intelligibility, word times.

    antiphon bench tts [--data DIR] [--sections first,clients,gaps,cancel,quality,words,peers] [--clients N,N…]

A real server process and real sockets; clients and server share the machine's cores. A client plays what it gets in
real time: it asks for its next sentence when the last has been heard. `words` and `peers` need `make peers`
(PocketSphinx aligns, Piper is compared). `--transports` measures connections instead: transports.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soxr
import websockets

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import HERE, Server, machine, percentile, save, server, table
from words import score

from antiphon.audio.containers import decode_all
from antiphon.audio.encode import Encoder
from antiphon.audio.pcm import from_pcm16
from antiphon.contracts import FileOptions, TranscriptSegment, Urgency, VoiceOptions, one_slab
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import SPEECH_ROLES, TRANSCRIPTION_ROLES
from antiphon.settings import load as load_settings
from antiphon.text.sentences import SentenceSplitter
from transports import transports

RATE_HZ = 24_000
SENTENCES = 200
# Twelve words each.
TWELVE = (
    "The weather will be mild tomorrow with some rain late in the evening.",
    "She sold her old piano to a teacher who lived across the street.",
    "We walked along the quiet river and talked about plans for the summer.",
    "Please remember to close every window before you leave the room this evening.",
)
CONFIG = {"type": "session.config", "response_format": "pcm", "stream_audio": True}


def sentences(data: Path, count: int) -> list[str]:
    """English sentences of 4 to 30 words, each once:
    those of sentences.txt and from the transcripts of the recordings.
    """
    found: dict[str, None] = dict.fromkeys((HERE / "sentences.txt").read_text(encoding="utf-8").splitlines())
    for line in (data / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("language") != "en" or not row.get("text"):
            continue
        splitter = SentenceSplitter()
        for unit in splitter.feed(row["text"]) + splitter.flush():
            if 4 <= len(unit.split()) <= 30:
                found[unit[0].upper() + unit[1:] + ("" if unit[-1] in ".!?" else ".")] = None
    spread = sorted(found)
    random.Random(0).shuffle(spread)
    return spread[:count]


@dataclass(slots=True)
class Heard:
    """What one client got for one utterance, by its own clock."""

    first_s: float = 0.0
    audio_s: float = 0.0
    late_s: list[float] = field(default_factory=list)
    slack_s: list[float] = field(default_factory=list)
    played_until: float = 0.0


async def utter(socket: Any, text: str, *, tokens: bool = False) -> Heard:
    """Send one utterance, play what comes in real time. `late_s`: how long the player had nothing to play, by chunk;
    `slack_s`: how much of the last sentence was still to be heard when the next one's first chunk came."""
    heard, began = Heard(), time.perf_counter()
    if tokens:
        for word in text.split():
            await socket.send(json.dumps({"type": "input.text", "text": word + " "}))
    else:
        await socket.send(json.dumps({"type": "input.text", "text": text}))
    await socket.send(json.dumps({"type": "input.done"}))
    fresh = False
    async for frame in socket:
        now = time.perf_counter()
        if isinstance(frame, bytes):
            seconds = len(frame) / 2 / RATE_HZ
            if not heard.audio_s:
                heard.first_s = now - began
                heard.played_until = now
            elif fresh:
                heard.slack_s.append(heard.played_until - now)
            if now > heard.played_until:
                heard.late_s.append(now - heard.played_until)
                heard.played_until = now
            fresh = False
            heard.played_until += seconds
            heard.audio_s += seconds
        else:
            kind = json.loads(frame)["type"]
            fresh = fresh or (kind == "audio.start" and heard.audio_s > 0)
            if kind == "session.done":
                return heard
            assert kind != "error", frame
    raise RuntimeError("the server closed the stream")


async def client(srv: Server, index: int, until: float, out: list[Heard], texts: tuple[str, ...] = TWELVE) -> None:
    """Speaks one sentence after another in real time, beginning at a time of its own."""
    chance = random.Random(index)
    await asyncio.sleep(chance.random() * 4.0)
    async with websockets.connect(f"{srv.ws}/v1/audio/speech/stream", max_size=None, compression=None) as socket:
        await socket.send(json.dumps(CONFIG))
        while time.perf_counter() < until:
            heard = await utter(socket, texts[chance.randrange(len(texts))])
            out.append(heard)
            await asyncio.sleep(max(0.0, heard.played_until - time.perf_counter()) + 0.2 * chance.random())


async def crowd(srv: Server, count: int, seconds: float) -> dict[str, float]:
    """`count` clients for `seconds`."""
    out: list[Heard] = []
    cpu, began = srv.cpu_s(), time.perf_counter()
    until = began + 4.0 + seconds
    await asyncio.gather(*(client(srv, k, until, out) for k in range(count)))
    firsts = [h.first_s * 1000 for h in out]
    return {
        "utterances": len(out),
        "first_p50_ms": percentile(firsts, 50),
        "first_p95_ms": percentile(firsts, 95),
        "first_max_ms": max(firsts),
        "late_chunks": sum(len(h.late_s) for h in out),
        "server_cores": (srv.cpu_s() - cpu) / (time.perf_counter() - began),
    }


async def first(srv: Server, trials: int) -> dict[str, Any]:
    """One client, alone; then 32 that all ask at the same moment."""
    alone = []
    async with websockets.connect(f"{srv.ws}/v1/audio/speech/stream", compression=None) as socket:
        await socket.send(json.dumps(CONFIG))
        for k in range(trials):
            alone.append((await utter(socket, TWELVE[k % len(TWELVE)])).first_s * 1000)
            await asyncio.sleep(0.05)
    rest = []
    async with httpx.AsyncClient() as http:
        for k in range(trials):
            began = time.perf_counter()
            body = {"input": TWELVE[k % len(TWELVE)], "response_format": "pcm"}
            async with http.stream("POST", f"{srv.url}/v1/audio/speech", json=body) as answer:
                async for data in answer.aiter_bytes():
                    if data:
                        rest.append((time.perf_counter() - began) * 1000)
                        break
    burst = []
    for _ in range(5):
        sockets = [
            await websockets.connect(f"{srv.ws}/v1/audio/speech/stream", max_size=None, compression=None)
            for _ in range(32)
        ]
        for socket in sockets:
            await socket.send(json.dumps(CONFIG))
        heard = await asyncio.gather(*(utter(s, TWELVE[k % len(TWELVE)]) for k, s in enumerate(sockets)))
        burst += [h.first_s * 1000 for h in heard]
        for socket in sockets:
            await socket.close()
    out = {
        "alone_p50_ms": percentile(alone, 50),
        "alone_p95_ms": percentile(alone, 95),
        "rest_p50_ms": percentile(rest, 50),
        "burst_32_p50_ms": percentile(burst, 50),
        "burst_32_p95_ms": percentile(burst, 95),
    }
    table(
        "time to first sound over the socket, 12 words, ms",
        ("one, p50", "one, p95", "REST, p50", "32 at the same moment, p50", "p95"),
        [tuple(out.values())],
    )
    return out


async def clients(srv: Server, counts: list[int], seconds: float) -> dict[str, Any]:
    out = {}
    for count in counts:
        out[str(count)] = row = await crowd(srv, count, seconds)
        if not row["utterances"]:
            break
    table(
        "clients in real time, one sentence after another (first sound in ms)",
        ("clients", *next(iter(out.values())).keys()),
        [(n, *r.values()) for n, r in out.items()],
    )
    return out


async def gaps(srv: Server, counts: list[int]) -> dict[str, Any]:
    """Five sentences, word by word; the least of a sentence that was still to be heard when the next began to come."""
    out: dict[str, Any] = {}
    text = "Yes. " + " ".join(TWELVE) + " Good. Come in. " + TWELVE[0]

    async def one(index: int) -> Heard:
        await asyncio.sleep(index * 0.05)
        async with websockets.connect(f"{srv.ws}/v1/audio/speech/stream", max_size=None, compression=None) as socket:
            await socket.send(json.dumps(CONFIG))
            return await utter(socket, text, tokens=True)

    for count in counts:
        heard = [h for _ in range(max(1, 16 // count)) for h in await asyncio.gather(*(one(k) for k in range(count)))]
        slack = [s for h in heard for s in h.slack_s]
        out[str(count)] = {
            "sentences": len(slack),
            "least_slack_s": min(slack),
            "p5_slack_s": percentile(slack, 5),
            "late": sum(len(h.late_s) for h in heard),
        }
    table(
        "how much of a sentence is still to be heard when the next one's sound comes, s",
        ("clients", "sentences", "least", "p5", "late chunks"),
        [(n, *r.values()) for n, r in out.items()],
    )
    return out


async def cancel(srv: Server, trials: int) -> dict[str, Any]:
    """From sending `input.cancel` to the last frame of sound that arrives, alone and beside 32 clients."""
    out: dict[str, Any] = {}
    long = "This sentence goes on and on, " * 600

    async def once(delay: float) -> tuple[float, float]:
        async with websockets.connect(f"{srv.ws}/v1/audio/speech/stream", max_size=None, compression=None) as socket:
            await socket.send(json.dumps(CONFIG))
            await socket.send(json.dumps({"type": "input.text", "text": long}))
            await socket.send(json.dumps({"type": "input.done"}))
            sent, last, done = 0.0, 0.0, 0.0
            until = time.perf_counter() + delay
            async for frame in socket:
                now = time.perf_counter()
                if not sent and now > until:
                    sent = now
                    await socket.send(json.dumps({"type": "input.cancel"}))
                elif sent and isinstance(frame, bytes):
                    last = now
                elif sent and json.loads(frame)["type"] == "session.done":
                    done = now
                    break
            return max(0.0, last - sent) * 1000, (done - sent) * 1000

    for others in (0, 32):
        heard: list[Heard] = []
        until = time.perf_counter() + 8.0
        crowd = [asyncio.create_task(client(srv, k, until, heard)) for k in range(others)]
        await asyncio.sleep(1.0 if others else 0.0)
        times = [await once(0.1 + 0.01 * k) for k in range(trials)]
        await asyncio.gather(*crowd)
        last, done = [t[0] for t in times], [t[1] for t in times]
        out[str(others)] = {
            "last_p50_ms": percentile(last, 50),
            "last_max_ms": max(last),
            "done_p50_ms": percentile(done, 50),
        }
    table(
        "cancel: ms from sending it to the last sound that arrives (sound on its way included), and to session.done",
        ("others speaking", "last sound p50", "max", "done p50"),
        [(n, *r.values()) for n, r in out.items()],
    )
    return out


async def spoken(srv: Server, texts: list[str]) -> list[np.ndarray]:
    """Each text by the stream, with a seed."""
    out = []
    async with websockets.connect(f"{srv.ws}/v1/audio/speech/stream", max_size=None, compression=None) as socket:
        await socket.send(json.dumps(CONFIG | {"seed": 0, "split_granularity": "none"}))
        for text in texts:
            await socket.send(json.dumps({"type": "input.text", "text": text}))
            await socket.send(json.dumps({"type": "input.done"}))
            data = b""
            async for frame in socket:
                if isinstance(frame, bytes):
                    data += frame
                elif json.loads(frame)["type"] == "session.done":
                    break
            out.append(from_pcm16(data))
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


async def quality(srv: Server, texts: list[str]) -> dict[str, Any]:
    streamed = await spoken(srv, texts)
    apart = []
    async with httpx.AsyncClient(timeout=60) as http:
        for text, pcm in zip(texts[:30], streamed, strict=False):
            body = {"input": text, "response_format": "wav", "seed": 0}
            data = (await http.post(f"{srv.url}/v1/audio/speech", json=body)).content[44:]
            apart.append(abs(len(data) / 2 - len(pcm)) / len(pcm) * 100)
    heard = await transcripts([at_16k(p) for p in streamed])
    out = {
        "sentences": len(texts),
        "words": sum(len(t.split()) for t in texts),
        "audio_s": sum(map(len, streamed)) / RATE_HZ,
        "wer": error_rate(texts, heard),
        "stream_against_file_max_percent": max(apart),
    }
    table(
        "intelligibility: word errors of the loaded Whisper, %; the stream's length against the file's, %",
        tuple(out),
        [tuple(out.values())],
    )
    return out


async def word_times(srv: Server, texts: list[str], folder: Path) -> dict[str, Any]:
    """Against PocketSphinx; and the loaded Whisper's alignment, which serves voices that do not tell."""
    settings = load_settings({}, os.environ)
    models = load(settings, store_of(settings.models), roles=(*TRANSCRIPTION_ROLES, *SPEECH_ROLES))
    options = VoiceOptions(models.required_synthesizer.profile.voices[0], 1.0, 0)
    clips, own, attended = [], [], []
    for k, text in enumerate(texts):
        sounds = [s async for s in models.required_synthesizer.speak(text, options, lambda: Urgency.BULK)]
        pcm = at_16k(np.concatenate([s.pcm for s in sounds]))
        encoder = Encoder("wav", 16_000, whole=True)
        encoder.feed(pcm)
        path = folder / f"{k}.wav"
        path.write_bytes(encoder.finish())
        clips.append({"path": str(path), "text": text})
        own.append([w for s in sounds for w in s.words])
        attended.append(await models.required_transcriber.align(pcm, text.split(), "en"))
    models.close()
    judged = peer("pocketsphinx", {"clips": clips}, folder)
    out: dict[str, Any] = {}
    for name, mine in (("durations", own), ("whisper", attended)):
        starts, ends = [], []
        for words, spans in zip(mine, judged, strict=True):
            if not spans or len(words) != len(spans):
                continue
            starts += [abs(w.start_s - s[0]) * 1000 for w, s in zip(words, spans, strict=True)]
            ends += [abs(w.end_s - s[1]) * 1000 for w, s in zip(words, spans, strict=True)]
        out[name] = {
            "words": len(starts),
            "start_median_ms": percentile(starts, 50),
            "start_p95_ms": percentile(starts, 95),
            "end_median_ms": percentile(ends, 50),
            "end_p95_ms": percentile(ends, 95),
        }
    table(
        "word times against forced alignment by PocketSphinx, ms apart",
        ("source", *next(iter(out.values())).keys()),
        [(n, *r.values()) for n, r in out.items()],
    )
    return out


def peer(name: str, inputs: dict[str, Any], folder: Path) -> Any:
    """Run a peer's driver in its own environment; None where it is not set up."""
    python = HERE / "peers" / f".venv-{name}" / "bin" / "python"
    if not python.is_file():
        raise SystemExit(f"{name} is not set up: make peers")
    command = [str(python), str(HERE / "peers" / name / "drive.py"), "--out", str(folder / f"{name}.json")]
    for key, value in inputs.items():
        path = folder / f"{name}-{key}.json"
        path.write_text(json.dumps(value))
        command += [f"--{key}", str(path)]
    subprocess.run(command, check=True)
    return json.loads((folder / f"{name}.json").read_text())


async def peers(srv: Server, texts: list[str], folder: Path) -> dict[str, Any]:
    """Piper in a process of its own, without a socket, on one thread; ours over the socket, one client."""
    theirs = peer("piper", {"sentences": texts}, folder)["results"]
    heard = await transcripts([decode_all(r["path"]) for r in theirs])
    ours = []
    async with websockets.connect(f"{srv.ws}/v1/audio/speech/stream", max_size=None, compression=None) as socket:
        await socket.send(json.dumps(CONFIG | {"split_granularity": "none"}))
        for text in texts:
            began = time.perf_counter()
            got = await utter(socket, text)
            ours.append((got.first_s, time.perf_counter() - began, got.audio_s))
    mine = await transcripts([at_16k(p) for p in await spoken(srv, texts)])
    out = {
        "antiphon": {
            "first_p50_ms": percentile([o[0] * 1000 for o in ours], 50),
            "seconds_a_second": sum(o[1] for o in ours) / sum(o[2] for o in ours),
            "wer": error_rate(texts, mine),
        },
        "piper": {
            "first_p50_ms": percentile([r["first_s"] * 1000 for r in theirs], 50),
            "seconds_a_second": sum(r["took_s"] for r in theirs) / sum(r["audio_s"] for r in theirs),
            "wer": error_rate(texts, heard),
        },
    }
    table(
        "side by side, sentence by sentence",
        ("", "first sound p50, ms", "seconds of work a second of sound", "word errors of Whisper, %"),
        [(n, r["first_p50_ms"], f"{r['seconds_a_second']:.4f}", r["wer"]) for n, r in out.items()],
    )
    return out


def plot(document: dict[str, Any]) -> None:
    """bench/results/tts-clients.png: time to first sound against clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document.get("clients")
    if not rows:
        return
    counts = [int(n) for n in rows]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label in (("first_p50_ms", "p50"), ("first_p95_ms", "p95")):
        axes.plot(counts, [r[key] for r in rows.values()], marker="o", label=label)
    axes.set(
        xlabel="clients speaking at once in real time",
        ylabel="first sound, ms",
        title="Speech on two shared cores (the clients on them too)",
        yscale="log",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "results" / "tts-clients.png", dpi=110)


async def measure(srv: Server, args: argparse.Namespace, document: dict[str, Any]) -> None:
    wanted = set(args.sections.split(","))
    texts = sentences(args.data, SENTENCES)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if "first" in wanted:
            document["first"] = await first(srv, args.trials)
        if "gaps" in wanted:
            document["gaps"] = await gaps(srv, [1, 8, 32])
        if "cancel" in wanted:
            document["cancel"] = await cancel(srv, 20)
        if "clients" in wanted:
            document["clients"] = await clients(srv, [int(n) for n in args.clients.split(",")], args.seconds)
        if "quality" in wanted:
            document["quality"] = await quality(srv, texts)
        if "words" in wanted:
            document["words"] = await word_times(srv, texts, folder)
        if "peers" in wanted:
            document["peers"] = await peers(srv, texts[:60], folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench tts", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "tests" / "data", help="folder with a manifest.jsonl"
    )
    parser.add_argument("--sections", default="first,gaps,cancel,clients,quality,words,peers")
    parser.add_argument("--clients", default="1,8,32,64,96,128,160,192")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each number of clients")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--transports", action="store_true", help="measure the transports, and nothing else")
    args = parser.parse_args()
    if args.transports:
        found = {"machine": machine(), "transports": transports(args.trials)}
        print(f"\nwritten: {save('tts-transports', found)}")
        return
    document: dict[str, Any] = {"machine": machine(), "data": args.data.name}
    with server("--language-model", "none", "--max-sessions", "2000", "--sessions-per-key", "2000") as srv:
        asyncio.run(measure(srv, args, document))
    path = save("tts", document)
    plot(json.loads(path.read_text()))
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
