"""Combines a language model and a synthesizer into one conversation model, which speaks text while it is still being
written.

Two tasks produce a response. The first task reads the language model and splits its text into sentences. The first
sentence ends at a clause or after a few words, so that audio begins early. Later sentences are whole, but if the audio
is about to run out, a part of the next sentence is split off early. The second task speaks the sentences
(`sentences.py`). Closing the response's generator cancels both tasks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from contextlib import aclosing, suppress
from typing import cast

import anyio

from antiphon.audio.playback_clock import PlaybackClock
from antiphon.contracts import (
    ConversationProfile,
    ConversationStream,
    LanguageModel,
    LanguageStream,
    LiveSynthesizer,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    Synthesizer,
    TextDelta,
    VoiceOptions,
)
from antiphon.errors import EngineError, ModelError, Refused
from antiphon.events.tools import Tool
from antiphon.pipelines.merge import PutChunk, side_by_side
from antiphon.pipelines.sentences import NO_AUDIO, speak_sentences
from antiphon.text.markup import MarkupReader
from antiphon.text.sentences import SentenceSplitter
from antiphon.text.word_timing import WordPacer

# Minimum characters of the first sentence. A shorter one waits for more text, because a gap would follow "Well," alone.
MIN_FIRST_CHARS = 10
# Without punctuation, the first sentence ends after FIRST_WORDS words. Each additional word delays the audio by 70 ms
# on two cores. Speaking three words takes as long as writing the next ten.
FIRST_WORDS = 3
# If less than RUNNING_OUT_S of audio is left, an incomplete sentence of at least MIN_CUT_WORDS words is split off and
# spoken. The voice begins within 50 ms, and a pause for breath disturbs less than a gap.
RUNNING_OUT_S, MIN_CUT_WORDS = 0.3, 3
# Maximum number of texts that wait for the voice: sentences, or the language model's deltas if the voice reads while it
# speaks. When the queue is full, after thousands of words in one response, the language model waits.
MAX_WAITING_TEXTS = 4096
# The rate in the profile if there is no voice, and so no audio.
DEFAULT_RATE_HZ = 24_000


class Cascade:
    """A ConversationModel with the text of a language model and the audio of a synthesizer.

    The caller owns both models and closes them.

    - `synthesizer`: speaks the text. If it is None, responses are text only.
    - `failure_line`: spoken if the language model fails in a spoken response, unless it is empty.
    - `clock`: returns monotonic seconds. It is used only to decide when audio is about to run out.
    """

    native = None

    def __init__(
        self,
        language: LanguageModel,
        synthesizer: Synthesizer | None,
        failure_line: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._language = language
        self._failure_line = failure_line
        self._clock = clock
        self.synthesizer = synthesizer
        voice = synthesizer.profile if synthesizer else None
        self.profile = ConversationProfile(
            language.profile.id,
            voice.sample_rate_hz if voice else DEFAULT_RATE_HZ,
            voice.voices if voice else (),
            language.profile.accepts_media,
            language.profile.max_preemptive,
            keeps_to_schemas=language.profile.keeps_to_schemas,
        )

    async def open(self, owner: Hashable | None = None) -> ConversationStream:
        """Open a conversation with the language model. The synthesizer keeps no state for it.

        Raises Refused if there is no room for its KV.
        """
        return _CascadeStream(await self._language.open(owner), self.synthesizer, self._clock, self._failure_line)


def spoken(
    language: LanguageStream,
    synthesizer: Synthesizer | None,
    options: ReplyOptions,
    voice: VoiceOptions | None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[ResponseChunk, None]:
    """Speak a language stream's reply, in the same way as a cascade's `respond`, but without passing it any messages.

    For a stream that already knows its question. The stream stays open. Closing the generator ends the response.
    """
    return _CascadeStream(language, synthesizer, clock).respond((), options, voice)


def line(text: str, synthesizer: Synthesizer) -> ConversationStream:
    """Return a conversation whose responses all say `text`."""
    return _CascadeStream(_Line(text), synthesizer, time.monotonic)


class _Line:
    """A LanguageStream that replies with a given text."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        return

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        yield TextDelta(self._text)
        yield ReplyDone("stop", 0, 0, 0)

    def close(self, *, keep: bool = False) -> None:
        return


