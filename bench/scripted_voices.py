"""A server of voices that answer at once: over HTTP, over the WebSocket of speech streams, and in conversations.

    python -m bench.scripted_voices

Prints its base URL. Each text is a second of a tone, in chunks of 20 ms.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator

import numpy as np
from bench.scripted_models import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header

RATE_HZ, CHUNK_BYTES = 24_000, 960
TONE = to_pcm16(np.sin(np.arange(RATE_HZ) / 20).astype(np.float32) / 4)
CHUNKS = [TONE[at : at + CHUNK_BYTES] for at in range(0, len(TONE), CHUNK_BYTES)]


async def speech(request: Request) -> StreamingResponse:
    await request.body()

    async def sound() -> AsyncIterator[bytes]:
        yield wav_header(RATE_HZ) + CHUNKS[0]
        for chunk in CHUNKS[1:]:
            yield chunk

    return StreamingResponse(sound(), media_type="audio/wav")


async def stream(wire: WebSocket) -> None:
    await wire.accept()
    try:
        while True:
            if json.loads(await wire.receive_text())["type"] == "input.done":
                await wire.send_text(json.dumps({"type": "audio.start", "sample_rate": RATE_HZ}))
                for chunk in CHUNKS:
                    await wire.send_bytes(chunk)
                await wire.send_text('{"type": "session.done"}')
    except WebSocketDisconnect:
        return


async def realtime(wire: WebSocket) -> None:
    await wire.accept()
    await wire.send_text('{"type": "session.created", "session": {}}')
    number = 0
    try:
        while True:
            if json.loads(await wire.receive_text())["type"] != "response.create":
                continue
            number += 1
            item = {"id": f"item_{number}", "type": "message"}
            await wire.send_text(json.dumps({"type": "response.output_item.added", "item": item}))
            for chunk in CHUNKS:
                event = {"type": "response.output_audio.delta", "delta": base64.b64encode(chunk).decode()}
                await wire.send_text(json.dumps(event))
            await wire.send_text(json.dumps({"type": "response.output_audio_transcript.delta", "delta": "One."}))
            await wire.send_text('{"type": "response.done", "response": {"status": "completed"}}')
    except WebSocketDisconnect:
        return


if __name__ == "__main__":
    serve(
        Route("/v1/audio/speech", speech, methods=["POST"]),
        WebSocketRoute("/v1/audio/speech/stream", stream),
        WebSocketRoute("/v1/realtime", realtime),
    )
