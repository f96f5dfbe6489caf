import asyncio
import wave

from pipecat.frames.frames import EndFrame, InputAudioRawFrame, TranscriptionFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService


class Printer(FrameProcessor):
    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, TranscriptionFrame):
            print(frame.text)
            await task.queue_frame(EndFrame())
        await self.push_frame(frame, direction)


async def main():
    global task
    with wave.open("speech.wav") as file:
        rate, audio = file.getframerate(), file.readframes(file.getnframes())
    hears = OpenAIRealtimeSTTService(
        api_key="none", model="default", base_url="ws://127.0.0.1:8000/v1/realtime", turn_detection=None
    )
    task = PipelineTask(Pipeline([hears, Printer()]), params=PipelineParams(audio_in_sample_rate=rate))
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    await asyncio.sleep(1)
    for at in range(0, len(audio) + 2 * rate, rate // 5):
        piece = audio[at : at + rate // 5] or bytes(rate // 5)
        await task.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=rate, num_channels=1))
        await asyncio.sleep(0.1)
    await running


asyncio.run(main())
