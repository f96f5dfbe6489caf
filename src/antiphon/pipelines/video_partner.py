"""A partner that hears and sees, asked about what is seen: each question is a turn of one conversation, made of its frames, what was heard, and the words.

Frames are taken in as they come (`eager`) or when somebody asks; the rows of a turn that goes on are kept, so that a question costs its own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import anyio.to_thread

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import (
    AudioPart,
    ConversationModel,
    ConversationStream,
    ImagePart,
    Message,
    MessagePart,
    ReplyDone,
    ReplyOptions,
    ResponseChunk,
    TextDelta,
    VideoFrame,
    VideoProfile,
    VideoQuestion,
    VoiceOptions,
)
from antiphon.errors import EngineError, MediaError, ModelError, Refused, RemoteProtocolError
from antiphon.signals import Signal

log = logging.getLogger(__name__)

SYSTEM = "You answer questions about what a camera or a screen shows and what is heard, in one or two sentences."
MAX_TOKENS = 256
# So many frames are taken in ahead at once, at most: where the sampling shifts with every frame, most would be taken in again.
MAX_AHEAD = 2
# Frames of answered questions that are remembered, seconds of sound, and messages: past the first, the oldest questions go until the second is left.
MOST_FRAMES, LEFT_FRAMES = 256, 128
MOST_SOUND_S, LEFT_SOUND_S = 600, 300
MOST_MESSAGES, LEFT_MESSAGES = 400, 200
# Of what was heard since the last question, a question has so much.
MAX_SOUND_S = 60
# A conversation that has outgrown the context is cut back to this share of it.
KEPT = 0.75


class ConversationVideoModel:
    """See Watcher."""

    def __init__(self, partner: ConversationModel, *, eager: bool) -> None:
        self._partner, self._eager = partner, eager
        facts = partner.profile
        self.profile = VideoProfile(facts.id, "pictures", facts.sample_rate_hz, facts.voices)

    async def open(self, instructions: str) -> ConversationVideoStream:
        """See Watcher."""
        return ConversationVideoStream(await self._partner.open(), instructions, eager=self._eager)

    def close(self) -> None:
        """The partner is closed by who loaded it."""


class ConversationVideoStream:
    """See Watching."""

    def __init__(self, talk: ConversationStream, instructions: str, *, eager: bool) -> None:
        self._talk, self._eager = talk, eager
        self._system = Message("system", f"{SYSTEM} {instructions}".strip())
        # Questions and their answers.
        self._past: list[Message] = []
        # Frames that came and are in no answered question yet; those that a question asked now would be answered from.
        self._new: dict[int, tuple[float, ImagePart]] = {}
        self._expected: tuple[int, ...] = ()
        self._shown: list[int] = []
        self._answering = self._closed = self._prefill_due = False
        self._changed = Signal()

    async def run(self) -> None:
        """Prefill the selected frames as they change, until cancelled. Does nothing where the stream is not eager."""
        while True:
            while not self._prefill_due:
                await self._changed.wait()
            try:
                await self._prefill()
            finally:
                self._prefill_due = False
                self._changed.notify()

    async def settled(self) -> None:
        """Wait until the selected frames are prefilled. `run` has to be running."""
        while self._prefill_due:
            await self._changed.wait()

    async def append_frame(self, frame: VideoFrame) -> None:
        """Keep a frame for the next question, as a file. Raises MediaError for what is no image, or is cut off."""
        await anyio.to_thread.run_sync(frame.image.overview)
        # The model's encoder soon reads the newest frame, from the pixels that are there; those that wait keep only
        # their files.
        for _, waiting in self._new.values():
            waiting.image.release()
        self._new[frame.number] = (frame.at_s, ImagePart(frame.image))

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """See Watching."""
        self._expected = frames
        wanted = self._wanted(frames)
        same = next((i for i, (a, b) in enumerate(zip(self._shown, wanted, strict=False)) if a != b), None)
        kept = min(len(self._shown), len(wanted)) if same is None else same
        free = self._eager and not self._answering and not self._closed
        if free and wanted and len(wanted) - kept <= MAX_AHEAD:
            self._shown = wanted
            self._prefill_due = True
            self._changed.notify()

    async def _prefill(self) -> None:
        """Prefill the frames that a question would be answered from, again as long as they changed meanwhile."""
        prefilled: list[int] | None = None
        while prefilled is not self._shown and not self._answering:
            prefilled = self._shown
            try:
                await self._talk.prefill((*self._asked_so_far(), self._user(self._wanted(prefilled))))
            except (ModelError, EngineError, Refused, MediaError, RemoteProtocolError) as error:
                # The question to come says it, if it is not for now only.
                log.warning("a frame was not taken in ahead: %s", error)
                return

    def drop_frame(self, frame: int) -> None:
        """See Watching."""
        self._new.pop(frame, None)

    def forget(self, before_s: float) -> None:
        """See Watching. What a question was answered from leaves with the oldest questions."""
        self._new = {n: (at_s, image) for n, (at_s, image) in self._new.items() if at_s >= before_s}

    def _wanted(self, frames: Sequence[int]) -> list[int]:
        return [n for n in sorted(frames) if n in self._new]

    def _asked_so_far(self) -> tuple[Message, ...]:
        return (self._system, *self._past)

    def _user(self, frames: Sequence[int], *more: MessagePart) -> Message:
        """A turn: each frame behind its time, and what is said."""
        seen = [part for n in frames for part in (f"<{self._new[n][0]:.1f} seconds>", self._new[n][1])]
        parts = (*seen, *more)
        return Message("user", " ".join(p for p in parts if isinstance(p, str)), parts=parts)

    async def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """See Watching."""
        known, text, complete = tuple(self._new), "", False
        more: list[MessagePart] = [question.text] if question.text.strip() else []
        if question.pcm is not None and len(question.pcm):
            more.insert(0, AudioPart(question.pcm[-MAX_SOUND_S * SAMPLE_RATE_HZ :]))
        asked = self._user(self._wanted(question.frames), *more)
        wanted = replace(options, max_tokens=options.max_tokens or MAX_TOKENS, truncation=KEPT)
        self._answering = True
        try:
            async with aclosing(self._talk.respond((*self._asked_so_far(), asked), wanted, voice)) as answers:
                async for answer in answers:
                    if isinstance(answer, TextDelta):
                        text += answer.text
                    complete = complete or isinstance(answer, ReplyDone)
                    yield answer
        finally:
            self._answering = False
            if complete:
                self._past += [asked, Message("assistant", text.strip())]
                # Those that were passed over when a question was asked are old at the next.
                for number in known:
                    self._new.pop(number, None)
                self._shown = []
                self._trim()
            self.select_frames(self._expected)

    def _trim(self) -> None:
        if self._is_over(MOST_FRAMES, MOST_SOUND_S, MOST_MESSAGES):
            while len(self._past) > 2 and self._is_over(LEFT_FRAMES, LEFT_SOUND_S, LEFT_MESSAGES):
                del self._past[:2]

    def _is_over(self, frames: int, sound_s: float, messages: int) -> bool:
        parts = [part for m in self._past for part in m.parts]
        heard_s = sum(len(part.pcm) for part in parts if isinstance(part, AudioPart)) / SAMPLE_RATE_HZ
        seen = sum(isinstance(part, ImagePart) for part in parts)
        return seen > frames or heard_s > sound_s or len(self._past) > messages

    def close(self) -> None:
        """See Watching."""
        self._closed = True
        self._talk.close()
