"""pipecat's GeminiLiveLLMService in a pipeline: a context answered in sound, then a spoken turn."""

import asyncio
import sys
from collections import Counter

import numpy as np
import soundfile
from google.genai.types import HttpOptions
from loguru import logger
from pipecat.frames.frames import ErrorFrame, InputAudioRawFrame, LLMRunFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.google.gemini_live.llm import GeminiLiveLLMService

logger.remove()
logger.add(sys.stderr, level="WARNING")
IN_HZ, OUT_HZ = 16_000, 24_000
seen, sound, failures = Counter(), [0], []


class Sink(FrameProcessor):
    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        seen[type(frame).__name__] += 1
        if isinstance(frame, TTSAudioRawFrame):
            sound[0] += len(frame.audio)
        if isinstance(frame, ErrorFrame):
            failures.append(str(frame))
        await self.push_frame(frame, direction)


async def heard(more, seconds):
    """Wait until more sound has come."""
    for _ in range(seconds * 10):
        if sound[0] >= more:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{sound[0]} of {more} bytes; {seen}")


async def main():
    llm = GeminiLiveLLMService(
        api_key="none", http_options=HttpOptions(base_url=sys.argv[1]), system_instruction="You are terse."
    )
    pair = LLMContextAggregatorPair(LLMContext([{"role": "user", "content": "Say hello."}]))
    task = PipelineTask(
        Pipeline([pair.user(), llm, Sink(), pair.assistant()]),
        params=PipelineParams(audio_in_sample_rate=IN_HZ, audio_out_sample_rate=OUT_HZ),
    )

    async def drive():
        await asyncio.sleep(1.5)
        await task.queue_frames([LLMRunFrame()])
        await heard(12_000, 60)
        await asyncio.sleep(6)
        first = sound[0]
        data, rate = soundfile.read(sys.argv[2], dtype="int16")
        at = np.arange(int(len(data) * IN_HZ / rate)) * rate / IN_HZ
        pcm = np.concatenate((np.interp(at, np.arange(len(data)), data), np.zeros(2 * IN_HZ))).astype("<i2")
        for k in range(0, len(pcm), 320):
            part = pcm[k : k + 320].tobytes()
            await task.queue_frames([InputAudioRawFrame(audio=part, sample_rate=IN_HZ, num_channels=1)])
            await asyncio.sleep(0.02)
        await heard(first + 12_000, 60)
        print(f"pipecat, Gemini Live: {first / 48_000:.1f} s of sound, then {(sound[0] - first) / 48_000:.1f} s")
        await task.cancel()

    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    try:
        await asyncio.wait_for(drive(), 160)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not failures, failures


asyncio.run(main())
