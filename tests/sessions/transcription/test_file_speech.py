"""Files through a scripted detector and transcriber: the transcriber's input, and the times in the results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import FileInfo, FileOptions, TranscriptSegment
from antiphon.events.transcription import ServerVad
from antiphon.events.words import Word
from antiphon.sessions.transcription.file_speech import transcribe_speech
from tests.scripted import WORD_SAMPLES, ScriptedDetector, ScriptedTranscriber, heard, speech

WORD_S = WORD_SAMPLES / SAMPLE_RATE_HZ
VAD = ServerVad(prefix_padding_ms=160, silence_duration_ms=480)


class WordSegments(ScriptedTranscriber):
    """Returns each word of a passage as a segment, and keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.passages: list[Pcm] = []
        self.languages: list[str | None] = []

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        pcm = np.concatenate([slab async for slab in slabs])
        self.passages.append(pcm)
        self.languages.append(options.language)
        for number, (word, start, end) in enumerate(heard(pcm)):
            a, b = start / SAMPLE_RATE_HZ, end / SAMPLE_RATE_HZ
            words = (Word(f"w{word}", a, b, 1.0),)
            yield TranscriptSegment(number, start // 160, a, b, f" w{word}", (), 0.0, 0.0, 1.0, 0.0, words)
        yield FileInfo("de", len(pcm) / SAMPLE_RATE_HZ)


def silence(seconds: float) -> Pcm:
    return np.zeros(int(seconds * SAMPLE_RATE_HZ), np.float32)


def transcribed(
    transcriber: ScriptedTranscriber, pcm: Pcm, slab_s: float = 1.0, language: str | None = None
) -> tuple[list[TranscriptSegment], FileInfo]:
    async def slabs() -> AsyncIterator[Pcm]:
        step = int(slab_s * SAMPLE_RATE_HZ)
        for at in range(0, len(pcm), step):
            yield pcm[at : at + step]

    async def main() -> list[FileInfo | TranscriptSegment]:
        options = FileOptions(language, word_times=True)
        return [p async for p in transcribe_speech(transcriber, ScriptedDetector(), slabs(), options, VAD)]

    *segments, info = asyncio.run(main())
    assert isinstance(info, FileInfo)
    return [s for s in segments if isinstance(s, TranscriptSegment)], info


def starts(segments: list[TranscriptSegment]) -> list[tuple[str, float]]:
    return [(s.text.strip(), round(s.start_s, 3)) for s in segments]


def test_times_are_those_of_the_file_and_silence_is_not_transcribed() -> None:
    pcm = np.concatenate((silence(5.12), speech(1, 2), silence(4.096), speech(3, 1), silence(3)))
    for slab_s in (0.1, 1.0, 60.0):
        transcriber = WordSegments()
        segments, info = transcribed(transcriber, pcm, slab_s)
        third = round(5.12 + 2 * WORD_S + 4.096, 3)
        assert starts(segments) == [("w1", 5.12), ("w2", 5.44), ("w3", third)]
        assert [s.id for s in segments] == [0, 1, 2]
        assert [s.seek for s in segments] == [512, 544, round(third * 100)]
        assert [(w.text, round(w.start_s, 3)) for s in segments for w in s.words] == starts(segments)
        assert all(round(s.end_s - s.start_s, 3) == WORD_S for s in segments)
        assert info == FileInfo("de", len(pcm) / SAMPLE_RATE_HZ)
        (passage,) = transcriber.passages
        assert len(passage) / SAMPLE_RATE_HZ < 3 * WORD_S + 2 * (0.16 + 0.48) + 0.01


def test_speech_far_apart_is_transcribed_on_its_own_in_the_language_of_the_first() -> None:
    pcm = np.concatenate((speech(1, 1), silence(20.48), speech(2, 1), silence(20.48), speech(3, 1)))
    transcriber = WordSegments()
    segments, info = transcribed(transcriber, pcm)
    assert starts(segments) == [("w1", 0.0), ("w2", 20.8), ("w3", 41.6)]
    assert [s.id for s in segments] == [0, 1, 2]
    assert transcriber.languages == [None, "de", "de"]
    assert info.duration_s == len(pcm) / SAMPLE_RATE_HZ


def test_the_transcriber_is_not_asked_about_silence() -> None:
    transcriber = WordSegments()
    assert transcribed(transcriber, silence(30)) == ([], FileInfo("en", 30.0))
    assert transcribed(transcriber, silence(0.01), language="de") == ([], FileInfo("de", 0.01))
    assert transcriber.passages == []
