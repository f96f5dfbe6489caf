import asyncio

from pipecat.frames.frames import EndFrame, LLMRunFrame, LLMTextFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.llm import OpenAILLMService


async def get_weather(params: FunctionCallParams, city: str):
    """Tell the weather in a city now.

    Args:
        city: The city.
    """
    await params.result_callback(f"It rains in {city}, 17 degrees.")


class Printer(FrameProcessor):
    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMTextFrame):
            print(frame.text, end="", flush=True)
        await self.push_frame(frame, direction)


async def main():
    llm = OpenAILLMService(api_key="none", base_url="http://127.0.0.1:8000/v1", model="default")
    question = {"role": "user", "content": "What is the weather in Paris?"}
    pair = LLMContextAggregatorPair(LLMContext([question], tools=[get_weather]))
    task = PipelineTask(Pipeline([pair.user(), llm, Printer(), pair.assistant()]))
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    await task.queue_frame(LLMRunFrame())
    await asyncio.sleep(15)
    await task.queue_frame(EndFrame())
    await running


asyncio.run(main())
