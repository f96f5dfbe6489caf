"""A voice for some languages and another one for the rest: each text is spoken by the one that speaks its language.

Without another one, a text that is surely of another language is refused: read out as the voice's own it is not
understood.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from antiphon.audio.pcm import Resampler
from antiphon.contracts import SpeechChunk, Synthesizer, Urgency, VoiceOptions
from antiphon.errors import RemoteProtocolError
from antiphon.text.language import OTHERS_OF_ONE_VOICE, language_finder
from antiphon.text.markup import without_pauses

REMEDY = "apt install espeak-ng, or load a voice of that language (--synthesizer)"
# A text is of another language than the voice's own if that is at least so probable. In 373 English sentences and
# clauses of the repository none was; "Ja, gerne." is German with 0.75, "Ja." nothing with more than 0.17.
MIN_PROBABILITY = 0.7
# Without another voice a text is refused only if it is of another language with this probability, and has as many
# letters. Of 4,156 beginnings of English sentences in the documentation none was; "Guten Tag, ich" has 0.88.
MIN_REFUSED_PROBABILITY, MIN_REFUSED_LETTERS = 0.85, 10


class VoiceByLanguage:
    """A Synthesizer that speaks with `main` what is in a language of its own, and with `fallback` what is not; None:
    it refuses that.

    `likeliest`: the likeliest language of a text and its probability; None: as `language_finder` has it. Audio is at
    the rate of `main`, and word times come where `main` has them. The fallback has one voice a
    language, whatever voice is asked for.
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
        told = self.profile.languages if fallback else {*own, *OTHERS_OF_ONE_VOICE}
        self._likeliest = likeliest or language_finder(told)

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Speak a text in `options.language`, or in its own; one that does not show it, in that of what was spoken
        before it. Raises as the two do, and RemoteProtocolError (`language_not_spoken`) for what none of them speaks.
        """
        language = options.language or self._language_of(text, options.spoken_before)
        if language in self._main.profile.languages:
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

    def _language_of(self, text: str, before: str) -> str:
        own = self._main.profile.languages
        for seen in (text, f"{before} {text}") if before else (text,):
            language, probability = self._likeliest(without_pauses(seen))
            if self._fallback is None:
                is_sure = probability >= MIN_REFUSED_PROBABILITY and sum(map(str.isalpha, seen)) >= MIN_REFUSED_LETTERS
                return language if is_sure else own[0]
            if probability >= MIN_PROBABILITY and language in self.profile.languages:
                return language
        return own[0]
