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

    transcriber: Transcriber | None
    vad: VoiceActivityDetector | None
    turn_detector: TurnDetector | None
    language_model: LanguageModel | None
    synthesizer: Synthesizer | None
    image_reader: ImageReader | None
    partner: ConversationModel | None
    watcher: VideoModel | None
    names: tuple[str, ...]
    lanes: tuple[Lane[Any, Any], ...]
    # A partner that sees takes frames in as they come.
    eager_frames: bool = True

    @property
    def required_transcriber(self) -> Transcriber:
        """Raises LookupError where none was asked for."""
        if self.transcriber is None:
            raise LookupError("no transcriber is loaded")
        return self.transcriber

    @property
    def required_vad(self) -> VoiceActivityDetector:
        """Raises LookupError where none was asked for."""
        if self.vad is None:
            raise LookupError("no speech detector is loaded")
        return self.vad

    @property
    def required_synthesizer(self) -> Synthesizer:
        """Raises LookupError where none was asked for."""
        if self.synthesizer is None:
            raise LookupError("no synthesizer is loaded")
        return self.synthesizer

    @property
    def conversation_model(self) -> ConversationModel | None:
        """Whoever answers in a conversation; None without a language model, or a model that converses by itself."""
        if self.partner:
            return self.partner
        return Cascade(self.language_model, self.synthesizer) if self.language_model else None

    @property
    def video_model(self) -> VideoModel | None:
        """Whoever answers questions about what is seen; None without a language model, or a model that sees."""
        if self.watcher:
            return self.watcher
        if self.partner and self.partner.profile.accepts_media:
            return ConversationVideoModel(self.partner, eager=self.eager_frames)
        if self.language_model is None or self.image_reader is None:
            return None
        return Observer(
            Cascade(self.language_model, self.synthesizer), self.image_reader, self.transcriber, self.synthesizer
        )

    async def warm(self) -> None:
        """One small step of each, side by side: the first is slow (pages come in, kernels are chosen), and no user should wait for it.

        Raises ModelError for a model that fails at it.
        """
        async with anyio.create_task_group() as group:
            if self.transcriber:
                group.start_soon(_warm_ears, self.transcriber)
            if self.turn_detector:
                group.start_soon(self.turn_detector.complete, np.zeros(SAMPLE_RATE_HZ, np.float32))
            if self.language_model:
                group.start_soon(_warm_language, self.language_model)
            if self.synthesizer:
                group.start_soon(_warm_voice, self.synthesizer)
            if self.partner and self.partner.profile.accepts_media:
                group.start_soon(_warm_partner, self.partner)

    def close(self) -> None:
        """Stop the workers; running steps finish."""
        for lane in self.lanes:
            lane.close()
        # Those that work in an engine are not in a lane.
        for model in (self.language_model, self.partner, self.watcher, self.transcriber, self.synthesizer):
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
    # A few frames: a voice that decides by itself when a text has ended may go on for minutes.
    options = VoiceOptions(voice.profile.voices[0], max_frames=8)
    async for _ in voice.speak("Good morning.", options, lambda: Urgency.BULK):
        pass
