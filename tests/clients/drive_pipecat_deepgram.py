"""pipecat's Deepgram services in a pipeline: STT, Flux and TTS. drive_pipecat_deepgram.py URL RECORDING"""

import asyncio
import sys

from pipecat.frames.frames import TTSSpeakFrame
from pipecat.services.deepgram.flux.stt import DeepgramFluxSTTService
from pipecat.services.deepgram.stt import DeepgramSTTService
from pipecat.services.deepgram.tts import DeepgramTTSService
from pipecat_pipeline import OUT_HZ, Sink, run, say, until

RATE_HZ, TURNS = 16_000, 3


async def main():
    url, recording = sys.argv[1:3]
    ws = url.replace("http", "ws", 1)

    async def hear(task, sink):
        for turn in range(1, TURNS + 1):
            await say(task, recording, RATE_HZ, 3, speed=2)
            await until(lambda n=turn: " ".join(sink.texts).count("surpassed") >= n, lambda: f"{sink.texts}")

    plain = await run([DeepgramSTTService(api_key="none", base_url=ws), Sink()], hear, RATE_HZ)
    flux = await run([DeepgramFluxSTTService(api_key="none", url=f"{ws}/v2/listen"), Sink()], hear, RATE_HZ)

    async def speak(task, sink):
        await task.queue_frames([TTSSpeakFrame("Hello there."), TTSSpeakFrame("How are you today?")])
        await until(lambda: sink.num_loud > OUT_HZ, lambda: f"{sink.num_loud} samples")

    spoken = await run([DeepgramTTSService(api_key="none", base_url=ws), Sink()], speak, RATE_HZ)
    assert plain.seen["InterimTranscriptionFrame"]
    turns = f"{len(plain.texts)} and {len(flux.texts)} turns"
    print(f"pipecat_deepgram: {turns}, {spoken.num_loud / OUT_HZ:.1f} s of speech")


asyncio.run(asyncio.wait_for(main(), 150))
