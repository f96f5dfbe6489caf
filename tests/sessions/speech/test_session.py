"""One speech session with a scripted synthesizer: order, one sentence ahead, bounds, cancelling, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest

from antiphon.contracts import SpeechChunk, Urgency, VoiceOptions
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    ConfigureSpeech,
    FlushText,
    SentenceAudio,
    SentenceDone,
    SentenceStarted,
    SpeechConfig,
    SpeechEvent,
    UtteranceDone,
)
from antiphon.events.words import Word
from antiphon.sessions.speech import render
from antiphon.sessions.speech import session as speech
from antiphon.sessions.speech.session import SpeechSession
from tests.sessions.speech.scripted import RATE_HZ, Live, Scripted

PCM = SpeechConfig(format="pcm", stream=True)
WHOLE = replace(PCM, granularity="none")


async def collect(session: SpeechSession) -> list[SpeechEvent]:
    out = []
    while output := await session.next_event():
        out.append(output)
    return out


def run(*inputs: object, synthesizer: Scripted | None = None) -> list[SpeechEvent]:
    async def main() -> list[SpeechEvent]:
        session = SpeechSession(synthesizer or Scripted())
        for item in inputs:
            session.handle(item)  # type: ignore[arg-type]
        session.close()
        running = asyncio.create_task(session.run())
        out = await collect(session)
        await running
        return out

    return asyncio.run(main())


def assert_no_text_waits(session: SpeechSession) -> None:
    """Assert that the session accepts as much text as a new one."""
    session.handle(AppendText("x" * speech.MAX_WAITING_CHARS))
    session.handle(CancelSpeech())


def shape(outputs: list[SpeechEvent]) -> list[str]:
    """Return a line for each event; all audio of a sentence is one line."""
    out: list[str] = []
    for output in outputs:
        match output:
            case SentenceStarted(utterance, sentence, text):
                out.append(f"start {utterance}.{sentence} {text}")
            case SentenceAudio(utterance, sentence):
                name = f"audio {utterance}.{sentence}"
                if not out or out[-1] != name:
                    out.append(name)
            case SentenceDone(utterance, sentence, error=error):
                out.append(f"done {utterance}.{sentence}" + (f" {error}" if error else ""))
            case UtteranceDone(utterance, count, cancelled):
                out.append(f"end {utterance} of {count}" + (" cancelled" if cancelled else ""))
    return out


def test_when_text_is_flushed_then_sentences_and_utterances_are_spoken_in_order() -> None:
    outputs = run(
        ConfigureSpeech(PCM),
        AppendText("One. Tw"),
        AppendText("o. Three"),
        FlushText(),
        AppendText("Four"),
        FlushText(),
    )
    assert shape(outputs) == [
        "start 0.0 One.", "audio 0.0", "done 0.0", "start 0.1 Two.", "audio 0.1", "done 0.1",
        "start 0.2 Three", "audio 0.2", "done 0.2", "end 0 of 3",
        "start 1.0 Four", "audio 1.0", "done 1.0", "end 1 of 1",
    ]  # fmt: skip
    sound = [o for o in outputs if isinstance(o, SentenceAudio) and (o.utterance, o.sentence) == (0, 0)]
    assert [round(s.start_s, 3) for s in sound] == [0.0, 0.1, 0.2, 0.3]
    assert all(len(s.data) == RATE_HZ // 10 * 2 for s in sound)
    done = next(o for o in outputs if isinstance(o, SentenceDone))
    assert done.words == (Word("One.", 0.0, 0.4, 1.0),)


def test_when_a_voice_reads_while_it_speaks_then_the_text_is_spoken_while_it_is_written() -> None:
    async def main() -> None:
        session = SpeechSession(Live())
        running = asyncio.create_task(session.run())
        session.handle(ConfigureSpeech(WHOLE))
        session.handle(AppendText("  "))
        await asyncio.sleep(0)
        assert session.idle
        session.handle(AppendText("Hel"))
        seen = [await session.next_event() for _ in range(6)]
        assert shape(seen) == ["start 0.0   Hel", "audio 0.0"]  # type: ignore[arg-type]
        # Nothing is left to speak until more text arrives.
        await asyncio.sleep(0)
        assert session.idle
        session.handle(AppendText("lo. There."))
        session.handle(FlushText())
        session.handle(AppendText("Two"))
        session.handle(FlushText())
        session.close()
        rest = await collect(session)
        await running
        assert shape(rest) == [
            "audio 0.0",
            "done 0.0",
            "end 0 of 1",
            "start 1.0 Two",
            "audio 1.0",
            "done 1.0",
            "end 1 of 1",
        ]
        assert_no_text_waits(session)

    asyncio.run(main())


def test_when_a_live_text_is_cancelled_or_closed_or_fails_then_the_next_is_spoken() -> None:
    async def main() -> None:
        synthesizer = Live()
        session = SpeechSession(synthesizer)
        running = asyncio.create_task(session.run())
        session.handle(ConfigureSpeech(WHOLE))
        session.handle(AppendText("Hello"))
        assert isinstance(await session.next_event(), SentenceStarted)
        session.handle(CancelSpeech())
        assert shape([await session.next_event()]) == ["end 0 of 1 cancelled"]  # type: ignore[list-item]
        session.handle(AppendText("so bad"))
        session.handle(AppendText(" it was"))
        session.handle(FlushText())
        # A closed session speaks the text received so far.
        session.handle(AppendText("an end"))
        session.close()
        assert shape(await collect(session)) == [
            "start 1.0 so bad it was", "audio 1.0", "done 1.0 the model failed", "end 1 of 1",
            "start 2.0 an end", "audio 2.0", "done 2.0",
        ]  # fmt: skip
        await running
        assert synthesizer.log == ["begin live", "left live"] * 3

    asyncio.run(main())


def test_when_the_audio_of_a_live_text_ends_early_then_its_text_counts_as_spoken() -> None:
    class Short(Live):
        async def speak_live(
            self, texts: AsyncIterator[str], options: VoiceOptions
        ) -> AsyncGenerator[SpeechChunk, None]:
            async for _ in texts:
                yield SpeechChunk(np.zeros(10, np.float32))
                return

    async def main() -> None:
        session = SpeechSession(Short())
        running = asyncio.create_task(session.run())
        session.handle(ConfigureSpeech(WHOLE))
        for _ in range(3):
            for word in ("Many ", "words ", "follow."):
                session.handle(AppendText(word * 1000))
            while not isinstance(await session.next_event(), SentenceDone):
                pass
            # The utterance is not over until it is flushed; text that arrives before that is not spoken.
            session.handle(AppendText("More."))
            session.handle(FlushText())
            assert isinstance(await session.next_event(), UtteranceDone)
        assert_no_text_waits(session)
        session.close()
        await running

    asyncio.run(main())


def test_when_text_is_split_into_sentences_or_empty_then_a_live_voice_speaks_it_as_any_other() -> None:
    # White space alone is a sentence without words. With other granularities, sentences are spoken as usual.
    silent = shape(run(ConfigureSpeech(WHOLE), AppendText(" \n"), FlushText(), synthesizer=Live()))
    assert (silent[0], silent[-1]) == ("start 0.0 ", "end 0 of 1")
    assert (
        shape(run(ConfigureSpeech(PCM), AppendText("One. Two."), FlushText(), synthesizer=Live()))[0]
        == "start 0.0 One."
    )


def test_when_the_model_is_to_have_the_whole_text_then_a_live_voice_waits_for_its_end() -> None:
    synthesizer = Live()
    config = ConfigureSpeech(SpeechConfig(granularity="none", format="pcm", stream=True, whole_text=True, rate_hz=8000))
    outputs = run(config, AppendText("One. "), AppendText("Two."), FlushText(), synthesizer=synthesizer)
    assert "begin live" not in synthesizer.log
    assert synthesizer.asked[0].whole_text is True
    (started,) = [o for o in outputs if isinstance(o, SentenceStarted)]
    assert (started.text, started.rate_hz) == ("One. Two.", 8000)


def test_when_nothing_is_flushed_then_the_utterance_has_no_sentences() -> None:
    assert shape(run(FlushText(), AppendText(""), FlushText())) == ["end 0 of 0", "end 1 of 0"]


@pytest.mark.parametrize("pieces", [["  "], ["<th", "ink>hm</thi", "nk>"], ["<speak></speak>"]])
def test_when_a_text_says_nothing_then_it_is_one_sentence_of_a_short_silence(pieces: list[str]) -> None:
    outputs = run(ConfigureSpeech(PCM), *map(AppendText, pieces), FlushText())
    assert [o.text for o in outputs if isinstance(o, SentenceStarted)] == [""]
    (audio,) = (o for o in outputs if isinstance(o, SentenceAudio))
    assert audio.data == bytes(2 * round(0.08 * RATE_HZ))


def test_when_tags_are_cut_over_messages_then_sentences_are_without_them() -> None:
    text = "<think>No.</think>One. <break time='500ms'/>Two &am|p; three.".replace("|", "")
    outputs = run(ConfigureSpeech(PCM), *map(AppendText, text), FlushText())
    assert [o.text for o in outputs if isinstance(o, SentenceStarted)] == ["One.", "Two & three."]


def test_when_audio_is_not_streamed_then_each_sentence_is_one_file() -> None:
    outputs = run(ConfigureSpeech(SpeechConfig(format="wav")), AppendText("Hi. Ho."), FlushText())
    sounds = [o for o in outputs if isinstance(o, SentenceAudio)]
    assert len(sounds) == 2
    assert all(s.data[:4] == b"RIFF" and len(s.data) == 44 + 3 * RATE_HZ // 10 * 2 for s in sounds)


def test_when_the_configuration_changes_then_it_holds_for_the_utterances_that_follow() -> None:
    synthesizer = Scripted()
    session = SpeechSession(synthesizer)
    session.handle(ConfigureSpeech(SpeechConfig(voice="two", format="pcm", stream=True, seed=3)))
    session.handle(AppendText("a"))
    with pytest.raises(RemoteProtocolError, match="utterance is in progress"):
        session.handle(ConfigureSpeech(PCM))
    session.handle(FlushText())
    # The first utterance is not spoken yet, and keeps its own configuration.
    session.handle(ConfigureSpeech(PCM))
    session.handle(AppendText("b"))
    session.handle(FlushText())
    session.close()

    async def main() -> None:
        await asyncio.gather(session.run(), collect(session))

    asyncio.run(main())
    assert synthesizer.asked == [VoiceOptions("two", 1.0, 3), VoiceOptions("one", 1.0, None)]


def test_while_one_sentence_waits_to_be_read_the_next_is_made() -> None:
    async def main() -> list[str]:
        synthesizer = Scripted()
        session = SpeechSession(synthesizer)
        session.handle(ConfigureSpeech(PCM))
        session.handle(AppendText("One. Two. "))
        running = asyncio.create_task(session.run())
        # No event of the first sentence is read.
        for _ in range(100):
            await asyncio.sleep(0)
        running.cancel()
        return synthesizer.log

    log = asyncio.run(main())
    assert log[:2] == ["begin One.", "end One."]
    assert "end Two." in log


def test_when_the_reader_stops_then_synthesis_stops_and_when_it_goes_on_it_gets_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speech, "MAX_WAITING_BYTES", 20_000)

    async def main() -> None:
        synthesizer = Scripted()
        session = SpeechSession(synthesizer)
        session.handle(ConfigureSpeech(PCM))
        session.handle(AppendText("x" * 500))
        session.handle(FlushText())
        session.close()
        running = asyncio.create_task(session.run())
        for _ in range(2000):
            await asyncio.sleep(0)
        assert synthesizer.chunks <= 6
        # The last chunk waits for room, and all before it fit the bound.
        assert (synthesizer.chunks - 2) * RATE_HZ // 10 * 2 <= 20_000
        outputs = await collect(session)
        await running
        assert sum(len(o.data) for o in outputs if isinstance(o, SentenceAudio)) == 500 * RATE_HZ // 10 * 2

    asyncio.run(main())


def test_when_speech_is_cancelled_then_nothing_of_it_follows_and_the_session_goes_on() -> None:
    async def main() -> tuple[list[str], list[str]]:
        synthesizer = Scripted()
        session = SpeechSession(synthesizer)
        session.handle(ConfigureSpeech(PCM))
        session.handle(AppendText("One. " + "x" * 400 + ". Three. Fo"))
        running = asyncio.create_task(session.run())
        seen: list[SpeechEvent] = []
        while not any(isinstance(o, SentenceAudio) and o.sentence == 1 for o in seen):
            output = await session.next_event()
            assert output
            seen.append(output)
        session.handle(CancelSpeech())
        session.handle(AppendText("Five."))
        session.handle(FlushText())
        session.close()
        rest = await collect(session)
        await running
        return shape(rest), synthesizer.log

    rest, log = asyncio.run(main())
    assert rest == ["end 0 of 2 cancelled", "start 1.0 Five.", "audio 1.0", "done 1.0", "end 1 of 1"]
    # The synthesis of the second sentence was closed before its end. The synthesis of the third sentence never began.
    assert not any(line.startswith("end x") for line in log)
    assert "begin Three." not in log


def test_when_speech_is_cancelled_that_is_made_and_not_read_then_it_is_not_sent() -> None:
    async def main() -> list[str]:
        session = SpeechSession(Scripted())
        session.handle(ConfigureSpeech(PCM))
        session.handle(AppendText("One. Two."))
        session.handle(FlushText())
        running = asyncio.create_task(session.run())
        for _ in range(100):
            await asyncio.sleep(0)
        first = await session.next_event()
        assert isinstance(first, SentenceStarted)
        session.handle(CancelSpeech())
        session.close()
        rest = await collect(session)
        await running
        return shape(rest)

    assert asyncio.run(main()) == ["end 0 of 2 cancelled"]


class Settled(Scripted):
    """A synthesizer whose chunk is ready when the cancel arrives, so the cancel does not interrupt the waiting task."""

    def __init__(self) -> None:
        super().__init__()
        self.next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        await self.next
        yield SpeechChunk(np.zeros(100, np.float32))


def test_when_a_chunk_is_done_as_the_cancel_comes_then_it_is_not_sent() -> None:
    async def main() -> list[str]:
        synthesizer = Settled()
        session = SpeechSession(synthesizer)
        session.handle(ConfigureSpeech(PCM))
        session.handle(AppendText("One. "))
        running = asyncio.create_task(session.run())
        assert isinstance(await session.next_event(), SentenceStarted)
        await asyncio.sleep(0)
        synthesizer.next.set_result(None)
        session.handle(CancelSpeech())
        session.close()
        rest = await collect(session)
        await running
        return shape(rest)

    assert asyncio.run(main()) == ["end 0 of 1 cancelled"]


def test_when_a_file_is_too_long_then_it_is_an_error_and_a_stream_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MAX_FILE_S", 1.0)
    whole = run(ConfigureSpeech(SpeechConfig(format="wav")), AppendText("x" * 20 + ". Two."), FlushText())
    assert [s for s in shape(whole) if s.startswith("done")] == [
        "done 0.0 one file may hold 1 s of sound: stream it, or send shorter units",
        "done 0.1",
    ]
    streamed = run(ConfigureSpeech(PCM), AppendText("x" * 20), FlushText())
    assert "done 0.0" in shape(streamed)


def test_when_too_many_utterances_wait_then_the_next_is_refused() -> None:
    session = SpeechSession(Scripted())
    for _ in range(speech.MAX_WAITING_UTTERANCES):
        session.handle(FlushText())
    with pytest.raises(RemoteProtocolError, match="utterances wait"):
        session.handle(FlushText())


def test_when_nothing_is_spoken_then_cancelling_does_nothing() -> None:
    assert shape(run(CancelSpeech(), AppendText("a"), FlushText()))[-1] == "end 0 of 1"


@pytest.mark.parametrize(
    ("text", "error"),
    [("bad", "the model failed"), ("foreign", "none of this text can be spoken"), ("full", "no room")],
)
def test_when_a_sentence_fails_then_the_others_are_spoken(text: str, error: str) -> None:
    outputs = run(ConfigureSpeech(PCM), AppendText(f"One. {text}. Two."), FlushText())
    assert [s for s in shape(outputs) if s.startswith(("done", "end"))] == [
        "done 0.0", f"done 0.1 {error}", "done 0.2", "end 0 of 3",
    ]  # fmt: skip


def test_when_too_much_text_waits_then_more_is_refused() -> None:
    session = SpeechSession(Scripted())
    for _ in range(8):
        session.handle(AppendText("x" * (speech.MAX_WAITING_CHARS // 8)))
    with pytest.raises(RemoteProtocolError, match="wait to be spoken"):
        session.handle(AppendText("x"))
    session.handle(CancelSpeech())
    session.handle(AppendText("x"))


def test_when_a_live_text_has_no_words_then_it_does_not_count_as_waiting_for_ever() -> None:
    async def main() -> None:
        session = SpeechSession(Live())
        session.handle(ConfigureSpeech(replace(PCM, granularity="none")))
        running = asyncio.create_task(session.run())
        for _ in range(3):
            session.handle(AppendText(" " * (speech.MAX_WAITING_CHARS // 2)))
            session.handle(FlushText())
            while not isinstance(await session.next_event(), UtteranceDone):
                pass
        assert session.num_bytes == 0
        session.close()
        await running

    asyncio.run(main())


def test_a_session_is_idle_while_it_has_nothing_to_speak() -> None:
    async def main() -> None:
        session = SpeechSession(Scripted())
        assert session.idle
        session.handle(ConfigureSpeech(PCM))
        session.handle(AppendText("Not yet a sentence"))
        assert session.idle
        session.handle(FlushText())
        assert not session.idle
        session.close()
        await asyncio.gather(session.run(), collect(session))
        assert session.idle
        # The last sentence is being synthesized: no text waits, but the session is not idle.
        synthesizer = Scripted()
        synthesizer.gate = asyncio.Event()
        session = SpeechSession(synthesizer)
        session.handle(AppendText("One. "))
        running = asyncio.create_task(session.run())
        assert isinstance(await session.next_event(), SentenceStarted)
        await asyncio.sleep(0)
        assert not session.idle
        running.cancel()

    asyncio.run(main())
