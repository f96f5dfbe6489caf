"""The loaded models of a process."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import (
    AudioPart,
    ConversationModel,
    ImageReader,
    LanguageModel,
    Message,
    ReplyOptions,
    ResponseAudio,
    Synthesizer,
    Transcriber,
    TurnDetector,
    Urgency,
    VideoModel,
    VoiceActivityDetector,
    VoiceOptions,
    Window,
)
from antiphon.engine.lane import Lane
from antiphon.pipelines.cascade import Cascade
from antiphon.pipelines.observer import Observer
from antiphon.pipelines.video_partner import ConversationVideoModel


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """What sessions share: None for a role that was not asked for. `lanes` is for measuring only."""

    hears: Transcriber | None
    watches: VoiceActivityDetector | None
    judges: TurnDetector | None
    language: LanguageModel | None
    speaks: Synthesizer | None
    reads: ImageReader | None
    converses: ConversationModel | None
    sees: VideoModel | None
    names: tuple[str, ...]
    lanes: tuple[Lane[Any, Any], ...]
    # A partner that sees takes frames in as they come.
    looks_ahead: bool = True

    @property
    def transcriber(self) -> Transcriber:
        """Raises LookupError where none was asked for."""
        if self.hears is None:
            raise LookupError("no transcriber is loaded")
        return self.hears

    @property
    def detector(self) -> VoiceActivityDetector:
        """Raises LookupError where none was asked for."""
        if self.watches is None:
            raise LookupError("no speech detector is loaded")
        return self.watches

    @property
    def synthesizer(self) -> Synthesizer:
        """Raises LookupError where none was asked for."""
        if self.speaks is None:
            raise LookupError("no synthesizer is loaded")
        return self.speaks

    @property
    def partner(self) -> ConversationModel | None:
        """Whoever answers in a conversation; None without a language model, or a model that converses by itself."""
        if self.converses:
            return self.converses
        return Cascade(self.language, self.speaks) if self.language else None

    @property
    def watcher(self) -> VideoModel | None:
        """Whoever answers questions about what is seen; None without a language model, or a model that sees."""
        if self.sees:
            return self.sees
        if self.converses and self.converses.profile.takes_media:
            return ConversationVideoModel(self.converses, eager=self.looks_ahead)
        if self.language is None or self.reads is None:
            return None
        return Observer(Cascade(self.language, self.speaks), self.reads, self.hears, self.speaks)

    async def warm(self) -> None:
        """One small step of each, side by side: the first is slow (pages come in, kernels are chosen), and no user should wait for it.

        Raises ModelError for a model that fails at it.
        """
        async with anyio.create_task_group() as group:
            if self.hears:
                group.start_soon(_warm_ears, self.hears)
            if self.judges:
                group.start_soon(self.judges.complete, np.zeros(SAMPLE_RATE_HZ, np.float32))
            if self.language:
                group.start_soon(_warm_language, self.language)
            if self.speaks:
                group.start_soon(_warm_voice, self.speaks)
            if self.converses and self.converses.profile.takes_media:
                group.start_soon(_warm_partner, self.converses)

    def close(self) -> None:
        """Stop the workers; running steps finish."""
        for lane in self.lanes:
            lane.close()
        # Those that work in an engine are not in a lane.
        for model in (self.language, self.converses, self.sees, self.hears, self.speaks):
            if close := getattr(model, "close", None):
                close()


async def _warm_language(language: LanguageModel) -> None:
    dialogue = await language.open()
    try:
        async for _ in dialogue.reply(
            [Message("user", "Good morning! How are you today?")], ReplyOptions(max_tokens=3)
        ):
            pass
    finally:
        dialogue.close()


async def _warm_ears(transcriber: Transcriber) -> None:
    hearing = transcriber.open()
    try:
        await hearing.decode(Window(np.zeros(SAMPLE_RATE_HZ, np.float32), final=True, max_tokens=1))
    finally:
        hearing.close()


async def _warm_partner(partner: ConversationModel) -> None:
    talk, voices = await partner.open(), partner.profile.voices
    asked = Message("user", "", parts=(AudioPart(np.zeros(SAMPLE_RATE_HZ, np.float32)), "Good morning!"))
    voice = VoiceOptions(voices[0]) if voices else None
    try:
        async with aclosing(talk.respond([asked], ReplyOptions(max_tokens=3), voice)) as answers:
            async for answer in answers:
                if isinstance(answer, ResponseAudio):
                    return
    finally:
        talk.close()


async def _warm_voice(voice: Synthesizer) -> None:
    async for _ in voice.speak("Good morning.", VoiceOptions(voice.profile.voices[0]), lambda: Urgency.BULK):
        pass
