"""One speech session with a synthesizer that does as it is told: order, one unit ahead, bounds, cancelling, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest

from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.errors import ModelError, Refused, RemoteProtocolError
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
from antiphon.sessions.speech.render import ListenerBuffer, speak
from antiphon.sessions.speech.session import SpeechSession

RATE_HZ = 24_000


class Scripted:
    """A tenth of a second of sound a letter, in chunks of that; `bad` fails, `foreign` cannot be spoken."""

    def __init__(self) -> None:
        self.profile = SynthesizerProfile("scripted", RATE_HZ, ("one", "two"), ("en",), (0.5, 2.0), word_times=True)
        self.log: list[str] = []
        self.asked: list[VoiceOptions] = []
        self.urgencies: list[Urgency] = []
        self.chunks = 0
        self.gate: asyncio.Event | None = None

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.log.append(f"begin {text}")
        self.asked.append(options)
        try:
            if "foreign" in text:
                raise RemoteProtocolError("unsupported_text", "none of this text can be spoken")
            for i, letter in enumerate(text):
                if self.gate:
                    await self.gate.wait()
                if "bad" in text and i == 2:
                    raise ModelError("no")
                if "full" in text:
                    raise Refused("no room", 1.0)
                self.urgencies.append(urgency())
                self.chunks += 1
                words = (Word(text, 0.0, 0.1 * len(text), 1.0),) if not i else ()
                yield SpeechChunk(np.full(RATE_HZ // 10, ord(letter) / 1000, np.float32), words)
                await asyncio.sleep(0)
            self.log.append(f"end {text}")
        finally:
            self.log.append(f"left {text}")


class Live(Scripted):
    """Speaks while the text is written, a chunk a letter."""

    def __init__(self) -> None:
        super().__init__()
        self.profile = replace(self.profile, streams_text=True, word_times=False)

    async def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        self.log.append("begin live")
        try:
            async for text in texts:
                for letter in text:
                    yield SpeechChunk(np.full(RATE_HZ // 10, ord(letter) / 1000, np.float32))
                if "bad" in text:
                    raise ModelError("no")
        finally:
            self.log.append("left live")


PCM = SpeechConfig(format="pcm", stream=True)
WHOLE = replace(PCM, granularity="none")


async def collect(session: SpeechSession) -> list[SpeechEvent]:
    out = []
    while output := await session.next_output():
        out.append(output)
    return out


def run(*inputs: object, synthesizer: Scripted | None = None) -> list[SpeechEvent]:
    async def main() -> list[SpeechEvent]:
        session = SpeechSession(synthesizer or Scripted())
        for item in inputs:
            session.receive(item)  # type: ignore[arg-type]
        session.close()
        running = asyncio.create_task(session.run())
        out = await collect(session)
        await running
        return out

    return asyncio.run(main())


def shape(outputs: list[SpeechEvent]) -> list[str]:
    """One word an output; sounds of a unit together."""
    out: list[str] = []
    for output in outputs:
        match output:
            case SentenceStarted(utterance, unit, text):
                out.append(f"start {utterance}.{unit} {text}")
            case SentenceAudio(utterance, unit):
                name = f"sound {utterance}.{unit}"
                if not out or out[-1] != name:
                    out.append(name)
            case SentenceDone(utterance, unit, error=error):
                out.append(f"done {utterance}.{unit}" + (f" {error}" if error else ""))
            case UtteranceDone(utterance, units, cancelled):
                out.append(f"end {utterance} of {units}" + (" cancelled" if cancelled else ""))
    return out


def test_units_and_utterances_in_order() -> None:
    outputs = run(
        ConfigureSpeech(PCM), AppendText("One. Tw"), AppendText("o. Three"), FlushText(), AppendText("Four"), FlushText()
    )  # fmt: skip
    assert shape(outputs) == [
        "start 0.0 One.", "sound 0.0", "done 0.0", "start 0.1 Two.", "sound 0.1", "done 0.1",
        "start 0.2 Three", "sound 0.2", "done 0.2", "end 0 of 3", "start 1.0 Four", "sound 1.0", "done 1.0", "end 1 of 1",
    ]  # fmt: skip
    sound = [o for o in outputs if isinstance(o, SentenceAudio) and (o.utterance, o.sentence) == (0, 0)]
    assert [round(s.start_s, 3) for s in sound] == [0.0, 0.1, 0.2, 0.3]
    assert all(len(s.data) == RATE_HZ // 10 * 2 for s in sound)
    done = next(o for o in outputs if isinstance(o, SentenceDone))
    assert done.words == (Word("One.", 0.0, 0.4, 1.0),)


def test_a_text_is_spoken_while_it_is_written() -> None:
    async def main() -> None:
        session = SpeechSession(Live())
        running = asyncio.create_task(session.run())
        session.receive(ConfigureSpeech(WHOLE))
        session.receive(AppendText("  "))
        await asyncio.sleep(0)
        assert session.idle
        session.receive(AppendText("Hel"))
        seen = [await session.next_output() for _ in range(6)]
        assert shape(seen) == ["start 0.0   Hel", "sound 0.0"]  # type: ignore[arg-type]
        # Nothing is to be said until more comes.
        await asyncio.sleep(0)
        assert session.idle
        session.receive(AppendText("lo. There."))
        session.receive(FlushText())
        session.receive(AppendText("Two"))
        session.receive(FlushText())
        session.close()
        rest = await collect(session)
        await running
        assert shape(rest) == [
            "sound 0.0",
            "done 0.0",
            "end 0 of 1",
            "start 1.0 Two",
            "sound 1.0",
            "done 1.0",
            "end 1 of 1",
        ]
        assert session._chars == 0

    asyncio.run(main())


def test_a_live_text_that_is_cancelled_closed_or_fails() -> None:
    async def main() -> None:
        synthesizer = Live()
        session = SpeechSession(synthesizer)
        running = asyncio.create_task(session.run())
        session.receive(ConfigureSpeech(WHOLE))
        session.receive(AppendText("Hello"))
        assert isinstance(await session.next_output(), SentenceStarted)
        session.receive(CancelSpeech())
        assert shape([await session.next_output()]) == ["end 0 of 1 cancelled"]  # type: ignore[list-item]
        session.receive(AppendText("so bad"))
        session.receive(AppendText(" it was"))
        session.receive(FlushText())
        # A session that ends says what there is of a text.
        session.receive(AppendText("an end"))
        session.close()
        assert shape(await collect(session)) == [
            "start 1.0 so bad it was", "sound 1.0", "done 1.0 the model failed", "end 1 of 1", "start 2.0 an end", "sound 2.0", "done 2.0",
        ]  # fmt: skip
        await running
        assert synthesizer.log == ["begin live", "left live"] * 3

    asyncio.run(main())


def test_a_live_text_whose_sound_ends_early_leaves_nothing_behind() -> None:
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
        session.receive(ConfigureSpeech(WHOLE))
        for _ in range(3):
            for word in ("Many ", "words ", "follow."):
                session.receive(AppendText(word * 1000))
            while not isinstance(await session.next_output(), SentenceDone):
                pass
            # It is not over until it is flushed, and what comes is nobody's.
            session.receive(AppendText("More."))
            session.receive(FlushText())
            assert isinstance(await session.next_output(), UtteranceDone)
            assert session._chars == 0
        session.close()
        await running

    asyncio.run(main())


def test_what_is_live_and_what_is_not() -> None:
    # Nothing but white space is an utterance of nothing; other granularities are units as ever.
    assert shape(run(ConfigureSpeech(WHOLE), AppendText(" \n"), FlushText(), synthesizer=Live())) == ["end 0 of 0"]
    assert (
        shape(run(ConfigureSpeech(PCM), AppendText("One. Two."), FlushText(), synthesizer=Live()))[0]
        == "start 0.0 One."
    )


def test_an_empty_flush_is_an_utterance_of_nothing() -> None:
    assert shape(run(FlushText(), AppendText("  "), FlushText())) == ["end 0 of 0", "end 1 of 0"]


def test_a_file_a_unit_is_one_piece() -> None:
    outputs = run(ConfigureSpeech(SpeechConfig(format="wav")), AppendText("Hi. Ho."), FlushText())
    sounds = [o for o in outputs if isinstance(o, SentenceAudio)]
    assert len(sounds) == 2
    assert all(s.data[:4] == b"RIFF" and len(s.data) == 44 + 3 * RATE_HZ // 10 * 2 for s in sounds)


def test_a_configuration_holds_until_the_next_and_not_inside_an_utterance() -> None:
    synthesizer = Scripted()
    session = SpeechSession(synthesizer)
    session.receive(ConfigureSpeech(SpeechConfig(voice="two", format="pcm", stream=True, seed=3)))
    session.receive(AppendText("a"))
    with pytest.raises(RemoteProtocolError, match="utterance is in progress"):
        session.receive(ConfigureSpeech(PCM))
    session.receive(FlushText())
    # The first is not spoken yet: it keeps its own.
    session.receive(ConfigureSpeech(PCM))
    session.receive(AppendText("b"))
    session.receive(FlushText())
    session.close()

    async def main() -> None:
        await asyncio.gather(session.run(), collect(session))

    asyncio.run(main())
    assert synthesizer.asked == [VoiceOptions("two", 1.0, 3), VoiceOptions("one", 1.0, None)]


def test_speed_beyond_the_voice_is_stretched() -> None:
    async def main(speed: float) -> tuple[float, float, VoiceOptions]:
        synthesizer = Scripted()
        config = SpeechConfig(format="pcm", stream=True, speed=speed)
        pieces = [p async for p in speak(synthesizer, "x" * 30, config)]
        words = [w for p in pieces for w in p.words]
        return sum(len(p.data) for p in pieces) / 2 / RATE_HZ, words[0].end_s, synthesizer.asked[0]

    for speed, own, seconds in ((4.0, 2.0, 1.5), (0.25, 0.5, 6.0), (1.5, 1.5, 3.0)):
        heard, word_s, options = asyncio.run(main(speed))
        assert options.speed == own
        # The scripted voice knows no tempo of its own: what is left of the 3 s is the stretch.
        assert heard == pytest.approx(seconds, rel=0.05)
        assert word_s == pytest.approx(seconds, rel=0.05)


def test_the_next_unit_is_made_while_the_last_is_sent() -> None:
    async def main() -> list[str]:
        synthesizer = Scripted()
        session = SpeechSession(synthesizer)
        session.receive(ConfigureSpeech(PCM))
        session.receive(AppendText("One. Two. "))
        running = asyncio.create_task(session.run())
        # Nothing of the first is taken.
        for _ in range(100):
            await asyncio.sleep(0)
        running.cancel()
        return synthesizer.log

    log = asyncio.run(main())
    assert log[:2] == ["begin One.", "end One."]
    assert "end Two." in log


def test_a_reader_that_stops_stops_the_synthesis_and_one_that_goes_on_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "MAX_WAITING_BYTES", 20_000)

    async def main() -> None:
        synthesizer = Scripted()
        session = SpeechSession(synthesizer)
        session.receive(ConfigureSpeech(PCM))
        session.receive(AppendText("x" * 500))
        session.receive(FlushText())
        session.close()
        running = asyncio.create_task(session.run())
        for _ in range(2000):
            await asyncio.sleep(0)
        assert synthesizer.chunks <= 6
        assert session.waiting_bytes <= 20_000 + RATE_HZ // 10 * 2
        outputs = await collect(session)
        await running
        assert sum(len(o.data) for o in outputs if isinstance(o, SentenceAudio)) == 500 * RATE_HZ // 10 * 2

    asyncio.run(main())


def test_cancelling_leaves_nothing_to_be_heard_and_the_session_goes_on() -> None:
    async def main() -> tuple[list[str], list[str]]:
        synthesizer = Scripted()
        session = SpeechSession(synthesizer)
        session.receive(ConfigureSpeech(PCM))
        session.receive(AppendText("One. " + "x" * 400 + ". Three. Fo"))
        running = asyncio.create_task(session.run())
        seen: list[SpeechEvent] = []
        while not any(isinstance(o, SentenceAudio) and o.sentence == 1 for o in seen):
            output = await session.next_output()
            assert output
            seen.append(output)
        session.receive(CancelSpeech())
        session.receive(AppendText("Five."))
        session.receive(FlushText())
        session.close()
        rest = await collect(session)
        await running
        return shape(rest), synthesizer.log

    rest, log = asyncio.run(main())
    assert rest == ["end 0 of 2 cancelled", "start 1.0 Five.", "sound 1.0", "done 1.0", "end 1 of 1"]
    # The synthesis was left under way, and the third sentence never begun.
    assert not any(line.startswith("end x") for line in log)
    assert "begin Three." not in log


def test_cancelling_what_is_made_and_not_yet_sent() -> None:
    async def main() -> list[str]:
        session = SpeechSession(Scripted())
        session.receive(ConfigureSpeech(PCM))
        session.receive(AppendText("One. Two."))
        session.receive(FlushText())
        running = asyncio.create_task(session.run())
        for _ in range(100):
            await asyncio.sleep(0)
        first = await session.next_output()
        assert isinstance(first, SentenceStarted)
        session.receive(CancelSpeech())
        session.close()
        rest = await collect(session)
        await running
        return shape(rest)

    assert asyncio.run(main()) == ["end 0 of 2 cancelled"]


class Settled(Scripted):
    """Its next chunk is there already when the cancel comes: the task that waits for it is not interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        await self.next
        yield SpeechChunk(np.zeros(100, np.float32))


