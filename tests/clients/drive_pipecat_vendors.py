"""pipecat's services for ElevenLabs, Cartesia and AssemblyAI in pipelines. drive_pipecat_vendors.py URL RECORDING"""

import asyncio
import sys

from pipecat.frames.frames import TTSSpeakFrame, VADUserStoppedSpeakingFrame
from pipecat.services.assemblyai.stt import AssemblyAISTTService
from pipecat.services.cartesia.stt import CartesiaSTTService
from pipecat.services.cartesia.tts import CartesiaTTSService
from pipecat.services.elevenlabs.tts import ElevenLabsTTSService
from pipecat_pipeline import OUT_HZ, Sink, run, say, until

RATE_HZ, TURNS = 16_000, 2
# Voices of the hosted services, which become a voice of the server.
ELEVENLABS_VOICE, CARTESIA_VOICE = "21m00Tcm4TlvDq8ikWAM", "e8e5fffb-252c-436d-b842-8879b84445b6"


async def main():
    url, recording = sys.argv[1:3]
    ws = url.replace("http", "ws", 1)

    async def hear(task, sink):
        for turn in range(1, TURNS + 1):
            await say(task, recording, RATE_HZ, 1, speed=2)
            await task.queue_frames([VADUserStoppedSpeakingFrame()])
            await until(lambda n=turn: " ".join(sink.texts).lower().count("surpassed") >= n, lambda: f"{sink.texts}")

    async def speak(task, sink):
        await task.queue_frames([TTSSpeakFrame("Hello there."), TTSSpeakFrame("How are you today?")])
        await until(lambda: sink.seen["TTSStoppedFrame"] >= 2, lambda: f"{sink.seen}")

    lines = []
    for service in (
        AssemblyAISTTService(api_key="none", api_endpoint_base_url=f"{ws}/v3/ws"),
        CartesiaSTTService(api_key="none", base_url=ws),
    ):
        heard = await run([service, Sink()], hear, RATE_HZ)
        lines.append(f"{type(service).__name__} {len(heard.texts)} turns")
    for service in (
        ElevenLabsTTSService(api_key="none", url=ws, settings=ElevenLabsTTSService.Settings(voice=ELEVENLABS_VOICE)),
        CartesiaTTSService(
            api_key="none", url=f"{ws}/tts/websocket", settings=CartesiaTTSService.Settings(voice=CARTESIA_VOICE)
        ),
    ):
        spoken = await run([service, Sink()], speak, RATE_HZ)
        assert spoken.num_loud > OUT_HZ, spoken.num_loud
        words = spoken.seen["TTSTextFrame"]
        assert words >= 6, spoken.seen
        lines.append(f"{type(service).__name__} {spoken.num_loud / OUT_HZ:.1f} s, {words} words")
    print(f"pipecat_vendors: {', '.join(lines)}")


asyncio.run(asyncio.wait_for(main(), 150))
