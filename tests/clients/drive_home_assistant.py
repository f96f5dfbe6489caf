"""Home Assistant's own Wyoming classes: its service, and its entities for STT, TTS, streamed TTS and conversations."""

import asyncio
import io
import sys
import tempfile
import wave

import soundfile
from home_assistant import METADATA, Entities
from homeassistant.components import stt, tts
from homeassistant.const import __version__

LIMIT_S = 60
CHUNK_SAMPLES = 1024


async def sound(path: str):
    samples, rate = soundfile.read(path, dtype="int16")
    assert rate == 16_000
    for at in range(0, len(samples), CHUNK_SAMPLES):
        yield samples[at : at + CHUNK_SAMPLES].tobytes()


async def pieces(text: str):
    for word in text.split():
        yield f"{word} "


async def main(uri: str, path: str, folder: str) -> None:
    entities = await Entities.of(uri, folder)
    assert entities.ears.check_metadata(METADATA)
    async with asyncio.timeout(LIMIT_S):
        heard = await entities.ears.async_process_audio_stream(METADATA, sound(path))
    assert heard.result is stt.SpeechResultState.SUCCESS
    assert heard.text
    voice = entities.voice
    assert "en" in voice.supported_languages
    names = [v.voice_id for v in voice.async_get_supported_voices("en")]
    async with asyncio.timeout(LIMIT_S):
        kind, data = await voice.async_get_tts_audio("The light is on.", "en", {"voice": names[0]})
    assert kind == "wav"
    with wave.open(io.BytesIO(data)) as file:
        seconds = file.getnframes() / file.getframerate()
    assert 0.5 < seconds < 5, seconds
    streamed_s = 0.0
    if hasattr(tts, "TTSAudioRequest"):
        # Newer versions send the text in pieces.
        assert voice.async_supports_streaming_input()
        async with asyncio.timeout(LIMIT_S):
            request = tts.TTSAudioRequest("en", {"voice": names[0]}, pieces("The light is on. Good night."))
            answer = await voice.async_stream_tts_audio(request)
            streamed = b"".join([chunk async for chunk in answer.data_gen])
        assert streamed[:4] == b"RIFF"
        streamed_s = len(streamed[44:]) / 2 / file.getframerate()
        assert seconds < streamed_s < 4 * seconds, (seconds, streamed_s)
    remembered = ""
    if entities.agent:
        async with asyncio.timeout(LIMIT_S):
            await entities.ask("My name is Ada. Answer in one short sentence.", "c1")
            remembered = await entities.ask("What is my name?", "c1")
        assert "Ada" in remembered, remembered
    await entities.hass.async_stop(force=True)
    print(
        f"home assistant {__version__}: {heard.text!r}, {seconds:.1f} s of speech, {streamed_s:.1f} s streamed, "
        f"{remembered!r}"
    )


with tempfile.TemporaryDirectory() as made:
    asyncio.run(main(sys.argv[1], sys.argv[2], made))
