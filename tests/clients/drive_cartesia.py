"""cartesia: speech as bytes, events and in contexts, and transcripts of both kinds. Its types check every message."""

import asyncio
import os
import sys
import time

import numpy as np
import soundfile
from cartesia import AsyncCartesia, Cartesia
from cartesia.types.stt.stt_auto_finalize_websocket_response import STTAutoFinalizeWebsocketResponse
from cartesia.types.stt.stt_manual_finalize_websocket_response import STTManualFinalizeWebsocketResponse
from cartesia.types.tts_sse_event import TTSSSEEvent
from cartesia.types.websocket_response import WebsocketResponse
from pydantic import TypeAdapter

TURNS = int(os.environ.get("TURNS", "100"))
VOICE = "6ccbfb76-1fc6-48f7-b71d-91ac6298247b"
RAW = {"container": "raw", "encoding": "pcm_f32le", "sample_rate": 44_100}
AUDIO = {"encoding": "pcm_s16le", "sample_rate": 16_000}
refused, checked = [], 0


def check(kind, event):
    """Validate an event strictly: the package itself only constructs it."""
    global checked
    checked += 1
    try:
        TypeAdapter(kind).validate_python(event.to_dict())
    except Exception as error:
        refused.append(f"{error}: {str(event)[:200]}")


def files(client):
    about = {"model_id": "sonic-3", "transcript": "Hello there.", "voice": VOICE}
    whole = client.tts.generate(**about, output_format={"container": "mp3", "sample_rate": 44_100, "bit_rate": 128_000})
    assert len(whole.read()) > 5_000
    events = list(client.tts.generate_sse(**about, output_format=RAW, add_timestamps=True))
    for event in events:
        check(TTSSSEEvent, event)
    assert events[-1].type == "done"
    assert any(event.type == "timestamps" for event in events)


def contexts(client):
    """Speak TURNS texts, each in a context. Every tenth is cancelled."""
    firsts_s, num_bytes = [], 0
    with client.tts.websocket_connect() as connection:
        for turn in range(TURNS):
            context = connection.context(
                context_id=f"turn-{turn}", model_id="sonic-3", voice=VOICE, output_format=RAW, add_timestamps=True
            )
            asked_s, first_s = time.monotonic(), None
            context.push("One two ")
            context.push("three. ")
            if turn % 10 != 9:
                context.no_more_inputs()
            for event in context.receive():
                check(WebsocketResponse, event)
                assert event.type != "error", event
                if event.type == "chunk":
                    first_s = first_s or time.monotonic() - asked_s
                    num_bytes += len(event.audio)
                    if turn % 10 == 9:
                        # A `done` message follows.
                        context.cancel()
            firsts_s.append(first_s)
    return sorted(firsts_s)[TURNS // 2], num_bytes / 4 / 44_100


async def turns(client, pcm):
    """Let the server end some turns, and commit the others."""
    pause = np.zeros(3 * 16_000, np.int16)
    sound, ends, joined = np.concatenate((pcm[:24_000], pause)), [], []
    async with client.stt.auto_finalize.websocket(model="ink-2", **AUDIO) as connection:
        for _ in range(TURNS // 4):
            for at in range(0, len(sound), 1600):
                await connection.send_raw(sound[at : at + 1600].tobytes())
            while True:
                event = await asyncio.wait_for(connection.recv(), 30)
                check(STTAutoFinalizeWebsocketResponse, event)
                assert event.type != "error", event
                if event.type == "turn.end":
                    ends.append(event.transcript)
                    break
    async with client.stt.manual_finalize.websocket(model="ink-2", **AUDIO) as connection:
        for _ in range(TURNS // 4):
            await connection.send_raw(pcm[:24_000].tobytes())
            await connection.send_raw("finalize")
            while True:
                event = await asyncio.wait_for(connection.recv(), 30)
                check(STTManualFinalizeWebsocketResponse, event)
                assert event.type != "error", event
                if event.type == "transcript" and event.is_final:
                    joined.append(event.text)
                if event.type == "flush_done":
                    break
        await connection.send_raw("close")
        async for event in connection:
            check(STTManualFinalizeWebsocketResponse, event)
    assert len(joined) == TURNS // 4
    return ends


def main():
    where = {"api_key": "none", "base_url": sys.argv[1], "websocket_base_url": sys.argv[1].replace("http", "ws", 1)}
    data, rate = soundfile.read(sys.argv[2], dtype="int16")
    assert rate == 16_000
    client = Cartesia(**where)
    files(client)
    first_s, spoken_s = contexts(client)
    ends = asyncio.run(turns(AsyncCartesia(**where), np.asarray(data)))
    assert not refused, (len(refused), checked, refused[:3])
    print(
        f"cartesia: {TURNS} contexts, {spoken_s:.0f} s of sound, the first after {first_s * 1000:.0f} ms (median); "
        f"{len(ends)} turns, {ends[0]!r}; {checked} messages, 0 refused"
    )


main()
