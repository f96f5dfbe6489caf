"""Home Assistant's classes as a pipeline, for `antiphon bench wyoming`: speech to text, conversation, streamed speech.

    time_home_assistant.py URI COMMANDS.json OUT.json

COMMANDS.json has the spoken commands: the WAV file (`path`), and the seconds to the end of speech in it (`end_s`). They
are played in real time. For each, OUT.json gets the texts, and the seconds from the end of speech to the transcript, to
the answer's text, and to the first sound of the answer.
"""

import asyncio
import json
import sys
import tempfile
import time
import wave
from pathlib import Path

from home_assistant import METADATA, Entities
from homeassistant.components import stt, tts

CHUNK_SAMPLES, RATE_HZ, HEADER_BYTES = 1024, 16_000, 44


async def played(path: str, began_s: float):
    with wave.open(path) as file:
        assert file.getframerate() == RATE_HZ
        number = 0
        while data := file.readframes(CHUNK_SAMPLES):
            number += 1
            # A chunk is complete when its last sample was said.
            await asyncio.sleep(max(0.0, began_s + number * CHUNK_SAMPLES / RATE_HZ - time.perf_counter()))
            yield data


async def once(text: str):
    yield text


async def main(uri: str, commands: list[dict], folder: str) -> list[dict]:
    entities = await Entities.of(uri, folder)
    options = {"voice": entities.voice.async_get_supported_voices("en")[0].voice_id}
    found = []
    for number, command in enumerate(commands):
        began_s = time.perf_counter()
        end_s = began_s + command["end_s"]
        heard = await entities.ears.async_process_audio_stream(METADATA, played(command["path"], began_s))
        assert heard.result is stt.SpeechResultState.SUCCESS
        transcript_s = time.perf_counter() - end_s
        answer = await entities.ask(heard.text, f"c{number}")
        handled_s = time.perf_counter() - end_s
        speech = await entities.voice.async_stream_tts_audio(tts.TTSAudioRequest("en", options, once(answer)))
        size, first_sound_s = 0, 0.0
        async for chunk in speech.data_gen:
            size += len(chunk)
            if not first_sound_s and size > HEADER_BYTES:
                first_sound_s = time.perf_counter() - end_s
        times = {"transcript_s": transcript_s, "handled_s": handled_s, "first_sound_s": first_sound_s}
        found.append({"said": command["text"], "heard": heard.text, "answer": answer, **times})
    await entities.hass.async_stop(force=True)
    return found


with tempfile.TemporaryDirectory() as made:
    given = json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[3]).write_text(json.dumps(asyncio.run(main(sys.argv[1], given, made))))
