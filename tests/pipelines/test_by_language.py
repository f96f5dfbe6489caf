"""Several synthesizers as one, and the voice that a text's language chooses among their voices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from antiphon.contracts import SpeechChunk, Synthesizer, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.events.words import Word
from antiphon.pipelines.by_language import SeveralVoices, VoiceByLanguage


class Voice:
    """A synthesizer that speaks a tenth of a second of its level, in the languages of its voices."""

    def __init__(self, level: float, voices: dict[str, str], rate_hz: int = 24_000) -> None:
        self.level, self.asked = level, list[tuple[str, str]]()
        languages = tuple(dict.fromkeys(voices.values()))
        by_voice = {name: (code,) for name, code in voices.items()}
        self.profile = SynthesizerProfile(
            f"voice{level}", rate_hz, tuple(voices), languages, (level, 2.0), True, voice_languages=by_voice
        )

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.asked.append((options.voice, text))
        word = Word(text, 0.0, 0.1, 1.0)
        yield SpeechChunk(np.full(self.profile.sample_rate_hz // 10, self.level, np.float32), (word,))


def spoken(voice: Synthesizer, text: str, name: str, **options: Any) -> list[SpeechChunk]:
    async def main() -> list[SpeechChunk]:
        async with aclosing(voice.speak(text, VoiceOptions(name, **options), lambda: Urgency.FINAL)) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.run(main())


def test_they_have_the_voices_and_languages_of_all_and_each_speaks_its_own_at_one_rate() -> None:
    english, others = Voice(0.2, {"ann": "en"}), Voice(0.4, {"eva": "de", "joe": "en", "ida": "fr"}, 16_000)
    voice = SeveralVoices([english, others])
    profile = voice.profile
    assert (profile.id, profile.sample_rate_hz, profile.speeds) == ("voice0.2", 24_000, (0.4, 2.0))
    assert (profile.voices, profile.languages) == (("ann", "eva", "joe", "ida"), ("en", "de", "fr"))
    assert profile.languages_of("eva") == ("de",)
    for name, level in (("ann", 0.2), ("joe", 0.4)):
        chunks = spoken(voice, "Hello", name)
        pcm = np.concatenate([chunk.pcm for chunk in chunks])
        assert len(pcm) == pytest.approx(2400, abs=5)
        assert float(np.median(pcm)) == pytest.approx(level, abs=0.01)
        assert chunks[0].words == (Word("Hello", 0.0, 0.1, 1.0),)
    assert (english.asked, others.asked) == ([("ann", "Hello")], [("joe", "Hello")])


def test_two_voices_of_one_name_are_refused() -> None:
    with pytest.raises(ModelError, match=r"voice0\.1 and voice0\.2 both have a voice ann"):
        SeveralVoices([Voice(0.1, {"ann": "en"}), Voice(0.2, {"ann": "de"})])


# Each text is its own language and its probability.
LIKELIEST = {"Hallo": ("de", 0.9), "Hello": ("en", 0.9), "Paris": ("fr", 0.4), "Hallo Paris": ("de", 0.8)}
LIKELIEST |= {"Witam serdecznie": ("pl", 0.99), "Witam": ("pl", 0.99)}


@pytest.mark.parametrize(
    ("text", "named", "options", "speaks"),
    [
        ("Hello", "ann", {}, "ann"),
        # The requested voice speaks its own language, and the first voice of another language speaks that.
        ("Hello", "joe", {}, "joe"),
        ("Hallo", "ann", {}, "eva"),
        ("Hello", "eva", {}, "ann"),
        ("Hello", "ann", {"language": "de"}, "eva"),
        # A text of no clear language is spoken like the text before it, or by the requested voice.
        ("Paris", "eva", {}, "eva"),
        ("Paris", "ann", {"spoken_before": "Hallo"}, "eva"),
        ("Paris", "ann", {"language": "fr"}, "ida"),
        # Too short to be refused.
        ("Witam", "eva", {}, "eva"),
    ],
)
def test_the_language_of_a_text_finds_the_voice(text: str, named: str, options: Any, speaks: str) -> None:
    parts = (Voice(0.2, {"ann": "en"}), Voice(0.4, {"eva": "de", "joe": "en", "ida": "fr"}))
    spoken(VoiceByLanguage(SeveralVoices(parts), None, LIKELIEST.__getitem__), text, named, **options)
    assert parts[0].asked + parts[1].asked == [(speaks, text)]


def test_a_language_that_no_voice_speaks_is_spoken_by_the_fallback_or_refused() -> None:
    main, fallback = Voice(0.2, {"ann": "en", "eva": "de"}), Voice(0.4, {"rules": "pl"})
    spoken(VoiceByLanguage(main, fallback, LIKELIEST.__getitem__), "Witam serdecznie", "eva")
    assert (main.asked, fallback.asked) == ([], [("rules", "Witam serdecznie")])
    with pytest.raises(RemoteProtocolError, match=r"another language \(pl\) than the loaded voice speaks \(en, de\)"):
        spoken(VoiceByLanguage(main, None, LIKELIEST.__getitem__), "Witam serdecznie", "eva")
