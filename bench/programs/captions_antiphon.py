import wave

from antiphon.client import SyncClient

with wave.open("speech.wav") as file:
    rate, audio = file.getframerate(), file.readframes(file.getnframes())
with SyncClient("http://127.0.0.1:8000") as client, client.captions(rate_hz=rate) as captions:
    captions.feed(audio[at : at + rate // 5] for at in range(0, len(audio), rate // 5))
    for words in captions:
        print(words, end="", flush=True)
