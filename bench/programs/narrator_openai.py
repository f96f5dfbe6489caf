import re
import wave

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
with wave.open("story.wav", "wb") as file:
    file.setparams((1, 2, 24_000, 0, "NONE", ""))
    text = ""
    for piece in ("Once upon", " a time there was a king. ", "He had", " a daughter.", ""):
        text += piece
        *sentences, text = re.split(r"(?<=[.!?]) +", text) if piece else [text, ""]
        for sentence in sentences:
            with client.audio.speech.with_streaming_response.create(
                model="default", voice="heart", input=sentence, response_format="pcm"
            ) as response:
                for pcm in response.iter_bytes():
                    file.writeframes(pcm)
