"""Shows a clip or a camera to a server, and asks questions about it.

    pip install av pillow websockets
    python examples/ask_what_is_seen.py clip.mp4 --ask "What does the sign say?" --ask "And five seconds ago?"
    python examples/ask_what_is_seen.py /dev/video0          # then type questions

Frames are sent at --fps: those of a camera in real time, those of a file as fast as possible. You can ask a question at
any time. It interrupts the answer to the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
from collections.abc import Iterator

import av
import websockets


def frames(source: str, fps: float) -> Iterator[tuple[float, bytes]]:
    """Yield the time in seconds and the JPEG of `fps` frames per second of the source."""
    camera = source.startswith("/dev/")
    with av.open(source, format="v4l2" if camera else None) as container:
        last = None
        for frame in container.decode(video=0):
            if last is None or frame.time - last >= 1 / fps:
                last = frame.time
                image = io.BytesIO()
                frame.to_image().save(image, "JPEG", quality=90)
                yield frame.time, image.getvalue()


async def show(socket: websockets.ClientConnection, source: str, fps: float, begun: asyncio.Event) -> None:
    """Send all frames, and set `begun` after the first. Waits when the server does not read."""
    stream = frames(source, fps)
    while (frame := await asyncio.to_thread(next, stream, None)) is not None:
        seconds, image = frame
        data = base64.b64encode(image).decode()
        await socket.send(json.dumps({"type": "video.frame", "data": data, "pts_ms": round(1000 * seconds)}))
        begun.set()


async def answers(socket: websockets.ClientConnection, answered: asyncio.Queue[None]) -> None:
    """Print answers as they arrive. Puts one entry into `answered` for each complete answer."""
    has_deltas = False
    async for message in socket:
        event = json.loads(message)
        if event["type"] == "response.text.delta":
            print(event["delta"], end="", flush=True)
            has_deltas = True
        elif event["type"] == "response.text.done":
            print("" if has_deltas else event["text"], flush=True)
            has_deltas = False
            answered.put_nowait(None)
        elif event["type"] == "error":
            sys.exit(f"error: {event['message']}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", help="a file, a URL, or a camera's device")
    parser.add_argument("--ask", action="append", default=[], help="ask after all frames; without it, type questions")
    parser.add_argument("--fps", type=float, default=1.0)
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/video/chat/stream")
    args = parser.parse_args()
    answered, begun = asyncio.Queue[None](), asyncio.Event()
    async with websockets.connect(args.url, max_size=None) as socket:
        await socket.send(json.dumps({"type": "session.config", "modalities": ["text"]}))
        listening = asyncio.create_task(answers(socket, answered))
        showing = asyncio.create_task(show(socket, args.source, args.fps, begun))
        await (showing if args.ask else begun.wait())
        for text in args.ask:
            await socket.send(json.dumps({"type": "video.query", "text": text}))
            await answered.get()
        while not args.ask and (text := (await asyncio.to_thread(sys.stdin.readline)).strip()):
            await socket.send(json.dumps({"type": "video.query", "text": text}))
        showing.cancel()
        await socket.send(json.dumps({"type": "video.done"}))
        await listening


if __name__ == "__main__":
    asyncio.run(main())