class _CascadeStream:
    def __init__(
        self,
        language: LanguageStream,
        synthesizer: Synthesizer | None,
        clock: Callable[[], float],
        failure_line: str = "",
    ) -> None:
        self._language = language
        self._synthesizer = synthesizer
        self._clock = clock
        self._failure_line = failure_line

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Prefill the language model. The synthesizer has nothing to prefill."""
        await self._language.prefill(messages, tools)

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Write a response and speak it. Text that the voice cannot speak stays text only.

        If the language model fails, the failure line is spoken before the error is raised.
        """
        synthesizer = self._synthesizer
        if voice is None or synthesizer is None:
            async with aclosing(self._language.reply(messages, options)) as replies:
                async for reply in replies:
                    yield reply
            return
        audio_left = _AudioLeft(self._clock)
        texts_in, texts_out = anyio.create_memory_object_stream[str](MAX_WAITING_TEXTS)
        failure: Exception | None = None

        async def give(text: str) -> None:
            # If the voice has ended by itself, the response continues as text only.
            with suppress(anyio.BrokenResourceError):
                await texts_in.send(text)

        async def write(put: PutChunk) -> None:
            nonlocal failure
            cutter = _TextCutter(audio_left, whole_texts=synthesizer.profile.streams_text)
            markup = MarkupReader()
            async with texts_in, aclosing(self._language.reply(messages, options)) as replies:
                ended_in = " "
                try:
                    async for reply in replies:
                        await put(reply)
                        ended_in = reply.text[-1:] or ended_in if isinstance(reply, TextDelta) else ended_in
                        said = markup.feed(reply.text) if isinstance(reply, TextDelta) else ""
                        for text in cutter.feed(said) if said else ():
                            await give(text)
                except (ModelError, EngineError, Refused) as error:
                    if not self._failure_line:
                        raise
                    failure = error
                    line = self._failure_line if ended_in.isspace() else f" {self._failure_line}"
                    await put(TextDelta(line))
                    for text in cutter.feed(markup.flush() + line):
                        await give(text)
                for text in (*cutter.feed(markup.flush()), cutter.flush()):
                    if text:
                        await give(text)

        async def speak(put: PutChunk) -> None:
            async with texts_out:
                if synthesizer.profile.streams_text:
                    await _speak_live(cast(LiveSynthesizer, synthesizer), voice, texts_out, put)
                else:
                    await speak_sentences(synthesizer, voice, texts_out, put, audio_left)

        with texts_in, texts_out:
            async with aclosing(side_by_side(write, speak)) as chunks:
                async for chunk in chunks:
                    yield chunk
        if failure:
            raise failure

    def close(self) -> None:
        """Close the language model's conversation. A later conversation with the same beginning may reuse its KV."""
        self._language.close(keep=True)


class _AudioLeft:
    """Tracks how much audio is left for the listener.

    `playback` is the clock of the audio so far. `num_waiting` counts the sentences that the voice has not spoken yet.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.playback = PlaybackClock(clock)
        self.num_waiting = 0

    @property
    def is_running_out(self) -> bool:
        """Whether the voice is idle and its audio is nearly played."""
        return not self.num_waiting and self.playback.ends_s is not None and self.playback.left_s < RUNNING_OUT_S


class _TextCutter:
    """Splits a reply, while it is being written, into the texts for the voice.

    With `whole_texts`, the voice reads while it speaks, so its texts are the language model's deltas themselves.
    """

    def __init__(self, audio_left: _AudioLeft, *, whole_texts: bool) -> None:
        self._audio_left = audio_left
        self._whole_texts = whole_texts
        # The text is split into clauses until the voice has its first text, then into sentences.
        self._splitter = SentenceSplitter("clause")
        self._first = ""

    def feed(self, text: str) -> list[str]:
        """Add text, and return the texts to speak now, in order."""
        if self._whole_texts:
            return [text]
        ready = []
        for sentence in self._splitter.feed(text):
            if self._splitter.granularity == "sentence":
                ready.append(self._given(sentence))
                continue
            self._first = f"{self._first} {sentence}".strip()
            if len(self._first) >= MIN_FIRST_CHARS or self._first[-1] in ".!?":
                ready.append(self._given(self._first))
        if self._splitter.granularity == "clause":
            if head := self._splitter.cut_words(FIRST_WORDS, MIN_FIRST_CHARS):
                ready.append(self._given(f"{self._first} {head}".strip()))
        elif self._audio_left.is_running_out and (head := self._splitter.cut_clause(MIN_CUT_WORDS)):
            ready.append(self._given(head))
        return ready

    def flush(self) -> str:
        """Return the rest of the reply as one text; "" if nothing is left."""
        rest = " ".join([*([self._first] if self._first else []), *self._splitter.flush()])
        return self._given(rest) if rest else ""

    def _given(self, text: str) -> str:
        self._audio_left.num_waiting += 1
        self._splitter.granularity, self._first = "sentence", ""
        return text


async def _speak_live(
    synthesizer: LiveSynthesizer, voice: VoiceOptions, texts: AsyncIterator[str], put: PutChunk
) -> None:
    """Speak texts, which may end anywhere, as one text. Word times are estimated, because such a voice has none."""
    rate_hz, pacer = synthesizer.profile.sample_rate_hz, WordPacer()

    async def paced() -> AsyncGenerator[str, None]:
        async for text in texts:
            pacer.feed(text)
            yield text

    async with aclosing(synthesizer.speak_live(paced(), voice)) as chunks:
        async for chunk in chunks:
            await put(ResponseAudio(chunk.pcm, pacer.advance(len(chunk.pcm) / rate_hz)))
    if words := pacer.finish():
        await put(ResponseAudio(NO_AUDIO, words))
