"""pipecat's Deepgram services in a pipeline: STT, Flux and TTS. drive_pipecat_deepgram.py URL RECORDING"""

import asyncio
import sys
from collections import Counter

import soundfile
from loguru import logger
from pipecat.frames.frames import ErrorFrame, InputAudioRawFrame, TranscriptionFrame, TTSAudioRawFrame, TTSSpeakFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.deepgram.flux.stt import DeepgramFluxSTTService
from pipecat.services.deepgram.stt import DeepgramSTTService
from pipecat.services.deepgram.tts import DeepgramTTSService

logger.remove()
logger.add(sys.stderr, level="WARNING")
RATE_HZ, TURNS = 16_000, 3


class Sink(FrameProcessor):
    def __init__(self):
        super().__init__()
        self.seen, self.texts, self.num_bytes, self.failures = Counter(), [], 0, []

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        self.seen[type(frame).__name__] += 1
        if isinstance(frame, TranscriptionFrame):
            self.texts.append(frame.text)
        if isinstance(frame, TTSAudioRawFrame):
            self.num_bytes += len(frame.audio)
        if isinstance(frame, ErrorFrame):
            self.failures.append(str(frame))
        await self.push_frame(frame, direction)


async def until(condition, what, seconds=60):
    for _ in range(seconds * 20):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(what)


async def run(service, drive):
    """Run a pipeline of one service."""
    sink = Sink()
    task = PipelineTask(
        Pipeline([service, sink]), params=PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=24_000)
    )
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    try:
        await asyncio.sleep(1.5)
        await drive(task, sink)
        await task.cancel()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not sink.failures, sink.failures
    return sink


async def main():
    url, recording = sys.argv[1:3]
    ws = url.replace("http", "ws", 1)
    data, rate = soundfile.read(recording, dtype="int16")
    assert rate == RATE_HZ
    pcm = data.astype("<i2").tobytes() + bytes(2 * RATE_HZ * 3)

    async def say(task, sink):
        for number in range(TURNS):
            for at in range(0, len(pcm), 640):
                part = pcm[at : at + 640]
                await task.queue_frames([InputAudioRawFrame(audio=part, sample_rate=RATE_HZ, num_channels=1)])
                await asyncio.sleep(0.01)
            await until(lambda n=number: " ".join(sink.texts).count("surpassed") > n, f"turn {number}: {sink.texts}")

    plain = await run(DeepgramSTTService(api_key="none", base_url=ws), say)
    flux = await run(DeepgramFluxSTTService(api_key="none", url=f"{ws}/v2/listen"), say)

    async def speak(task, sink):
        await task.queue_frames([TTSSpeakFrame("Hello there."), TTSSpeakFrame("How are you today?")])
        await until(lambda: sink.num_bytes > 48_000, f"{sink.num_bytes} bytes")

    spoken = await run(DeepgramTTSService(api_key="none", base_url=ws), speak)
    assert plain.seen["InterimTranscriptionFrame"]
    print(
        f"pipecat_deepgram: {len(plain.texts)} and {len(flux.texts)} turns, {spoken.num_bytes / 48_000:.1f} s of speech"
    )


asyncio.run(asyncio.wait_for(main(), 150))
