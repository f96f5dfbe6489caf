"""Holds a full-duplex conversation: a recording is played as the user's speech, and the answer is saved.

    pip install websockets
    python examples/duplex_demo.py question.wav
    python examples/duplex_demo.py question.wav --push-to-talk --url ws://HOST:8091/v1/realtime?duplex=1 --model MODEL

It runs against vLLM-Omni and antiphon, with a native model or a cascade. The recording is 16-bit PCM, mono, 16 kHz;
`ffmpeg -i FILE -ac 1 -ar 16000 question.wav` makes one. After the recording, the script sends silence until the answer
is over, as a microphone would. With --push-to-talk, it commits the recording and sends no silence. It plays the answer
in real time, and acknowledges the part that was played.
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

IN_HZ, OUT_HZ, CHUNK_S, ACK_S = 16_000, 24_000, 0.2, 0.5
SESSION = {
    "input_audio_format": "pcm16",
    "sample_rate_hz": IN_HZ,
    "output_audio_format": "pcm16",
    "modalities": ["text", "audio"],
    "playback_commit_policy": "ack_only",
}


class Player:
    """Simulates playback in real time. Audio plays when it arrives, or after the audio that arrived before it."""

    def __init__(self, out: str) -> None:
        self._file = wave.open(out, "wb")  # noqa: SIM115
        self._file.setparams((1, 2, OUT_HZ, 0, "NONE", ""))
        # The current response, the seconds of its audio, and the time at which all of it will have been played.
        self.response = ""
        self.audio_s, self.until_s = 0.0, 0.0

    def add(self, response: str, pcm: bytes) -> None:
        if response != self.response:
            self.response, self.audio_s = response, 0.0
        seconds = len(pcm) / 2 / OUT_HZ
        self._file.writeframes(pcm)
        self.audio_s += seconds
        self.until_s = max(self.until_s, time.monotonic()) + seconds

    @property
    def heard_ms(self) -> int:
        """Return how many milliseconds of the response were played."""
        return round(1000 * (self.audio_s - max(0.0, self.until_s - time.monotonic())))

    def close(self) -> None:
        self._file.close()


async def speak(socket: websockets.ClientConnection, pcm: bytes, push_to_talk: bool) -> None:
    """Send the recording in real time, and then silence or the commit."""
    begun_s, step, at = time.monotonic(), int(CHUNK_S * IN_HZ) * 2, 0
    while at < len(pcm) or not push_to_talk:
        chunk = pcm[at : at + step].ljust(step, b"\0")
        audio = base64.b64encode(chunk).decode()
        append = {"type": "input_audio_buffer.append", "audio": audio, "format": "pcm16", "sample_rate_hz": IN_HZ}
        await socket.send(json.dumps(append))
        at += step
        await asyncio.sleep(max(0.0, begun_s + at / 2 / IN_HZ - time.monotonic()))
    await socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))


async def acknowledge(socket: websockets.ClientConnection, player: Player) -> None:
    """Report twice a second how much of the response was played."""
    while True:
        await asyncio.sleep(ACK_S)
        if player.response:
            heard_ms = player.heard_ms
            ack = {"played_ms": heard_ms, "committed_ms": heard_ms, "response_id": player.response}
            await socket.send(json.dumps({"type": "playback.ack"} | ack))


async def listen(socket: websockets.ClientConnection, player: Player, begun_s: float) -> None:
    """Print the texts and play the audio. Returns at the end of the first answer."""
    answered = False
    async for message in socket:
        event = json.loads(message)
        kind = event["type"]
        if kind == "response.output_audio.delta":
            if not player.response:
                print(f"[first audio {time.monotonic() - begun_s:.2f} s after the session's start] ", end="")
            player.add(event.get("response_id") or "response", base64.b64decode(event["delta"]))
            answered = True
        elif kind in ("response.output_audio_transcript.delta", "response.output_text.delta", "response.text.delta"):
            print(event["delta"], end="", flush=True)
            answered = True
        elif kind == "conversation.item.input_audio_transcription.completed":
            print(f"> {event['transcript'].strip()}")
        elif kind == "response.done" and answered:
            print()
            return
        elif kind == "error":
            sys.exit(f"error: {event['error'].get('message', event['error'])}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", help="the user's speech: a WAV file, 16-bit, mono, 16 kHz")
    parser.add_argument("--push-to-talk", action="store_true", help="commit the recording, and send no silence")
    parser.add_argument("--instructions", default="Answer in one short sentence.")
    parser.add_argument("--max-tokens", type=int, help="maximum number of tokens of an answer")
    parser.add_argument("--out", default="answer.wav")
    parser.add_argument("--model", default="default")
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/realtime?duplex=1")
    args = parser.parse_args()
    with wave.open(args.file, "rb") as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, IN_HZ):
            sys.exit(f"{args.file} is not 16-bit mono at 16 kHz: ffmpeg -i {args.file} -ac 1 -ar 16000 mono16.wav")
        pcm = file.readframes(file.getnframes())
    player = Player(args.out)
    async with websockets.connect(args.url, max_size=None) as socket:
        session = SESSION | {"model": args.model, "instructions": args.instructions}
        if args.max_tokens:
            session["max_response_output_tokens"] = args.max_tokens
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        begun_s = time.monotonic()
        tasks = [
            asyncio.create_task(speak(socket, pcm, args.push_to_talk)),
            asyncio.create_task(acknowledge(socket, player)),
        ]
        await listen(socket, player, begun_s)
        for task in tasks:
            task.cancel()
        # Plays the rest of the answer before the conversation ends.
        await asyncio.sleep(max(0.0, player.until_s - time.monotonic()))
        ack = {"played_ms": player.heard_ms, "committed_ms": player.heard_ms, "response_id": player.response}
        await socket.send(json.dumps({"type": "playback.ack"} | ack))
        await socket.send(json.dumps({"type": "session.close"}))
        async for _ in socket:
            """Reads the remaining messages until the server closes the session."""
    player.close()
    print(f"{player.audio_s:.1f} s of the answer are in {args.out}")


if __name__ == "__main__":
    asyncio.run(main())