def test_a_chunk_that_is_done_as_the_cancel_comes_is_not_said() -> None:
    async def main() -> list[str]:
        synthesizer = Settled()
        session = SpeechSession(synthesizer)
        session.receive(ConfigureSpeech(PCM))
        session.receive(AppendText("One. "))
        running = asyncio.create_task(session.run())
        assert isinstance(await session.next_output(), SentenceStarted)
        await asyncio.sleep(0)
        synthesizer.next.set_result(None)
        session.receive(CancelSpeech())
        session.close()
        rest = await collect(session)
        await running
        return shape(rest)

    assert asyncio.run(main()) == ["end 0 of 1 cancelled"]


def test_one_file_is_bounded_and_a_stream_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MAX_FILE_S", 1.0)
    whole = run(ConfigureSpeech(SpeechConfig(format="wav")), AppendText("x" * 20 + ". Two."), FlushText())
    assert [s for s in shape(whole) if s.startswith("done")] == [
        "done 0.0 one file may hold 1 s of sound: stream it, or send shorter units",
        "done 0.1",
    ]
    streamed = run(ConfigureSpeech(PCM), AppendText("x" * 20), FlushText())
    assert "done 0.0" in shape(streamed)


def test_utterances_that_wait_are_bounded() -> None:
    session = SpeechSession(Scripted())
    for _ in range(speech.MAX_WAITING_UTTERANCES):
        session.receive(FlushText())
    with pytest.raises(RemoteProtocolError, match="utterances wait"):
        session.receive(FlushText())


