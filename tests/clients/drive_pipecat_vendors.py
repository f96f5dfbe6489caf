"""pipecat's services for ElevenLabs, Cartesia and AssemblyAI in pipelines. drive_pipecat_vendors.py URL RECORDING"""

import asyncio
import sys
from collections import Counter

import soundfile
from loguru import logger
from pipecat.frames.frames import (
    ErrorFrame,
    InputAudioRawFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.assemblyai.stt import AssemblyAISTTService
from pipecat.services.cartesia.stt import CartesiaSTTService
from pipecat.services.cartesia.tts import CartesiaTTSService
from pipecat.services.elevenlabs.tts import ElevenLabsTTSService

logger.remove()
logger.add(sys.stderr, level="WARNING")
RATE_HZ, TURNS = 16_000, 2
# Voices of the hosted services, which become a voice of the server.
ELEVENLABS_VOICE, CARTESIA_VOICE = "21m00Tcm4TlvDq8ikWAM", "e8e5fffb-252c-436d-b842-8879b84445b6"


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
    raise TimeoutError(what())


async def run(service, drive):
    """Run a pipeline of one service."""
    sink = Sink()
    task = PipelineTask(
        Pipeline([service, sink]), params=PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=24_000)
    )
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    try:
        # What comes before the connection is lost.
        await until(lambda: sink.seen["StartFrame"], lambda: "the pipeline does not start")
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
    pcm = data.astype("<i2").tobytes() + bytes(2 * RATE_HZ)

    async def say(task, sink):
        for number in range(TURNS):
            for at in range(0, len(pcm), 640):
                part = pcm[at : at + 640]
                await task.queue_frames([InputAudioRawFrame(audio=part, sample_rate=RATE_HZ, num_channels=1)])
                await asyncio.sleep(0.01)
            await task.queue_frames([VADUserStoppedSpeakingFrame()])
            await until(
                lambda n=number: " ".join(sink.texts).lower().count("surpassed") > n,
                lambda n=number: f"turn {n}: {sink.texts}",
            )

    async def speak(task, sink):
        await task.queue_frames([TTSSpeakFrame("Hello there."), TTSSpeakFrame("How are you today?")])
        await until(lambda: sink.seen["TTSStoppedFrame"] >= 2, lambda: f"{sink.seen}")

    lines = []
    for service in (
        AssemblyAISTTService(api_key="none", api_endpoint_base_url=f"{ws}/v3/ws"),
        CartesiaSTTService(api_key="none", base_url=ws),
    ):
        heard = await run(service, say)
        lines.append(f"{type(service).__name__} {len(heard.texts)} turns")
    for service in (
        ElevenLabsTTSService(api_key="none", url=ws, settings=ElevenLabsTTSService.Settings(voice=ELEVENLABS_VOICE)),
        CartesiaTTSService(
            api_key="none", url=f"{ws}/tts/websocket", settings=CartesiaTTSService.Settings(voice=CARTESIA_VOICE)
        ),
    ):
        spoken = await run(service, speak)
        assert spoken.num_bytes > 48_000, spoken.num_bytes
        words = spoken.seen["TTSTextFrame"]
        assert words >= 6, spoken.seen
        lines.append(f"{type(service).__name__} {spoken.num_bytes / 48_000:.1f} s, {words} words")
    print(f"pipecat_vendors: {', '.join(lines)}")


asyncio.run(asyncio.wait_for(main(), 150))
