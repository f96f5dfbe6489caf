"""Window servers of the Wyoming protocol: one connection for each window.

A server transcribes when all audio has arrived, so a partial is a connection of its own. It reports neither times nor
probabilities.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import to_pcm16
from antiphon.contracts import TranscriptionTask, Window
from antiphon.errors import RemoteError
from antiphon.events.languages import language_code
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.transcriber.heard import HeardText, words_of
from antiphon.remote.transcriber.pace import Pace
from antiphon.remote.wyoming import WyomingFailure, connected, read
from antiphon.wyoming import WyomingAudio

# Samples of one `audio-chunk`.
CHUNK_SAMPLES = SAMPLE_RATE_HZ // 4
FORMAT = WyomingAudio(SAMPLE_RATE_HZ, 2, 1)


class _Transcribe(msgspec.Struct, omit_defaults=True):
    name: str = ""
    language: str = ""


class _Transcript(msgspec.Struct):
    text: str
    language: str | None = None


class WyomingServer:
    """A server of a pool that transcribes over the Wyoming protocol."""

    name = "Wyoming"

    def __init__(self, pool: Pool[Any], endpoint: Endpoint, model: str) -> None:
        self.pace = Pace()
        self._endpoint, self._model = endpoint, model

    async def hear(self, window: Window, task: TranscriptionTask = "transcribe", temperature: float = 0.0) -> HeardText:
        """Transcribe a window. Raises RemoteError. The protocol has neither translations nor a temperature."""
        endpoint = self._endpoint
        async with connected(endpoint) as connection:
            await connection.send("transcribe", _Transcribe(self._model, window.language or ""))
            await connection.send("audio-start", FORMAT)
            for at in range(0, len(window.pcm), CHUNK_SAMPLES):
                await connection.send("audio-chunk", FORMAT, to_pcm16(window.pcm[at : at + CHUNK_SAMPLES]))
            await connection.send("audio-stop")
            async with aclosing(connection.events()) as events:
                async for event in events:
                    if event.kind == "transcript":
                        found = read(endpoint, event, _Transcript)
                        return HeardText(words_of(found.text), language_code(found.language) if found.language else "")
                    if event.kind == "error":
                        raise RemoteError(f"{endpoint.host} failed: {read(endpoint, event, WyomingFailure).text[:300]}")
        raise RemoteError(f"{endpoint.host} sent no transcript")
