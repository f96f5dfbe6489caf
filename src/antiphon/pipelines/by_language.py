"""Several synthesizers as one, and the choice of a voice by the language of each text: the requested voice, another
voice that speaks the language, or a fallback voice for all other languages.

Without a fallback, a text that is surely in another language is refused, because the voice would read it
unintelligibly.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from antiphon.audio.pcm import Resampler
from antiphon.contracts import SpeechChunk, Synthesizer, Urgency, VoiceOptions
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.text.language import OTHERS_OF_ONE_VOICE, language_finder
from antiphon.text.markup import without_pauses

REMEDY = "apt install espeak-ng, or load a voice of that language (--synthesizer)"
# Minimum probability at which a text counts as a language other than the voice's own. None of 373 English sentences and
# clauses of the repository reached it. "Ja, gerne." is German with 0.75; "Ja." has at most 0.17 for any language.
MIN_PROBABILITY = 0.7
# Without a fallback, a text is refused only if the probability of another language is at least MIN_REFUSED_PROBABILITY
# and the text has MIN_REFUSED_LETTERS letters. None of 4,156 beginnings of English sentences in the documentation was
# refused. "Guten Tag, ich" has 0.88.
MIN_REFUSED_PROBABILITY, MIN_REFUSED_LETTERS = 0.85, 10


class SeveralVoices:
    """A Synthesizer with the voices and languages of all `parts`. The first part has the default voice.

    Its id and its sample rate are those of the first part. The parts take whole texts and clone no voices.
    """

    def __init__(self, parts: Sequence[Synthesizer]) -> None:
        """Raises ModelError if two parts have voices of the same name."""
        self._part_of: dict[str, Synthesizer] = {}
        for part in parts:
            for name in part.profile.voices:
                if name in self._part_of:
                    ids = (self._part_of[name].profile.id, part.profile.id)
                    raise ModelError(f"{' and '.join(ids)} both have a voice {name}")
                self._part_of[name] = part
        profiles = [part.profile for part in parts]
        self.profile = replace(
            profiles[0],
            voices=tuple(self._part_of),
            languages=tuple(dict.fromkeys(code for one in profiles for code in one.languages)),
            speeds=(max(one.speeds[0] for one in profiles), min(one.speeds[1] for one in profiles)),
            word_times=all(one.word_times for one in profiles),
            voice_languages={name: part.profile.languages_of(name) for name, part in self._part_of.items()},
        )

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Speak a text by the part that has the voice. Raises the errors of the part."""
        part = self._part_of[options.voice]
        resampler = Resampler(part.profile.sample_rate_hz, self.profile.sample_rate_hz)
        async with aclosing(part.speak(text, options, urgency)) as chunks:
            async for chunk in chunks:
                yield replace(chunk, pcm=resampler.feed(chunk.pcm))
        if len(rest := resampler.flush()):
            yield SpeechChunk(rest)


class VoiceByLanguage:
    """A Synthesizer that speaks the languages of `main` with `main`, and others with `fallback`. Without a `fallback`,
    it refuses other languages. If the requested voice of `main` does not speak a language, the first one that does
    speaks it.

    Audio has the rate of `main`, and word times are available if `main` has them. The fallback has one voice for each
    language, regardless of the requested voice.

    `likeliest` returns the likeliest language of a text and its probability. If it is None, `language_finder` is used.
    """

    def __init__(
        self,
        main: Synthesizer,
        fallback: Synthesizer | None,
        likeliest: Callable[[str], tuple[str, float]] | None = None,
    ) -> None:
        self._main, self._fallback = main, fallback
        own = main.profile.languages
        more = fallback.profile.languages if fallback else ()
        self.profile = replace(main.profile, languages=(*own, *(code for code in more if code not in own)))
        candidates = self.profile.languages if fallback else {*own, *OTHERS_OF_ONE_VOICE}
        self._likeliest = likeliest or language_finder(candidates)

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Speak a text in `options.language`, or in the detected language.

        If the text is too short to detect its language, the text that was spoken before it is used too. Raises the
        errors of both voices, and RemoteProtocolError (`language_not_spoken`) if neither voice speaks the language.
        """
        language = options.language or self._language_of(text, options)
        profile = self._main.profile
        if language in profile.languages:
            if language not in profile.languages_of(options.voice):
                voice = next(name for name in profile.voices if language in profile.languages_of(name))
                options = replace(options, voice=voice)
            async with aclosing(self._main.speak(text, options, urgency)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        if self._fallback is None:
            spoken = ", ".join(self.profile.languages)
            message = f"the text is in another language ({language}) than the loaded voice speaks ({spoken}); {REMEDY}"
            raise RemoteProtocolError("language_not_spoken", message, "input")
        other = replace(options, voice=self._fallback.profile.voices[0], language=language)
        resampler = Resampler(self._fallback.profile.sample_rate_hz, self.profile.sample_rate_hz)
        async with aclosing(self._fallback.speak(text, other, urgency)) as chunks:
            async for chunk in chunks:
                words = chunk.words if self.profile.word_times else ()
                yield replace(chunk, pcm=resampler.feed(chunk.pcm), words=words)
        yield SpeechChunk(resampler.flush())

    def _language_of(self, text: str, options: VoiceOptions) -> str:
        before, own = options.spoken_before, self._main.profile.languages_of(options.voice)
        for seen in (text, f"{before} {text}") if before else (text,):
            language, probability = self._likeliest(without_pauses(seen))
            if self._fallback is None and language not in self.profile.languages:
                is_sure = probability >= MIN_REFUSED_PROBABILITY and sum(map(str.isalpha, seen)) >= MIN_REFUSED_LETTERS
                return language if is_sure else own[0]
            if probability >= MIN_PROBABILITY and language in self.profile.languages:
                return language
        return own[0]
