"""Whisper on recordings that make it loop or hallucinate: noise, sequences of short commands, and real repetitions."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from bench.hearing.files import cues_off_s, with_pauses
from faster_whisper import WhisperModel

from antiphon.adapters.whisper import decoder
from antiphon.audio import Pcm
from antiphon.contracts import FileOptions, TranscriptSegment, Window, one_slab
from antiphon.events.transcription import AppendAudio, ServerVad, TranscriptDone, TranscriptionConfig
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import TRANSCRIPTION_ROLES
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.file_speech import segments_by_words, transcribe_speech
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.settings import load as load_settings
from tests.conftest import Recording

# The tests load the default models.
pytestmark = pytest.mark.slow

Recordings = dict[str, Recording]
COMMANDS = ("ps-cards-001", "ps-cards-003", "tau2-yes", "tau2-help-me", "tau2-hi-how-are-you")
ORDER = ("ps-cards-003", "tau2-no", "tau2-check-order-12345")
# Without the guard, Whisper writes "No! No! No! No! No!", "Now we're going to add the meat." and "Yeah". The VAD takes
# the sneeze for speech.
DOG, RAIN, SNEEZE = "esc10-001-2-114280-A", "esc10-002-2-101676-A", "esc10-006-2-109505-A"
NOISE = (DOG, RAIN, SNEEZE, "librosa-trumpet")


@pytest.fixture(scope="module")
def models() -> Iterator[LoadedModels]:
    settings = load_settings({}, os.environ)
    loaded = load(settings, store_of(settings.models), roles=TRANSCRIPTION_ROLES)
    yield loaded
    loaded.close()


def in_a_row(recordings: Recordings, ids: tuple[str, ...], gap_s: float) -> Pcm:
    gap = np.zeros(int(gap_s * 16000), np.float32)
    return np.concatenate([pcm for i in ids for pcm in (recordings[i].pcm, gap)])


def bare(text: str) -> str:
    return " ".join(re.findall(r"[\w']+", text.lower()))


def final(models: LoadedModels, pcm: Pcm, *, word_times: bool = False) -> str:
    window = Window(pcm, language="en", final=True, word_times=word_times)
    found = asyncio.run(models.required_transcriber.open().decode(window))
    assert not found.words or [w.text for w in found.words] == [p.text.strip() for p in found.pieces]
    return bare("".join(p.text for p in found.pieces))


async def segments(models: LoadedModels, pcm: Pcm, prompt: str = "", *, detect: bool = True) -> list[TranscriptSegment]:
    options, transcriber = FileOptions(language="en", prompt=prompt), models.required_transcriber
    parts = transcriber.transcribe(one_slab(pcm), options)
    if detect:
        parts = transcribe_speech(transcriber, models.required_vad, one_slab(pcm), options)
    return [p async for p in parts if isinstance(p, TranscriptSegment)]


@pytest.mark.parametrize(
    ("ids", "gap_s", "word_times", "once"),
    [(COMMANDS, 0.2, False, "can you help me with something"), (ORDER, 0.05, True, "can you check the status")],
    ids=["commands", "order"],
)
def test_commands_said_in_a_row_come_once(
    models: LoadedModels, recordings: Recordings, ids: tuple[str, ...], gap_s: float, word_times: bool, once: str
) -> None:
    heard = final(models, in_a_row(recordings, ids, gap_s), word_times=word_times)
    assert heard.count(once) == 1
    assert heard.startswith(("ten of", "seven of"))


def test_what_is_really_said_again_stays(models: LoadedModels, recordings: Recordings) -> None:
    thrice = final(models, in_a_row(recordings, ("tau2-no", "tau2-no", "tau2-no"), 0.1))
    assert thrice == "no no no"
    twice = final(models, in_a_row(recordings, ("tau2-help-me", "tau2-help-me"), 0.2))
    assert twice == "can you help me with something can you help me with something"
    numbers = final(models, in_a_row(recordings, ("ps-cards-004", "ps-cards-003"), 0.2))
    assert numbers.startswith(("five five", "5 5"))


@pytest.mark.parametrize("name", NOISE)
def test_noise_in_a_file_gives_no_words(models: LoadedModels, recordings: Recordings, name: str) -> None:
    assert asyncio.run(segments(models, recordings[name].pcm)) == []


@pytest.mark.parametrize("sound", ["zeros", "rain"])
def test_without_detection_silence_and_rain_give_no_words(
    models: LoadedModels, recordings: Recordings, sound: str
) -> None:
    pcm = np.zeros(5 * 16000, np.float32) if sound == "zeros" else recordings[RAIN].pcm
    assert asyncio.run(segments(models, pcm, detect=False)) == []


@pytest.mark.parametrize("prompt", ["", "Anna, Bob, Hamburg", "The results were presented by Dr. Elena Marchetti."])
@pytest.mark.parametrize("peak_db", [-3, -42])
def test_a_prompt_and_a_low_level_take_no_word_away(
    models: LoadedModels, recordings: Recordings, prompt: str, peak_db: int
) -> None:
    pcm = recordings["tau2-no"].pcm
    pcm = np.round(pcm / np.abs(pcm).max() * 10 ** (peak_db / 20) * 32768).astype(np.float32) / 32768
    assert bare("".join(s.text for s in asyncio.run(segments(models, pcm, prompt)))) == "no"


def test_what_is_no_speech_is_decoded_a_bounded_number_of_times(
    models: LoadedModels, recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of a sneeze, with a requested language, is decoded in at most two windows, each at two temperatures."""
    max_tokens = list[int]()
    original = WhisperModel.generate_with_fallback

    class Counting:
        def __init__(self, model: Any) -> None:
            self._model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self._model, name)

        def generate(self, features: object, prompts: list[list[int]], **options: int) -> object:
            max_tokens.append(options["max_length"] - len(prompts[0]))
            return self._model.generate(features, prompts, **options)

    def counted(whisper: WhisperModel, *arguments: Any) -> Any:
        model = whisper.model
        whisper.model = Counting(model)
        try:
            return original(whisper, *arguments)
        finally:
            whisper.model = model

    monkeypatch.setattr(WhisperModel, "generate_with_fallback", counted)
    asyncio.run(segments(models, recordings[SNEEZE].pcm[:16000], detect=False))
    assert 1 <= len(max_tokens) <= 6
    assert max(max_tokens) <= 30


