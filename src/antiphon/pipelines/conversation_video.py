"""Uses a conversation model that hears and sees as a video model. Each question is a turn of one conversation.

A turn consists of the new frames with their times, the audio, and the question. A model that was trained with video
gets frames and sound interleaved by their times. Other models get the time of each frame followed by its image, and
then the sound. With `eager`, frames are prefilled as they arrive, otherwise when a question is asked. The rows of
earlier turns stay in the model's KV, so only new input is computed for a question.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Hashable, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import ceil

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
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
    VideoPart,
    VideoProfile,
    VideoQuestion,
    VoiceOptions,
)
from antiphon.contracts.language import ToolServers
from antiphon.errors import EngineError, MediaError, ModelError, Refused, RemoteProtocolError
from antiphon.pipelines.tool_calls import reply_with_tools, server_tools
from antiphon.pipelines.video_sound import VideoSound
from antiphon.shares.threads import IMAGE_THREADS, in_thread
from antiphon.signals import Signal

log = logging.getLogger(__name__)

SYSTEM = "You answer questions about what a camera or a screen shows and what is heard, in one or two sentences."
MAX_TOKENS = 256
# Maximum number of frames that are prefilled at once. If more frames are new, the sampling shifts with every frame, and
# most of the selected frames would be computed again each time.
MAX_PREFILL_FRAMES = 2
# Bounds of the frames, the audio and the messages of answered questions. When the first number of a pair is exceeded,
# the oldest questions are dropped until none of the second numbers is exceeded.
MAX_PAST_FRAMES, KEPT_PAST_FRAMES = 256, 128
MAX_PAST_AUDIO_S, KEPT_PAST_AUDIO_S = 600, 300
MAX_PAST_MESSAGES, KEPT_PAST_MESSAGES = 400, 200
# Maximum seconds of audio of a question. Of longer audio, the end is used.
MAX_QUESTION_AUDIO_S = 60
# The model's positions in time are bounded. If a video spans more than MAX_SPAN_S, which is possible with few frames,
# its start is moved to a later multiple of SPAN_STEP_S, and older frames are placed at the start.
MAX_SPAN_S, SPAN_STEP_S = 300.0, 60.0
# A conversation that has outgrown the context is cut to this share of it.
TRUNCATION = 0.75


class ConversationVideoModel:
    """A VideoModel that uses a conversation model with support for media.

    The caller owns `conversation_model` and closes it. With `eager`, frames are prefilled before a question is asked.
    `tool_servers` carry out functions that the model may call.
    """

    def __init__(
        self, conversation_model: ConversationModel, *, eager: bool, tool_servers: ToolServers | None = None
    ) -> None:
        self._conversation_model, self._eager, self._tool_servers = conversation_model, eager, tool_servers
        facts = conversation_model.profile
        self.profile = VideoProfile(facts.id, "pictures", facts.sample_rate_hz, facts.voices)

    async def open(self, instructions: str, owner: Hashable | None = None) -> ConversationVideoStream:
        """Open a separate conversation for a session. `instructions` are added after SYSTEM. Raises Refused if the
        model has no room for another conversation.
        """
        conversation = await self._conversation_model.open(owner)
        window_s = self._conversation_model.profile.video_window_s
        servers = self._tool_servers
        return ConversationVideoStream(
            conversation, instructions, eager=self._eager, window_s=window_s, tool_servers=servers
        )

    def close(self) -> None:
        """Do nothing: the caller closes the conversation model."""


class ConversationVideoStream:
    """A VideoStream whose questions and answers are the messages of `conversation`, which it owns and closes.

    `window_s` is the `video_window_s` of the model's profile. For one event loop. Frames are held as files: those that
    the session keeps, and those of answered questions, within the bounds of this module.
    """

    def __init__(
        self,
        conversation: ConversationStream,
        instructions: str,
        *,
        eager: bool,
        window_s: float = 0.0,
        tool_servers: ToolServers | None = None,
    ) -> None:
        self._tool_servers = tool_servers
        self._conversation, self._eager = conversation, eager
        self._sound = VideoSound(window_s) if window_s else None
        self._system = Message("system", f"{SYSTEM} {instructions}".strip())
        # Answered questions and their answers, alternating.
        self._past: list[Message] = []
        # The frames that no answered question has used: the time in seconds and the image of each, by its number.
        self._frames: dict[int, tuple[float, ImagePart]] = {}
        # The numbers of the frames that a question would use now, and of those among them that are or will be
        # prefilled.
        self._selected: tuple[int, ...] = ()
        self._prefilled: list[int] = []
        self._prefill_due = self._answering = self._closed = False
        self._changed = Signal()

    async def run(self) -> None:
        """Prefill the selected frames as they change, until cancelled. If the stream is not eager, it only waits.

        Errors of a prefill are logged. If they persist, the next question raises them.
        """
        while True:
            while not self._prefill_due:
                await self._changed.wait()
            try:
                await self._prefill()
            finally:
                self._prefill_due = False
                self._changed.notify()

    async def settled(self) -> None:
        """Wait until the selected frames are prefilled. `run` must be running."""
        while self._prefill_due:
            await self._changed.wait()

    async def append_frame(self, frame: VideoFrame) -> None:
        """Keep a frame for the next question, as a file. Raises MediaError if it is not an image, or is truncated."""
        await in_thread(frame.image.overview, places=IMAGE_THREADS)
        # Only the newest frame keeps its decoded pixels, which the model's encoder will read shortly. Of older frames,
        # only the files are kept.
        for _, waiting in self._frames.values():
            waiting.image.release()
        self._frames[frame.number] = (frame.at_s, ImagePart(frame.image, in_video=self._sound is not None))

    def append_audio(self, pcm: Pcm, at_s: float) -> None:
        """Add sound as it arrives, if the model interleaves sound with frames. Complete windows are prefilled."""
        if self._sound and self._sound.append(pcm, at_s):
            self.select_frames(self._selected)

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """Set the frames that a question would use now, and prefill them if it is worthwhile.

        Nothing is prefilled during an answer, or if more than MAX_PREFILL_FRAMES frames are new at once.
        """
        self._selected = frames
        wanted = self._held(frames)
        same = next((i for i, (a, b) in enumerate(zip(self._prefilled, wanted, strict=False)) if a != b), None)
        num_kept = min(len(self._prefilled), len(wanted)) if same is None else same
        may_prefill = self._eager and not self._answering and not self._closed
        if may_prefill and wanted and len(wanted) - num_kept <= MAX_PREFILL_FRAMES:
            self._prefilled = list(wanted)
            self._prefill_due = True
            self._changed.notify()

    async def _prefill(self) -> None:
        """Prefill the frames that a question would use now. Repeats this if they change in the meantime."""
        prefilled: list[int] | None = None
        while prefilled is not self._prefilled and not self._answering:
            prefilled = self._prefilled
            try:
                messages = (*self._messages(), self._turn(self._held(prefilled), goes_on=True))
                await self._conversation.prefill(messages, server_tools(self._tool_servers))
            except (ModelError, EngineError, Refused, MediaError, RemoteProtocolError) as error:
                log.warning("a frame was not prefilled: %s", error)
                return

    def drop_frame(self, frame: int) -> None:
        """Drop the frame with this number, unless an answered question has used it. Ignores unknown numbers."""
        self._frames.pop(frame, None)

    def forget(self, before_s: float) -> None:
        """Drop the frames from before `before_s`, in seconds since the session began.

        Frames of answered questions stay in the conversation and are dropped with the oldest questions.
        """
        self._frames = {n: (at_s, image) for n, (at_s, image) in self._frames.items() if at_s >= before_s}

    def _held(self, frames: Sequence[int]) -> list[int]:
        return [n for n in sorted(frames) if n in self._frames]

    def _messages(self) -> tuple[Message, ...]:
        return (self._system, *self._past)

    def _turn(self, frames: Sequence[int], *more: MessagePart, goes_on: bool = False) -> Message:
        """Return a user's turn: the frames, the sound, and then `more`. `goes_on`: whether more sound will follow."""
        shown: list[MessagePart]
        if self._sound and frames:
            shown = [self._video(frames, self._sound, goes_on=goes_on)]
        else:
            shown = [part for n in frames for part in (f"<{self._frames[n][0]:.1f} seconds>", self._frames[n][1])]
        parts = (*shown, *more)
        return Message("user", " ".join(p for p in parts if isinstance(p, str)), parts=parts)

    def _video(self, frames: Sequence[int], sound: VideoSound, *, goes_on: bool) -> VideoPart:
        """Return the frames and the sound since the last question. Times count from the first frame or sound."""
        times = [self._frames[n][0] for n in frames]
        heard = [] if sound.at_s is None else [sound.at_s]
        end_s = max((*times, sound.end_s))
        begin_s = min((*times, *heard), default=0.0)
        if end_s - begin_s > MAX_SPAN_S:
            begin_s = ceil((end_s - MAX_SPAN_S) / SPAN_STEP_S) * SPAN_STEP_S
        placed = tuple((max(0.0, self._frames[n][0] - begin_s), self._frames[n][1]) for n in frames)
        if sound.at_s is None:
            return VideoPart(placed)
        windows = tuple(sound.windows) if goes_on else sound.all()
        return VideoPart(placed, windows, max(0.0, sound.at_s - begin_s), goes_on)

    async def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Answer a question as a turn of the conversation, with at most MAX_TOKENS tokens unless `options` has another
        limit.

        If an answer is cut off, neither it nor its question is remembered, and its frames stay for the next question.
        One question is answered at a time. Raises Refused, ModelError, EngineError or RemoteProtocolError.
        """
        known, text, complete = tuple(self._frames), "", False
        more: list[MessagePart] = [question.text] if question.text.strip() else []
        heard = question.pcm if question.pcm is not None and len(question.pcm) else None
        frames = self._held(question.frames)
        if heard is not None and not (self._sound and frames):
            more.insert(0, AudioPart(heard[-MAX_QUESTION_AUDIO_S * SAMPLE_RATE_HZ :]))
        later = self._settle_sound(self._sound, question) if self._sound else None
        turn = self._turn(frames, *more)
        if self._sound:
            # This also runs if the answer is cut off. Neither the answer nor its question is remembered then.
            end_s = self._sound.end_s
            self._sound.clear()
            if later is not None and len(later):
                self._sound.append(later, end_s)
        options = replace(options, max_tokens=options.max_tokens or MAX_TOKENS, truncation=TRUNCATION)
        self._answering = True

        def respond(asked: tuple[Message, ...], how: ReplyOptions) -> AsyncGenerator[ResponseChunk, None]:
            return self._conversation.respond(asked, how, voice)

        try:
            made = reply_with_tools(respond, (*self._messages(), turn), options, self._tool_servers)
            async with aclosing(made) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, TextDelta):
                        text += chunk.text
                    complete = complete or isinstance(chunk, ReplyDone)
                    yield chunk
        finally:
            self._answering = False
            if complete:
                self._past += [turn, Message("assistant", text.strip())]
                # Frames that were not selected for this question would be too old for the next one.
                for number in known:
                    self._frames.pop(number, None)
                self._prefilled = []
                self._trim()
            self.select_frames(self._selected)

    def _settle_sound(self, sound: VideoSound, question: VideoQuestion) -> Pcm:
        """Cut the sound to the part that belongs to the question, and return the sound after it."""
        heard = np.zeros(0, np.float32) if question.pcm is None else question.pcm
        later = sound.cut(len(heard))
        if sound.num_samples != len(heard):
            sound.clear()
            sound.append(heard, question.pcm_at_s)
        return later

    def _trim(self) -> None:
        if self._exceeds(MAX_PAST_FRAMES, MAX_PAST_AUDIO_S, MAX_PAST_MESSAGES):
            while len(self._past) > 2 and self._exceeds(KEPT_PAST_FRAMES, KEPT_PAST_AUDIO_S, KEPT_PAST_MESSAGES):
                del self._past[:2]

    def _exceeds(self, num_frames: int, audio_s: float, num_messages: int) -> bool:
        parts = [part for m in self._past for part in m.parts]
        videos = [part for part in parts if isinstance(part, VideoPart)]
        heard = [part.pcm for part in parts if isinstance(part, AudioPart)]
        heard += [window.pcm for video in videos for window in video.sound]
        past_audio_s = sum(map(len, heard)) / SAMPLE_RATE_HZ
        past_frames = sum(isinstance(part, ImagePart) for part in parts) + sum(len(v.frames) for v in videos)
        return past_frames > num_frames or past_audio_s > audio_s or len(self._past) > num_messages

    def close(self) -> None:
        """Close the conversation, and prefill nothing any more. The caller cancels `run`."""
        self._closed = True
        self._conversation.close()
