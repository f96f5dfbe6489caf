import wave

from antiphon.client import SyncClient

with SyncClient("http://127.0.0.1:8000") as client, client.speech() as narrator, wave.open("story.wav", "wb") as file:
    file.setparams((1, 2, 24_000, 0, "NONE", ""))
    for piece in ("Once upon", " a time there was a king. ", "He had", " a daughter."):
        narrator.say(piece)
    narrator.finish()
    for audio in narrator:
        file.writeframes(audio.pcm)
