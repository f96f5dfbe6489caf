"""Several synthesizers as one: each voice is spoken by the synthesizer that has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from antiphon.audio.pcm import Resampler
from antiphon.contracts import SpeechChunk, Synthesizer, Urgency, VoiceOptions
from antiphon.errors import ModelError


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
