import base64
import wave

from openai import OpenAI

with wave.open("speech.wav") as file:
    rate, audio = file.getframerate(), file.readframes(file.getnframes())
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
with client.realtime.connect(model="default", extra_query={"intent": "transcription"}) as connection:
    audio_input = {"format": {"type": "audio/pcm", "rate": rate}, "turn_detection": None}
    connection.session.update(session={"type": "transcription", "audio": {"input": audio_input}})
    for at in range(0, len(audio), rate // 5):
        connection.input_audio_buffer.append(audio=base64.b64encode(audio[at : at + rate // 5]).decode())
    connection.input_audio_buffer.commit()
    for event in connection:
        if event.type == "conversation.item.input_audio_transcription.delta":
            print(event.delta, end="", flush=True)
        elif event.type == "conversation.item.input_audio_transcription.completed":
            break
