"""elevenlabs: speech over HTTP and over WebSockets, files, and live transcripts. Its types check every message."""

import asyncio
import base64
import json
import os
import sys
import time

import numpy as np
import soundfile
import websockets
from elevenlabs import types
from elevenlabs.client import ElevenLabs
from elevenlabs.realtime.connection import RealtimeEvents
from elevenlabs.realtime.scribe import AudioFormat, CommitStrategy, ScribeRealtime

TURNS = int(os.environ.get("TURNS", "100"))
VOICE = "21m00Tcm4TlvDq8ikWAM"
# The version of 2025 has no types for live transcripts, and none for contexts.
MULTI = getattr(types, "WebsocketTtsServerMessageMulti", None)
PAYLOADS = {
    event: getattr(types, kind)
    for event, kind in (
        (RealtimeEvents.PARTIAL_TRANSCRIPT, "PartialTranscriptPayload"),
        (RealtimeEvents.COMMITTED_TRANSCRIPT, "CommittedTranscriptPayload"),
        (RealtimeEvents.COMMITTED_TRANSCRIPT_WITH_TIMESTAMPS, "CommittedTranscriptWithTimestampsPayload"),
    )
    if hasattr(types, kind)
}
refused, checked = [], 0


def check(kind, frame):
    """Parse a message with one of the package's types."""
    global checked
    checked += 1
    try:
        kind.model_validate(frame)
    except Exception as error:
        refused.append(f"{kind.__name__}: {error}: {str(frame)[:200]}")


def speech(client):
    tts = client.text_to_speech
    text = {"voice_id": VOICE, "text": "Hello there.", "model_id": "eleven_flash_v2_5"}
    whole = b"".join(tts.convert(**text))
    pieces = list(tts.stream(**text, output_format="pcm_16000"))
    assert len(whole) > 5_000
    assert sum(map(len, pieces)) > 10_000
    timed = tts.convert_with_timestamps(**text, output_format="pcm_16000")
    assert "".join(timed.alignment.characters) == "Hello there."
    lines = list(tts.stream_with_timestamps(**text, output_format="pcm_16000"))
    assert "".join(lines[-1].alignment.characters) == "Hello there."
    # The version of 2025 fails without settings.
    settings = types.VoiceSettings(speed=1.0)
    pieces = iter(["Hello ", "there. ", "Bye."])
    live = b"".join(tts.convert_realtime(VOICE, text=pieces, model_id="eleven_flash_v2_5", voice_settings=settings))
    assert len(live) > 5_000
    assert client.voices.get_all().voices
    assert client.models.list()


async def contexts(where):
    """Speak TURNS texts, each in a context. Every tenth is interrupted."""
    url = f"{where}/v1/text-to-speech/{VOICE}/multi-stream-input?model_id=eleven_flash_v2_5&output_format=pcm_16000"
    firsts_s, num_bytes = [], 0
    async with websockets.connect(url, additional_headers={"xi-api-key": "none"}) as socket:
        for turn in range(TURNS):
            name, cut = f"turn-{turn}", turn % 10 == 9
            asked_s, first_s = time.monotonic(), None
            await socket.send(json.dumps({"text": " ", "context_id": name}))
            await socket.send(json.dumps({"text": "One two three. ", "context_id": name, "flush": not cut}))
            if not cut:
                await socket.send(json.dumps({"context_id": name, "close_context": True}))
            while True:
                frame = json.loads(await asyncio.wait_for(socket.recv(), 30))
                if MULTI:
                    check(MULTI, frame)
                assert "error" not in frame, frame
                if frame["audio"] and frame["contextId"] == name and first_s is None:
                    first_s = time.monotonic() - asked_s
                    if cut:
                        await socket.send(json.dumps({"context_id": name, "close_context": True}))
                num_bytes += len(base64.b64decode(frame["audio"] or ""))
                if frame["isFinal"]:
                    assert frame["contextId"] == name
                    break
            firsts_s.append(first_s)
        await socket.send(json.dumps({"close_socket": True}))
        await socket.wait_closed()
        assert socket.close_code == 1000
    return sorted(firsts_s)[TURNS // 2], num_bytes / 32_000


async def transcripts(where, pcm):
    """Commit a part of the recording TURNS times."""
    seen, errors = [], []
    connection = await ScribeRealtime("none", where).connect(
        {
            "model_id": "scribe_v2_realtime",
            "audio_format": AudioFormat.PCM_16000,
            "sample_rate": 16_000,
            "commit_strategy": CommitStrategy.MANUAL,
            "include_timestamps": True,
        }
    )
    connection.on(RealtimeEvents.COMMITTED_TRANSCRIPT_WITH_TIMESTAMPS, seen.append)
    for event, kind in PAYLOADS.items():
        connection.on(event, lambda frame, kind=kind: check(kind, frame))
    connection.on(RealtimeEvents.ERROR, errors.append)
    part = base64.b64encode(pcm[:24_000].tobytes()).decode()
    for turn in range(TURNS):
        await connection.send({"audio_base_64": part})
        await connection.commit()
        for _ in range(3000):
            if len(seen) > turn or errors:
                break
            await asyncio.sleep(0.01)
        assert len(seen) == turn + 1, errors
    await connection.close()
    assert not errors, errors
    assert all(found["words"] for found in seen)
    return seen[0]["text"]


def main():
    https = sys.argv[1]
    wss = https.replace("http", "ws", 1)
    client = ElevenLabs(api_key="none", base_url=https)
    speech(client)
    data, rate = soundfile.read(sys.argv[2], dtype="int16")
    assert rate == 16_000
    with open(sys.argv[2], "rb") as file:
        heard = client.speech_to_text.convert(model_id="scribe_v1", file=file)
    assert heard.words, heard
    first_s, spoken_s = asyncio.run(contexts(wss))
    text = asyncio.run(transcripts(wss, np.asarray(data)))
    assert not refused, (len(refused), checked, refused[:3])
    print(
        f"elevenlabs: {TURNS} contexts, {spoken_s:.0f} s of sound, the first after {first_s * 1000:.0f} ms (median); "
        f"{TURNS} commits, {text!r}; {checked} messages, 0 refused"
    )


main()
