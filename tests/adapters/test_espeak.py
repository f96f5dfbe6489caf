"""eSpeak NG as a voice, and the choice between it and a neural voice by the language of a text."""

from __future__ import annotations

import asyncio
import functools
import shutil
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from antiphon.adapters import espeak as module
from antiphon.adapters.espeak_ng.synthesizer import LANGUAGES, RATE_HZ, Espeak
from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio.pcm import from_pcm16
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.pipelines.by_language import VoiceByLanguage
from antiphon.text.language import OTHERS_OF_ONE_VOICE, language_finder

needs_espeak = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng (Debian)")
GERMAN = "Guten Tag. Ich wohne in Berlin."


def spoken(voice: Any, text: str, **options: Any) -> list[SpeechChunk]:
    async def main() -> list[SpeechChunk]:
        asked = VoiceOptions(voice.profile.voices[0], **options)
        async with aclosing(voice.speak(text, asked, lambda: Urgency.FINAL)) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.run(main())


@pytest.fixture
def espeak() -> Any:
    voice = Espeak(LaneModelOptions())
    yield voice
    voice.lane.close()


@needs_espeak
def test_a_sentence_is_what_the_program_makes_of_it(espeak: Espeak) -> None:
    chunks = spoken(espeak, GERMAN, language="de")
    command = ["espeak-ng", "-v", "de", "-s", "150", "--stdout"]
    for chunk, sentence in zip(chunks, ("Guten Tag.", "Ich wohne in Berlin."), strict=True):
        wav = subprocess.run([*command, sentence], capture_output=True, check=True).stdout
        assert np.array_equal(chunk.pcm, from_pcm16(wav[44:]))
        assert [w.text for w in chunk.words] == sentence.split() or len(chunks) > 1
    words = [w for chunk in chunks for w in chunk.words]
    assert [w.text for w in words] == GERMAN.split()
    ends = [w.end_s for w in words]
    assert ends == sorted(ends)
    # The words share the audio in proportion to their letters, and the last word has no extra time.
    assert max(w.end_s - w.start_s for w in words) < 0.5 * ends[-1]
    assert ends[-1] == pytest.approx(sum(len(c.pcm) for c in chunks) / RATE_HZ, abs=0.01)


@needs_espeak
def test_all_of_its_languages_are_spoken_and_a_tempo_is_kept(espeak: Espeak) -> None:
    for language in LANGUAGES:
        assert sum(len(c.pcm) for c in spoken(espeak, "1 2 3", language=language)) > RATE_HZ // 4, language
    slow, fast = (len(spoken(espeak, "Guten Tag.", language="de", speed=s)[0].pcm) for s in (0.5, 2.0))
    assert slow > 2 * fast
    # A text that looks like a flag of the program is spoken.
    assert spoken(espeak, "-h", language="de")[0].pcm.any()


def test_without_the_program_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAM", "no-such-program")
    with pytest.raises(ModelError, match="apt install"):
        Espeak(LaneModelOptions())


class Voice:
    """A voice with constant samples that identify it."""

    def __init__(self, level: float, languages: tuple[str, ...], rate_hz: int = 24_000) -> None:
        self.level, self.asked = level, list[VoiceOptions]()
        self.profile = SynthesizerProfile(f"voice{level}", rate_hz, (f"v{level}",), languages, (0.5, 2.0), True)

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.asked.append(options)
        yield SpeechChunk(np.full(self.profile.sample_rate_hz // 10, self.level, np.float32))


@pytest.fixture(scope="module")
def likeliest() -> Callable[[str], tuple[str, float]]:
    return language_finder(("en", *LANGUAGES))


@pytest.mark.parametrize(
    ("text", "before", "language", "spoken_by_main"),
    [
        ("The weather will be mild tomorrow.", "", None, True),
        (GERMAN, "", None, False),
        ("Hola, me llamo Ana y vivo en Madrid.", "", None, False),
        ("La capitale de la France est Paris.", "", None, False),
        ("Buongiorno, come stai?", "", None, False),
        ("Obrigado, tudo bem.", "", None, False),
        # A text without a clear language is spoken like the preceding text, or by the loaded voice.
        ("Paris.", "", None, True),
        ("Paris.", "La capitale de la France est une grande ville.", None, False),
        ("Paris.", "The capital of France is a large city.", None, True),
        # An explicit language is used.
        ("Paris.", "", "de", False),
        (GERMAN, "", "en", True),
        # A language without a voice is spoken by the loaded voice.
        ("ご飯を食べました。", "", None, True),
        ("今日は良い天気です", "", None, True),
        ("你好,今天天气很好。", "", None, True),
        ("안녕하세요, 반갑습니다.", "", None, False),
    ],
)
def test_each_text_is_spoken_by_the_voice_of_its_language(
    text: str, before: str, language: str | None, spoken_by_main: bool, likeliest: Callable[[str], tuple[str, float]]
) -> None:
    main, other = Voice(0.1, ("en",)), Voice(0.2, tuple(LANGUAGES), 22_050)
    voice = VoiceByLanguage(main, other, likeliest)
    pcm = np.concatenate([c.pcm for c in spoken(voice, text, language=language, spoken_before=before)])
    assert len(pcm) == pytest.approx(2400, abs=5)
    assert float(np.median(pcm)) == pytest.approx(0.1 if spoken_by_main else 0.2, abs=0.01)
    if not spoken_by_main:
        (asked,) = other.asked
        assert asked.voice == "v0.2"
        assert asked.language is not None


@pytest.mark.parametrize(
    ("text", "is_spoken"),
    [
        (GERMAN, False),
        ("Guten Tag, ich", False),
        ("Bonjour, je suis votre assistant.", False),
        ("The weather will be mild tomorrow.", True),
        ("Dr. Müller lives in Berlin.", True),
        ("Paris.", True),
        ("Ja, gerne.", True),
        ("Prost!", True),
    ],
)
def test_without_another_voice_what_is_surely_of_another_language_is_refused(text: str, is_spoken: bool) -> None:
    main = Voice(0.1, ("en",))
    voice = VoiceByLanguage(main, None, only_english())
    assert voice.profile == main.profile
    if is_spoken:
        assert len(np.concatenate([c.pcm for c in spoken(voice, text)]))
        return
    with pytest.raises(RemoteProtocolError, match="apt install espeak-ng, or load") as refused:
        spoken(voice, text)
    assert (refused.value.code, refused.value.param) == ("language_not_spoken", "input")


@functools.cache
def only_english() -> Callable[[str], tuple[str, float]]:
    return language_finder({"en", *OTHERS_OF_ONE_VOICE})


def test_it_speaks_the_languages_of_both_at_the_rate_of_the_first(
    likeliest: Callable[[str], tuple[str, float]],
) -> None:
    main = Voice(0.1, ("en", "de"))
    voice = VoiceByLanguage(main, Voice(0.2, ("de", "fr"), 22_050), likeliest)
    assert voice.profile == replace(main.profile, languages=("en", "de", "fr"))


def test_no_english_sentence_of_the_repository_is_taken_for_another_language(
    likeliest: Callable[[str], tuple[str, float]], recordings: dict[str, Any]
) -> None:
    main, other = Voice(0.1, ("en",)), Voice(0.2, tuple(LANGUAGES))
    voice = VoiceByLanguage(main, other, likeliest)
    texts = [r.text for r in recordings.values() if r.text and r.language in ("en", "")]
    assert len(texts) >= 15
    for text in texts:
        spoken(voice, text)
    assert not other.asked
