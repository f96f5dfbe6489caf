"""Streams a recording to /v1/realtime and prints its words; saves the answer if the model speaks.

    pip install websockets
    python examples/realtime_audio.py speech.wav
    python examples/realtime_audio.py speech.wav --speed 15 --url ws://HOST:8091/v1/realtime --model MODEL

It uses vLLM's dialect, so it runs against vLLM, vLLM-Omni and antiphon. The recording is 16-bit PCM, mono, 16 kHz;
`ffmpeg -i FILE -ac 1 -ar 16000 speech.wav` makes one.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
import time
import wave

import websockets

RATE_HZ, CHUNK_S = 16_000, 0.2


def recording(path: str) -> bytes:
    """Return the samples of a WAV file: 16-bit PCM, mono, 16 kHz."""
    with wave.open(path, "rb") as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE_HZ):
            sys.exit(f"{path} is not 16-bit mono at 16 kHz: ffmpeg -i {path} -ac 1 -ar 16000 mono16.wav")
        return file.readframes(file.getnframes())


async def send(socket: websockets.ClientConnection, pcm: bytes, speed: float) -> None:
    """Append the recording at `speed` times real time, and commit it."""
    begun_s, step = time.monotonic(), int(CHUNK_S * RATE_HZ) * 2
    for at in range(0, len(pcm), step):
        audio = base64.b64encode(pcm[at : at + step]).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        due_s = begun_s + (at + step) / 2 / RATE_HZ / speed
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    await socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))


async def receive(socket: websockets.ClientConnection, out: str) -> None:
    """Print the words as they arrive. Returns after the transcript and the answer's audio, if the model speaks."""
    file = None
    async for message in socket:
        event = json.loads(message)
        match event["type"]:
            case "transcription.delta":
                print(event["delta"], end="", flush=True)
            case "response.output_audio.delta":
                if file is None:
                    file = wave.open(out, "wb")  # noqa: SIM115
                    file.setparams((1, 2, event["sample_rate_hz"], 0, "NONE", ""))
                file.writeframes(base64.b64decode(event["audio"]))
            case "transcription.done":
                print(f"\n{event['usage']}")
                if file is None:
                    return
            case "response.output_audio.done":
                if file:
                    file.close()
                    print(f"the answer is in {out}")
                return
            case "error":
                sys.exit(f"error: {event['error']}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", help="a WAV file: 16-bit, mono, 16 kHz")
    parser.add_argument("--speed", type=float, default=1.0, help="speed of sending, relative to real time")
    parser.add_argument("--out", default="answer.wav", help="file for the spoken answer, if the model speaks")
    parser.add_argument("--model", default="default")
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/realtime")
    args = parser.parse_args()
    pcm = recording(args.file)
    async with websockets.connect(args.url, max_size=None) as socket:
        await socket.send(json.dumps({"type": "session.update", "model": args.model}))
        # The first commit is not final. It starts the request.
        await socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": False}))
        sending = asyncio.create_task(send(socket, pcm, args.speed))
        await receive(socket, args.out)
        await sending


if __name__ == "__main__":
    asyncio.run(main())
