"""pipecat's OpenAIRealtimeLLMService in a pipeline: a context answered in sound, then a spoken turn."""

import asyncio
import sys
from collections import Counter

import numpy as np
import soundfile
from loguru import logger
from pipecat.frames.frames import ErrorFrame, InputAudioRawFrame, LLMRunFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService

logger.remove()
logger.add(sys.stderr, level="WARNING")
RATE_HZ = 24_000
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
    where = sys.argv[1].replace("http", "ws", 1) + "/v1/realtime"
    llm = OpenAIRealtimeLLMService(
        api_key="none", base_url=where, session_properties=SessionProperties(instructions="You are terse.")
    )
    pair = LLMContextAggregatorPair(LLMContext([{"role": "user", "content": "Say hello."}]))
    task = PipelineTask(
        Pipeline([pair.user(), llm, Sink(), pair.assistant()]),
        params=PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ),
    )

    async def drive():
        await asyncio.sleep(1.5)
        await task.queue_frames([LLMRunFrame()])
        await heard(12_000, 30)
        await asyncio.sleep(6)
        first = sound[0]
        data, rate = soundfile.read(sys.argv[2], dtype="int16")
        at = np.arange(int(len(data) * RATE_HZ / rate)) * rate / RATE_HZ
        pcm = np.concatenate((np.interp(at, np.arange(len(data)), data), np.zeros(2 * RATE_HZ))).astype("<i2")
        for k in range(0, len(pcm), 480):
            part = pcm[k : k + 480].tobytes()
            await task.queue_frames([InputAudioRawFrame(audio=part, sample_rate=RATE_HZ, num_channels=1)])
            await asyncio.sleep(0.02)
        await heard(first + 12_000, 30)
        print(f"pipecat: {first / 48_000:.1f} s of sound, then {(sound[0] - first) / 48_000:.1f} s for a spoken turn")
        await task.cancel()

    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    try:
        await asyncio.wait_for(drive(), 120)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not failures, failures


asyncio.run(main())
