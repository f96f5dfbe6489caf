"""LiveKit's plugins for ElevenLabs, Cartesia and AssemblyAI: texts in streams, and turns of a recording."""

import asyncio
import logging
import os
import sys

import aiohttp
import numpy as np
import soundfile
from livekit import rtc
from livekit.agents import stt
from livekit.plugins import assemblyai, cartesia, elevenlabs

logging.basicConfig(level=logging.WARNING)
TURNS = int(os.environ.get("TURNS", "20"))


async def speak(plugin, turns):
    """Say a text of two sentences in each of these streams; return the seconds of sound and the words with times."""
    seconds, words = 0.0, 0
    for _ in range(turns):
        async with plugin.stream() as stream:
            stream.push_text("One two three. ")
            stream.push_text("Four five six.")
            stream.end_input()
            heard = 0.0
            async for event in stream:
                heard += event.frame.duration
                words += len(event.frame.userdata.get("lk.timed_transcripts", []))
            assert heard > 0.5, heard
            seconds += heard
    return seconds, words


async def listen(plugin, pcm, turns):
    """Send the recording and a pause for each of these turns; return the final transcripts."""
    sound = np.concatenate((pcm, np.zeros(32_000, np.int16)))
    finals, received, stream = [], asyncio.Semaphore(0), plugin.stream()

    async def send():
        for _turn in range(turns):
            for at in range(0, len(sound), 1600):
                part = sound[at : at + 1600]
                stream.push_frame(rtc.AudioFrame(part.tobytes(), 16_000, 1, len(part)))
                await asyncio.sleep(0.02)
            await received.acquire()
        stream.end_input()

    sending = asyncio.create_task(send())
    async for event in stream:
        if event.type == stt.SpeechEventType.FINAL_TRANSCRIPT and event.alternatives[0].text:
            finals.append(event.alternatives[0].text)
            received.release()
        if len(finals) >= turns:
            break
    sending.cancel()
    await stream.aclose()
    return finals


async def main():
    data, rate = soundfile.read(sys.argv[2], dtype="int16")
    assert rate == 16_000
    pcm, where = np.asarray(data)[:24_000], sys.argv[1]
    lines = []
    async with aiohttp.ClientSession() as http:
        about = {"api_key": "none", "http_session": http}
        voices = {
            "elevenlabs": elevenlabs.TTS(**about, base_url=f"{where}/v1", encoding="pcm_24000"),
            "cartesia": cartesia.TTS(**about, base_url=where),
        }
        for name, voice in voices.items():
            seconds, words = await asyncio.wait_for(speak(voice, TURNS), 80)
            assert words >= 6 * TURNS, (name, words)
            lines.append(f"{name} {seconds:.0f} s of sound")
            await voice.aclose()
        vad = {"vad_silence_threshold_secs": 0.5}
        ears = {
            "assemblyai": assemblyai.STT(**about, base_url=where.replace("http", "ws", 1)),
            "elevenlabs": elevenlabs.STT(
                **about, base_url=f"{where}/v1", model_id="scribe_v2_realtime", server_vad=vad
            ),
            "cartesia": cartesia.STT(**about, base_url=where, model="ink-2"),
        }
        for name, ear in ears.items():
            finals = await asyncio.wait_for(listen(ear, pcm, max(2, TURNS // 5)), 80)
            lines.append(f"{name} {len(finals)} transcripts, {finals[0]!r}")
    print(f"livekit_vendors: {'; '.join(lines)}")


asyncio.run(main())
