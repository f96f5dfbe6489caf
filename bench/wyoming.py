"""Wyoming beside the socket, connections that say nothing, and Home Assistant's own classes from speech to sound.

    antiphon bench wyoming [--sections added,silent,home_assistant] [--turns 20] [--texts 30] [--connections 1000]

- added: the time from the last audio to the transcript, and from a text to its first sound, over Wyoming and over the
  sockets of the same server, in turns. Recordings are played in real time, and the client ends them.
- silent: connections that say nothing, and `info`, a synthesis and the server's memory beside them.
- home_assistant: Home Assistant's classes for speech to text, conversation and text to speech (`tests/clients`). A
  spoken command is played in real time, followed by the pause after which Home Assistant ends a command. Measures from
  the end of speech to each stage.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import HERE, Server, measured, options, percentile, server, show, spread
from bench.driver import Session, on_wire
from bench.hearing.clips import DATA, loaded, read_manifest
from tests.clients.run import environment
from tests.server.wyoming.harness import Client
from tests.store.servers import free_port

from antiphon import client as antiphon_client
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.audio.wav import wav_header

ROOT = HERE.parent
PATH = "/v1/realtime?intent=transcription"
COMPLETED = "conversation.item.input_audio_transcription.completed"
CHUNK_SAMPLES = 1024
# Twelve words each.
TEXTS = (
    "We walked along the quiet river and talked about plans for summer.",
    "Please remember to close every window before you leave the room tonight.",
    "The light in the kitchen is on, and the door is closed.",
)
COMMANDS = (
    "Turn on the light in the kitchen.",
    "What is the capital of France?",
    "How many days are in a week?",
    "Tell me a fact about the moon.",
)
# No language model, where nothing is answered.
NO_ANSWERS = ("--language-model", "none")
# Seconds of silence after which Home Assistant ends a command.
HOME_ASSISTANT_PAUSE_S = 0.7
# Level below which the end of a spoken command counts as silence.
SILENT = 0.003
# An address of loopback other than that of the client that is measured, which has a bound of its own.
ELSEWHERE = "127.0.0.2"


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """Open a connection to a Wyoming port while the block runs."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def paced(pcm: Pcm, step: int, send: Callable[[Pcm], Any]) -> float:
    """Send audio in real time, in pieces of `step` samples. Return the time of the last piece."""
    began_s = time.perf_counter()
    for at in range(0, len(pcm), step):
        await asyncio.sleep(max(0.0, began_s + at / SAMPLE_RATE_HZ - time.perf_counter()))
        if (sent := send(pcm[at : at + step])) is not None:
            await sent
    return time.perf_counter()


async def heard_over_wyoming(port: int, pcm: Pcm) -> float:
    async with connected(port) as client:
        client.say("transcribe", language="en")
        last_s = await paced(pcm, CHUNK_SAMPLES, client.sound)
        client.say("audio-stop")
        assert (await client.until("transcript"))["text"]
        return time.perf_counter() - last_s


async def heard_over_socket(srv: Server, pcm: Pcm) -> float:
    audio = {"turn_detection": None, "transcription": {"model": "default", "language": "en"}}
    async with Session(srv.url, PATH, {"session": {"type": "transcription", "audio": {"input": audio}}}) as session:
        last_s = await paced(pcm, CHUNK_SAMPLES, lambda piece: session.append(on_wire(piece)))
        await session.send("input_audio_buffer.commit")
        _, event = await session.first(COMPLETED)
        assert event["transcript"]
        return time.perf_counter() - last_s


async def spoken_over_wyoming(port: int, text: str) -> float:
    async with connected(port) as client:
        since_s = time.perf_counter()
        client.say("synthesize", text=text)
        await client.until("audio-chunk")
        first_s = time.perf_counter() - since_s
        await client.until("audio-stop")
        return first_s


async def spoken_over_socket(client: antiphon_client.Client, text: str) -> float:
    async with client.speech() as speech:
        since_s, first_s = time.perf_counter(), 0.0
        await speech.say(text)
        await speech.finish()
        async for audio in speech:
            if not first_s and audio.pcm:
                first_s = time.perf_counter() - since_s
        return first_s


async def added(srv: Server, port: int, turns: int, texts: int) -> dict[str, Any]:
    """Measure both ways in turns. The first of each is left out: models may run for the first time."""
    clips = loaded(c for c in read_manifest(DATA) if c.language == "en" and c.kind == "asr_read" and c.seconds < 6)
    times: dict[str, list[float]] = {name: [] for name in ("stt_wyoming", "stt_socket", "tts_wyoming", "tts_socket")}
    for turn in range(turns + 1):
        pcm = clips[turn % len(clips)].pcm
        times["stt_wyoming"].append(await heard_over_wyoming(port, pcm))
        times["stt_socket"].append(await heard_over_socket(srv, pcm))
    async with antiphon_client.Client(srv.url) as client:
        for turn in range(texts + 1):
            times["tts_wyoming"].append(await spoken_over_wyoming(port, TEXTS[turn % len(TEXTS)]))
            times["tts_socket"].append(await spoken_over_socket(client, TEXTS[turn % len(TEXTS)]))
    rows = {name: spread([1000 * s for s in found[1:]], "", "ms") for name, found in times.items()}
    for kind in ("stt", "tts"):
        rows[f"{kind}_wyoming"]["added_p50_ms"] = rows[f"{kind}_wyoming"]["p50_ms"] - rows[f"{kind}_socket"]["p50_ms"]
    show("last audio to the transcript; text to the first sound", rows)
    return rows


