"""hibari: chunks equal the whole, every word has a time, and all text is spoken, skipped or refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from hibari import dsp

from antiphon.adapters.hibari import synthesizer as hibari
from antiphon.adapters.hibari.synthesizer import Hibari
from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import Pcm
from antiphon.contracts import SpeechChunk, Urgency, VoiceOptions
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.events.speech import AppendText, ConfigureSpeech, FlushText, SentenceDone, SpeechConfig
from antiphon.events.words import Word
from antiphon.loading.loader import load, prepare, store_of
from antiphon.loading.selection import SPEECH_ROLES, TRANSCRIPTION_ROLES, selected_models
from antiphon.sessions.speech.session import SpeechSession
from antiphon.settings import load as load_settings

# Most tests here load a model.
pytestmark = pytest.mark.slow

SHORT = "Hello there, how are you today?"
LONG = (
    "When the train finally arrived at the small station in the valley, the passengers, who had been waiting for "
    "nearly two hours in the cold wind, picked up their bags and walked slowly towards the doors without saying a word."
)


@pytest.fixture(scope="module")
def voice() -> Iterator[Hibari]:
    settings = load_settings({}, os.environ)
    (source,) = selected_models(settings, SPEECH_ROLES)
    loaded = Hibari(prepare(settings, store_of(settings.models), source), source.id, LaneModelOptions(workers=2))
    yield loaded
    loaded.lane.close()


def spoken(
    voice: Hibari, text: str, speed: float = 1.0, seed: int | None = 0, spoken_before: str = ""
) -> list[SpeechChunk]:
    async def main() -> list[SpeechChunk]:
        options = VoiceOptions(voice.profile.voices[0], speed, seed, spoken_before=spoken_before)
        async with aclosing(voice.speak(text, options, lambda: Urgency.FINAL)) as sounds:
            return [s async for s in sounds]

    return asyncio.run(main())


def joined(sounds: list[SpeechChunk]) -> Pcm:
    return np.concatenate([s.pcm for s in sounds])


def test_the_first_chunk_is_short_however_long_the_sentence(voice: Hibari) -> None:
    for text in (SHORT, LONG):
        first = spoken(voice, text)[0]
        assert len(first.pcm) <= hibari.CHUNK_FRAMES[0] * dsp.HOP
        assert first.words


def test_chunks_join_without_a_seam(voice: Hibari, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = spoken(voice, LONG)
    pcm = joined(chunks)
    monkeypatch.setattr(hibari, "CHUNK_FRAMES", (10**6,))
    (whole,) = spoken(voice, LONG)
    assert len(pcm) == len(whole.pcm)
    # Because int8 activations are scaled per chunk, the audio differs slightly everywhere. A seam would be a larger
    # difference at the cuts.
    error = (pcm - whole.pcm) ** 2
    power = float(np.mean(whole.pcm**2))
    assert float(np.mean(error)) < 0.02 * power
    cuts = np.cumsum([len(c.pcm) for c in chunks])[:-1]
    at_cuts = np.mean([error[c - 240 : c + 240].mean() for c in cuts])
    assert at_cuts < 3 * float(np.mean(error))
    # Steps of loudness and pitch at a cut are no larger than between adjacent frames of the whole.
    assert _steps(pcm, cuts) < 1.5 * np.percentile(_loudness_steps(whole.pcm), 95)


def _loudness_steps(pcm: Pcm) -> Pcm:
    frames = pcm[: len(pcm) // 240 * 240].reshape(-1, 240)
    level = np.log10(np.sqrt((frames**2).mean(1)) + 1e-3)
    return np.abs(np.diff(level))


def _steps(pcm: Pcm, cuts: np.ndarray) -> float:
    return float(np.median([_loudness_steps(pcm[c - 480 : c + 480])[1] for c in cuts]))


def test_the_cut_graph_has_the_loudness_over_time_of_the_librarys_own_synthesis(voice: Hibari) -> None:
    from hibari import Hibari as Library

    theirs = Library()(SHORT, seed=1)
    ours = joined(spoken(voice, SHORT, seed=1))
    # The adapter cuts the silence at the beginning of the published audio.
    theirs = theirs[len(theirs) - len(ours) :]
    mine, other = (np.sqrt((p[: len(p) // 600 * 600].reshape(-1, 600) ** 2).mean(1)) for p in (ours, theirs))
    assert np.corrcoef(mine, other)[0, 1] > 0.98


def test_the_first_text_of_a_response_begins_with_less_silence_than_the_next(voice: Hibari) -> None:
    first, later = (joined(spoken(voice, SHORT, spoken_before=before)) for before in ("", "Well."))
    first_s, later_s = (np.argmax(np.abs(pcm) > 0.02) / dsp.SR for pcm in (first, later))
    assert 0.0 < first_s < 0.06 < later_s < 0.12
    # Only the silence differs, so the words begin earlier by as much.
    assert later_s - first_s == pytest.approx((len(later) - len(first)) / dsp.SR, abs=0.01)


def test_when_a_text_does_not_end_a_sentence_then_no_pause_follows(voice: Hibari) -> None:
    def silence_s(text: str) -> float:
        sounds = spoken(voice, text)
        return len(joined(sounds)) / dsp.SR - [w for s in sounds for w in s.words][-1].end_s

    assert silence_s("The weather in Rome") < 0.15
    assert silence_s("When it rains,") < 0.15
    assert silence_s("The weather is fine.") > 0.2


def test_when_a_seed_is_given_then_every_sample_repeats_and_else_none_does(voice: Hibari) -> None:
    assert np.array_equal(joined(spoken(voice, SHORT, seed=7)), joined(spoken(voice, SHORT, seed=7)))
    assert not np.array_equal(joined(spoken(voice, SHORT, seed=7)), joined(spoken(voice, SHORT, seed=8)))
    assert not np.array_equal(joined(spoken(voice, SHORT, seed=None)), joined(spoken(voice, SHORT, seed=None)))


@pytest.mark.parametrize("speed", [0.5, 0.75, 1.5, 2.0])
def test_the_duration_follows_the_speed(voice: Hibari, speed: float) -> None:
    normal, other = len(joined(spoken(voice, LONG))), len(joined(spoken(voice, LONG, speed)))
    assert other == pytest.approx(normal / speed, rel=0.15)


@pytest.mark.parametrize(
    "text",
    [
        SHORT,
        LONG,
        "It cost $1,234.50 on 3/4/2021 at 9:30am; Dr. Smith paid 50% of it. See https://example.com/a-b now!",
        "One 😀 two 你好 three. **Four** five?",
        "well-known U.S. places, didn't they?\nNew line — and more…",
    ],
)
def test_every_word_has_its_time(voice: Hibari, text: str) -> None:
    sounds = spoken(voice, text)
    words = [w for s in sounds for w in s.words]
    assert [w.text for w in words] == text.split()
    seconds = len(joined(sounds)) / dsp.SR
    at = 0.0
    for word in words:
        assert at - 1e-6 <= word.start_s <= word.end_s <= seconds + 1e-6
        at = word.end_s
        if any(c.isascii() and c.isalnum() for c in word.text):
            assert word.end_s - word.start_s >= 0.049


def test_words_come_before_their_audio(voice: Hibari) -> None:
    have_s, sounds = 0.0, spoken(voice, f"{SHORT} {LONG} {SHORT}")
    assert len([s for s in sounds if s.words]) == 3
    for sound in sounds:
        for word in sound.words:
            assert word.start_s >= have_s
        have_s += len(sound.pcm) / dsp.SR


def test_words_lie_where_the_audio_is_loud_and_pauses_lie_between_words(voice: Hibari) -> None:
    sounds = spoken(voice, "Stop. Wait here, please. Go!")
    pcm, words = joined(sounds), [w for s in sounds for w in s.words]
    loud = np.sqrt((pcm[: len(pcm) // 240 * 240].reshape(-1, 240) ** 2).mean(1))
    for word in words:
        inside = loud[int(word.start_s * 100) : int(word.end_s * 100)]
        assert np.percentile(inside, 80) > 0.02, word
    for before, after in ((0, 1), (3, 4)):
        gap = loud[int(words[before].end_s * 100) + 5 : int(words[after].start_s * 100) - 2]
        assert len(gap) == 0 or gap.min() < 0.01


@pytest.mark.parametrize("text", ["", "  \n ", "😀", "...", "**", "\x00\x01"])
def test_when_there_is_nothing_to_say_then_there_is_no_audio(voice: Hibari, text: str) -> None:
    assert sum(len(s.pcm) for s in spoken(voice, text)) == 0


def test_when_letters_cannot_be_spoken_then_they_are_skipped_or_the_text_is_refused(voice: Hibari) -> None:
    sounds = spoken(voice, "The word 你好 means hello.")
    assert "".join(s.skipped for s in sounds) == "你好"
    assert len(joined(sounds)) > dsp.SR // 2
    with pytest.raises(RemoteProtocolError, match="你好"):
        spoken(voice, "你好。我很好。")


def test_when_a_text_is_very_long_then_its_first_chunk_takes_one_job(voice: Hibari) -> None:
    async def main() -> tuple[int, float]:
        options = VoiceOptions(voice.profile.voices[0])
        jobs = voice.lane.stats.jobs
        async with aclosing(voice.speak("word " * 20_000, options, lambda: Urgency.FINAL)) as sounds:
            first = await anext(sounds)
        return voice.lane.stats.jobs - jobs, len(first.pcm) / dsp.SR

    jobs, seconds = asyncio.run(main())
    assert jobs == 1
    assert 0 < seconds < 0.4


def test_when_the_caller_cancels_then_synthesis_ends_within_a_chunk(voice: Hibari) -> None:
    async def main() -> int:
        options = VoiceOptions(voice.profile.voices[0])
        stream = voice.speak(LONG * 20, options, lambda: Urgency.FINAL)
        await anext(stream)
        pending = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        before = voice.lane.stats.jobs
        await asyncio.sleep(0.1)
        return voice.lane.stats.jobs - before + voice.lane.depth

    assert asyncio.run(main()) <= 1


def test_texts_synthesized_at_the_same_time_equal_those_synthesized_alone(voice: Hibari) -> None:
    texts = [SHORT, LONG, "Yes.", "The quick brown fox jumps over the lazy dog."]
    alone = [joined(spoken(voice, t)) for t in texts]

    async def one(text: str) -> Pcm:
        options = VoiceOptions(voice.profile.voices[0], 1.0, 0)
        return np.concatenate([s.pcm async for s in voice.speak(text, options, lambda: Urgency.BULK)])

    async def main() -> list[Pcm]:
        return await asyncio.gather(*(one(t) for t in texts * 4))

    for k, pcm in enumerate(asyncio.run(main())):
        assert np.array_equal(pcm, alone[k % len(texts)])


class Timeless:
    """The same voice without word times."""

    def __init__(self, voice: Hibari) -> None:
        self._voice = voice
        self.profile = replace(voice.profile, word_times=False)

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        async with aclosing(self._voice.speak(text, options, urgency)) as sounds:
            async for sound in sounds:
                yield replace(sound, words=())


def test_when_a_synthesizer_gives_no_word_times_then_the_transcriber_finds_them(voice: Hibari) -> None:
    settings = load_settings({}, os.environ)
    hearing = load(settings, store_of(settings.models), roles=TRANSCRIPTION_ROLES)

    async def main() -> tuple[Word, ...]:
        session = SpeechSession(Timeless(voice), aligner=hearing.required_transcriber)
        session.handle(ConfigureSpeech(SpeechConfig(format="pcm", stream=True, word_times=True, seed=0)))
        session.handle(AppendText(LONG))
        session.handle(FlushText())
        session.close()
        running = asyncio.create_task(session.run())
        words: tuple[Word, ...] = ()
        while event := await session.next_event():
            if isinstance(event, SentenceDone):
                words = event.words
        await running
        return words

    found = asyncio.run(main())
    hearing.close()
    own = [w for s in spoken(voice, LONG) for w in s.words]
    assert [w.text for w in found] == [w.text for w in own] == LONG.split()
    # Two independent measures: the model's own durations, and attention to the audio.
    apart = sorted(abs(a.start_s - b.start_s) for a, b in zip(found, own, strict=True))
    assert apart[len(apart) // 2] < 0.08
    assert apart[-3] < 0.3


def test_when_a_file_is_no_voice_then_the_error_names_it(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "hibari.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match="hibari-x does not load"):
        Hibari(folder, "hibari-x", LaneModelOptions())
