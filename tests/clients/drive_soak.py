"""speech-to-speech's soak, which is a script of its repository and in no registry: its frames, as it sends them.

As `scripts/synthetic_conversation_realtime_client.py` does with four clients: a URL without a model, no
`session.update`, a question in frames of 20 ms of 16 kHz and 1.5 s of silence, in real time, then nothing until
`response.done`, for at most 30 s; and the next question when its interval is over. Sixty turns in all. The script has
macOS's `say` speak the questions; here the server does.
"""

import asyncio
import base64
import json
import sys
import time
import urllib.request

import websockets

CLIENTS, TURNS, INTERVAL_S, RESPONSE_S = 4, 15, 10.0, 30.0
CHUNK_BYTES, CHUNK_S, SILENCE_CHUNKS = 640, 0.02, 75
QUESTIONS = (
    "What is the capital of France?",
    "How many continents are there?",
    "What is two plus two?",
    "Who wrote Romeo and Juliet?",
    "What is the largest ocean on Earth?",
    "Why is the sky blue?",
    "How do magnets work?",
    "Who painted the Mona Lisa?",
    "What is gravity?",
    "Who invented the telephone?",
    "What is a leap year?",
    "How fast can a cheetah run?",
    "What is the longest river on Earth?",
    "How many planets are in our solar system?",
    "Say goodbye for now.",
)


def spoken(url: str, text: str) -> bytes:
    """The question as 16-bit PCM of 16 kHz."""
    body = json.dumps({"input": text, "response_format": "pcm", "sample_rate": 16_000}).encode()
    request = urllib.request.Request(f"{url}/v1/audio/speech", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


async def ask(socket, pcm: bytes) -> tuple[str, int]:
    """One turn: what was heard, and how many bytes of sound the answer had. Raises where it is not answered."""
    begun_s = time.monotonic()
    chunks = [pcm[at : at + CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0") for at in range(0, len(pcm), CHUNK_BYTES)]
    for number, chunk in enumerate([*chunks, *[bytes(CHUNK_BYTES)] * SILENCE_CHUNKS], 1):
        audio = base64.b64encode(chunk).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        await asyncio.sleep(max(0.0, begun_s + number * CHUNK_S - time.monotonic()))
    heard, sound = "", 0
    async with asyncio.timeout(RESPONSE_S):
        while True:
            event = json.loads(await socket.recv())
            match event["type"]:
                case "conversation.item.input_audio_transcription.completed":
                    heard += event["transcript"]
                case "response.output_audio.delta":
                    sound += len(base64.b64decode(event["delta"]))
                case "response.done":
                    return heard, sound
                case "error":
                    raise RuntimeError(event["error"]["message"])


async def client(url: str, number: int, questions: list[bytes], failures: list[str]) -> int:
    answered = 0
    async with websockets.connect(url.replace("http", "ws", 1) + "/v1/realtime", max_size=2**24) as socket:
        first = json.loads(await socket.recv())
        assert first["type"] == "session.created", first
        for turn in range(TURNS):
            begun_s = time.monotonic()
            try:
                _, sound = await ask(socket, questions[(turn + 7 * number) % len(questions)])
                answered += sound > 0
                if not sound:
                    failures.append(f"client {number}, turn {turn}: no sound")
            except (TimeoutError, RuntimeError) as error:
                failures.append(f"client {number}, turn {turn}: {error or 'no response'}")
            await asyncio.sleep(max(0.0, begun_s + INTERVAL_S - time.monotonic()))
    return answered


async def main() -> None:
    url = sys.argv[1]
    questions = [spoken(url, text) for text in QUESTIONS]
    failures: list[str] = []
    answered = sum(await asyncio.gather(*(client(url, n, questions, failures) for n in range(CLIENTS))))
    print(
        f"speech-to-speech's soak: {answered} of {CLIENTS * TURNS} turns answered in sound; {failures or 'no failure'}"
    )
    sys.exit(answered < CLIENTS * TURNS)


asyncio.run(main())
