"""A video model for servers without a model that sees. It answers from the text on the frames, and from plain facts.

The text on frames is read as they arrive, the newest first (`unread_frames.py`). A frame is not read if it looks like
the last frame that was read. With each question, the language model gets the notes since the previous question, with
their times, so that its KV is only appended to. If a question asks about a time, the notes of that time are put before
the question.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Hashable
from contextlib import aclosing
from dataclasses import replace

import anyio
import numpy as np

from antiphon.audio import Pcm
from antiphon.contracts import (
    ConversationModel,
    ConversationStream,
    FileOptions,
    ImageReader,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    Synthesizer,
    TextDelta,
    Transcriber,
    TranscriptSegment,
    Urgency,
    VideoFrame,
    VideoProfile,
    VideoQuestion,
    VoiceOptions,
    one_slab,
)
from antiphon.contracts.language import ToolServers
from antiphon.errors import EngineError, ModelError, Refused, RemoteProtocolError
from antiphon.pipelines.frame_notes import (
    MAX_NOTES,
    PROMPT,
    FrameReading,
    ObservedFrame,
    asked_time,
    asks_about_whole_picture,
    notes_on,
    unseen_answer,
)
from antiphon.pipelines.grounding import Grounding
from antiphon.pipelines.tool_calls import reply_with_tools, server_tools
from antiphon.pipelines.unread_frames import ReadAhead, UnreadFrames
from antiphon.shares.threads import IMAGE_THREADS, in_thread
from antiphon.signals import Signal
from antiphon.vision.frame_filters import EvsFilter
from antiphon.vision.scene import describe

log = logging.getLogger(__name__)

# Minimum similarity to the last frame that was read, at which a frame counts as having the same text.
SAME_TEXT_LIKENESS = 0.999
# Maximum seconds for which a question waits for the text of its frames, which are read first.
MAX_READING_WAIT_S = 4.0
# Maximum number of frames whose notes are remembered, an hour at two frames per second. The oldest are forgotten.
MAX_FRAMES = 7200
# Maximum number of the newest frames whose notes are prefilled, and used by an answer if its question names no time.
MAX_ANSWER_FRAMES = 500
# Maximum tokens of an answer if the client sets none. The prompt asks for two short sentences, but a small model may
# repeat a sentence until its context is full, and the client's next question may wait for the end.
MAX_ANSWER_TOKENS = 300
# A question about a time gets the nearest frame within this distance, in seconds.
MAX_TIME_OFFSET_S = 3.0


class Observer:
    """A VideoModel that knows a frame's text, as read by `reader`, and its brightness, colours and motion.

    The caller owns all models and closes them.

    - `conversation_model`: writes the answers and speaks them in its voice.
    - `transcriber`: transcribes spoken questions. If None, they are ignored.
    - `synthesizer`: if the notes do not support an answer, speaks the answer that replaces it. If None, the replacement
      is text only.
    - `tool_servers`: carry out functions that the language model may call. Their results support an answer.
    """

    def __init__(
        self,
        conversation_model: ConversationModel,
        reader: ImageReader,
        transcriber: Transcriber | None,
        synthesizer: Synthesizer | None = None,
        tool_servers: ToolServers | None = None,
    ) -> None:
        self._tool_servers = tool_servers
        self._conversation_model, self._read_ahead, self._transcriber = (
            conversation_model,
            ReadAhead(reader),
            transcriber,
        )
        self._synthesizer = synthesizer
        facts = conversation_model.profile
        self.profile = VideoProfile(facts.id, "text", facts.sample_rate_hz, facts.voices)

    async def open(self, instructions: str, owner: Hashable | None = None) -> ObserverStream:
        """Open a separate conversation for a session. `instructions` are added after the observer's own instructions.
        Raises Refused if the model has no room for another conversation.
        """
        conversation = await self._conversation_model.open(owner)
        return ObserverStream(
            conversation, self._read_ahead, self._transcriber, self._synthesizer, instructions, self._tool_servers
        )

    def close(self) -> None:
        """Do nothing: the caller that loaded the models closes them."""


class ObserverStream:
    """A VideoStream that answers from notes. It owns `conversation` and closes it. For one event loop.

    It keeps the files of the frames that are still unread, and the notes of MAX_FRAMES frames.
    """

    def __init__(
        self,
        conversation: ConversationStream,
        read_ahead: ReadAhead,
        transcriber: Transcriber | None,
        synthesizer: Synthesizer | None,
        instructions: str,
        tool_servers: ToolServers | None = None,
    ) -> None:
        self._tool_servers = tool_servers
        self._conversation, self._transcriber = conversation, transcriber
        self._synthesizer = synthesizer
        # The conversation so far: the system turn, then each question with its notes, and its answer.
        self._messages: list[Message] = [Message("system", f"{PROMPT} {instructions}".strip())]
        self._frames: list[ObservedFrame] = []
        # The number of the last frame that the language model knows from a remembered question.
        self._last_told = -1
        self._changed = Signal()
        self._unread = UnreadFrames(read_ahead, self._changed.notify)
        self._thumbnail: np.ndarray | None = None
        self._likeness = EvsFilter(SAME_TEXT_LIKENESS)
        self._reading = FrameReading()
        self._answering = self._was_grounded = False

    async def run(self) -> None:
        """Read the text on frames, the newest first, and prefill the notes after all are read. Runs until cancelled."""
        while True:
            while self._unread:
                await self._unread.read_next()
            changed = self._changed.pending()
            await self._prefill()
            if not self._unread:
                await changed.wait()

    async def _prefill(self) -> None:
        """Prefill the new notes before a question asks about them."""
        new = self._new_frames()
        unread = any(frame.reading.lines is None for frame in new)
        if self._answering or not new or len(new) == MAX_ANSWER_FRAMES or unread:
            return
        notes = notes_on(new)
        if len(notes) >= MAX_NOTES:
            # When a question is asked, the oldest notes will be gone, so the prefilled rows would be useless.
            return
        message = Message("user", "Notes:\n" + "\n".join(notes) + "\n")
        try:
            await self._conversation.prefill((*self._messages, message), server_tools(self._tool_servers))
        except (ModelError, EngineError, Refused, RemoteProtocolError) as error:
            # If the error persists, the next question raises it.
            log.warning("notes were not prefilled: %s", error)

    def _new_frames(self) -> list[ObservedFrame]:
        return [frame for frame in self._frames[-MAX_ANSWER_FRAMES:] if frame.number > self._last_told]

    async def append_frame(self, frame: VideoFrame) -> None:
        """Record the plain facts of a frame, and queue the frame for `run` to read its text. Raises MediaError."""
        pixels = await in_thread(frame.image.overview, places=IMAGE_THREADS)
        scene, self._thumbnail = describe(pixels, self._thumbnail)
        if self._likeness.keeps(pixels):
            self._reading = FrameReading()
            self._unread.put(self._reading, frame.image)
        self._frames.append(ObservedFrame(frame.number, frame.at_s, scene, self._reading))
        del self._frames[:-MAX_FRAMES]
        self._changed.notify()

    def append_audio(self, pcm: Pcm, at_s: float) -> None:
        """Do nothing: each question contains its audio."""

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """Do nothing: an answer uses all new notes, regardless of the sampling."""

    def drop_frame(self, frame: int) -> None:
        """Do nothing: notes are small, so they are kept after their frame, up to MAX_FRAMES of them."""

    async def settled(self) -> None:
        """Wait until the text of all frames is read. `run` must be running."""
        while any(frame.reading.lines is None for frame in self._frames):
            await self._changed.wait()

    def forget(self, before_s: float) -> None:
        """Drop the notes on frames from before `before_s`, in seconds since the session began. Those of these frames
        that are unread will not be read.

        Notes that the language model got with a question stay in its conversation.
        """
        self._frames = [frame for frame in self._frames if frame.at_s >= before_s]
        self._unread.keep([frame.reading for frame in self._frames])

    async def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Answer a question from the notes. Waits up to MAX_READING_WAIT_S for the text of its frames.

        If the language model begins to say something that the notes do not support, its answer is replaced by an answer
        from the plain facts. An answer that was replaced or cut off is not remembered, so the notes that were new for
        its question are still new for the next question. One question is answered at a time. Raises Refused,
        ModelError, EngineError or RemoteProtocolError.
        """
        asked_s = asked_time(question.text, question.at_s)
        await self._read_for(question, asked_s)
        heard = await words_of(question, self._transcriber)
        messages = [*self._messages, Message("user", self._question_with_notes(question, asked_s, heard))]
        text: list[str] = []
        self._answering = True
        try:
            async with aclosing(self._grounded(messages, question, heard, options, voice)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, TextDelta):
                        text.append(chunk.text)
                    yield chunk
        finally:
            self._answering = False
        # Made-up answers are not remembered, because the next answer would imitate them.
        if self._was_grounded:
            self._messages = [*messages, Message("assistant", "".join(text))]
            self._last_told = max([self._last_told, *(frame.number for frame in self._frames)])

    async def _grounded(
        self,
        messages: list[Message],
        question: VideoQuestion,
        heard: str,
        options: ReplyOptions,
        voice: VoiceOptions | None,
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the language model's answer if the notes support it, else an answer from the facts."""
        text = question.text.strip() or heard
        check, held_back = Grounding(text, [*self._known_texts(text), heard]), list[ResponseChunk]()
        done = ReplyDone("stop", 0, 0, 0)

        def respond(asked: tuple[Message, ...], how: ReplyOptions) -> AsyncGenerator[ResponseChunk, None]:
            return self._conversation.respond(asked, how, voice)

        options = replace(options, max_tokens=options.max_tokens or MAX_ANSWER_TOKENS)
        made = reply_with_tools(respond, messages, options, self._tool_servers, check.know)
        async with aclosing(made) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, ReplyDone):
                    done = chunk
                elif not isinstance(chunk, TextDelta):
                    held_back.append(chunk)
                elif allowed := check.feed(chunk.text):
                    yield TextDelta(allowed)
                if check.grounded is False:
                    break
                while check.grounded and held_back:
                    yield held_back.pop(0)
        if check.grounded is None and (allowed := check.finish()):
            yield TextDelta(allowed)
            for chunk in held_back:
                yield chunk
        self._was_grounded = bool(check.grounded)
        if not check.grounded:
            async for chunk in self._unseen(text, voice):
                yield chunk
        yield done

    def _known_texts(self, question: str) -> list[str]:
        """Return the texts from which the words of an answer may come."""
        frames = self._frames[-MAX_ANSWER_FRAMES:]
        readings = {id(frame.reading): frame.reading for frame in frames}
        texts = [line for reading in readings.values() for line in reading.lines or ()]
        if asks_about_whole_picture(question):
            texts += [frame.note() for frame in frames]
        return texts

    async def _unseen(self, question: str, voice: VoiceOptions | None) -> AsyncGenerator[ResponseChunk, None]:
        text = unseen_answer(question, self._frames[-1] if self._frames else None)
        yield TextDelta(text)
        if voice and self._synthesizer:
            async with aclosing(self._synthesizer.speak(text, voice, lambda: Urgency.FINAL)) as chunks:
                async for chunk in chunks:
                    yield ResponseAudio(chunk.pcm, chunk.words)

    async def _read_for(self, question: VideoQuestion, asked_s: float | None) -> None:
        """Read the frames of a question before all others, and wait for them up to MAX_READING_WAIT_S."""
        wanted = [frame for frame in self._frames if frame.number in question.frames]
        if asked_s is not None:
            wanted = self._nearest(asked_s)[:2]
        with anyio.move_on_after(MAX_READING_WAIT_S):
            await self._unread.read_first([frame.reading for frame in wanted])
            while any(frame.reading.lines is None for frame in wanted):
                await self._changed.wait()

    def _nearest(self, at_s: float) -> list[ObservedFrame]:
        """Return the frames within MAX_TIME_OFFSET_S of a time, the nearest first."""
        near = [frame for frame in self._frames if abs(frame.at_s - at_s) <= MAX_TIME_OFFSET_S]
        return sorted(near, key=lambda frame: abs(frame.at_s - at_s))

    def _question_with_notes(self, question: VideoQuestion, asked_s: float | None, heard: str) -> str:
        """Return the user's turn: the notes since the last remembered question, followed by the question."""
        lines = notes_on(self._new_frames())
        if heard:
            lines.append(f'Somebody said: "{heard}".')
        if not lines:
            lines.append("Nothing new.")
        if asked_s is not None:
            near = self._nearest(asked_s)
            note = near[0].note() if near else "nothing is known of it"
            lines.append(f"The time asked about is {asked_s:.0f} s; then {note}.")
        text = question.text.strip() or heard or "What do you see?"
        return "Notes:\n" + "\n".join(lines) + f"\nIt is {question.at_s:.0f} s now. Question: {text}"

    def close(self) -> None:
        """Close the conversation. The caller cancels `run`, and the reader stays open."""
        self._conversation.close()


async def words_of(question: VideoQuestion, transcriber: Transcriber | None) -> str:
    """Transcribe the audio of a question as a whole. Waits for the transcriber.

    Returns "" if there is no audio or no transcriber. If the transcriber fails, logs the error and returns "".
    """
    if question.pcm is None or transcriber is None:
        return ""
    words = []
    try:
        async for part in transcriber.transcribe(one_slab(question.pcm), FileOptions()):
            if isinstance(part, TranscriptSegment):
                words.append(part.text.strip())
    except (ModelError, Refused) as error:
        log.warning("a spoken question was not transcribed: %s", error)
        return ""
    return " ".join(w for w in words if w)
