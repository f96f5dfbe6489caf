"""livekit's deepgram plugin: STT, STTv2 (Flux) and TTS. drive_livekit_deepgram.py URL RECORDING"""

import asyncio
import logging
import sys

import aiohttp
import soundfile
from livekit import rtc
from livekit.agents.stt import SpeechEventType
from livekit.plugins import deepgram

logging.basicConfig(level=logging.WARNING)
RATE_HZ, TURNS = 16_000, 3


async def heard(engine, pcm):
    """The final texts of a few turns, and the kinds of events."""
    stream, finals, kinds = engine.stream(), [], set()

    async def say():
        for _ in range(TURNS):
            data = pcm + bytes(2 * RATE_HZ * 3)
            for at in range(0, len(data), 640):
                part = data[at : at + 640]
                stream.push_frame(rtc.AudioFrame(part, RATE_HZ, 1, len(part) // 2))
                await asyncio.sleep(0.01)
        stream.end_input()

    saying = asyncio.create_task(say())
    async for event in stream:
        kinds.add(event.type)
        if event.type == SpeechEventType.FINAL_TRANSCRIPT:
            finals.append(event.alternatives[0].text)
    await saying
    await stream.aclose()
    return " ".join(finals), kinds


async def main():
    url, recording = sys.argv[1:3]
    data, rate = soundfile.read(recording, dtype="int16")
    assert rate == RATE_HZ
    pcm = data.astype("<i2").tobytes()
    async with aiohttp.ClientSession() as http:
        common = {"api_key": "none", "http_session": http}
        plain = deepgram.STT(base_url=f"{url}/v1/listen", model="nova-3", sample_rate=RATE_HZ, **common)
        text, kinds = await heard(plain, pcm)
        assert text.count("surpassed") == TURNS, text
        assert {SpeechEventType.START_OF_SPEECH, SpeechEventType.INTERIM_TRANSCRIPT} <= kinds, kinds
        flux = deepgram.STTv2(base_url=f"{url}/v2/listen", model="flux-general-en", eager_eot_threshold=0.4, **common)
        turns, kinds = await heard(flux, pcm)
        assert turns.count("surpassed") == TURNS, turns
        assert SpeechEventType.END_OF_SPEECH in kinds, kinds
        voice = deepgram.TTS(base_url=f"{url}/v1/speak", model="aura-2-thalia-en", **common)
        samples = 0
        async with voice.synthesize("Hello there.") as whole:
            async for audio in whole:
                samples += audio.frame.samples_per_channel
        assert samples > 6_000, samples
        async with voice.stream() as pieces:
            for word in ("How ", "are ", "you ", "today?"):
                pieces.push_text(word)
            pieces.end_input()
            async for audio in pieces:
                samples += audio.frame.samples_per_channel
        await voice.aclose()
    preflight = SpeechEventType.PREFLIGHT_TRANSCRIPT in kinds
    print(f"livekit_deepgram: {TURNS} turns twice, guesses: {preflight}, {samples / 24_000:.1f} s of speech")


asyncio.run(asyncio.wait_for(main(), 150))
