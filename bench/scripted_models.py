"""A server of models that answer at once: a transcriber in vLLM's dialect, and a language model.

    python -m bench.scripted_models [SENTENCE]

Prints its base URL. The transcriber hears a word in each quarter of a second of audio: those of the sentence and no
more, if there is one. The language model always gives the same short answer.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

MODEL, ANSWER = "scripted", ("That ", "is ", "right.")
# Bytes of a quarter of a second: PCM16, 16 kHz.
WORD_BYTES = 8_000
SENTENCE = " ".join(sys.argv[1:]).split()


async def models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})


async def chat(request: Request) -> StreamingResponse:
    await request.body()

    async def events() -> AsyncIterator[str]:
        for word in ANSWER:
            yield f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n"
        yield 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    return StreamingResponse(events(), media_type="text/event-stream")


async def realtime(wire: WebSocket) -> None:
    await wire.accept()
    await wire.send_text('{"type": "session.created", "id": "sess-1", "created": 1}')
    num_bytes, words = 0, list[str]()
    try:
        while True:
            event = json.loads(await wire.receive_text())
            if event["type"] == "input_audio_buffer.append":
                num_bytes += len(base64.b64decode(event["audio"]))
                while len(words) < min(num_bytes // WORD_BYTES, len(SENTENCE) or num_bytes):
                    words.append(f" {SENTENCE[len(words)]}" if SENTENCE else f" word{len(words)}")
                    await wire.send_text(json.dumps({"type": "transcription.delta", "delta": words[-1]}))
            elif event.get("final"):
                await wire.send_text(json.dumps({"type": "transcription.done", "text": "".join(words)}))
    except WebSocketDisconnect:
        return


def serve(*routes: BaseRoute) -> None:
    """Serve `routes` and the list of models on a free port, and print the base URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{sock.getsockname()[1]}/v1", flush=True)
    app = Starlette(routes=[Route("/v1/models", models), *routes])
    config = uvicorn.Config(app, log_level="warning", ws_per_message_deflate=False)
    asyncio.run(uvicorn.Server(config).serve(sockets=[sock]))


if __name__ == "__main__":
    serve(Route("/v1/chat/completions", chat, methods=["POST"]), WebSocketRoute("/v1/realtime", realtime))