def test_cancelling_nothing_does_nothing() -> None:
    assert shape(run(CancelSpeech(), AppendText("a"), FlushText()))[-1] == "end 0 of 1"


@pytest.mark.parametrize(
    ("text", "error"),
    [("bad", "the model failed"), ("foreign", "none of this text can be spoken"), ("full", "no room")],
)
def test_a_unit_that_fails_fails_alone(text: str, error: str) -> None:
    outputs = run(ConfigureSpeech(PCM), AppendText(f"One. {text}. Two."), FlushText())
    assert [s for s in shape(outputs) if s.startswith(("done", "end"))] == [
        "done 0.0", f"done 0.1 {error}", "done 0.2", "end 0 of 3",
    ]  # fmt: skip


def test_text_that_waits_is_bounded() -> None:
    session = SpeechSession(Scripted())
    for _ in range(8):
        session.receive(AppendText("x" * (speech.MAX_WAITING_CHARS // 8)))
    with pytest.raises(RemoteProtocolError, match="wait to be spoken"):
        session.receive(AppendText("x"))
    session.receive(CancelSpeech())
    session.receive(AppendText("x"))


def test_whose_sound_is_due_first() -> None:
    now = [0.0]
    playback = ListenerBuffer(lambda: now[0])
    assert playback.urgency() is Urgency.FINAL
    playback.more(1.0)
    assert playback.urgency() is Urgency.PARTIAL
    playback.more(5.0)
    assert playback.urgency() is Urgency.BULK
    now[0] = 5.8
    assert playback.urgency() is Urgency.FINAL
    # A listener who has waited does not catch up.
    now[0] = 20.0
    playback.more(1.0)
    assert playback.urgency() is Urgency.PARTIAL


def test_an_idle_session_is_one_with_nothing_to_say() -> None:
    async def main() -> None:
        session = SpeechSession(Scripted())
        assert session.idle
        session.receive(ConfigureSpeech(PCM))
        session.receive(AppendText("Not yet a sentence"))
        assert session.idle
        session.receive(FlushText())
        assert not session.idle
        session.close()
        await asyncio.gather(session.run(), collect(session))
        assert session.idle
        # The last unit is being made: nothing waits, and it is not idle.
        synthesizer = Scripted()
        synthesizer.gate = asyncio.Event()
        session = SpeechSession(synthesizer)
        session.receive(AppendText("One. "))
        running = asyncio.create_task(session.run())
        assert isinstance(await session.next_output(), SentenceStarted)
        await asyncio.sleep(0)
        assert not session.idle
        running.cancel()

    asyncio.run(main())