def test_cues_begin_with_their_speech_behind_pauses(models: LoadedModels, recordings: Recordings) -> None:
    clips = [recordings[name].pcm for name in ("lj-LJ001-0002", "tau2-help-me")]
    sound = [np.flatnonzero(np.abs(pcm) > 0.03) for pcm in clips]
    pcm, spans = with_pauses([pcm[s[0] : s[-1]] for pcm, s in zip(clips, sound, strict=True)], 0.6)
    options = FileOptions(language="en", word_times=True)
    parts = transcribe_speech(models.required_transcriber, models.required_vad, one_slab(pcm), options)

    async def cues() -> list[TranscriptSegment]:
        return [p async for p in segments_by_words(parts) if isinstance(p, TranscriptSegment)]

    found = asyncio.run(cues())
    off_s = cues_off_s([s.start_s for s in found], spans)
    assert len(off_s) >= 2
    assert max(off_s) <= 0.3
    assert all(b.start_s - a.end_s < 1.5 for s in found for a, b in pairwise(s.words))


def test_speech_between_noise_is_heard_with_the_times_of_the_file(models: LoadedModels, recordings: Recordings) -> None:
    order = recordings["tau2-check-order-12345"].pcm
    pcm = np.concatenate([recordings[i].pcm for i in (DOG, RAIN)] + [order, recordings[RAIN].pcm])
    heard = asyncio.run(segments(models, pcm))
    assert bare("".join(s.text for s in heard)).startswith("can you check the status of my order number")
    assert all(9.5 < s.start_s < s.end_s < 14.5 for s in heard)


def test_noise_in_a_live_session_gives_no_words(models: LoadedModels, recordings: Recordings) -> None:
    async def main() -> list[str]:
        inbox, texts = Inbox(60.0), list[str]()

        async def emit(event: object) -> None:
            if isinstance(event, TranscriptDone):
                texts.append(event.text)

        config = TranscriptionConfig(language="en", vad=ServerVad())
        await inbox.put(AppendAudio(in_a_row(recordings, NOISE, 0.7)))
        inbox.close()
        await TranscriptionSession(config, models.required_transcriber, models.required_vad, inbox, emit).run()
        return texts

    assert "".join(asyncio.run(main())) == ""


@pytest.mark.parametrize("languages", [(), ("en", "ar")])
def test_speech_that_is_taken_for_another_language_is_not_dropped_as_noise(
    models: LoadedModels, recordings: Recordings, monkeypatch: pytest.MonkeyPatch, languages: tuple[str, ...]
) -> None:
    # An accent does this to the detection; here it is replaced. The words in that language are very unlikely.
    monkeypatch.setattr(decoder, "chosen_language", lambda *_: ("ar", 0.6))

    def decoded(pcm: Pcm, **settings: Any) -> tuple[str, str, bool]:
        window = Window(pcm, final=True, **settings)
        found = asyncio.run(models.required_transcriber.open().decode(window))
        return "".join(p.text for p in found.pieces).strip(), found.language, found.is_speech

    speech = recordings["lj-LJ001-0002"].pcm
    text, language, is_speech = decoded(speech, languages=languages)
    assert (bare(text), language, is_speech) == ("in being comparatively modern", "en", True)
    # A language that was set is kept, and noise does not become words.
    assert decoded(speech, language="ar")[1:] == ("ar", False)
    for name in NOISE:
        assert not decoded(recordings[name].pcm)[2]
