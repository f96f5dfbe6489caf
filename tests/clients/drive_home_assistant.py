"""Home Assistant's own Wyoming classes, without a Home Assistant around them: its service, STT and TTS entities."""

import asyncio
import io
import sys
import wave
from types import SimpleNamespace

import soundfile
from homeassistant.components import stt, tts
from homeassistant.components.wyoming.data import WyomingService
from homeassistant.components.wyoming.stt import WyomingSttProvider
from homeassistant.components.wyoming.tts import WyomingTtsProvider
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


async def main(uri: str, path: str) -> None:
    host, _, port = uri.removeprefix("tcp://").rpartition(":")
    service = await WyomingService.create(host, int(port))
    assert service, "cannot connect"
    assert service.info.asr[0].name == "antiphon"
    tasks = []
    entry = SimpleNamespace(
        entry_id="e",
        title="antiphon",
        async_create_background_task=lambda hass, work, name: tasks.append(asyncio.create_task(work, name=name)),
    )
    ears = WyomingSttProvider(entry, service)
    metadata = stt.SpeechMetadata(
        language="en",
        format=stt.AudioFormats.WAV,
        codec=stt.AudioCodecs.PCM,
        bit_rate=stt.AudioBitRates.BITRATE_16,
        sample_rate=stt.AudioSampleRates.SAMPLERATE_16000,
        channel=stt.AudioChannels.CHANNEL_MONO,
    )
    assert ears.check_metadata(metadata)
    async with asyncio.timeout(LIMIT_S):
        heard = await ears.async_process_audio_stream(metadata, sound(path))
    assert heard.result is stt.SpeechResultState.SUCCESS
    assert heard.text
    voice = WyomingTtsProvider(entry, service)
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
    print(f"home assistant {__version__}: {heard.text!r}, {seconds:.1f} s of speech, {streamed_s:.1f} s streamed")


asyncio.run(main(sys.argv[1], sys.argv[2]))
