"""pipecat's OpenAILiveLLMService in a pipeline: an opening, then a spoken turn."""

import asyncio
import sys
from collections import Counter

import numpy as np
import soundfile
from loguru import logger
from pipecat.frames.frames import ErrorFrame, InputAudioRawFrame, LLMRunFrame, OutputAudioRawFrame, TTSTextFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.live.llm import OpenAILiveLLMService

logger.remove()
logger.add(sys.stderr, level="WARNING")
RATE_HZ = 24_000
seen, loud, said, failures = Counter(), [0], [""], []


class Sink(FrameProcessor):
    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        seen[type(frame).__name__] += 1
        if isinstance(frame, OutputAudioRawFrame):
            pcm = np.frombuffer(frame.audio, "<i2")
            loud[0] += len(pcm) if np.abs(pcm).max(initial=0) > 300 else 0
        if isinstance(frame, TTSTextFrame):
            said[0] += frame.text
        if isinstance(frame, ErrorFrame):
            failures.append(str(frame))
        await self.push_frame(frame, direction)


async def heard(more, seconds=60):
    """Wait until more speech has come."""
    for _ in range(seconds * 10):
        if loud[0] >= more:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{loud[0]} of {more} samples; {seen}")


async def main():
    where = sys.argv[1].replace("http", "ws", 1) + "/v1/live/sessions"
    llm = OpenAILiveLLMService(
        api_key="none", base_url=where, settings=OpenAILiveLLMService.Settings(system_instruction="You are terse.")
    )
    pair = LLMContextAggregatorPair(LLMContext([{"role": "developer", "content": "Say hello to the user."}]))
    task = PipelineTask(
        Pipeline([pair.user(), llm, Sink(), pair.assistant()]),
        params=PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ),
    )

    async def drive():
        await asyncio.sleep(1.5)
        await task.queue_frames([LLMRunFrame()])
        await heard(6_000)
        await asyncio.sleep(6)
        first = loud[0]
        data, rate = soundfile.read(sys.argv[2], dtype="int16")
        at = np.arange(int(len(data) * RATE_HZ / rate)) * rate / RATE_HZ
        pcm = np.concatenate((np.interp(at, np.arange(len(data)), data), np.zeros(2 * RATE_HZ))).astype("<i2")
        for k in range(0, len(pcm), 480):
            part = pcm[k : k + 480].tobytes()
            await task.queue_frames([InputAudioRawFrame(audio=part, sample_rate=RATE_HZ, num_channels=1)])
            await asyncio.sleep(0.02)
        await heard(first + 6_000)
        print(f"pipecat, OpenAI Live: {first / RATE_HZ:.1f} s of speech, then {(loud[0] - first) / RATE_HZ:.1f} s")
        assert said[0].strip()
        await task.cancel()

    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    try:
        await asyncio.wait_for(drive(), 160)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not failures, failures


asyncio.run(main())
