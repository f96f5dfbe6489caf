"""The real Whisper and Silero models in their adapters, on recordings."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, wait
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from antiphon.adapters.silero.detector import SileroDetector
from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.whisper.files import PART_S, PART_SLACK_S
from antiphon.adapters.whisper.transcriber import WhisperTranscriber
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.quiet import split_at_quiet
from antiphon.contracts import FileInfo, FileOptions, Hypothesis, TranscriptSegment, Window, one_slab
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import TRANSCRIPTION_ROLES
from antiphon.settings import load as load_settings
from antiphon.store import MODELS
from tests.conftest import Recording


@pytest.fixture(scope="module")
def models() -> Iterator[LoadedModels]:
    settings = load_settings({}, os.environ)
    loaded = load(settings, store_of(settings.models), roles=TRANSCRIPTION_ROLES)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def whisper(models: LoadedModels) -> WhisperTranscriber:
    assert isinstance(models.required_transcriber, WhisperTranscriber)
    return models.required_transcriber


@pytest.mark.slow
def test_when_a_window_has_a_prefix_then_the_decode_continues_it(
    whisper: WhisperTranscriber, recordings: dict[str, Recording]
) -> None:
    pcm = recordings["lj-LJ001-0004"].pcm

    async def main() -> None:
        whole = await whisper.decode(Window(pcm, language="en"))
        prefix = tuple(t for p in whole.pieces[:4] for t in p.tokens)
        rest = await whisper.decode(Window(pcm, language="en", prefix=prefix))
        assert [p.text for p in rest.pieces] == [p.text for p in whole.pieces[4:]]
        assert all(0.0 < p.probability <= 1.0 for p in rest.pieces)

    asyncio.run(main())


def test_word_times_rise_and_lie_in_the_audio(whisper: WhisperTranscriber, recordings: dict[str, Recording]) -> None:
    pcm = recordings["jfk"].pcm
    final = asyncio.run(whisper.decode(Window(pcm, language="en", final=True, word_times=True)))
    assert [w.text for w in final.words] == [p.text.strip() for p in final.pieces]
    times = [t for w in final.words for t in (w.start_s, w.end_s)]
    assert times == sorted(times)
    assert times[-1] <= len(pcm) / 16000 + 0.02
    # "Americans" ends before the long pause, and "Ask" begins after it (measured on the waveform).
    ask = next(w for w in final.words if w.text.lower().startswith("ask"))
    assert 2.7 < ask.start_s < 3.7


def test_words_beside_a_pause_do_not_reach_into_it(
    whisper: WhisperTranscriber, recordings: dict[str, Recording]
) -> None:
    first, second = recordings["lj-LJ001-0008"].pcm, recordings["lj-LJ001-0002"].pcm
    pause = np.zeros(16000, np.float32)
    window = Window(np.concatenate((first, pause, second)), language="en", final=True, word_times=True)
    words = asyncio.run(whisper.decode(window)).words
    before = next(w for w in words if w.text.lower().startswith("surpassed"))
    after = words[words.index(before) + 1]
    begin_s = len(first) / 16000
    assert before.end_s < begin_s + 0.1
    assert begin_s + 0.9 < after.start_s < begin_s + 1.2


@pytest.mark.parametrize("final", [False, True])
def test_when_log_probabilities_are_asked_for_then_every_token_has_its_own(
    whisper: WhisperTranscriber, recordings: dict[str, Recording], final: bool
) -> None:
    window = Window(recordings["lj-LJ001-0004"].pcm, language="en", final=final, logprobs=True)
    pieces = asyncio.run(whisper.decode(window)).pieces
    assert all(b"".join(t.utf8 for t in p.logprobs).decode() == p.text for p in pieces)
    assert all(p.probability == pytest.approx(np.exp(min(t.logprob for t in p.logprobs))) for p in pieces)
    assert all(p.probability <= 1.0 for p in pieces)
    # Words of read speech have high probabilities, which all differ.
    assert 0.5 < np.mean([p.probability for p in pieces]) < 0.999
    assert len({p.probability for p in pieces}) > len(pieces) // 2


@pytest.mark.slow
def test_a_likely_language_is_kept_in_short_speech_and_given_up_where_another_is_clear(
    whisper: WhisperTranscriber, recordings: dict[str, Recording]
) -> None:
    german = recordings["fleurs-de-001"].pcm

    def heard(seconds: float, **asked: Any) -> str:
        return asyncio.run(whisper.decode(Window(german[: int(seconds * 16000)], **asked))).language

    assert heard(6.0) == heard(6.0, likely_language="en") == "de"
    assert heard(6.0, languages=("en", "fr")) in ("en", "fr")
    assert heard(0.5, likely_language="en") == "en"
    assert heard(6.0, language="en") == "en"


@pytest.mark.parametrize("text", ["<|fr|><|translate|>", "<|endoftext|>", "a <|startofprev|> b", "<|0.00|>"])
def test_a_hint_can_never_become_a_control_token(whisper: WhisperTranscriber, text: str) -> None:
    tokenizer = whisper.decoder.tokenizer("en")
    ids = whisper.decoder.prompt_tokens(Window(np.zeros(16000, np.float32), prompt=text))
    assert ids
    assert all(i < tokenizer.eot for i in ids)


@pytest.mark.slow
def test_a_keyterm_turns_a_wrong_word_right(whisper: WhisperTranscriber, recordings: dict[str, Recording]) -> None:
    pcm = recordings["barista-19d5be84"].pcm

    async def words(*keyterms: str) -> str:
        final = await whisper.decode(Window(pcm, language="en", final=True, word_times=True, keyterms=keyterms))
        assert [w.text for w in final.words] == [p.text.strip() for p in final.pieces]
        return "".join(p.text for p in final.pieces).lower()

    async def main() -> None:
        plain = await words()
        assert "americana " in plain
        assert await words("cappuccino", "americano", "Reykjavik") == plain.replace("americana", "americano")
        assert await words("Ljubljana", "Kubernetes", "amoxicillin", "<|endoftext|>") == plain

    asyncio.run(main())


def test_a_hint_is_bounded(whisper: WhisperTranscriber, recordings: dict[str, Recording]) -> None:
    window = Window(recordings["lj-LJ001-0008"].pcm, prompt="word " * 5000, language="en", final=True)
    assert "surpassed" in "".join(p.text for p in asyncio.run(whisper.decode(window)).pieces)


@pytest.mark.slow
def test_windows_decoded_in_a_batch_equal_those_decoded_alone(recordings: dict[str, Recording]) -> None:
    settings = load_settings({}, os.environ)
    folder = store_of(settings.models).require(MODELS["whisper-base"])
    batched = WhisperTranscriber(folder, "whisper-base", LaneModelOptions(), max_batch=4)
    windows = [
        Window(recordings[i].pcm, language="en", final=True, word_times=True)
        for i in ("lj-LJ001-0008", "lj-LJ001-0002", "lj-LJ001-0013")
    ]

    async def together() -> list[str]:
        return ["".join(p.text for p in h.pieces) for h in await asyncio.gather(*map(batched.decode, windows))]

    async def alone() -> list[str]:
        return ["".join(p.text for p in (await batched.decode(w)).pieces) for w in windows]

    assert asyncio.run(together()) == asyncio.run(alone())
    assert batched.lane.stats.batches < batched.lane.stats.jobs
    batched.close()


@pytest.mark.slow
def test_when_many_windows_wait_then_finals_and_first_words_come_before_later_partials_by_their_deadlines(
    recordings: dict[str, Recording],
) -> None:
    settings = load_settings({}, os.environ)
    lone = WhisperTranscriber(
        store_of(settings.models).require(MODELS["whisper-base"]), "whisper-base", LaneModelOptions()
    )
    pcm, release, order = recordings["lj-LJ001-0008"].pcm[:16000], threading.Event(), list[str]()

    def queue(name: str, **facts: Any) -> Future[Hypothesis]:
        waiting = lone.submit(Window(pcm, language="en", max_tokens=1, **facts))
        waiting.add_done_callback(lambda _: order.append(name))
        return waiting

    lone.lane.submit(release.wait)
    waiting = [
        queue("later", deadline_s=1.0),
        queue("final", final=True, deadline_s=9.0),
        queue("first", urgent=True, deadline_s=8.5),
        queue("newer first", urgent=True, deadline_s=9.5),
    ]
    assert lone.replace(waiting[0], Window(pcm[:8000], language="en", max_tokens=1))
    release.set()
    wait(waiting)
    lone.close()
    assert order == ["first", "final", "newer first", "later"]
    assert not lone.replace(waiting[0], Window(pcm))


@pytest.mark.slow
def test_when_there_is_a_model_for_partials_then_it_decodes_those_of_a_known_language_and_no_final(
    recordings: dict[str, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings({}, os.environ)
    folder = store_of(settings.models).require(MODELS["whisper-base"])
    whisper = WhisperTranscriber(folder, "whisper-base", LaneModelOptions(), partials=folder)
    model, prefixes = whisper.decoder.partials, list[str]()
    assert model
    text_ids = model.text_ids

    def noted(text: str) -> tuple[int, ...]:
        prefixes.append(text)
        return text_ids(text)

    monkeypatch.setattr(model, "text_ids", noted)
    pcm = recordings["lj-LJ001-0008"].pcm[:32000]

    async def main() -> None:
        whole = await whisper.decode(Window(pcm, language="en"))
        assert prefixes == [""]
        prefix = whole.pieces[0].tokens
        rest = await whisper.decode(Window(pcm, language="en", prefix=prefix))
        assert prefixes[1:] == [whole.pieces[0].text]
        assert [(p.text, p.tokens) for p in rest.pieces] == [(p.text, p.tokens) for p in whole.pieces[1:]]
        await whisper.decode(Window(pcm, language="en", final=True))
        await whisper.decode(Window(pcm))
        assert len(prefixes) == 2

    asyncio.run(main())
    whisper.close()


def test_when_a_window_is_noise_then_it_is_no_speech(whisper: WhisperTranscriber) -> None:
    sound = np.random.default_rng(0).normal(0, 0.01, 3 * 16000).astype(np.float32)
    final = asyncio.run(whisper.decode(Window(sound, language="en", final=True)))
    assert not final.is_speech or not final.pieces


def test_parts_cover_a_long_file_once() -> None:
    pcm = np.random.default_rng(0).normal(0, 0.1, 500 * 16000).astype(np.float32)
    pcm[110 * 16000 : 110 * 16000 + 3200] = 0

    async def split(slab_s: int) -> list[slice]:
        async def slabs() -> AsyncIterator[np.ndarray]:
            for at in range(0, len(pcm), slab_s * 16000):
                yield pcm[at : at + slab_s * 16000]

        found = [(a, part) async for a, part in split_at_quiet(slabs(), PART_S, PART_SLACK_S)]
        assert np.array_equal(np.concatenate([part for _, part in found]), pcm)
        return [slice(a, a + len(part)) for a, part in found]

    parts = asyncio.run(split(7))
    assert parts == asyncio.run(split(500))
    assert parts[0].start == 0
    assert abs(parts[0].stop - 110.05 * 16000) < 3200
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert parts[-1].stop == len(pcm)
    assert max(s.stop - s.start for s in parts) <= 135 * 16000


@pytest.mark.heavy
def test_a_long_file_has_rising_times_and_all_its_words(
    whisper: WhisperTranscriber, recordings: dict[str, Recording]
) -> None:
    names = ("lj-LJ001-0004", "jfk", "ls-other-3331-159605-0000", "lj-LJ001-0002", "ls-other-1688-142285-0003")
    pause = np.zeros(16000, np.float32)
    pcm = np.tile(np.concatenate([x for n in names for x in (recordings[n].pcm, pause)]), 4)

    async def main() -> tuple[FileInfo, list[TranscriptSegment]]:
        parts = [p async for p in whisper.transcribe(one_slab(pcm), FileOptions(language="en"))]
        assert isinstance(parts[-1], FileInfo)
        return parts[-1], [p for p in parts if isinstance(p, TranscriptSegment)]

    info, segments = asyncio.run(main())
    assert info.duration_s == pytest.approx(len(pcm) / 16000)
    assert info.duration_s > 135
    assert [s.id for s in segments] == list(range(len(segments)))
    assert all(a.start_s <= b.start_s for a, b in pairwise(segments))
    text = " ".join(s.text.lower() for s in segments)
    assert 3 <= text.count("predecessors") <= 4
    assert 6 <= text.count("country") <= 8


def test_vad_probabilities_do_not_depend_on_chunks_or_other_sessions(
    models: LoadedModels, recordings: dict[str, Recording]
) -> None:
    detector = models.required_vad
    assert isinstance(detector, SileroDetector)
    speech, noise = recordings["lj-LJ001-0004"].pcm, recordings["esc10-002-2-101676-A"].pcm

    async def cut(pcm: np.ndarray, size: int) -> list[float]:
        stream, out = detector.open(), []
        for at in range(0, len(pcm), size):
            out += await stream.feed(pcm[at : at + size])
        return out

    async def main() -> list[list[float]]:
        alone = await cut(speech, len(speech))
        return [alone, *await asyncio.gather(cut(speech, 700), cut(speech, 5000), cut(noise, 512))]

    alone, small, large, rain = asyncio.run(main())
    np.testing.assert_allclose(small, alone, atol=1e-4)
    np.testing.assert_allclose(large, alone, atol=1e-4)
    assert np.mean(np.array(alone) > 0.5) > 0.8
    assert max(rain) < 0.5


def test_when_a_soft_voice_follows_a_loud_one_then_it_is_detected(
    models: LoadedModels, recordings: dict[str, Recording]
) -> None:
    speech = recordings["lj-LJ001-0004"].pcm
    pause = np.zeros(2 * 16000, np.float32)

    async def main() -> list[float]:
        # The second voice is 40 dB softer, as in two recordings of one corpus.
        return await models.required_vad.open().feed(np.concatenate((speech, pause, speech * 0.01)))

    probabilities = np.array(asyncio.run(main()))
    assert np.mean(probabilities[(len(speech) + len(pause)) // 512 :] > 0.5) > 0.6


@pytest.mark.parametrize("peak_db", [-30, -36, -42])
def test_when_speech_is_quiet_then_it_is_detected_as_it_is_at_full_level(
    models: LoadedModels, recordings: dict[str, Recording], peak_db: int
) -> None:
    clips = [recordings[name].pcm for name in ("lj-LJ001-0004", "tau2-no", "tau2-help-me", "ps-cards-001")]
    loud = np.concatenate([np.pad(c, (0, 16000)) / np.abs(c).max() for c in clips])

    async def main(gain_db: float) -> np.ndarray:
        # The samples are rounded to 16 bits.
        pcm = np.round(loud * 10 ** (gain_db / 20) * 32768).astype(np.float32) / 32768
        return np.array(await models.required_vad.open().feed(pcm)) >= 0.5

    full, quiet = asyncio.run(main(-3)), asyncio.run(main(peak_db))
    assert np.mean(quiet[full]) > 0.95
    assert np.mean(quiet[~full]) < 0.05


@pytest.mark.parametrize(("added", "found"), [("offset", 0.9), ("clicks", 0.7), ("rumble", 0.8)])
def test_speech_is_detected_beside_what_microphones_add(
    models: LoadedModels, recordings: dict[str, Recording], added: str, found: float
) -> None:
    speech = np.concatenate([np.pad(recordings[n].pcm, (8000, 8000)) for n in ("lj-LJ001-0004", "ps-cards-001")])
    speech *= 10 ** (-42 / 20) / np.abs(speech).max()

    async def main() -> tuple[np.ndarray, np.ndarray]:
        plain, disturbed = models.required_vad.open(), models.required_vad.open()
        sound = speech + disturbance(added, len(speech))
        probabilities = await asyncio.gather(plain.feed(speech), disturbed.feed(sound))
        return np.array(probabilities[0]) >= 0.5, np.array(probabilities[1]) >= 0.5

    plain, disturbed = asyncio.run(main())
    assert np.mean(disturbed[plain]) > found


@pytest.mark.parametrize("peak_db", [-26, -30])
def test_a_lines_noise_is_not_raised_to_a_near_one(
    models: LoadedModels, recordings: dict[str, Recording], peak_db: int
) -> None:
    speech = np.pad(recordings["ps-cards-001"].pcm, 16000)
    speech *= 10 ** (peak_db / 20) / np.abs(speech).max()
    speech += (10 ** (-50 / 20) * np.random.default_rng(63).normal(size=len(speech))).astype(np.float32)
    spectrum, hz = np.fft.rfft(speech), np.fft.rfftfreq(len(speech), 1 / SAMPLE_RATE_HZ)
    telephone = np.fft.irfft(spectrum * ((hz >= 300) & (hz <= 3400)), len(speech)).astype(np.float32)

    async def main() -> list[float]:
        return await models.required_vad.open().feed(telephone)

    assert np.sum(np.array(asyncio.run(main())) > 0.5) > 19


def disturbance(kind: str, size: int) -> Pcm:
    """Return the disturbance that a microphone, a desk or wires add to audio, [size]."""
    time_s = np.arange(size) / SAMPLE_RATE_HZ
    out = np.zeros(size)
    if kind == "offset":
        out += 0.5
    elif kind == "clicks":
        click = np.exp(-np.arange(160) / 32) * np.random.default_rng(1).normal(size=160)
        for at in range(0, size - 160, SAMPLE_RATE_HZ // 3):
            out[at : at + 160] = click / np.abs(click).max() * 10 ** (-10 / 20)
    elif kind == "rumble":
        out += 0.3 * np.sin(2 * np.pi * 22 * time_s) * (1 + np.sin(2 * np.pi * 0.7 * time_s)) / 2
    else:
        for factor, gain in ((1, 0.025), (2, 0.005), (3, 0.002)):
            out += gain * np.sin(2 * np.pi * 50 * factor * time_s)
    return out.astype(np.float32)


@pytest.mark.parametrize("kind", ["hum", "keys", "comfort", "white", "busy", "offset", "wind"])
def test_sound_of_wires_desks_and_lines_is_no_speech(models: LoadedModels, kind: str) -> None:
    size, rng = 8 * SAMPLE_RATE_HZ, np.random.default_rng(2)
    time_s = np.arange(size) / SAMPLE_RATE_HZ
    if kind == "keys":
        row, column = (697, 770, 852, 941), (1209, 1336, 1477)
        key = (time_s / 0.2).astype(int)
        tones = np.sin(2 * np.pi * np.take(row, key % 4) * time_s)
        tones += np.sin(2 * np.pi * np.take(column, key % 3) * time_s)
        sound = 0.2 * tones * (time_s % 0.2 < 0.1)
    elif kind == "busy":
        sound = 0.1 * (np.sin(2 * np.pi * 480 * time_s) + np.sin(2 * np.pi * 620 * time_s)) * (time_s % 1 < 0.5)
    elif kind in ("comfort", "white", "wind"):
        hz = np.fft.rfftfreq(size, 1 / SAMPLE_RATE_HZ)
        shape = {"comfort": (hz < 3400) / (1 + hz / 800), "white": np.ones(len(hz)), "wind": 1 / (1 + (hz / 60) ** 2)}
        sound = np.fft.irfft(np.fft.rfft(rng.normal(size=size)) * shape[kind], size)
        sound *= 10 ** ((-20 if kind == "wind" else -50) / 20) / sound.std()
    else:
        sound = disturbance(kind, size).astype(float)

    async def main() -> list[float]:
        # At 0, -20 and -40 dB. The gain must not turn the sound into speech.
        quieter = (models.required_vad.open().feed((sound * g).astype(np.float32)) for g in (1.0, 0.1, 0.01))
        return [p for probabilities in await asyncio.gather(*quieter) for p in probabilities]

    assert max(asyncio.run(main())) < 0.5
