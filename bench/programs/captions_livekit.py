import asyncio
import wave

from livekit import rtc
from livekit.agents import stt, utils
from livekit.plugins import openai


async def main():
    with wave.open("speech.wav") as file:
        rate, audio = file.getframerate(), file.readframes(file.getnframes())
    async with utils.http_context.open():
        hears = openai.STT(model="default", base_url="http://127.0.0.1:8000/v1", api_key="none", use_realtime=True)
        stream = hears.stream()
        for at in range(0, len(audio), rate // 5):
            piece = audio[at : at + rate // 5]
            stream.push_frame(rtc.AudioFrame(piece, rate, 1, len(piece) // 2))
        stream.push_frame(rtc.AudioFrame(bytes(2 * rate), rate, 1, rate))
        stream.end_input()
        async for event in stream:
            if event.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
                print(event.alternatives[0].text)
                if "budget" in event.alternatives[0].text:
                    break


asyncio.run(main())
