"""Questions about a stream of frames, answered where no model that sees is at hand: from the text read on the frames and plain facts about them.

Frames are read as they come, the newest first, and one that looks like the last that was read is not read again. At a question the language model gets
what is new since the last one, with its times, so that its KV is appended to; questions about a time get what was seen then put before them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np

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
)
from antiphon.errors import EngineError, MediaError, ModelError, Refused
from antiphon.pipelines.grounding import Grounding
from antiphon.signals import Signal
from antiphon.vision.frame_filters import EvsFilter
from antiphon.vision.images import EncodedImage
from antiphon.vision.scene import SceneFacts, describe

log = logging.getLogger(__name__)

# A frame as like as this to one that was read says the same.
SAME = 0.999
# A question waits so long for the frames it is to be answered from to be read; they are read before all others.
READING_S = 4.0
# Frames whose text is still to be read: the oldest of more are not.
MAX_UNREAD, MAX_UNREAD_BYTES = 16, 32 << 20
# Bound: kept frames whose notes are remembered, an hour of two a second.
MAX_MOMENTS = 7200
# The newest of them an answer may be about, unless it asks about a time, and that are taken in ahead.
MAX_KNOWN = 500
# Moments that are told of a question's time: the nearest, within so many seconds.
NEAR_S = 3.0
# Of more that is new at one question the newest is told.
MAX_NOTES = 24
# Lines of text that one moment is told with.
MAX_LINES = 20

PROMPT = """You answer questions about what a camera or a screen shows, in one or two short sentences. You cannot see pictures. You only have notes: the text that was read on the picture, what was said, brightness, main \
colours and motion, each with the seconds at which it was so."""
# What is said where the notes do not say it, and how the picture is right now.
UNSEEN = "I cannot see that: I only read text and notice motion, light and colours. Right now it is {look}, and {text}."
# Questions about what is written: where the language model does not say it, it is said as it was read.
READS = re.compile(r"\b(read|reads|say|says|written|writing|text|words)\b", re.I)
# Questions that the plain facts answer.
PLAIN = re.compile(
    r"\b(bright|brightness|dark|light|lit|motion|moving|moves?|still|chang\w*|scenes?|colou?rs?)\b", re.I
)
OF_ALL = re.compile(
    r"\b(screen|picture|scene|image|background|frame|it|overall|camera|anything|something|everything)\b", re.I
)
AGO = re.compile(
    r"\b(\d+(?:\.\d+)?|an?|one|two|three|five|ten|twenty|thirty)\s*(s|sec|secs|seconds?|m|min|mins|minutes?)\s+ago\b",
    re.I,
)
AT = re.compile(r"\bat\s+(?:(\d+):(\d{2})|(?:second\s+)?(\d+(?:\.\d+)?)\s*(?:s|sec|secs|seconds?)?)\b", re.I)
NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "five": 5, "ten": 10, "twenty": 20, "thirty": 30}


@dataclass(slots=True, eq=False)
class FrameReading:
    """The text of one frame, and of those after it that look the same. `lines` None: not read yet."""

    lines: tuple[str, ...] | None = None


@dataclass(slots=True, eq=False)
class ObservedFrame:
    """One kept frame."""

    number: int
    at_s: float
    look: SceneFacts
    reading: FrameReading

    def facts(self) -> str:
        """The picture in a few words."""
        colours = " and ".join(self.look.colours[:2] or ("mixed colours",))
        return f"{self.look.light_level}, {self.look.motion_level}, mostly {colours}"

    @property
    def text(self) -> str:
        """What is written on it."""
        return " / ".join((self.reading.lines or ())[:MAX_LINES])

    def told(self) -> str:
        """For the language model."""
        said = f'it says "{self.text}"' if self.text else "no text"
        return f"{said} ({'a new scene, ' if self.look.new_scene else ''}{self.facts()})"


class Observer:
    """See Watcher. `partner` writes and speaks the answers, `synthesizer` says what it does not."""

    def __init__(
        self,
        partner: ConversationModel,
        reader: ImageReader,
        transcriber: Transcriber | None,
        synthesizer: Synthesizer | None = None,
    ) -> None:
        self._partner, self._reader, self._transcriber = partner, reader, transcriber
        self._synthesizer = synthesizer
        facts = partner.profile
        self.profile = VideoProfile(facts.id, "text", facts.sample_rate_hz, facts.voices)

    async def open(self, instructions: str) -> ObserverStream:
        """See Watcher."""
        return ObserverStream(
            await self._partner.open(), self._reader, self._transcriber, self._synthesizer, instructions
        )

    def close(self) -> None:
        """See Watcher. The models it uses are others'."""


