"""The loaded models of a process, and the conversation and video models composed of them."""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import (
    AudioPart,
    ConversationModel,
    ConversationStream,
    ImageReader,
    LanguageModel,
    Message,
    NativeModel,
    NativeOptions,
    ReplyOptions,
    ResponseAudio,
    SpeakerModel,
    SpeakStep,
    Synthesizer,
    Transcriber,
    Unit,
    Urgency,
    VideoModel,
    VoiceActivityDetector,
    VoiceOptions,
    Window,
)
from antiphon.contracts.language import ToolServers
from antiphon.engine.grammar_trial import TRIALS
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.pipelines.cascade import Cascade, line
from antiphon.pipelines.conversation_video import ConversationVideoModel
from antiphon.pipelines.observer import Observer
from antiphon.pipelines.tool_calls import LanguageModelWithTools
from antiphon.pipelines.turn_blend import CheckedBackchannel, DetectorFailures, TurnBlend
from antiphon.remote.pool import Pool
from antiphon.roles import ModelRole, shown_role

# The maximum number of units for warming a native model.
MAX_WARM_UNITS = 4


class ModelWorker(Protocol):
    """A worker that runs a model (a lane, or an engine's thread), as its watchdog sees it.

    `lost`: why it no longer computes; None while it is alive.
    """

    lost: str | None

    def busy_s(self) -> float:
        """Return how long the step under way has run, in seconds; 0 if none runs."""
        ...

    def fail(self, reason: str) -> None:
        """Declare the worker lost: waiting calls fail with ModelLost now, later calls when they are made."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models that all sessions share; None for a role that was not requested."""

    # Transcribes speech.
    transcriber: Transcriber | None
    # Detects speech.
    vad: VoiceActivityDetector | None
    # Judges whether a turn has ended.
    turn_detector: TurnBlend | None
    # Writes the text of answers.
    language_model: LanguageModel | None
    # Speaks text.
    synthesizer: Synthesizer | None
    # Reads the text on images.
    image_reader: ImageReader | None
    # Answers in conversations by itself, in place of the language model and the synthesizer.
    conversation_model: ConversationModel | None
    # Answers questions about video frames.
    video_model: VideoModel | None
    # The ids by which clients may name the models.
    names: tuple[str, ...]
    # The models' lanes, for metrics.
    lanes: tuple[Lane[Any, Any], ...]
    # Whether a conversation model that accepts media computes frames when they arrive, instead of when a question is
    # asked.
    eager_frames: bool = True
    # The text that is spoken if a language model fails in an answer; "": none.
    failure_line: str = ""
    # Compares voices.
    speaker_model: SpeakerModel | None = None
    # Judges the sound of speech over a response.
    backchannel_detector: CheckedBackchannel | None = None
    # What the turn detectors and the backchannel detector did not judge, for metrics.
    detector_failures: DetectorFailures = field(default_factory=DetectorFailures)
    # The servers of the models on other servers.
    pools: tuple[Pool[Any], ...] = ()

    @property
    def workers(self) -> dict[str, ModelWorker]:
        """The workers that run the models.

        Lanes have their own names, and the threads of local engines are named by the role of their model. The second
        engine of a model is named ROLE-2.
        """
        workers: dict[str, ModelWorker] = {lane.name: lane for lane in self.lanes}
        conversation_model = getattr(self.conversation_model, "native", None) or self.conversation_model
        owners: dict[ModelRole, Any] = {
            "language": self.language_model,
            "conversation_model": conversation_model,
            "video_model": self.video_model,
            "transcriber": self.transcriber,
            "synthesizer": self.synthesizer,
        }
        for role, model in owners.items():
            for number, engine in enumerate(getattr(model, "engines", ()), 1):
                if (thread := getattr(engine, "thread", None)) and thread not in workers.values():
                    workers[shown_role(role) + (f"-{number}" if number > 1 else "")] = thread
        return workers

    def lost(self) -> dict[str, str]:
        """Return the lost workers, each with the reason; empty while all are alive."""
        return {name: worker.lost for name, worker in self.workers.items() if worker.lost}

    def degraded(self) -> dict[str, str]:
        """Return the models that are unreachable now, by their role, each with the reason; empty if there are none."""
        away = {pool.role for pool in self.pools if pool.is_away}
        if self.language_model and self.language_model.load().is_away:
            away.add("language")
        return dict.fromkeys(sorted(away), "its server did not answer the last request")

    @property
    def required_transcriber(self) -> Transcriber:
        """The transcriber, for callers that require one. Raises LookupError if none was requested."""
        if self.transcriber is None:
            raise LookupError("no transcriber is loaded")
        return self.transcriber

    @property
    def required_vad(self) -> VoiceActivityDetector:
        """The voice activity detector, for callers that require one. Raises LookupError if none was requested."""
        if self.vad is None:
            raise LookupError("no speech detector is loaded")
        return self.vad

    @property
    def required_synthesizer(self) -> Synthesizer:
        """The synthesizer, for callers that require one. Raises LookupError if none was requested."""
        if self.synthesizer is None:
            raise LookupError("no synthesizer is loaded")
        return self.synthesizer

    @property
    def for_conversations(self) -> ConversationModel | None:
        """The model that answers in conversations: the conversation model, or else a cascade with the language model.

        The cascade uses the synthesizer, if there is one. Each access creates a new cascade, which holds no state. None
        without a conversation model and a language model.
        """
        if self.conversation_model:
            return self.conversation_model
        return self._cascade(self.language_model) if self.language_model else None

    def line(self, text: str) -> ConversationStream:
        """Return a conversation whose responses all say `text`. Raises LookupError without a synthesizer."""
        return line(text, self.required_synthesizer)

    def _cascade(self, language: LanguageModel) -> Cascade:
        return Cascade(language, self.synthesizer, self.failure_line)

    def language_with(self, tool_servers: ToolServers | None) -> LanguageModel | None:
        """Return the language model for replies without a session, in which `tool_servers` carry out calls."""
        model = self.language_model
        return LanguageModelWithTools(model, tool_servers) if model and tool_servers else model

    @property
    def for_video(self) -> VideoModel | None:
        """The model that answers questions about frames, without tool servers; None if no loaded model can."""
        return self.video_with(None)

    def video_with(self, tool_servers: ToolServers | None) -> VideoModel | None:
        """Return the model that answers questions about frames; None if no loaded model can.

        `tool_servers` carry out the functions that it may call, unless it is the video model. It is that, a
        conversation or language model that accepts media, or an observer that passes the text on the frames to the
        language model. A new one is created by each call, except for the video model.
        """
        if self.video_model:
            return self.video_model
        if self.conversation_model and self.conversation_model.profile.accepts_media:
            return ConversationVideoModel(self.conversation_model, eager=self.eager_frames, tool_servers=tool_servers)
        if self.language_model and self.language_model.profile.accepts_media:
            cascade = self._cascade(self.language_model)
            return ConversationVideoModel(cascade, eager=False, tool_servers=tool_servers)
        if self.language_model is None or self.image_reader is None:
            return None
        cascade = self._cascade(self.language_model)
        return Observer(cascade, self.image_reader, self.transcriber, self.synthesizer, tool_servers)

    async def warm(self) -> None:
        """Run one small step of each model, all at the same time.

        A first step is slow, because pages are read and kernels chosen, and no user should wait for it. Models on other
        servers are left out. Takes seconds. Raises ModelError if a model fails.
        """
        elsewhere = {pool.role for pool in self.pools}
        async with anyio.create_task_group() as group:
            if self.transcriber and "transcriber" not in elsewhere:
                group.start_soon(_warm_transcriber, self.transcriber)
            if self.turn_detector:
                group.start_soon(_warm_turn_detector, self.turn_detector)
            if self.speaker_model:
                group.start_soon(self.speaker_model.embed, np.zeros(SAMPLE_RATE_HZ, np.float32))
            if self.language_model and self.language_model.profile.keeps_to_schemas:
                TRIALS.start()
            if self.language_model and not self.language_model.profile.remote:
                group.start_soon(_warm_language_model, self.language_model)
            if self.synthesizer and "synthesizer" not in elsewhere:
                group.start_soon(_warm_synthesizer, self.synthesizer)
            partner = None if "conversation_model" in elsewhere else self.conversation_model
            if native := getattr(partner, "native", None):
                group.start_soon(_warm_native, native)
            if partner and partner.profile.accepts_media:
                group.start_soon(_warm_conversation_model, partner)

    def close(self) -> None:
        """Stop the workers of all models. Running steps finish first; jobs that wait in the lanes are dropped."""
        for lane in self.lanes:
            lane.close()
        # Models that an engine steps have no lane.
        for model in (
            self.language_model,
            self.conversation_model,
            self.video_model,
            self.transcriber,
            self.synthesizer,
        ):
            if close := getattr(model, "close", None):
                close()


