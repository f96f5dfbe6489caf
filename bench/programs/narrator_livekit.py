import asyncio
import wave

from livekit.agents import tokenize, tts, utils
from livekit.plugins import openai


async def main():
    async with utils.http_context.open():
        speaks = openai.TTS(model="default", voice="heart", base_url="http://127.0.0.1:8000/v1", api_key="none",
                            response_format="pcm")  # fmt: skip
        stream = tts.StreamAdapter(tts=speaks, sentence_tokenizer=tokenize.basic.SentenceTokenizer()).stream()
        for piece in ("Once upon", " a time there was a king. ", "He had", " a daughter."):
            stream.push_text(piece)
        stream.end_input()
        with wave.open("story.wav", "wb") as file:
            file.setparams((1, 2, 24_000, 0, "NONE", ""))
            async for audio in stream:
                file.writeframes(audio.frame.data)


asyncio.run(main())