class ObserverStream:
    """See Watching."""

    def __init__(
        self,
        talk: ConversationStream,
        reader: ImageReader,
        transcriber: Transcriber | None,
        synthesizer: Synthesizer | None,
        instructions: str,
    ) -> None:
        self._talk, self._reader, self._transcriber = talk, reader, transcriber
        self._synthesizer = synthesizer
        system = f"{PROMPT} {instructions}".strip()
        self._messages: list[Message] = [Message("system", system)]
        self._moments: list[ObservedFrame] = []
        self._told = -1
        self._unread: list[tuple[FrameReading, EncodedImage]] = []
        self._changed = Signal()
        self._thumbnail: np.ndarray | None = None
        self._alike = EvsFilter(SAME)
        self._reading = FrameReading()
        self._answering = self._grounded_last = False
        # How many frames were read, for measuring.
        self.num_read = 0

    async def run(self) -> None:
        """Read what is on the frames, the newest first."""
        while True:
            while self._unread:
                reading, image = self._unread.pop()
                try:
                    reading.lines = await self._reader.read(image)
                except (ModelError, Refused, MediaError) as error:
                    log.warning("the text on a frame was not read: %s", error)
                    reading.lines = ()
                self.num_read += 1
                self._changed.notify()
            changed = self._changed.pending()
            await self._prefill()
            if not self._unread:
                await changed.wait()

    async def _prefill(self) -> None:
        """The language model takes in what is new before it is asked."""
        new = [m for m in self._moments[-MAX_KNOWN:] if m.number > self._told]
        if self._answering or not new or len(new) == MAX_KNOWN or any(m.reading.lines is None for m in new):
            return
        lines = _lines(new)
        if len(lines) >= MAX_NOTES:
            # The first of them will not be told: what was taken in would be given up again.
            return
        message = Message("user", "Notes:\n" + "\n".join(lines) + "\n")
        try:
            await self._talk.prefill((*self._messages, message))
        except (ModelError, EngineError, Refused) as error:
            # The answer to come will say it, if it is not for now only.
            log.warning("notes were not prefilled: %s", error)

    async def append_frame(self, frame: VideoFrame) -> None:
        """See Watching."""
        pixels = await anyio.to_thread.run_sync(frame.image.overview)
        seen, self._thumbnail = describe(pixels, self._thumbnail)
        if self._alike.keeps(pixels):
            self._reading = FrameReading()
            # The newest is read first and soon, from the pixels that are there; those that wait keep only their files.
            for _, image in self._unread:
                image.release()
            self._unread.append((self._reading, frame.image))
            while len(self._unread) > MAX_UNREAD or sum(len(i.data) for _, i in self._unread) > MAX_UNREAD_BYTES:
                self._unread.pop(0)[0].lines = ()
        self._moments.append(ObservedFrame(frame.number, frame.at_s, seen, self._reading))
        del self._moments[:-MAX_MOMENTS]
        self._changed.notify()

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """See Watching. All that is read is taken in as it is read."""

    def drop_frame(self, frame: int) -> None:
        """See Watching. What was read on it stays known, within MAX_MOMENTS."""

    async def settled(self) -> None:
        """See Watching."""
        while any(m.reading.lines is None for m in self._moments):
            await self._changed.wait()

    def forget(self, before_s: float) -> None:
        """See Watching. What the language model was told stays told; nothing of it is told again."""
        self._moments = [m for m in self._moments if m.at_s >= before_s]
        alive = {id(m.reading) for m in self._moments}
        self._unread = [(r, i) for r, i in self._unread if id(r) in alive]

    async def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """See Watching."""
        asked_s = time_of(question.text, question.at_s)
        await self._read_for(question, asked_s)
        heard = await words_of(question, self._transcriber)
        message = Message("user", self._notes(question, asked_s, heard))
        said: list[str] = []
        messages = [*self._messages, message]
        self._answering = True
        try:
            async with aclosing(self._grounded(messages, question, heard, options, voice)) as answers:
                async for answer in answers:
                    if isinstance(answer, TextDelta):
                        said.append(answer.text)
                    yield answer
        finally:
            self._answering = False
        # An answer that was cut is not remembered: the model's KV goes back to the question before. Nor is one that was made up, which would be
        # what the next is made like.
        if self._grounded_last:
            self._messages = [*messages, Message("assistant", "".join(said))]
            self._told = max([self._told, *(m.number for m in self._moments)])

    async def _grounded(
        self,
        messages: list[Message],
        question: VideoQuestion,
        heard: str,
        options: ReplyOptions,
        voice: VoiceOptions | None,
    ) -> AsyncGenerator[ResponseChunk, None]:
        """The language model's answer, if it says what the notes say; else that nobody can see that here."""
        readings = {id(m.reading): m.reading for m in self._moments[-MAX_KNOWN:]}
        known = [line for reading in readings.values() for line in reading.lines or ()]
        text = question.text.strip() or heard
        if PLAIN.search(text) and OF_ALL.search(text):
            known += [m.told() for m in self._moments[-MAX_KNOWN:]]
        check, held = Grounding(text, [*known, heard]), list[ResponseChunk]()
        done = ReplyDone("stop", 0, 0, 0)
        async with aclosing(self._talk.respond(tuple(messages), options, voice)) as answers:
            async for answer in answers:
                if isinstance(answer, ReplyDone):
                    done = answer
                elif not isinstance(answer, TextDelta):
                    held.append(answer)
                elif out := check.feed(answer.text):
                    yield TextDelta(out)
                if check.grounded is False:
                    break
                while check.grounded and held:
                    yield held.pop(0)
        if check.grounded is None and (out := check.end()):
            yield TextDelta(out)
            for answer in held:
                yield answer
        self._grounded_last = bool(check.grounded)
        if not check.grounded:
            async for answer in self._unseen(text, voice):
                yield answer
        yield done

    async def _unseen(self, asked: str, voice: VoiceOptions | None) -> AsyncGenerator[ResponseChunk, None]:
        last = self._moments[-1] if self._moments else None
        lines = (last.reading.lines or ()) if last else ()
        shown = f'the text on it is "{" / ".join(lines[:3])}"' if lines else "there is no text on it"
        text = UNSEEN.format(look=last.facts() if last else "dark", text=shown)
        if lines and READS.search(asked):
            text = f'It says "{" / ".join(lines[:MAX_LINES])}".'
        yield TextDelta(text)
        if voice and self._synthesizer:
            async with aclosing(self._synthesizer.speak(text, voice, lambda: Urgency.FINAL)) as sounds:
                async for sound in sounds:
                    yield ResponseAudio(sound.pcm, sound.words)

    async def _read_for(self, question: VideoQuestion, asked_s: float | None) -> None:
        """Wait a little for what the question is about to be read."""
        wanted = [m for m in self._moments if m.number in question.frames]
        if asked_s is not None:
            near = [m for m in self._moments if abs(m.at_s - asked_s) <= NEAR_S]
            wanted = sorted(near, key=lambda m: abs(m.at_s - asked_s))[:2]
        first = {id(m.reading) for m in wanted}
        self._unread.sort(key=lambda unread: id(unread[0]) in first)
        with anyio.move_on_after(READING_S):
            while any(m.reading.lines is None for m in wanted):
                await self._changed.wait()

    def _notes(self, question: VideoQuestion, asked_s: float | None, heard: str) -> str:
        """What is new since the last question, and the question."""
        new = [m for m in self._moments[-MAX_KNOWN:] if m.number > self._told]
        lines = _lines(new)
        if heard:
            lines.append(f'Somebody said: "{heard}".')
        if not lines:
            lines.append("Nothing new.")
        if asked_s is not None:
            near = sorted(self._moments, key=lambda m: abs(m.at_s - asked_s))[:1]
            near = [m for m in near if abs(m.at_s - asked_s) <= NEAR_S]
            told = near[0].told() if near else "nothing is known of it"
            lines.append(f"The time asked about is {asked_s:.0f} s; then {told}.")
        text = question.text.strip() or heard or "What do you see?"
        return "Notes:\n" + "\n".join(lines) + f"\nIt is {question.at_s:.0f} s now. Question: {text}"

    def close(self) -> None:
        """See Watching."""
        self._talk.close()


