"""Audio files from hostile clients: hours in a few kilobytes, from clients that do not wait for the response."""

from __future__ import annotations

import io
import json
import socket
import struct
import threading
import tracemalloc
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import av
import httpx
import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_in_slabs, measure_s
from antiphon.contracts import FileInfo, FileOptions, TranscriptSegment
from antiphon.errors import MediaError
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.scripted import ScriptedTranscriber
from tests.server.scripted import serving

LIMIT_S = 30
MAX_S = 600
PATH = "/v1/audio/transcriptions"
# Two strategies that send silence to the transcriber: no detection, and a detector that takes everything for speech.
ALL_OF_IT = ("null", '{"type": "server_vad", "threshold": 0}')


def silence(seconds: int, rate_hz: int = SAMPLE_RATE_HZ) -> bytes:
    """Return silence as FLAC. An hour takes 656 kB, and 230 MB when decoded to float32."""
    out = io.BytesIO()
    with av.open(out, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 60 * rate_hz), np.int16), format="s16", layout="mono")
        frame.sample_rate = rate_hz
        for _ in range(seconds // 60):
            frame.pts = None
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def wav(rate_hz: int, num_samples: int) -> bytes:
    data = bytes(2 * num_samples)
    head = struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVEfmt ", 16, 1, 1, rate_hz, 2 * rate_hz, 2, 16,
                       b"data", len(data))  # fmt: skip
    return head + data


class SlabCounter(ScriptedTranscriber):
    """Counts the slabs that it reads. With `hold` it waits forever after the first. `left` is set when it ends."""

    def __init__(self, *, hold: bool = False) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.begun, self.left, self.hold = threading.Event(), threading.Event(), hold

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        try:
            async for slab in slabs:
                self.seconds.append(len(slab) / SAMPLE_RATE_HZ)
                self.begun.set()
                if self.hold:
                    await anyio.sleep_forever()
            yield FileInfo("en", sum(self.seconds))
        finally:
            self.left.set()


@contextmanager
def server(transcriber: SlabCounter, **limits: Any) -> Iterator[tuple[str, ServerState]]:
    settings = Settings()
    settings = replace(
        settings,
        audio=replace(settings.audio, max_file_s=MAX_S),
        server=replace(settings.server, **limits),
    )
    with serving(settings, transcriber) as (ws, state, _):
        yield ws.replace("ws", "http", 1), state


def post(url: str, data: bytes, **fields: str) -> httpx.Response:
    form = {"model": "default", **fields}
    return httpx.post(f"{url}{PATH}", data=form, files={"file": ("a.flac", data)}, timeout=LIMIT_S)


@pytest.mark.slow
def test_when_a_small_file_holds_much_then_no_more_than_slabs_of_it_are_ever_held() -> None:
    data = silence(1200)
    assert len(data) < 300_000
    tracemalloc.start()
    try:
        lengths = [len(slab) for slab in decode_in_slabs(io.BytesIO(data), 30.0)]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(lengths) == 1200 * SAMPLE_RATE_HZ
    assert max(lengths) < 31 * SAMPLE_RATE_HZ
    # The whole file would take 77 MB. One slab takes 2 MB, both as chunks and as the joined array.
    assert peak_bytes < 10 << 20


def test_when_a_file_holds_more_than_the_limit_then_it_is_refused_by_name_before_it_is_transcribed() -> None:
    transcriber = SlabCounter()
    with server(transcriber) as (url, _):
        for more in ({}, {"stream": "true"}):
            response = post(url, silence(MAX_S + 60), **more)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (413, "file_too_long", "file")
    assert not transcriber.begun.is_set()


@pytest.mark.parametrize("strategy", ALL_OF_IT)
def test_when_a_file_is_within_the_limit_then_its_transcriber_gets_all_of_it_in_slabs(strategy: str) -> None:
    transcriber = SlabCounter()
    with server(transcriber) as (url, _):
        response = post(url, silence(MAX_S), response_format="verbose_json", chunking_strategy=strategy)
    assert response.json()["duration"] == MAX_S
    assert sum(transcriber.seconds) == MAX_S
    assert max(transcriber.seconds) < 31


@pytest.mark.slow
def test_when_packets_do_not_tell_their_length_then_the_limit_holds_while_the_file_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("antiphon.server.routes.transcriptions.measure_s", lambda file, max_s: 0.0)
    transcriber = SlabCounter()
    with server(transcriber) as (url, _):
        data = silence(MAX_S + 300)
        response = post(url, data)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "file_too_long")
        last = post(url, data, stream="true").text.strip().rpartition("data: ")[2]
    error = json.loads(last)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "file_too_long", "file")
    assert "600 s" in error["message"]


@pytest.mark.parametrize(("stream", "strategy"), [("false", ALL_OF_IT[0]), ("true", ALL_OF_IT[1])])
def test_when_a_sender_leaves_then_its_work_stops_and_its_place_is_given_back(stream: str, strategy: str) -> None:
    transcriber = SlabCounter(hold=True)
    data = silence(MAX_S)
    with server(transcriber, sessions_per_key=1) as (url, state):
        fields = {"model": "default", "stream": stream, "chunking_strategy": strategy}
        request = httpx.Request("POST", f"{url}{PATH}", data=fields, files={"file": ("a.flac", data)})
        request.read()
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        with socket.create_connection((request.url.host, request.url.port or 0), LIMIT_S) as raw:
            raw.sendall(f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
            assert transcriber.begun.wait(LIMIT_S)
            # A file takes a place, as a session does.
            assert state.admission.num_sessions == 1
            refused = post(url, data)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert transcriber.left.wait(LIMIT_S)
        assert len(transcriber.seconds) == 1
        transcriber.hold = False
        while state.admission.num_sessions:
            httpx.get(f"{url}/health", timeout=LIMIT_S)
        assert post(url, data).status_code == 200


def test_when_a_files_rate_is_absurd_then_it_is_refused_before_it_is_resampled() -> None:
    # When resampled from 1 Hz, each frame of 2,048 samples would become 33 million samples, or 131 MB.
    for read in (lambda file: list(decode_in_slabs(file, 30.0)), lambda file: measure_s(file, MAX_S)):
        with pytest.raises(MediaError, match="1 samples a second"):
            read(io.BytesIO(wav(1, 5000)))


def test_a_file_is_measured_by_its_packets_and_left_at_its_start() -> None:
    file = io.BytesIO(silence(120))
    assert measure_s(file, MAX_S) == pytest.approx(120, abs=1)
    assert file.tell() == 0
    assert 30 < measure_s(file, 30) < 40
