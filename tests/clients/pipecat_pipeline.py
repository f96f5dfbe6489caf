"""Pipelines of one service of Pipecat, and how they are driven: the common part of the drivers for Pipecat."""

import asyncio
import sys
from collections import Counter

import numpy as np
import soundfile
from loguru import logger
from pipecat.frames.frames import (
    ErrorFrame,
    InputAudioRawFrame,
    LLMRunFrame,
    OutputAudioRawFrame,
    TranscriptionFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameProcessor

logger.remove()
logger.add(sys.stderr, level="WARNING")
# The sample rate of the services' speech, in Hz.
OUT_HZ = 24_000
# Speech has samples above this. OpenAI's Live API also sends silence.
LOUD = 300
# Speech that is enough for an answer, in samples.
ENOUGH = OUT_HZ // 4


class Sink(FrameProcessor):
    """The end of a pipeline. `num_loud`: samples of speech at OUT_HZ."""

    def __init__(self):
        super().__init__()
        self.seen, self.texts, self.said, self.num_loud, self.failures = Counter(), [], "", 0, []

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        self.seen[type(frame).__name__] += 1
        match frame:
            case TranscriptionFrame():
                self.texts.append(frame.text)
            case TTSTextFrame():
                self.said += frame.text
            case OutputAudioRawFrame():
                pcm = np.frombuffer(frame.audio, "<i2").astype(int)
                self.num_loud += len(pcm) if np.abs(pcm).max(initial=0) > LOUD else 0
            case ErrorFrame():
                self.failures.append(str(frame))
        await self.push_frame(frame, direction)


async def until(condition, what, seconds=60):
    """Wait until the condition holds. `what()` describes the state for an error."""
    for _ in range(seconds * 20):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(what())


async def run(processors, drive, in_hz):
    """Run a pipeline until `drive(task, sink)` returns, and return its sink, which is one of the processors."""
    sink = next(each for each in processors if isinstance(each, Sink))
    params = PipelineParams(audio_in_sample_rate=in_hz, audio_out_sample_rate=OUT_HZ)
    task = PipelineTask(Pipeline(processors), params=params)
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    try:
        # Frames that come before the connection are lost.
        await until(lambda: sink.seen["StartFrame"], lambda: "the pipeline does not start")
        await drive(task, sink)
        await task.cancel()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not sink.failures, sink.failures
    return sink


async def say(task, recording, rate_hz, silence_s, speed=1):
    """Send a recording and silence after it, as a microphone does at speed 1."""
    data, rate = soundfile.read(recording, dtype="int16")
    at = np.arange(int(len(data) * rate_hz / rate)) * rate / rate_hz
    silence = np.zeros(round(silence_s * rate_hz))
    pcm = np.concatenate((np.interp(at, np.arange(len(data)), data), silence)).astype("<i2")
    for k in range(0, len(pcm), rate_hz // 50):
        part = pcm[k : k + rate_hz // 50].tobytes()
        await task.queue_frames([InputAudioRawFrame(audio=part, sample_rate=rate_hz, num_channels=1)])
        await asyncio.sleep(0.02 / speed)


async def converse(service, opening, in_hz, recording):
    """Let the service answer an opening, then a spoken turn. Return the sink, and the seconds of both answers."""
    pair = LLMContextAggregatorPair(LLMContext([opening]))
    loud = []

    async def drive(task, sink):
        await task.queue_frames([LLMRunFrame()])
        await until(lambda: sink.num_loud >= ENOUGH, lambda: f"no answer to the opening: {sink.seen}")
        # The rest of the answer.
        await asyncio.sleep(6)
        loud.append(sink.num_loud)
        await say(task, recording, in_hz, 2)
        await until(lambda: sink.num_loud >= loud[0] + ENOUGH, lambda: f"no answer to the turn: {sink.seen}")
        loud.append(sink.num_loud - loud[0])

    sink = await run([pair.user(), service, Sink(), pair.assistant()], drive, in_hz)
    return sink, *(samples / OUT_HZ for samples in loud)
