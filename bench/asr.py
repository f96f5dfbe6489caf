"""`antiphon bench asr`: live transcription, measured from outside, over real sockets, on real recordings.

    antiphon bench asr [--data DIR] [--sections quality,latency,load,long,quiet,peers] [--clips N] [--profile NAME]

Words and times are those a client sees: speech is played in real time over the OpenAI transcription session (24 kHz),
and the clock runs from the first sample. `speech_start` and `speech_end` of the manifest are the true bounds of the
speech.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import difflib
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import websockets

sys.path.insert(0, str(Path(__file__).resolve().parent))
import words as wer
from common import HERE, Server, machine, percentile, save, server, table

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import to_pcm16
from antiphon.contracts import FileInfo, FileOptions, one_slab
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import TRANSCRIPTION_ROLES
from antiphon.settings import load as load_settings

WIRE_HZ = 24_000
CHUNK_S = 0.032
TRAIL_S = 2.5
READ, NONNATIVE = "asr_read", "asr_nonnative"
QUALITY_KINDS = (READ, NONNATIVE, "asr_noisy", "asr_8k_native", "asr_speech")


@dataclass(slots=True)
class Clip:
    id: str
    path: Path
    seconds: float
    text: str
    language: str
    kind: str
    speech_start: float
    speech_end: float
    active_dbfs: float = 0.0
    pcm: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(slots=True)
class Heard:
    """What came back for one clip;
    times in seconds since its first sample. `from_ms`: its place in the session's audio.
    """

    zero: float = 0.0
    from_ms: float = 0.0
    deltas: list[tuple[float, str]] = field(default_factory=list)
    finals: list[tuple[float, str]] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(t for _, t in self.finals if t)

    @property
    def streamed(self) -> str:
        return " ".join(joined for joined, _ in self.turns if joined)


def read_manifest(data: Path) -> list[Clip]:
    clips = []
    for line in (data / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row["path"].endswith((".flac", ".wav")):
            continue
        clips.append(
            Clip(
                row["id"],
                data / row["path"],
                row["seconds"],
                row.get("text") or "",
                row.get("language") or "",
                row["kind"],
                row.get("speech_start", 0.0),
                row.get("speech_end", row["seconds"]),
                row.get("active_dbfs", 0.0),
            )
        )
    return clips


def loaded(clips: Iterable[Clip]) -> list[Clip]:
    out = list(clips)
    for clip in out:
        if not len(clip.pcm):
            clip.pcm = decode_all(str(clip.path))
    return out


# --- a client -------------------------------------------------------------------------------------


class Client:
    """One live session, played to in real time."""

    def __init__(self, url: str, *, chunk_s: float = CHUNK_S, session: dict[str, Any] | None = None) -> None:
        self._url = f"{url}/v1/realtime?intent=transcription"
        self._chunk_s = chunk_s
        self._session = session
        self._partial: dict[str, str] = defaultdict(str)
        self.heard = Heard()
        self._clips = [self.heard]
        self._of_item: dict[str, Heard] = {}
        self._sent_s = 0.0

    async def __aenter__(self) -> Client:
        self._socket = await websockets.connect(self._url, max_size=None)
        if self._session:
            update = {"type": "session.update", "session": {"type": "transcription", "audio": {"input": self._session}}}
            await self._socket.send(json.dumps(update))
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.cancel()
        await self._socket.close()

    def begin(self) -> Heard:
        """A new clip begins now."""
        self.heard = Heard(zero=time.monotonic(), from_ms=self._sent_s * 1000)
        self._clips.append(self.heard)
        return self.heard

    async def play(self, pcm: Pcm) -> None:
        """Send 16 kHz sound in real time: a chunk goes out when its last sample would have been recorded."""
        wire = to_pcm16(np.asarray(soxr.resample(pcm, SAMPLE_RATE_HZ, WIRE_HZ), np.float32))
        step = int(self._chunk_s * WIRE_HZ) * 2
        begun = time.monotonic()
        self._sent_s += len(pcm) / SAMPLE_RATE_HZ
        for at in range(0, len(wire), step):
            due = begun + min(at + step, len(wire)) / 2 / WIRE_HZ
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self.append(wire[at : at + step])

    async def append(self, data: bytes) -> None:
        await self._socket.send(
            json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})
        )

    async def _listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message)
            name = event["type"].removeprefix("conversation.item.input_audio_transcription.")
            if name == "input_audio_buffer.speech_started":
                # An answer belongs to the clip whose sound it is, however late it comes. Half a second of padding may
                # reach back into the silence before.
                at_ms = event["audio_start_ms"] + 500
                self._of_item[event["item_id"]] = next(c for c in reversed(self._clips) if c.from_ms <= at_ms)
            heard = self._of_item.get(event.get("item_id", ""), self.heard)
            now = time.monotonic() - heard.zero
            if name == "delta":
                heard.deltas.append((now, event["delta"]))
                self._partial[event["item_id"]] += event["delta"]
            elif name == "completed":
                heard.finals.append((now, event["transcript"]))
                heard.turns.append((self._partial.pop(event["item_id"], ""), event["transcript"]))
            elif name in ("error", "failed"):
                raise RuntimeError(message)


async def play_clips(url: str, clips: Sequence[Clip], **options: Any) -> dict[str, Heard]:
    """Clips one after another over one session, silence between them."""
    out: dict[str, Heard] = {}
    silence = np.zeros(int(TRAIL_S * SAMPLE_RATE_HZ), np.float32)
    async with Client(url, **options) as client:
        for clip in clips:
            out[clip.id] = client.begin()
            await client.play(np.concatenate((clip.pcm, silence)))
    return out


# --- figures --------------------------------------------------------------------------------------


def rate(pairs: Iterable[tuple[Clip, str]]) -> float:
    """Word error rate (character error rate in scripts without spaces) over clips, in percent."""
    errors = total = 0
    for clip, text in pairs:
        e, n = wer.score(clip.text, text, clip.language)
        errors, total = errors + e, total + n
    return 100 * errors / max(1, total)


def word_delays(clip: Clip, heard: Heard, spoken: Sequence[tuple[str, float]]) -> list[float]:
    """Seconds from the end of each word (as the offline decode places it) to the delta that brought it."""
    sent = [(w, t) for t, text in heard.deltas for w in wer.norm(text, clip.language)]
    theirs = [(w, end) for word, end in spoken for w in wer.norm(word, clip.language)]
    match = difflib.SequenceMatcher(None, [w for w, _ in theirs], [w for w, _ in sent], autojunk=False)
    return [sent[b + k][1] - theirs[a + k][1] for a, b, size in match.get_matching_blocks() for k in range(size)]


@dataclass(slots=True)
class Offline:
    """The same weights on the whole clip: text, and word ends in seconds."""

    text: str
    words: list[tuple[str, float]]


async def decode_offline(models: LoadedModels, clips: Sequence[Clip]) -> dict[str, Offline]:
    out = {}
    for clip in clips:
        text, words = "", []
        async for part in models.required_transcriber.transcribe(
            one_slab(clip.pcm), FileOptions(language=clip.language, word_times=True)
        ):
            if not isinstance(part, FileInfo):
                text += part.text
                words += [(w.text, w.end_s) for w in part.words]
        out[clip.id] = Offline(text, words)
    return out


def latency_row(clips: Sequence[Clip], heard: dict[str, Heard], offline: dict[str, Offline]) -> dict[str, float]:
    onset = [h.deltas[0][0] - c.speech_start for c in clips if (h := heard[c.id]).deltas]
    final = [h.finals[-1][0] - c.speech_end for c in clips if (h := heard[c.id]).finals]
    words = [d for c in clips for d in word_delays(c, heard[c.id], offline[c.id].words)]
    turns = [t for c in clips for t in heard[c.id].turns]
    changed = sum(wer.norm(a, "en") != wer.norm(b, "en") for a, b in turns)
    return {
        "clips": len(clips),
        "first_partial_p50": percentile(onset, 50),
        "first_partial_p95": percentile(onset, 95),
        "final_p50": percentile(final, 50),
        "final_p95": percentile(final, 95),
        "word_p50": percentile(words, 50),
        "word_p95": percentile(words, 95),
        "wer": rate((c, heard[c.id].text) for c in clips),
        "wer_deltas": rate((c, heard[c.id].streamed) for c in clips),
        "wer_offline": rate((c, offline[c.id].text) for c in clips),
        "turns_corrected_by_final": changed / max(1, len(turns)),
    }


# --- sections -------------------------------------------------------------------------------------


async def latency(srv: Server, clips: list[Clip], offline: dict[str, Offline]) -> dict[str, Any]:
    rows = {}
    for name, silence_ms in (("default (200 ms)", 200), ("500 ms", 500)):
        session = {"transcription": {"language": "en"}, "turn_detection": {"silence_duration_ms": silence_ms}}
        before = srv.cpu_s()
        heard = await play_clips(srv.ws, clips, session=session)
        row = latency_row(clips, heard, offline)
        row["cpu_per_audio_s"] = (srv.cpu_s() - before) / sum(c.seconds + TRAIL_S for c in clips)
        rows[name] = row
    keys = (
        "first_partial_p50",
        "final_p50",
        "final_p95",
        "word_p50",
        "wer",
        "wer_deltas",
        "wer_offline",
        "cpu_per_audio_s",
    )
    table(
        "one stream in real time, by endpoint silence (seconds; WER in %)",
        ("endpoint", *keys),
        [(n, *(r[k] for k in keys)) for n, r in rows.items()],
    )
    return rows


async def quality(srv: Server, clips: list[Clip], offline: dict[str, Offline], streams: int) -> dict[str, Any]:
    heard: dict[str, Heard] = {}
    by_language: dict[str, list[Clip]] = defaultdict(list)
    for clip in clips:
        by_language[clip.language].append(clip)

    async def one(part: list[Clip], language: str) -> None:
        heard.update(await play_clips(srv.ws, part, session={"transcription": {"language": language}}))

    for language, group in by_language.items():
        await asyncio.gather(*(one(group[i::streams], language) for i in range(streams)))
    rows = {}
    for kind in dict.fromkeys(c.kind for c in clips):
        for language in dict.fromkeys(c.language for c in clips if c.kind == kind):
            mine = [c for c in clips if (c.kind, c.language) == (kind, language)]
            rows[f"{kind} {language}"] = {
                "clips": len(mine),
                "streamed": rate((c, heard[c.id].text) for c in mine),
                "deltas": rate((c, heard[c.id].streamed) for c in mine),
                "offline": rate((c, offline[c.id].text) for c in mine),
            }
    table(
        f"word errors in %, {streams} streams at once, finals and joined deltas against the same weights offline",
        ("kind", "clips", "finals", "deltas", "offline"),
        [(k, r["clips"], r["streamed"], r["deltas"], r["offline"]) for k, r in rows.items()],
    )
    return rows


async def load_test(srv: Server, clips: list[Clip], counts: Sequence[int], seconds: float) -> dict[str, Any]:
    rows = {}
    for count in counts:
        heards: list[tuple[Clip, Heard]] = []

        async def one(number: int, count: int, into: list[tuple[Clip, Heard]]) -> None:
            order = random.Random(number).sample(clips, len(clips))
            await asyncio.sleep(number * 2.0 / count)
            silence = np.zeros(int(1.5 * SAMPLE_RATE_HZ), np.float32)
            session = {"transcription": {"language": "en"}, "turn_detection": {"silence_duration_ms": 500}}
            async with Client(srv.ws, chunk_s=0.1, session=session) as client:
                end = time.monotonic() + seconds
                for clip in order:
                    if time.monotonic() > end:
                        break
                    mine = client.begin()
                    await client.play(np.concatenate((clip.pcm, silence)))
                    into.append((clip, mine))
                await asyncio.sleep(3.0)

        before, began = srv.cpu_s(), time.monotonic()
        await asyncio.gather(*(one(i, count, heards) for i in range(count)))
        cores = (srv.cpu_s() - before) / (time.monotonic() - began)
        final = [h.finals[-1][0] - c.speech_end for c, h in heards if h.finals]
        first = [h.deltas[0][0] - c.speech_start for c, h in heards if h.deltas]
        rows[str(count)] = {
            "utterances": len(heards),
            "final_p50": percentile(final, 50),
            "final_p95": percentile(final, 95),
            "first_partial_p50": percentile(first, 50),
            "first_partial_p95": percentile(first, 95),
            "wer": rate((c, h.text) for c, h in heards),
            "server_cores": cores,
        }
        table(
            "streams at once in real time (seconds)",
            ("streams", *rows[str(count)]),
            [(n, *r.values()) for n, r in rows.items()],
        )
        if rows[str(count)]["final_p95"] > 3.0:
            break
    return rows


async def long_session(srv: Server, clips: list[Clip], minutes: float) -> dict[str, Any]:
    """One session, fed as fast as the server takes it: what it holds and costs as it grows."""
    chooser = random.Random(1)
    marks: list[dict[str, float]] = []
    noise = np.random.default_rng(1)
    sent = 0.0
    async with Client(
        srv.ws, session={"transcription": {"language": "en"}, "format": {"type": "audio/pcm", "rate": 16000}}
    ) as client:
        client.begin()
        cpu, next_mark = srv.cpu_s(), 60.0
        while sent < minutes * 60:
            clip = chooser.choice(clips)
            gap = noise.normal(0, 3e-4, int(chooser.uniform(0.3, 3.0) * SAMPLE_RATE_HZ)).astype(np.float32)
            wire = to_pcm16(np.concatenate((clip.pcm, gap)))
            for at in range(0, len(wire), 32000):
                await client.append(wire[at : at + 32000])
            sent += len(wire) / 2 / SAMPLE_RATE_HZ
            # Wait until the session has caught up, so that a minute's cost is its own.
            while srv.metric("antiphon_backlog_seconds") > 1.0:
                await asyncio.sleep(0.05)
            if sent >= next_mark:
                now = srv.cpu_s()
                marks.append(
                    {
                        "minute": sent / 60,
                        "rss_mb": srv.rss_mb(),
                        "cpu_per_audio_s": (now - cpu) / (sent - next_mark + 60),
                    }
                )
                cpu, next_mark = now, sent + 60.0
        await asyncio.sleep(2.0)
        num_finals = len(client.heard.finals)
    ten = max(1, len(marks) // 6)
    first, last = marks[:ten], marks[-ten:]
    late = [m["rss_mb"] for m in marks[ten:]]
    row = {
        "minutes": sent / 60,
        "turns": num_finals,
        "rss_first": marks[0]["rss_mb"],
        "rss_spread_after_first_sixth": max(late) - min(late),
        "cost_last_to_first": float(
            np.mean([m["cpu_per_audio_s"] for m in last]) / np.mean([m["cpu_per_audio_s"] for m in first])
        ),
        "cpu_per_audio_s": float(np.mean([m["cpu_per_audio_s"] for m in marks])),
    }
    table("one long session", tuple(row), [tuple(row.values())])
    return row | {"marks": marks}


async def quiet(srv: Server, clips: list[Clip], minutes: float) -> dict[str, Any]:
    """Noise, music and silence at four streams: how many words come of it."""
    rng, chooser = np.random.default_rng(2), random.Random(2)
    pieces: list[tuple[str, Pcm]] = [(f"{c.kind} {c.id}", c.pcm) for c in clips]
    floors = (0.0, 1e-4, 1e-3, 5e-3)
    have = sum(len(p) for _, p in pieces) / SAMPLE_RATE_HZ
    while have < minutes * 60:
        floor = floors[len(pieces) % len(floors)]
        pieces.append(
            (
                f"floor {floor}",
                rng.normal(0, floor, 10 * SAMPLE_RATE_HZ).astype(np.float32)
                if floor
                else np.zeros(10 * SAMPLE_RATE_HZ, np.float32),
            )
        )
        have += 10
    chooser.shuffle(pieces)
    found: list[tuple[str, str]] = []

    async def one(part: list[tuple[str, Pcm]]) -> None:
        async with Client(srv.ws, chunk_s=0.1) as client:
            for name, pcm in part:
                heard = client.begin()
                await client.play(np.concatenate((pcm, np.zeros(SAMPLE_RATE_HZ, np.float32))))
                found.extend((name, t) for _, t in heard.finals if t)

    await asyncio.gather(*(one(pieces[i::4]) for i in range(4)))
    num_words = sum(len(t.split()) for _, t in found)
    table(f"words in {have / 60:.1f} min of noise, music and silence: {num_words}", ("sound", "heard"), found)
    return {"minutes": have / 60, "false_words": num_words, "heard": found}


def peers(clips: list[Clip], offline: dict[str, Offline], model: Path) -> dict[str, Any]:
    work = HERE / "work"
    work.mkdir(exist_ok=True)
    listing = work / "clips.json"
    listing.write_text(json.dumps([{"id": c.id, "path": str(c.path), "seconds": c.seconds} for c in clips]))
    rows = {}
    for peer in ("realtimestt", "whisperlivekit"):
        python = HERE / "peers" / f".venv-{peer}" / "bin" / "python"
        if not python.exists():
            print(f"{peer}: not set up (make peers)")
            continue
        out = work / f"{peer}.json"
        command = [
            str(python),
            str(HERE / "peers" / peer / "drive.py"),
            "--clips",
            str(listing),
            "--model",
            str(model),
            "--out",
            str(out),
        ]
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "2"},
        )
        result = json.loads(out.read_text())
        rows[peer] = peer_row(clips, offline, result)
    return rows


def peer_row(clips: list[Clip], offline: dict[str, Offline], result: dict[str, Any]) -> dict[str, Any]:
    by_id = {c["id"]: c for c in result["clips"]}
    final, onset, texts = [], [], []
    for clip in clips:
        events = by_id[clip.id]["events"]
        finals = [e for e in events if e["kind"] == "final"]
        shown = [e for e in events if e["text"].strip()]
        texts.append((clip, " ".join(e["text"] for e in finals)))
        if finals:
            final.append(finals[-1]["t"] - clip.speech_end)
        if shown:
            onset.append(shown[0]["t"] - clip.speech_start)
    return {
        "version": result["version"],
        "settings": result["settings"],
        "first_partial_p50": percentile(onset, 50),
        "final_p50": percentile(final, 50),
        "final_p95": percentile(final, 95),
        "wer": rate(texts),
        "wer_offline": rate((c, offline[c.id].text) for c in clips),
        "cpu_per_audio_s": result["cpu_s"] / result.get("streamed_s", result["audio_s"]),
    }


def ratios(ours: dict[str, float], rows: dict[str, Any]) -> None:
    keys = ("first_partial_p50", "final_p50", "final_p95", "wer", "cpu_per_audio_s")
    out: list[tuple[Any, ...]] = [("antiphon", *(ours[k] for k in keys))]
    for name, row in rows.items():
        out.append((name, *(row[k] for k in keys)))
        out.append((f"{name} / antiphon", *(row[k] / ours[k] for k in keys)))
    table("side by side, one stream, the same clips and weights (ratios above 1: antiphon is better)", ("", *keys), out)


def plot(document: dict[str, Any]) -> None:
    """bench/results/asr-load.png: final latency against streams."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document.get("load")
    if not rows:
        return
    counts = [int(n) for n in rows]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label in (
        ("final_p50", "final, p50"),
        ("final_p95", "final, p95"),
        ("first_partial_p50", "first words, p50"),
    ):
        axes.plot(counts, [r[key] for r in rows.values()], marker="o", label=label)
    axes.axhline(1.5, color="grey", linestyle=":", label="1.5 s")
    axes.set(
        xlabel="live streams at once",
        ylabel="seconds",
        title="Live transcription on two shared cores, Whisper base int8",
        ylim=(0, 3),
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "results" / "asr-load.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench asr", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "tests" / "data", help="folder with a manifest.jsonl"
    )
    parser.add_argument("--sections", default="quality,latency,load,long,quiet,peers")
    parser.add_argument("--clips", type=int, default=30, help="clips of the latency and peer sections")
    parser.add_argument("--streams", default="1,4,8,12,16,20,24,32", help="stream counts of the load section")
    parser.add_argument("--load-seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the long session")
    parser.add_argument("--profile", default="default")
    args = parser.parse_args()
    sections = set(args.sections.split(","))
    everything = read_manifest(args.data)
    english = [c for c in everything if c.language == "en" and c.text]
    read = loaded(c for c in english if c.kind in (READ, NONNATIVE, "asr_speech") and c.seconds < 25)
    spread = sorted(read, key=lambda c: c.id)
    some = spread[:: max(1, len(spread) // args.clips)][: args.clips]
    judged = loaded(
        c
        for c in everything
        if c.text and (c.kind in QUALITY_KINDS or (c.kind == "asr_multilang" and args.profile == "default"))
    )
    settings = load_settings({"profile": args.profile}, os.environ)
    store = store_of(settings.models)
    document: dict[str, Any] = {"machine": machine(), "profile": args.profile, "data": args.data.name}
    offline: dict[str, Offline] = {}
    if sections & {"quality", "latency", "peers"}:
        models = load(settings, store, roles=TRANSCRIPTION_ROLES)
        wanted = judged if "quality" in sections else some
        offline = asyncio.run(decode_offline(models, wanted + [c for c in some if c not in wanted]))
        models.close()
    with server("--profile", args.profile, "--language-model", "none", "--synthesizer", "none") as srv:
        if "latency" in sections or "peers" in sections:
            document["latency"] = asyncio.run(latency(srv, some, offline))
        if "quality" in sections:
            document["quality"] = asyncio.run(quality(srv, judged, offline, 4))
        if "load" in sections:
            document["load"] = asyncio.run(
                load_test(srv, read, [int(n) for n in args.streams.split(",")], args.load_seconds)
            )
        if "quiet" in sections:
            document["quiet"] = asyncio.run(
                quiet(srv, loaded(c for c in everything if c.kind in ("noise", "music")), 10)
            )
    if "long" in sections:
        with server(
            "--profile", args.profile, "--language-model", "none", "--synthesizer", "none", "--session-s", "0"
        ) as srv:
            document["long"] = asyncio.run(long_session(srv, read, args.minutes))
    if "peers" in sections:
        folder = store.require(
            next(
                m
                for m in __import__("antiphon.store.registry", fromlist=["profile"]).profile(args.profile)
                if m.role == "transcriber"
            )
        )
        document["peers"] = peers(some, offline, folder)
        ratios(document["latency"]["default (200 ms)"], document["peers"])
    path = save("asr" if args.profile == "default" else f"asr-{args.profile}", document)
    plot(json.loads(path.read_text()))
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
