"""A real server with the fallback voice, which speaks German text in German."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import wave
from typing import Any

import httpx
import numpy as np
import pytest
import soxr
from websockets.asyncio.client import connect

from tests.conftest import VOICE, Process, Serve

pytestmark = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng (Debian)")
GERMAN, ENGLISH = "Guten Tag, wie geht es Ihnen heute?", "Hello, how are you today?"


@pytest.fixture(scope="module")
def polyglot(serve: Serve) -> Process:
    return serve("--synthesizer", VOICE, "--fallback-voice", "espeak-ng")


def by_program(text: str, language: str) -> Any:
    command = ["espeak-ng", "-v", language, "-s", "150", "--stdout", text]
    wav = subprocess.run(command, capture_output=True, check=True).stdout
    return soxr.resample(np.frombuffer(wav[44:], "<i2"), 22_050, 24_000)


def spoken(server: Process, **fields: Any) -> httpx.Response:
    body = {"model": "default", "response_format": "wav", **fields}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=60)


def samples(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    with wave.open(io.BytesIO(answer.content)) as file:
        assert file.getframerate() == 24_000
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def likeness(a: Any, b: Any) -> float:
    """Return the correlation of two sounds, aligned at their starts."""
    length = min(len(a), len(b))
    return float(np.corrcoef(a[:length].astype(float), b[:length].astype(float))[0, 1])


@pytest.mark.parametrize("language", [{}, {"language": "auto"}, {"language": "de"}, {"language": "German"}])
def test_a_text_in_german_is_spoken_by_the_fallback_voice(polyglot: Process, language: dict[str, str]) -> None:
    assert likeness(samples(spoken(polyglot, input=GERMAN, **language)), by_program(GERMAN, "de")) > 0.99


def test_a_text_in_english_is_spoken_by_the_loaded_voice(polyglot: Process) -> None:
    heard = samples(spoken(polyglot, input=ENGLISH))
    assert abs(likeness(heard, by_program(ENGLISH, "en-us"))) < 0.5


def test_a_language_that_nobody_speaks_is_refused_with_those_there_are(polyglot: Process) -> None:
    answer = spoken(polyglot, input="こんにちは", language="ja")
    assert answer.status_code == 400
    assert "en, de, es, fr" in answer.json()["error"]["message"]


def test_a_stream_changes_its_voice_with_the_language_of_its_sentences(polyglot: Process) -> None:
    async def main() -> tuple[list[str], int]:
        async with connect(f"{polyglot.ws}/v1/audio/speech/stream", max_size=None) as socket:
            config = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
            for event in (config, {"type": "input.text", "text": f"{ENGLISH} {GERMAN}"}, {"type": "input.done"}):
                await socket.send(json.dumps(event))
            kinds, num_bytes = [], 0
            while "session.done" not in kinds:
                message = await socket.recv()
                if isinstance(message, bytes):
                    num_bytes += len(message)
                else:
                    kinds.append(json.loads(message)["type"])
            return kinds, num_bytes

    kinds, num_bytes = asyncio.run(asyncio.wait_for(main(), 60))
    assert "error" not in kinds
    english = len(samples(spoken(polyglot, input=ENGLISH)))
    assert num_bytes / 2 == pytest.approx(english + len(by_program(GERMAN, "de")), rel=0.1)
