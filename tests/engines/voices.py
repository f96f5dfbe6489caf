"""A voice on a real other server, in an environment of its own, behind a real antiphon: wyoming-piper.

`run.py` runs it (`make engines`). Each line is something that a client did and got.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from bench.words import score

from tests.clients.run import environment
from tests.engines.environments import free_port

HERE = Path(__file__).resolve().parent
NAMES = ("wyoming-piper",)
VOICE = "en_US-joe-medium"
START_S, ANSWER_S = 300, 90
TEXT = "The harbor was quiet, and the boats came home before the rain."
# The share of wrong words that antiphon's own transcriber may hear in a text.
MAX_WRONG = 0.25


@dataclass(slots=True)
class Other:
    """A server of voices, which can be killed and started again on its port."""

    name: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The front's flags."""
        none = ("--language-model", "none", "--turn-detector", "none", "--fallback-voice", "off")
        return (*none, "--synthesizer", f"tcp://127.0.0.1:{self.port}#piper", "--voice", VOICE)

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        python = environment(self.name.replace("-", "_"), HERE)
        files = python.parents[1] / "files"
        files.mkdir(exist_ok=True)
        if not (files / f"{VOICE}.onnx").exists():
            (found,) = (python.parents[1] / "lib").rglob(f"{VOICE}.onnx")
            shutil.copy(f"{found}.json", files / f"{VOICE}.onnx.json")
            shutil.copy(found, files / f"{VOICE}.onnx")
        where = ["--uri", f"tcp://127.0.0.1:{self.port}", "--data-dir", files]
        command = [python, "-m", "wyoming_piper", "--voice", VOICE, *where]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        until_s = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, f"{self.name} did not start"
                assert time.monotonic() < until_s, f"{self.name} did not start in time"
                time.sleep(0.5)

    def stop(self) -> None:
        """Kill the server."""
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30)
            self.process = None


async def spoken(url: str, text: str) -> bytes:
    """Return the WAV of a text from a server. Raises httpx.HTTPStatusError."""
    async with httpx.AsyncClient(timeout=ANSWER_S) as client:
        asked = {"input": text, "model": "default", "voice": VOICE, "response_format": "wav"}
        answer = await client.post(f"{url}/v1/audio/speech", json=asked)
        answer.raise_for_status()
        return answer.content


async def a_text_is_spoken_and_understood(url: str, other: Other) -> str:
    wav = await spoken(url, TEXT)
    async with httpx.AsyncClient(timeout=ANSWER_S) as client:
        file = {"file": ("a.wav", io.BytesIO(wav))}
        answer = await client.post(f"{url}/v1/audio/transcriptions", files=file, data={"model": "default"})
        answer.raise_for_status()
    heard = str(answer.json()["text"]).strip()
    errors, words = score(TEXT, heard)
    assert errors <= MAX_WRONG * words, heard
    return f"{len(wav)} bytes of sound; {heard!r}"


async def a_voice_that_was_killed_speaks_when_it_is_back(url: str, other: Other) -> str:
    await asyncio.to_thread(other.stop)
    status = 200
    try:
        await spoken(url, TEXT)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
    assert status >= 500, status
    await asyncio.to_thread(other.start)
    for number in range(1, 41):
        try:
            await spoken(url, TEXT)
        except httpx.HTTPStatusError:
            # After failures in a row the server is left alone for a while.
            await asyncio.sleep(1)
            continue
        return f"status {status}; then it speaks at attempt {number}"
    raise AssertionError("it does not speak again")


CHECKS: tuple[Callable[[str, Other], Awaitable[str]], ...] = (
    a_text_is_spoken_and_understood,
    a_voice_that_was_killed_speaks_when_it_is_back,
)
