"""google-genai's Live client: spoken and typed turns, an interruption, a handle. The types of the SDK check each frame.

TURNS (3) is the number of typed turns.
"""

import asyncio
import os
import sys
from collections import Counter
from importlib.metadata import version

import numpy as np
import soundfile
from google import genai
from google.genai import types

RATE_HZ = 16_000
TURNS = int(os.environ.get("TURNS", "3"))
MODEL = "gemini-live-2.5-flash-preview"
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
}
seen = Counter()


async def turn(session, handles):
    """Read a turn of the model. Returns its audio in bytes, its words, those of the user, and how it ended."""
    audio, said, heard, interrupted = 0, "", "", False
    async for message in session.receive():
        seen["frames"] += 1
        audio += len(message.data or b"")
        if update := message.session_resumption_update:
            handles.append(update.new_handle)
        if call := message.tool_call:
            answers = [
                types.FunctionResponse(id=c.id, name=c.name, response={"output": "sunny"}) for c in call.function_calls
            ]
            await session.send_tool_response(function_responses=answers)
            seen["calls"] += len(answers)
        if content := message.server_content:
            said += (content.output_transcription and content.output_transcription.text) or ""
            heard += (content.input_transcription and content.input_transcription.text) or ""
            interrupted = interrupted or bool(content.interrupted)
    return audio, said, heard, interrupted


async def typed(session, text, handles):
    await session.send_client_content(turns={"role": "user", "parts": [{"text": text}]}, turn_complete=True)
    return await asyncio.wait_for(turn(session, handles), 60)


async def speak(session, pcm):
    for k in range(0, len(pcm), 1600):
        blob = types.Blob(data=pcm[k : k + 1600].tobytes(), mime_type=f"audio/pcm;rate={RATE_HZ}")
        await session.send_realtime_input(audio=blob)
        await asyncio.sleep(0.1)


async def main():
    client = genai.Client(api_key="none", http_options={"base_url": sys.argv[1]})
    data, rate = soundfile.read(sys.argv[2], dtype="int16")
    at = np.arange(int(len(data) * RATE_HZ / rate)) * rate / RATE_HZ
    speech = np.interp(at, np.arange(len(data)), data)
    pcm = np.concatenate((speech, np.zeros(2 * RATE_HZ))).astype("<i2")
    config = {
        "response_modalities": ["AUDIO"],
        "system_instruction": "You are terse.",
        "input_audio_transcription": {},
        "output_audio_transcription": {},
        "session_resumption": {},
        "tools": [{"function_declarations": [WEATHER]}],
        "realtime_input_config": {"automatic_activity_detection": {"silence_duration_ms": 700}},
    }
    handles, sound = [], 0
    async with client.aio.live.connect(model=MODEL, config=config) as session:
        speaking = asyncio.create_task(speak(session, pcm))
        audio, said, heard, _ = await asyncio.wait_for(turn(session, handles), 90)
        await speaking
        assert audio > 12_000, (audio, said, heard)
        assert "surpassed" in heard, heard
        for number in range(TURNS):
            audio, said, _, interrupted = await typed(session, f"Say the number {number}.", handles)
            assert audio > 2_000, (number, audio, said)
            assert not interrupted, (number, said)
            sound += audio
        await session.send_client_content(
            turns={"role": "user", "parts": [{"text": "Count slowly from one to one hundred, in words."}]}
        )
        reading = asyncio.create_task(turn(session, handles))
        await asyncio.sleep(4)
        speaking = asyncio.create_task(speak(session, pcm))
        _, _, _, interrupted = await asyncio.wait_for(reading, 90)
        assert interrupted
        await asyncio.wait_for(turn(session, handles), 90)
        await speaking
    assert handles
    config["session_resumption"] = {"handle": handles[-1]}
    async with client.aio.live.connect(model=MODEL, config=config) as session:
        audio, said, _, _ = await typed(session, "What number did I ask you to say last?", handles)
        assert audio > 2_000, audio
    print(
        f"google-genai {version('google-genai')}: {seen['frames']} frames, none refused, {sound / 48_000:.1f} s of "
        f"sound in {TURNS} typed turns, {seen['calls']} calls, after the resume: {said.strip()!r}"
    )


asyncio.run(main())