async def silent(srv: Server, port: int, count: int) -> dict[str, Any]:
    """Measure `info` and a synthesis without and with silent connections. Their address is another one."""

    async def info() -> float:
        since_s = time.perf_counter()
        async with connected(port) as client:
            client.say("describe")
            await client.until("info")
            return time.perf_counter() - since_s

    async def row() -> dict[str, float]:
        infos = [1000 * await info() for _ in range(50)]
        sounds = [1000 * await spoken_over_wyoming(port, TEXTS[0]) for _ in range(10)]
        return {
            **spread(infos, "info", "ms"),
            **spread(sounds, "first_sound", "ms"),
            "held": srv.metric('antiphon_listener_connections{listener="wyoming"}'),
            "refused": srv.metric('antiphon_refused_total{reason="listener_connections"}'),
            "rss_mb": srv.rss_mb(),
        }

    rows = {"without": await row()}
    async with AsyncExitStack() as stack:
        for _ in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ELSEWHERE, 0))
            stack.callback(writer.close)
        rows[f"{count} silent"] = await row()
    show("connections that say nothing", rows)
    return rows


async def command(port: int, text: str) -> tuple[Pcm, float]:
    """Return a spoken command with the pause after it, and the seconds to its end of speech."""
    data, rate = b"", SAMPLE_RATE_HZ
    async with connected(port) as client:
        client.say("synthesize", text=text)
        while (event := await client.read()) and event.kind != "audio-stop":
            if event.kind == "audio-chunk":
                data += event.payload
                rate = json.loads(event.data)["rate"]
    resampler = Resampler(rate, SAMPLE_RATE_HZ)
    pcm = np.concatenate((resampler.feed(from_pcm16(data)), resampler.flush()))
    end = int(np.flatnonzero(np.abs(pcm) > SILENT)[-1]) + 1
    pause = np.zeros(int(HOME_ASSISTANT_PAUSE_S * SAMPLE_RATE_HZ), np.float32)
    return np.concatenate((pcm[:end], pause)), end / SAMPLE_RATE_HZ


def home_assistant(turns: int, folder: Path) -> dict[str, Any]:
    """Run Home Assistant's classes in their own environment."""
    python, port = environment("home_assistant_2026"), free_port()
    with server("--wyoming", f"127.0.0.1:{port}"):

        async def commands() -> list[dict[str, Any]]:
            found = []
            for number, text in enumerate(COMMANDS):
                pcm, end_s = await command(port, text)
                path = folder / f"{number}.wav"
                path.write_bytes(wav_header(SAMPLE_RATE_HZ, 2 * len(pcm)) + to_pcm16(pcm))
                found.append({"path": str(path), "end_s": end_s, "text": text})
            return found

        spoken = asyncio.run(commands())
        given, out = folder / "commands.json", folder / "home-assistant.json"
        # The first turn is left out.
        given.write_text(json.dumps(list(itertools.islice(itertools.cycle(spoken), turns + 1))))
        driver = ROOT / "tests" / "clients" / "time_home_assistant.py"
        subprocess.run([python, driver, f"tcp://127.0.0.1:{port}", given, out], check=True, timeout=60 + 30 * turns)
    turns_found = json.loads(out.read_text())
    stages = ("transcript_s", "handled_s", "first_sound_s")
    row = {f"{name}_{p}": percentile([t[name] for t in turns_found[1:]], q)
           for name in stages for p, q in (("p50", 50), ("p95", 95))}  # fmt: skip
    show("Home Assistant's classes, from the end of speech, with its pause of 0.7 s", [row])
    return row | {"turns": turns_found, "pause_s": HOME_ASSISTANT_PAUSE_S}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options("antiphon bench wyoming", __doc__, ("added", "silent", "home_assistant"))
    parser.add_argument("--turns", type=int, default=20, help="recordings of each way [%(default)s]")
    parser.add_argument("--texts", type=int, default=30, help="texts of each way [%(default)s]")
    parser.add_argument("--connections", type=int, default=1000, help="silent connections [%(default)s]")
    args = parser.parse_args(argv)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    def serving(*flags: str) -> Any:
        return server("--wyoming", f"127.0.0.1:{port}", *flags)

    def section_added() -> dict[str, Any]:
        with serving("--wyoming-endpointing", "client", *NO_ANSWERS) as srv:
            return asyncio.run(added(srv, port, args.turns, args.texts))

    def section_silent() -> dict[str, Any]:
        room = ("--max-sessions", str(4 * args.connections), "--connections-per-address", str(2 * args.connections))
        with serving(*room, *NO_ANSWERS) as srv:
            return asyncio.run(silent(srv, port, args.connections))

    with tempfile.TemporaryDirectory() as made:
        port = free_port()
        measured(
            "wyoming",
            args.sections,
            {
                "added": section_added,
                "silent": section_silent,
                "home_assistant": lambda: home_assistant(args.turns, Path(made)),
            },
            commit=commit,
            load=os.getloadavg()[0],
        )


if __name__ == "__main__":
    main()
