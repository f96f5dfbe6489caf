"""A language model and a voice as one conversation model: order, early audio, barge-in, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from antiphon.contracts import (
    LanguageLoad,
    LanguageProfile,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    SpeechChunk,
    SynthesizerProfile,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Urgency,
    VoiceOptions,
)
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.events.words import Word
from antiphon.pipelines.cascade import Cascade, line
from antiphon.text.markup import pause_s

RATE_HZ = 1000


class Writer:
    """Writes the given text, one word in each step; `!fail` fails."""

    def __init__(self, text: str, call: bool = False) -> None:
        self.text, self.call = text, call
        self.profile = LanguageProfile("writer", 1000)
        self.log: list[str] = []
        self.seen: list[tuple[Message, ...]] = []

    async def open(self, owner: object = None) -> Writer:
        return self

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        self.log.append("prefill")

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        self.seen.append(tuple(messages))
        try:
            for word in self.text.split(" ") if self.text else ():
                await asyncio.sleep(0)
                if word == "!fail":
                    raise ModelError("no")
                self.log.append(f"wrote {word}")
                yield TextDelta(word + " ")
            if self.call:
                yield ToolCallStarted("call_1", "look")
                yield ToolCallDelta("{}")
            yield ReplyDone("tool_calls" if self.call else "stop", 10, 4, 3)
        finally:
            self.log.append("left")

    def load(self) -> LanguageLoad:
        raise NotImplementedError

    def close(self, *, keep: bool = False) -> None:
        self.log.append("closed")


class Voice:
    """Speaks each word for a tenth of a second. `sentences`: its texts; `num_ended`: the number of texts that ended."""

    def __init__(self, word_times: bool = True) -> None:
        self.profile = SynthesizerProfile("voice", RATE_HZ, ("one",), ("en",), (0.5, 2.0), word_times)
        self.sentences, self.before = list[str](), list[str]()
        self.num_ended = 0

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.sentences.append(text)
        self.before.append(options.spoken_before)
        try:
            if "foreign" in text:
                raise RemoteProtocolError("unsupported_text", "no")
            if "broken" in text:
                raise ModelError("the voice broke")
            for k, word in enumerate(text.split()):
                await asyncio.sleep(0)
                words = (Word(word, k / 10, (k + 1) / 10, 1.0),) if self.profile.word_times else ()
                yield SpeechChunk(np.zeros(RATE_HZ // 10, np.float32), words)
        finally:
            self.num_ended += 1


async def answers(
    writer: Writer, voice: Voice | None, speaks: bool = True, clock: Callable[[], float] = lambda: 0.0
) -> list[ResponseChunk]:
    talk = await Cascade(writer, voice, clock=clock).open()
    options = VoiceOptions("one") if speaks else None
    async with aclosing(talk.respond((Message("user", "Hi"),), ReplyOptions(), options)) as parts:
        return [p async for p in parts]


class LiveVoice(Voice):
    """Reads while it speaks: a tenth of a second for each piece of text."""

    def __init__(self) -> None:
        super().__init__(word_times=False)
        self.profile = replace(self.profile, streams_text=True)

    async def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        try:
            async for text in texts:
                self.sentences.append(text)
                if "broken" in text:
                    raise ModelError("the voice broke")
                yield SpeechChunk(np.zeros(RATE_HZ // 10, np.float32))
        finally:
            self.num_ended += 1


def test_when_a_voice_reads_while_it_speaks_then_it_is_given_the_text_as_it_is_written() -> None:
    voice = LiveVoice()
    out = asyncio.run(answers(Writer("One two three, four."), voice))
    assert voice.sentences == ["One ", "two ", "three, ", "four. "]
    assert len([p for p in out if isinstance(p, ResponseAudio) and len(p.pcm)]) == 4
    words = [w for p in out if isinstance(p, ResponseAudio) for w in p.words]
    assert [w.text for w in words] == ["One", "two", "three,", "four."]
    assert words[-1].end_s == pytest.approx(0.4)
    assert isinstance(out[-1], ReplyDone)
    # The first audio arrives before the last word.
    kinds = [type(p) for p in out]
    assert kinds.index(ResponseAudio) < len(kinds) - 1 - kinds[::-1].index(TextDelta)
    broken = LiveVoice()
    with pytest.raises(ModelError, match="broke"):
        asyncio.run(answers(Writer("One broken two"), broken))
    assert (voice.num_ended, broken.num_ended) == (1, 1)


def test_when_a_voice_gives_no_word_times_then_they_are_estimated() -> None:
    voice = Voice(word_times=False)
    out = asyncio.run(answers(Writer("One two three four five six. Seven eight."), voice))
    words = [w for p in out if isinstance(p, ResponseAudio) for w in p.words]
    assert [w.text for w in words] == ["One", "two", "three", "four", "five", "six.", "Seven", "eight."]
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(words))
    # The words of a sentence end with its audio, which is examined in frames of 20 ms.
    assert words[-1].end_s == pytest.approx(0.8, abs=0.03)


def test_when_audio_would_run_out_then_a_long_sentence_is_spoken_in_parts() -> None:
    """A word takes as long to write as to say, so the audio of the first words is over long before the sentence."""
    text = "One two three four five six, seven eight nine ten eleven twelve."
    writer, voice = Writer(text), Voice()
    out = asyncio.run(answers(writer, voice, clock=lambda: 0.1 * len(writer.log)))
    assert voice.sentences == ["One two three", "four five six,", "seven eight nine ten eleven", "twelve."]
    assert [w.text for p in out if isinstance(p, ResponseAudio) for w in p.words] == text.split()
    # Each gets the text spoken before it, by which the language of a short text is detected.
    assert voice.before == ["", "One two three", "One two three four five six,", text.removesuffix(" twelve.")]
    # A sentence that arrives as a whole is spoken as a whole.
    swift = Voice()
    asyncio.run(answers(Writer(text), swift))
    assert swift.sentences == ["One two three", "four five six, seven eight nine ten eleven twelve."]


TEXT = "Well, I think it is, all in all, fine. Do you not? Yes."


def test_the_first_clause_is_spoken_before_the_text_is_complete() -> None:
    writer, voice = Writer(TEXT), Voice()
    out = asyncio.run(answers(writer, voice))
    assert voice.sentences == ["Well, I think it", "is, all in all, fine.", "Do you not?", "Yes."]
    first = next(k for k, p in enumerate(out) if isinstance(p, ResponseAudio))
    assert any(isinstance(p, TextDelta) for p in out[first:])
    assert "".join(p.text for p in out if isinstance(p, TextDelta)).strip() == TEXT
    words = [w for p in out if isinstance(p, ResponseAudio) for w in p.words]
    assert [w.text for w in words] == TEXT.split()
    # Times continue from one sentence to the next.
    assert [round(w.start_s, 3) for w in words] == [round(k / 10, 3) for k in range(len(words))]
    assert isinstance(out[-1], ReplyDone)


def test_when_the_first_clause_is_long_then_it_is_spoken_from_three_words_on() -> None:
    voice = Voice()
    out = asyncio.run(answers(Writer("The weather in Rome will be sunny and warm today. Yes, it will."), voice))
    assert voice.sentences == ["The weather in", "Rome will be sunny and warm today.", "Yes, it will."]
    words = [w.text for p in out if isinstance(p, ResponseAudio) for w in p.words]
    assert words == [
        "The",
        "weather",
        "in",
        "Rome",
        "will",
        "be",
        "sunny",
        "and",
        "warm",
        "today.",
        "Yes,",
        "it",
        "will.",
    ]


def test_when_there_is_no_voice_then_the_response_is_text() -> None:
    for voice, speaks in ((None, True), (Voice(), False)):
        out = asyncio.run(answers(Writer(TEXT), voice, speaks))
        assert not [p for p in out if isinstance(p, ResponseAudio)]
        assert isinstance(out[-1], ReplyDone)


def test_when_a_tool_is_called_then_the_call_comes_last_and_is_not_spoken() -> None:
    writer, voice = Writer("One moment please.", call=True), Voice()
    out = asyncio.run(answers(writer, voice))
    assert voice.sentences == ["One moment please."]
    kinds = [type(p) for p in out if not isinstance(p, ResponseAudio)]
    assert kinds == [TextDelta, TextDelta, TextDelta, ToolCallStarted, ToolCallDelta, ReplyDone]
    assert asyncio.run(answers(Writer("", call=True), Voice()))[-1] == ReplyDone("tool_calls", 10, 4, 3)


def test_when_the_response_is_closed_then_writing_and_speaking_end() -> None:
    async def main() -> tuple[Writer, Voice]:
        writer, voice = Writer("word " * 1000), Voice()
        talk = await Cascade(writer, voice).open()
        stream = talk.respond((Message("user", "Hi"),), ReplyOptions(), VoiceOptions("one"))
        async for _ in stream:
            break
        await stream.aclose()
        written = len(writer.log)
        await asyncio.sleep(0.01)
        assert len(writer.log) == written
        return writer, voice

    writer, voice = asyncio.run(main())
    assert "left" in writer.log
    assert voice.num_ended == len(voice.sentences)


@pytest.mark.parametrize(
    ("text", "message"), [("One two !fail three", "no"), ("A broken one. Two.", "the voice broke")]
)
def test_when_writing_or_speaking_fails_then_the_response_raises_that_error(text: str, message: str) -> None:
    writer = Writer(text)
    with pytest.raises(ModelError, match=message):
        asyncio.run(answers(writer, Voice()))
    assert "left" in writer.log


def test_when_the_voice_cannot_speak_a_sentence_then_it_is_still_written() -> None:
    out = asyncio.run(answers(Writer("A foreign word. Fine."), Voice()))
    assert "".join(p.text for p in out if isinstance(p, TextDelta)).strip() == "A foreign word. Fine."
    assert [w.text for p in out if isinstance(p, ResponseAudio) for w in p.words] == ["Fine."]


class OtherVoice(Voice):
    """Refuses German text."""

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        if "Guten" in text:
            raise RemoteProtocolError("language_not_spoken", "no voice for German")
        async for chunk in super().speak(text, options, urgency):
            yield chunk


def test_when_nothing_is_spoken_for_no_voice_speaks_the_language_then_the_response_fails_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ModelError, match="no voice for German"):
        asyncio.run(answers(Writer("Guten Tag allerseits."), OtherVoice()))
    assert "no voice for German" in caplog.text
    # If a part of it is spoken, that part is heard.
    out = asyncio.run(answers(Writer("Guten Tag, my friend. That is all of it."), OtherVoice()))
    assert [w.text for p in out if isinstance(p, ResponseAudio) for w in p.words][-2:] == ["of", "it."]


def test_thinking_tags_and_pauses_are_not_spoken_however_the_text_is_cut() -> None:
    text = "<think>Hm, well.</think>One two three four. <b>Five</b> &amp; six <break time='1s'/>seven."
    voice = Voice()
    out = asyncio.run(answers(Writer(text), voice))
    words = [w.text for p in out if isinstance(p, ResponseAudio) for w in p.words]
    assert [w for w in words if not pause_s(w)] == ["One", "two", "three", "four.", "Five", "&", "six", "seven."]
    assert "".join(p.text for p in out if isinstance(p, TextDelta)).strip() == text


class SlowVoice(Voice):
    """Still speaks when the language model calls a tool."""

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        async for chunk in super().speak(text, options, urgency):
            for _ in range(20):
                await asyncio.sleep(0)
            yield chunk


def test_when_a_voice_is_slower_than_a_call_then_its_audio_still_comes_before_the_call() -> None:
    out = asyncio.run(answers(Writer("I will look that up for you.", call=True), SlowVoice()))
    kinds = [type(p) for p in out]
    assert kinds.count(ResponseAudio) == 7
    assert kinds[-3:] == [ToolCallStarted, ToolCallDelta, ReplyDone]


def test_when_nothing_is_written_then_a_live_voice_says_nothing() -> None:
    out = asyncio.run(answers(Writer("", call=True), LiveVoice()))
    assert [type(p) for p in out] == [ToolCallStarted, ToolCallDelta, ReplyDone]


class ShortVoice(LiveVoice):
    """Ends after its first text, like a voice that has reached its longest audio."""

    async def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        async with aclosing(super().speak_live(texts, options)) as chunks:
            async for chunk in chunks:
                yield chunk
                return


def test_when_a_live_voice_ends_early_then_the_text_goes_on() -> None:
    out = asyncio.run(answers(Writer("One two three."), ShortVoice()))
    assert "".join(p.text for p in out if isinstance(p, TextDelta)).strip() == "One two three."
    assert isinstance(out[-1], ReplyDone)


def test_a_line_is_spoken_whatever_the_conversation_is() -> None:
    async def main() -> list[ResponseChunk]:
        stream = line("One moment.", voice)
        return [
            chunk async for chunk in stream.respond((Message("user", "Well?"),), ReplyOptions(), VoiceOptions("one"))
        ]

    voice = Voice()
    chunks = asyncio.run(main())
    assert (chunks[0], voice.sentences) == (TextDelta("One moment."), ["One moment."])
    assert [word.text for chunk in chunks if isinstance(chunk, ResponseAudio) for word in chunk.words] == [
        "One",
        "moment.",
    ]
    assert isinstance(chunks[-1], ReplyDone)
