"""Speaks text while it is written: standard input goes to /v1/audio/speech/stream, and the audio to a WAV file.

    pip install websockets
    echo "Each sentence is spoken when it is complete." | python examples/speech_stream.py
    python examples/speech_stream.py --voice vivian --url ws://HOST:8091/v1/audio/speech/stream < story.txt

It runs against vLLM-Omni and antiphon. In a terminal, each line is a separate utterance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import wave

import websockets

# The sample rate in Hz if the server does not report one.
RATE_HZ = 24_000


async def write(socket: websockets.ClientConnection) -> None:
    """Send the input piece by piece as it arrives. At its end, send the end of the input."""
    lines = sys.stdin.isatty()
    while text := await asyncio.to_thread(sys.stdin.readline):
        await socket.send(json.dumps({"type": "input.text", "text": text}))
        if lines:
            await socket.send(json.dumps({"type": "input.done"}))
    if not lines:
        await socket.send(json.dumps({"type": "input.done"}))


async def listen(socket: websockets.ClientConnection, out: str, writing: asyncio.Task[None]) -> None:
    """Save the audio as it arrives, and print each sentence. Returns after the whole input has been spoken."""
    begun_s, first, file = time.monotonic(), True, None
    async for message in socket:
        if isinstance(message, bytes):
            if file is None:
                file = wave.open(out, "wb")  # noqa: SIM115
                file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
            file.writeframes(message)
            if first:
                print(f"first audio after {1000 * (time.monotonic() - begun_s):.0f} ms", file=sys.stderr)
            first = False
            continue
        event = json.loads(message)
        match event["type"]:
            case "audio.start":
                if file is None:
                    file = wave.open(out, "wb")  # noqa: SIM115
                    file.setparams((1, 2, event.get("sample_rate") or RATE_HZ, 0, "NONE", ""))
                print(event["sentence_text"].strip())
            case "session.done" if writing.done():
                break
            case "error":
                sys.exit(f"error: {event['message']}")
    if file:
        file.close()
        print(f"saved as {out}", file=sys.stderr)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--voice", help="a voice of GET /v1/audio/voices; default: the server's first")
    parser.add_argument("--split", default="sentence", choices=("sentence", "clause", "none"))
    parser.add_argument("--out", default="speech.wav")
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/audio/speech/stream")
    args = parser.parse_args()
    config = {"type": "session.config", "response_format": "pcm", "stream_audio": True, "split_granularity": args.split}
    if args.voice:
        config["voice"] = args.voice
    async with websockets.connect(args.url, max_size=None) as socket:
        await socket.send(json.dumps(config))
        writing = asyncio.create_task(write(socket))
        await listen(socket, args.out, writing)


if __name__ == "__main__":
    asyncio.run(main())
