"""Files over real sockets: how damage, and files without audio, are reported to the client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.audio.sound_files import pcm16, wav, written
from tests.scripted import speech, text
from tests.server.scripted import serving

SAID = speech(1, 12, 20)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as (ws, _, _):
        yield ws.replace("ws", "http", 1)


def post(url: str, data: bytes, **fields: str) -> httpx.Response:
    form = {"model": "whisper-1", "chunking_strategy": "null", **fields}
    return httpx.post(f"{url}/v1/audio/transcriptions", data=form, files={"file": ("a", data)}, timeout=30)


def damaged() -> bytes:
    """Return a FLAC file of noise in which the bytes of half a second in the middle are zeros.

    Noise makes all of its frames large.
    """
    noise = np.random.default_rng(0).uniform(-3e-4, 3e-4, len(SAID)).astype(np.float32)
    data = written(SAID + noise, "flac", "flac", 16_000)
    start = len(data) * 6 // 10
    length = (len(data) - 8192) * 8000 // len(SAID)
    return data[:start] + bytes(length) + data[start + length :]


def test_what_was_damaged_is_told_beside_the_words(url: str) -> None:
    answer = post(url, damaged(), response_format="verbose_json")
    assert answer.status_code == 200
    received = answer.json()
    assert received["skipped_seconds"] == float(answer.headers["antiphon-skipped-seconds"])
    words = [w for w in text(1, 12).split() if w not in received["text"].split()]
    assert received["skipped_seconds"] == pytest.approx(0.5, abs=0.15)
    assert 1 <= len(words) <= 3
    assert {"w1", "w2", "w11", "w12"} <= set(received["text"].split())
    assert received["duration"] == pytest.approx(len(SAID) / 16_000, abs=0.1)
    # For formats without a field for the skipped seconds, the header has them.
    assert post(url, damaged(), response_format="text").headers["antiphon-skipped-seconds"]
    last = json.loads(post(url, damaged(), stream="yes").text.strip().rpartition("data: ")[2])
    assert (last["type"], last["skipped_seconds"]) == ("transcript.text.done", received["skipped_seconds"])


def test_a_whole_file_has_no_word_of_damage(url: str) -> None:
    answer = post(url, wav(pcm16(SAID)), response_format="verbose_json")
    assert answer.json()["text"] == text(1, 12)
    assert "skipped_seconds" not in answer.json()
    assert "antiphon-skipped-seconds" not in answer.headers


@pytest.mark.parametrize(
    "data",
    [
        wav(pcm16(np.stack([SAID, -SAID], 1)), channels=2),
        wav(pcm16(SAID, ">"), order=">"),
        wav(pcm16(SAID), sizes=0xFFFFFFFF),
        b"ID3\x03\0\0\0\0\0\x0a" + bytes(10) + wav(pcm16(SAID)),
    ],
    ids=["channels that cancel", "RIFX", "endless", "tagged"],
)
def test_unusual_files_have_their_words(url: str, data: bytes) -> None:
    assert post(url, data).json()["text"] == text(1, 12)


def test_recordings_in_one_file_have_all_of_their_words(url: str) -> None:
    both = wav(pcm16(speech(1, 3, 20))) + wav(pcm16(speech(4, 3, 20)))
    assert post(url, both).json()["text"] == text(1, 6)


@pytest.mark.parametrize("stream", ["false", "true"])
def test_what_is_no_sound_is_the_clients_fault(url: str, stream: str) -> None:
    answer = post(url, b"<html>502 Bad Gateway</html>", stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "file")
    assert "HTML" in error["message"]
