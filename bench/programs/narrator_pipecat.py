import asyncio
import wave

from pipecat.frames.frames import (
    EndFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineTask
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.tts import OpenAITTSService


class Writer(FrameProcessor):
    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            file.writeframes(frame.audio)
        await self.push_frame(frame, direction)


async def main():
    speaks = OpenAITTSService(api_key="none", base_url="http://127.0.0.1:8000/v1", model="default", voice="alloy")
    task = PipelineTask(Pipeline([speaks, Writer()]))
    pieces = [LLMTextFrame(piece) for piece in ("Once upon", " a time there was a king. ", "He had", " a daughter.")]
    await task.queue_frames([LLMFullResponseStartFrame(), *pieces, LLMFullResponseEndFrame(), EndFrame()])
    await PipelineRunner(handle_sigint=False).run(task)


with wave.open("story.wav", "wb") as file:
    file.setparams((1, 2, 24_000, 0, "NONE", ""))
    asyncio.run(main())