async def _warm_turn_detector(detector: TurnBlend) -> None:
    # The blend logs which of its detectors cannot judge. Sessions go on without them.
    stream = detector.open()
    with suppress(ModelError):
        await stream.complete(0, np.zeros(SAMPLE_RATE_HZ, np.float32))
    await stream.read("Good morning!")


async def _warm_language_model(model: LanguageModel) -> None:
    stream = await model.open()
    question = Message("user", "Good morning! How are you today?")
    try:
        async for _ in stream.reply([question], ReplyOptions(max_tokens=3)):
            pass
    finally:
        stream.close()


async def _warm_transcriber(transcriber: Transcriber) -> None:
    stream, silence = transcriber.open(), np.zeros(SAMPLE_RATE_HZ, np.float32)
    language = "en" if "en" in transcriber.profile.languages else None
    try:
        # Partials may have a model of their own.
        for final in (True, False):
            await stream.decode(Window(silence, language=language, final=final, max_tokens=1))
    finally:
        stream.close()


async def _warm_conversation_model(conversation_model: ConversationModel) -> None:
    stream, voices = await conversation_model.open(), conversation_model.profile.voices
    question = Message("user", "", parts=(AudioPart(np.zeros(SAMPLE_RATE_HZ, np.float32)), "Good morning!"))
    voice = VoiceOptions(voices[0]) if voices else None
    try:
        async with aclosing(stream.respond([question], ReplyOptions(max_tokens=3), voice)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, ResponseAudio):
                    return
    finally:
        stream.close()


async def _warm_native(native: NativeModel) -> None:
    """Warm the model with a unit in which it listens, a unit in which it speaks, and the few until its speech ends."""
    stream = await native.open(NativeOptions(listen_only_units=1))
    silence = Unit(np.zeros(int(native.profile.unit_s * SAMPLE_RATE_HZ), np.float32))
    try:
        for number in range(MAX_WARM_UNITS):
            await stream.append(silence)
            step = await stream.step(must_speak=number == 1)
            if isinstance(step, SpeakStep) and step.end_of_turn:
                return
    finally:
        stream.close()


async def _warm_synthesizer(synthesizer: Synthesizer) -> None:
    # A few frames only: a voice that decides by itself when a text has ended may continue for minutes.
    voice = VoiceOptions(synthesizer.profile.voices[0], max_frames=8)
    async for _ in synthesizer.speak("Good morning.", voice, lambda: Urgency.BULK):
        pass
