"""Models of this process that continue while the servers of a voice or of a conversation model fail (`--fallback`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler
from antiphon.contracts import (
    ConversationModel,
    ConversationStream,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    SpeechChunk,
    Synthesizer,
    TextDelta,
    Urgency,
    VoiceOptions,
)
from antiphon.errors import AntiphonError, Refused, RemoteError
from antiphon.events.tools import Tool
from antiphon.pipelines.cascade import Cascade
from antiphon.pipelines.sentences import NO_AUDIO

log = logging.getLogger(__name__)


class VoiceWithFallback:
    """A Synthesizer on other servers, `main`, and one that speaks the texts for which its servers fail.

    A text that fails after its first sound is not repeated. Its audio has the rate of `main`. It owns both voices.
    """

    def __init__(self, main: Synthesizer, fallback: Synthesizer) -> None:
        self.profile = main.profile
        self._main, self._fallback = main, fallback

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Speak a text with the main voice, or with the fallback's default voice. Raises the errors of both."""
        has_begun = False
        try:
            async with aclosing(self._main.speak(text, options, urgency)) as chunks:
                async for chunk in chunks:
                    has_begun = True
                    yield chunk
            return
        except (RemoteError, Refused) as error:
            if has_begun:
                raise
            log.info("%s speaks for %s: %s", self._fallback.profile.id, self.profile.id, error)
        other = replace(options, voice=self._fallback.profile.voices[0])
        resampler = Resampler(self._fallback.profile.sample_rate_hz, self.profile.sample_rate_hz)
        async with aclosing(self._fallback.speak(text, other, urgency)) as chunks:
            async for chunk in chunks:
                yield replace(chunk, pcm=resampler.feed(chunk.pcm), words=())
        yield SpeechChunk(resampler.flush())

    @property
    def engines(self) -> tuple[Any, ...]:
        """The engines of the fallback voice. Empty for a voice that runs in a lane."""
        return tuple(getattr(self._fallback, "engines", ()))

    def close(self) -> None:
        """Close both voices, if they can be closed."""
        for voice in (self._main, self._fallback):
            if close := getattr(voice, "close", None):
                close()


class ConversationWithFallback:
    """A ConversationModel on other servers, `main`, and a cascade that answers while its servers fail.

    The caller owns the cascade's models and closes them. `failure_line` is spoken by the cascade's voice if the servers
    fail in the middle of a spoken answer, unless it is empty. If `main` is native, it is not asked for responses: the
    cascade makes all that are requested of this model, and `native` takes its turns by itself.
    """

    def __init__(self, main: ConversationModel, fallback: Cascade, failure_line: str = "") -> None:
        self.profile, self.native = main.profile, main.native
        self.main, self.fallback, self.failure_line = main, fallback, failure_line

    async def open(self, owner: Hashable | None = None) -> _FallbackStream:
        """Open a conversation with the main model. The fallback's is opened with its first answer.

        Raises Refused if there is no room.
        """
        return _FallbackStream(self, await self.main.open(owner), owner)

    def close(self) -> None:
        """Close the main model, if it can be closed."""
        if close := getattr(self.main, "close", None):
            close()


class _FallbackStream:
    def __init__(self, model: ConversationWithFallback, main: ConversationStream, owner: Hashable | None) -> None:
        self._model, self._main, self._owner = model, main, owner
        self._other: ConversationStream | None = None

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Prefill the main model. The fallback gets a conversation only when it answers."""
        await self._main.prefill(messages, tools)

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Respond with the main model. If it fails before its first word, the fallback responds to the text.

        If it fails later, the failure line is spoken before the error is raised.
        """
        text, model = "", self._model
        failure: AntiphonError = RemoteError("it cannot be reached")
        if model.native is None:
            try:
                async with aclosing(self._main.respond(messages, options, voice)) as chunks:
                    async for chunk in chunks:
                        text += chunk.text if isinstance(chunk, TextDelta) else " "
                        yield chunk
                return
            except (RemoteError, Refused) as error:
                failure = error
        profile = model.fallback.profile
        other_voice = VoiceOptions(profile.voices[0], voice.speed) if voice and profile.voices else None
        if not text:
            log.info("%s answers for %s: %s", profile.id, model.profile.id, failure)
            if self._other is None:
                self._other = await model.fallback.open(self._owner)
            written = [replace(message, parts=()) for message in messages]
            async with aclosing(self._other.respond(written, options, other_voice)) as chunks:
                async for chunk in self._resampled(chunks):
                    yield chunk
            return
        if model.failure_line and other_voice and model.fallback.synthesizer:
            line = model.failure_line if text[-1:].isspace() else f" {model.failure_line}"
            yield TextDelta(line)
            spoken = model.fallback.synthesizer.speak(model.failure_line, other_voice, lambda: Urgency.FINAL)
            async with aclosing(_audio_of(spoken)) as chunks:
                async for chunk in self._resampled(chunks):
                    yield chunk
        raise failure

    def close(self) -> None:
        """Close the conversations with both models."""
        self._main.close()
        if self._other:
            self._other.close()

    async def _resampled(self, chunks: AsyncGenerator[ResponseChunk, None]) -> AsyncGenerator[ResponseChunk, None]:
        """Yield chunks of the fallback with audio at the rate of the main model."""
        resampler = Resampler(self._model.fallback.profile.sample_rate_hz, self._model.profile.sample_rate_hz)
        async for chunk in chunks:
            if isinstance(chunk, ResponseAudio):
                chunk = replace(chunk, pcm=resampler.feed(chunk.pcm))
            elif isinstance(chunk, ReplyDone) and len(rest := resampler.flush()):
                yield ResponseAudio(rest)
            yield chunk
        if len(rest := resampler.flush()):
            yield ResponseAudio(rest)


async def _audio_of(chunks: AsyncGenerator[SpeechChunk, None]) -> AsyncGenerator[ResponseChunk, None]:
    """Yield the audio of a text that is spoken outside of a cascade, without word times."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield ResponseAudio(chunk.pcm if len(chunk.pcm) else NO_AUDIO)


async def whole_audio(voice: Synthesizer, text: str, rate_hz: int) -> Pcm:
    """Return the audio of a text with a voice's default voice: float32 [num_samples], mono, at `rate_hz`.

    Raises the errors of the voice.
    """
    resampler, found = Resampler(voice.profile.sample_rate_hz, rate_hz), list[Pcm]()
    chunks = voice.speak(text, VoiceOptions(voice.profile.voices[0]), lambda: Urgency.FINAL)
    async with aclosing(chunks):
        async for chunk in chunks:
            found.append(resampler.feed(chunk.pcm))
    return np.concatenate((*found, resampler.flush()))
