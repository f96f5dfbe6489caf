"""A voice for some languages and another one for the rest: each text is spoken by the one that speaks its language."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from antiphon.audio.pcm import Resampler
from antiphon.contracts import SpeechChunk, Synthesizer, Urgency, VoiceOptions
from antiphon.text.language import language_finder
from antiphon.text.markup import without_pauses

# A text is of another language than the voice's own if that is at least so probable. In 373 English sentences and
# clauses of the repository none was; "Ja, gerne." is German with 0.75, "Ja." nothing with more than 0.17.
MIN_PROBABILITY = 0.7


class VoiceByLanguage:
    """A Synthesizer that speaks with `main` what is in a language of its own, and with `fallback` what is not.

    `likeliest`: the likeliest language of a text and its probability; None: as `language_finder` has it. Audio is at
    the rate of `main`, and word times come where `main` has them. The fallback has one voice a
    language, whatever voice is asked for.
    """

    def __init__(
        self, main: Synthesizer, fallback: Synthesizer, likeliest: Callable[[str], tuple[str, float]] | None = None
    ) -> None:
        self._main, self._fallback = main, fallback
        own = main.profile.languages
        self.profile = replace(
            main.profile, languages=(*own, *(code for code in fallback.profile.languages if code not in own))
        )
        self._likeliest = likeliest or language_finder(self.profile.languages)

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Speak a text in `options.language`, or in its own; one that does not show it, in that of what was spoken
        before it. Raises as the two do.
        """
        language = options.language or self._language_of(text, options.spoken_before)
        if language in self._main.profile.languages:
            async with aclosing(self._main.speak(text, options, urgency)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        other = replace(options, voice=self._fallback.profile.voices[0], language=language)
        resampler = Resampler(self._fallback.profile.sample_rate_hz, self.profile.sample_rate_hz)
        async with aclosing(self._fallback.speak(text, other, urgency)) as chunks:
            async for chunk in chunks:
                words = chunk.words if self.profile.word_times else ()
                yield replace(chunk, pcm=resampler.feed(chunk.pcm), words=words)
        yield SpeechChunk(resampler.flush())

    def _language_of(self, text: str, before: str) -> str:
        own = self._main.profile.languages
        for seen in (text, f"{before} {text}") if before else (text,):
            language, probability = self._likeliest(without_pauses(seen))
            if probability >= MIN_PROBABILITY and language in self.profile.languages:
                return language
        return own[0]
