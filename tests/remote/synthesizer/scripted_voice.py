"""Scripts of a voice's server: audio in each of its forms, and voices in each form of their list."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import numpy as np

from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from tests.remote.chat.scripted_server import Answer, Script

RATE_HZ = 24_000
TONE = np.sin(np.arange(RATE_HZ // 10) / 20).astype(np.float32) / 2
SAMPLES = to_pcm16(TONE)


async def chunked(answer: Answer, kind: str, *pieces: bytes, complete: bool = True, **headers: str) -> None:
    """Send a body in chunks. Without `complete`, the connection ends before the last chunk."""
    await answer.head(200, kind, transfer_encoding="chunked", **headers)
    for piece in pieces:
        await answer.raw(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    if complete:
        await answer.raw(b"0\r\n\r\n")


def speaks(kind: str, *pieces: bytes, complete: bool = True, **headers: str) -> Script:
    """Send pieces of audio with a content type."""

    async def script(answer: Answer) -> None:
        await chunked(answer, kind, *pieces, complete=complete, **headers)

    return script


async def wav(answer: Answer) -> None:
    """Send the tone as a WAV file while it is made."""
    await chunked(answer, "audio/wav", wav_header(RATE_HZ), SAMPLES[:1001], SAMPLES[1001:])


def tells(*events: dict[str, Any] | str) -> Script:
    """Send server-sent events."""

    async def script(answer: Answer) -> None:
        await answer.head()
        for event in events:
            await answer.event(event)

    return script


def base64(data: bytes) -> str:
    return b64encode(data).decode()


def lists(document: object) -> Script:
    """Send a JSON document, such as a list of voices."""

    async def script(answer: Answer) -> None:
        await answer.head(200, "application/json")
        await answer.raw(json.dumps(document).encode())

    return script
