"""The contract of transcribers. Each test runs with the scripted transcriber, and with it behind other servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import FileInfo, FileOptions, Hypothesis, Transcriber, TranscriptionStream, Window, one_slab
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from tests.contracts.transcribers import ALL
from tests.scripted import WORD_SAMPLES, speech

LIMIT_S = 30
# The audio that a growing window gets at once, in samples.
STEP = SAMPLE_RATE_HZ // 5


@pytest.fixture(scope="module", params=list(ALL))
def transcriber(request: pytest.FixtureRequest) -> Iterator[Transcriber]:
    with pytest.MonkeyPatch.context() as patch, ALL[request.param]() as found:
        # Here, audio arrives faster than it is spoken.
        patch.setattr("antiphon.remote.transcriber.transcriber.NEWS_S", 0.05)
        yield found


def run(coroutine: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def used(transcriber: Transcriber, use: Callable[[TranscriptionStream], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        stream = transcriber.open()
        try:
            return await use(stream)
        finally:
            stream.close()

    return run(closed(transcriber, main()))


async def closed(transcriber: Transcriber, use: Awaitable[Any]) -> Any:
    """Close the connections of this event loop at the end."""
    try:
        return await use
    finally:
        if isinstance(transcriber, RemoteTranscriber):
            await transcriber.pool.close()


def said(hypothesis: Hypothesis) -> list[str]:
    return [piece.text.strip() for piece in hypothesis.pieces]


def names(first: int, count: int) -> list[str]:
    return [f"w{n}" for n in range(first, first + count)]


def audio(first: int, count: int) -> Pcm:
    return speech(first, count, silence_frames=8)


def test_its_profile_is_consistent(transcriber: Transcriber) -> None:
    profile = transcriber.profile
    assert profile.id
    assert "en" in profile.languages
    assert 0 < profile.first_step_s <= profile.step_s
    assert profile.long_window_s <= profile.max_window_s
    assert not transcriber.overdue()


def test_a_final_has_all_words_of_its_window(transcriber: Transcriber) -> None:
    found = used(transcriber, lambda stream: stream.decode(Window(audio(1, 4), final=True)))
    assert said(found) == names(1, 4)
    assert found.is_speech
    assert "".join(piece.text for piece in found.pieces) == " w1 w2 w3 w4"
    assert all(piece.tokens and 0 <= piece.probability <= 1 for piece in found.pieces)


def test_word_times_belong_to_the_words_and_lie_in_the_window(transcriber: Transcriber) -> None:
    window = Window(audio(1, 4), final=True, word_times=True)
    found = used(transcriber, lambda stream: stream.decode(window))
    assert [w.text for w in found.words] == said(found)
    starts = [w.start_s for w in found.words]
    assert starts == sorted(starts)
    middle_s = WORD_SAMPLES / SAMPLE_RATE_HZ / 2
    for number, word in enumerate(found.words):
        assert 0 <= word.start_s <= word.end_s <= len(window.pcm) / SAMPLE_RATE_HZ
        spoken_s = (2 * number + 1) * middle_s
        assert word.start_s - 0.35 <= spoken_s <= word.end_s + 0.35


def test_a_partial_has_the_words_after_its_prefix(transcriber: Transcriber) -> None:
    async def use(stream: TranscriptionStream) -> None:
        first = await grown(stream, audio(1, 6), ())
        assert first.pieces
        assert said(first) == names(1, len(first.pieces))
        prefix = tuple(token for piece in first.pieces for token in piece.tokens)
        longer = await grown(stream, audio(1, 12), prefix)
        assert longer.pieces
        assert said(longer) == names(1 + len(first.pieces), len(longer.pieces))
        final = await stream.decode(Window(audio(1, 12), final=True))
        assert said(final) == names(1, 12)

    used(transcriber, use)


async def grown(stream: TranscriptionStream, pcm: Pcm, prefix: tuple[int, ...]) -> Hypothesis:
    """Decode partials of a window that grows, until one has words after the prefix, or the audio ends."""
    found = None
    for end in range(STEP, len(pcm) + STEP, STEP):
        found = await stream.decode(Window(pcm[:end], prefix=prefix))
        if found.pieces:
            break
    assert found
    return found


def test_a_window_with_another_start_is_heard_by_itself(transcriber: Transcriber) -> None:
    async def use(stream: TranscriptionStream) -> None:
        await stream.decode(Window(audio(1, 3)))
        assert said(await stream.decode(Window(audio(1, 3), final=True))) == names(1, 3)
        second = Window(audio(7, 2), final=True, start_sample=100_000)
        assert said(await stream.decode(second)) == names(7, 2)

    used(transcriber, use)


def test_a_final_in_a_pause_does_not_end_the_window(transcriber: Transcriber) -> None:
    async def use(stream: TranscriptionStream) -> None:
        assert said(await stream.decode(Window(audio(1, 3), final=True))) == names(1, 3)
        both = np.concatenate((audio(1, 3), audio(4, 3)))
        await stream.decode(Window(both))
        assert said(await stream.decode(Window(both, final=True))) == names(1, 6)

    used(transcriber, use)


def test_a_window_without_speech_has_no_words(transcriber: Transcriber) -> None:
    silence = np.zeros(SAMPLE_RATE_HZ, np.float32)
    assert said(used(transcriber, lambda stream: stream.decode(Window(silence, final=True)))) == []


def test_a_cancelled_decode_leaves_the_stream_usable(transcriber: Transcriber) -> None:
    async def use(stream: TranscriptionStream) -> None:
        for final in (False, True):
            waiting = asyncio.create_task(stream.decode(Window(audio(1, 4), final=final)))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert said(await stream.decode(Window(audio(1, 4), final=True))) == names(1, 4)

    used(transcriber, use)


def test_newer_audio_may_replace_that_of_a_waiting_partial(transcriber: Transcriber) -> None:
    async def use(stream: TranscriptionStream) -> None:
        assert not stream.replace(Window(audio(1, 3)))
        waiting = asyncio.create_task(stream.decode(Window(audio(1, 5)[:WORD_SAMPLES])))
        await asyncio.sleep(0)
        stream.replace(Window(audio(1, 5)))
        found = await waiting
        assert said(found) == names(1, 5)[: len(found.pieces)]
        assert said(await stream.decode(Window(audio(1, 5), final=True))) == names(1, 5)

    used(transcriber, use)


def test_streams_do_not_hear_each_other(transcriber: Transcriber) -> None:
    async def main() -> None:
        streams = [transcriber.open() for _ in range(6)]
        windows = [Window(audio(1 + 10 * k, 3), final=True) for k in range(6)]
        found = await asyncio.gather(*(s.decode(w) for s, w in zip(streams, windows, strict=True)))
        assert [said(f) for f in found] == [names(1 + 10 * k, 3) for k in range(6)]
        for stream in streams:
            stream.close()

    run(closed(transcriber, main()))


def test_a_file_is_transcribed_in_segments_and_then_described(transcriber: Transcriber) -> None:
    async def main() -> list[Any]:
        options = FileOptions(language="en")
        return [part async for part in transcriber.transcribe(one_slab(audio(1, 5)), options)]

    *segments, info = run(closed(transcriber, main()))
    assert " ".join(s.text.strip() for s in segments) == " ".join(names(1, 5))
    assert isinstance(info, FileInfo)
    assert info.duration_s == pytest.approx(len(audio(1, 5)) / SAMPLE_RATE_HZ)
