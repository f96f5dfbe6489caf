"""Calls a server as Twilio does, with a recording as the caller, and saves what the caller hears. No carrier is needed.

    pip install websockets
    python examples/telephone/caller.py question.wav --url ws://127.0.0.1:8000/v1/telephone/media/KEY

The recording is 16-bit PCM, mono, 8 kHz: `ffmpeg -i FILE -ac 1 -ar 8000 question.wav` makes one. After it, the caller
is silent until the answer has ended, or enough of it was heard, and hangs up.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
import time
import wave
from collections import deque

import websockets

RATE_HZ, FRAME_S, QUIET_S = 8000, 0.02, 2.0


def to_ulaw(pcm: bytes) -> bytes:
    """Encode 16-bit samples as µ-law (G.711)."""
    out = bytearray()
    for at in range(0, len(pcm), 2):
        value = int.from_bytes(pcm[at : at + 2], "little", signed=True)
        magnitude = min(abs(value), 32635) + 132
        exponent = magnitude.bit_length() - 8
        out.append(~((128 if value < 0 else 0) | exponent << 4 | (magnitude >> exponent + 3 & 15)) & 255)
    return bytes(out)


def from_ulaw(data: bytes) -> bytes:
    """Decode µ-law to 16-bit samples."""
    out = bytearray()
    for code in data:
        code = ~code & 255
        magnitude = ((code & 15) << 3) + 132 << (code >> 4 & 7)
        out += (132 - magnitude if code & 128 else magnitude - 132).to_bytes(2, "little", signed=True)
    return bytes(out)


class Ear:
    """Plays what the server sends, and returns its marks when they were played."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.ends_s = 0.0
        self.marks: deque[tuple[float, str]] = deque()

    def take(self, message: dict) -> list[str]:
        """Take a message of the server. Returns the marks that go back at once."""
        now_s = time.monotonic()
        if message["event"] == "media":
            data = base64.b64decode(message["media"]["payload"])
            self.heard += data
            self.ends_s = max(now_s, self.ends_s) + len(data) / RATE_HZ
        elif message["event"] == "mark":
            self.marks.append((max(now_s, self.ends_s), message["mark"]["name"]))
        elif message["event"] == "clear":
            del self.heard[len(self.heard) - max(0, int((self.ends_s - now_s) * RATE_HZ)) :]
            names, self.ends_s = [name for _, name in self.marks], now_s
            self.marks.clear()
            return names
        return []

    def due(self) -> list[str]:
        """Return the marks whose audio was played by now."""
        names = []
        while self.marks and self.marks[0][0] <= time.monotonic():
            names.append(self.marks.popleft()[1])
        return names


async def call(url: str, question: bytes, out: str, enough_s: float, limit_s: float) -> None:
    """Hold one call, and write what the caller hears to `out`."""
    ear, stream = Ear(), {"streamSid": "MZ1"}
    begun_s = time.monotonic()
    async with websockets.connect(url) as socket:

        async def say(event: str, **fields: object) -> None:
            await socket.send(json.dumps({"event": event, **stream, **fields}))

        async def listen() -> None:
            async for data in socket:
                for name in ear.take(json.loads(data)):
                    await say("mark", mark={"name": name})

        await socket.send(json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"}))
        form = {"encoding": "audio/x-mulaw", "sampleRate": RATE_HZ, "channels": 1}
        about = {**stream, "accountSid": "AC1", "callSid": "CA1", "customParameters": {}, "mediaFormat": form}
        await say("start", start=about)
        listening = asyncio.create_task(listen())
        size, number = int(RATE_HZ * FRAME_S), 0
        while time.monotonic() - begun_s < limit_s and not listening.done():
            frame = question[number * size : (number + 1) * size].ljust(size, b"\xff")
            number += 1
            await say("media", media={"track": "inbound", "payload": base64.b64encode(frame).decode()})
            for name in ear.due():
                await say("mark", mark={"name": name})
            is_quiet = ear.heard and time.monotonic() > ear.ends_s + QUIET_S
            if number * size > len(question) and (is_quiet or len(ear.heard) > enough_s * RATE_HZ):
                await say("stop", stop={"callSid": "CA1"})
                break
            await asyncio.sleep(max(0.0, begun_s + number * FRAME_S - time.monotonic()))
        listening.cancel()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(from_ulaw(bytes(ear.heard)))
    print(f"{len(ear.heard) / RATE_HZ:.1f} s heard, written to {out}")


def main() -> None:
    """Read the arguments, and call."""
    parser = argparse.ArgumentParser(description="Call a server as Twilio does.")
    parser.add_argument("recording", help="what the caller says: a WAV file, 16-bit mono at 8 kHz")
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/telephone/media")
    parser.add_argument("--out", default="heard.wav", help="what the caller hears")
    parser.add_argument("--enough-s", type=float, default=60.0, help="hang up when this much was heard")
    parser.add_argument("--limit-s", type=float, default=60.0, help="the longest call")
    args = parser.parse_args()
    with wave.open(args.recording, "rb") as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE_HZ):
            sys.exit(f"{args.recording} is not 16-bit mono at 8 kHz: ffmpeg -i FILE -ac 1 -ar 8000 question.wav")
        question = to_ulaw(file.readframes(file.getnframes()))
    asyncio.run(call(args.url, question, args.out, args.enough_s, args.limit_s))


if __name__ == "__main__":
    main()