async def words_of(question: VideoQuestion, transcriber: Transcriber | None) -> str:
    """What was said since the last question; "" where nobody hears, or it cannot be told."""
    if question.pcm is None or transcriber is None:
        return ""
    words = []
    try:
        async for part in transcriber.transcribe(question.pcm, FileOptions()):
            if isinstance(part, TranscriptSegment):
                words.append(part.text.strip())
    except (ModelError, Refused) as error:
        log.warning("a spoken question was not transcribed: %s", error)
        return ""
    return " ".join(w for w in words if w)


def _lines(moments: Sequence[ObservedFrame]) -> list[str]:
    """Notes, a line for each stretch that says the same; as it was at its end."""
    groups: list[list[ObservedFrame]] = []
    for moment in moments:
        if groups and groups[-1][-1].text == moment.text:
            groups[-1].append(moment)
        else:
            groups.append([moment])
    out = []
    for group in groups[-MAX_NOTES:]:
        cuts = sum(m.look.new_scene for m in group)
        more = f", {cuts} scene changes" if cuts > 1 else ""
        out.append(f"At {_span(group)}: {group[-1].told()}{more}.")
    return out


def _span(group: Sequence[ObservedFrame]) -> str:
    first, last = group[0].at_s, group[-1].at_s
    return f"{first:.1f} s" if last - first < 0.5 else f"{first:.1f} to {last:.1f} s"


def time_of(text: str, now_s: float) -> float | None:
    """The moment a question asks about, on the session's clock; None where it names none."""
    if found := AGO.search(text):
        word = found[1].lower()
        amount = float(NUMBERS[word]) if word in NUMBERS else float(word)
        return max(0.0, now_s - amount * (60 if found[2].lower().startswith("m") else 1))
    if found := AT.search(text):
        return int(found[1]) * 60 + int(found[2]) if found[1] else float(found[3])
    return None
