"""Piper's voices: the divided graph, phonemes and their words, folders of voices, and what is refused."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import unicodedata
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest
import soxr

from antiphon.adapters import espeak
from antiphon.adapters.piper.files import BEGIN, END, PAD, VoiceFields, describe, voice_files
from antiphon.adapters.piper.graph import VoiceGraph
from antiphon.adapters.piper.phonemes import Phonemizer
from antiphon.adapters.piper.synthesizer import Piper
from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import FileOptions, SpeechChunk, TranscriptSegment, Urgency, VoiceOptions, one_slab
from antiphon.errors import ModelError
from antiphon.loading.loader import load, store_of
from antiphon.settings import load as load_settings
from antiphon.store import MODELS
from tests.adapters.onnx_graphs import streaming_graph
from tests.adapters.tiny_piper import write_voice

pytestmark = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng (Debian)")
TEXT = "Hello there, how are you? The weather will be mild tomorrow with some rain late in the evening."


@contextmanager
def loaded(folder: Path, **voices: Path) -> Iterator[Piper]:
    voice = Piper(folder, folder.name, LaneModelOptions(), voices=voices)
    try:
        yield voice
    finally:
        voice.lane.close()


def chunks_of(piper: Piper, text: str, **options: Any) -> list[SpeechChunk]:
    async def main() -> list[SpeechChunk]:
        asked = VoiceOptions(**{"voice": piper.profile.voices[0], "seed": 0} | options)
        async with aclosing(piper.speak(text, asked, lambda: Urgency.FINAL)) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.run(main())


def pcm_of(chunks: list[SpeechChunk]) -> Pcm:
    return np.concatenate([chunk.pcm for chunk in chunks])


@pytest.mark.parametrize("speakers", [1, 3])
def test_the_pieces_of_a_sentence_are_the_audio_of_the_published_graph(tmp_path: Path, speakers: int) -> None:
    path = write_voice(tmp_path, "en_US-tiny-low", speakers=speakers)
    graph, ids = VoiceGraph(path, speakers=speakers), (1, 0, *(k for n in range(3, 40) for k in (n, 0)), 2)
    given = {"input": np.array([ids]), "input_lengths": np.array([len(ids)]), "scales": np.array([0, 1.3, 0], "f4")}
    if speakers > 1:
        given["sid"] = np.array([2])
    (whole,) = onnxruntime.InferenceSession(str(path)).run(None, given)
    sentence = graph.sentence(ids, (0.0, 1.3, 0.0), 2, np.random.default_rng())
    num = sentence.num_frames
    assert num == sentence.durations.sum() > 3 * graph.reach
    pieces = [graph.audio(sentence, at, min(at + 7, num)) for at in range(0, num, 7)]
    assert {len(piece) for piece in pieces[:-1]} == {7 * graph.frame_samples}
    np.testing.assert_allclose(np.concatenate(pieces), whole.reshape(-1), atol=1e-6)
    assert np.abs(whole).max() > 0.01


def test_a_seed_gives_the_same_audio_and_none_gives_another(tmp_path: Path) -> None:
    write_voice(tmp_path, "en_US-tiny-low")
    with loaded(tmp_path) as voice:
        first, again, other = (pcm_of(chunks_of(voice, TEXT, seed=seed)) for seed in (5, 5, None))
    assert np.array_equal(first, again)
    assert len(other) != len(first) or not np.array_equal(first, other)


def test_words_have_the_times_of_their_phonemes(tmp_path: Path) -> None:
    write_voice(tmp_path, "en_US-tiny-low", inference={"noise_scale": 0, "length_scale": 1, "noise_w": 0})
    with loaded(tmp_path) as voice:
        chunks, alone = chunks_of(voice, TEXT), chunks_of(voice, "Hello")[0]
    words = [word for chunk in chunks for word in chunk.words]
    assert [word.text for word in words] == TEXT.split()
    assert all(word.start_s < word.end_s for word in words)
    assert all(a.end_s <= b.start_s for a, b in pairwise(words))
    audio_s = sum(len(chunk.pcm) for chunk in chunks) / voice.profile.sample_rate_hz
    assert 0.9 * audio_s < words[-1].end_s < audio_s
    # The words of a sentence come with its first audio.
    assert [len(chunk.words) for chunk in chunks if chunk.words] == [5, 13]
    assert chunks[0].words
    assert len(chunks[0].pcm)
    # The first symbol and the pause after it are before the first word.
    graph = VoiceGraph(tmp_path / "en_US-tiny-low.onnx", speakers=1)
    ids = Phonemizer(next(voice_files(tmp_path)).fields).phonemes(["Hello"]).ids
    durations = graph.sentence(ids, (0.0, 1.0, 0.0), None, np.random.default_rng()).durations
    frame_s = graph.frame_samples / 16_000
    assert alone.words[0].start_s == pytest.approx(durations[:2].sum() * frame_s)
    assert alone.words[0].end_s == pytest.approx(durations[:-1].sum() * frame_s)


def test_a_tempo_scales_the_durations(tmp_path: Path) -> None:
    write_voice(tmp_path, "en_US-tiny-low", inference={"noise_w": 0, "length_scale": 20})
    with loaded(tmp_path) as voice:
        slow, fast = (len(pcm_of(chunks_of(voice, "Hello there.", speed=speed))) for speed in (0.5, 2.0))
    assert slow == pytest.approx(4 * fast, rel=0.05)


def test_a_folder_has_several_voices_languages_and_speakers(tmp_path: Path) -> None:
    german = {"espeak": {"voice": "de"}, "language": {"code": "de_DE"}}
    write_voice(tmp_path / "home", "en_US-tiny-low", rate_hz=16_000)
    write_voice(tmp_path / "home", "de_DE-viele-medium", rate_hz=22_050, speakers=2, **german)
    # The files of 2023 name no language; eSpeak NG's voice does.
    write_voice(tmp_path / "more", "fr_FR-alt-low", espeak={"voice": "fr"}, language={})
    with loaded(tmp_path / "home", more=tmp_path / "more") as voice:
        profile = voice.profile
        names = ("de_DE-viele-medium", "de_DE-viele-medium:p0", "de_DE-viele-medium:p1", "en_US-tiny-low")
        assert profile.voices == (*names, "fr_FR-alt-low")
        assert profile.languages == ("de", "en", "fr")
        assert [profile.languages_of(name) for name in profile.voices] == [("de",)] * 3 + [("en",), ("fr",)]
        assert profile.sample_rate_hz == 24_000
        sounds = [pcm_of(chunks_of(voice, "Guten Tag.", voice=name)) for name in names]
        # Each voice's audio is resampled from its own rate.
        words = next(chunk.words for chunk in chunks_of(voice, "Guten Tag.", voice=names[3]) if chunk.words)
    assert np.array_equal(sounds[0], sounds[1])
    assert len(sounds[2]) != len(sounds[1]) or not np.array_equal(sounds[2], sounds[1])
    assert len(sounds[3]) / 24_000 == pytest.approx(words[-1].end_s, abs=0.1)


def test_a_text_without_words_is_silent_and_its_words_have_no_time(tmp_path: Path) -> None:
    write_voice(tmp_path, "en_US-tiny-low")
    with loaded(tmp_path) as voice:
        assert not len(pcm_of(chunks_of(voice, "— … 🙂")))
        chunks = chunks_of(voice, "Yes — no.")
    words = [word for chunk in chunks for word in chunk.words]
    assert [word.text for word in words] == ["Yes", "—", "no."]
    assert words[0].end_s == words[1].start_s == words[1].end_s


class EverySymbol(dict[str, list[Any]]):
    """A map that has every symbol, so that ids are the symbols themselves."""

    def get(self, symbol: str, default: Any = None) -> Any:
        return self[symbol]

    def __missing__(self, symbol: str) -> list[Any]:
        return [symbol]


def phonemizer(language: str, **fields: Any) -> Phonemizer:
    """Return the phonemizer of a voice that has every symbol; its ids are the symbols themselves."""
    config = {"audio": {"sample_rate": 16_000}, "espeak": {"voice": language}, "phoneme_id_map": {}} | fields
    return Phonemizer(msgspec.structs.replace(msgspec.convert(config, VoiceFields), phoneme_id_map=EverySymbol()))


def read(text: str, language: str, **fields: Any) -> tuple[str, dict[str, str]]:
    """Return what a voice reads for a text, and what of that belongs to each of its words."""
    found, by_word = phonemizer(language, **fields).phonemes(text.split()), dict[str, str]()
    for symbol, word in zip(found.ids, found.words, strict=True):
        if word is not None and symbol != PAD:
            by_word[text.split()[word]] = by_word.get(text.split()[word], "") + str(symbol)
    symbols = list(map(str, found.ids))
    assert (symbols[0], symbols[-1], set(symbols[1::2])) == (BEGIN, END, {PAD})
    return "".join(symbols[2:-1:2]), by_word


@pytest.mark.parametrize(
    ("text", "language", "said"),
    [
        # As piper-tts 1.8 reads them. Its eSpeak NG is newer, and 1 % of its phonemes differ from those of 1.51.
        ("Hello there, how are you?", "en-us", "həlˈoʊ ðˈɛɹ, hˈaʊ ɑːɹ juː?"),
        ("He said: yes; no!", "en-us", "hiː sˈɛd: jˈɛs; nˈoʊ!"),
        ("Guten Tag, ich bin da.", "de", "ɡˈuːtən tˈɑːk, ɪç bɪn dˈɑː."),
        # An open end has no mark.
        ("and then", "en-us", "ænd ðˈɛn"),
        # piper-tts ends a sentence after the abbreviation.
        ("Mr. Smith", "en-us", "mˈɪstɚ smˈɪθ"),
        # Marks of eSpeak NG's change of language are left out.
        ("das Weather", "de", "das wˈɛðə"),
    ],
)
def test_a_text_is_read_as_phonemes_with_the_marks_of_its_clauses(text: str, language: str, said: str) -> None:
    assert read(text, language)[0] == unicodedata.normalize("NFD", said)


@pytest.mark.parametrize(
    ("text", "language", "by_word"),
    [
        # Some words are one group of phonemes, and others several.
        ("late in the evening", "en-us", {"in": "ɪn", "the": "ðɪ", "evening": "ˈiːvnɪŋ"}),
        ("in 2023, of the people", "en-us", {"2023,": "tˈuːθˈaʊzəndtwˈɛntiθɹˈiː", "the": "ðə", "people": "pˈiːpəl"}),
        ("am 3. Mai", "de", {"3.": "dɾˈaɪ", "Mai": "mˈaɪ"}),
    ],
)
def test_each_phoneme_belongs_to_its_word(text: str, language: str, by_word: dict[str, str]) -> None:
    found = read(text, language)[1]
    assert list(found) == text.split()
    assert {word: found[word] for word in by_word} == by_word


def test_a_voice_of_letters_reads_the_letters() -> None:
    said, by_word = read("Так, світе!", "", phoneme_type="text")
    assert (said, by_word) == ("Так, світе!", {"Так,": "Так", "світе!": "світе"})


def test_vowels_that_are_one_symbol_of_the_voice_are_read_as_one() -> None:
    for clusters, vowels in (([["o", "ʊ"]], ("oʊ",)), (None, ("o", "ʊ"))):
        ids = phonemizer("en-us", vowel_clusters=clusters).phonemes(["Hello"]).ids
        assert ids[2:-1:2] == ("h", "ə", "l", "ˈ", *vowels)


def no_json(folder: Path) -> None:
    (folder / "a.onnx.json").unlink()


def broken_json(folder: Path) -> None:
    (folder / "a.onnx.json").write_text("{")


def no_rate(folder: Path) -> None:
    write_voice(folder, "a", audio={})


def other_phonemes(folder: Path) -> None:
    write_voice(folder, "a", phoneme_type="pinyin")


def no_espeak_voice(folder: Path) -> None:
    write_voice(folder, "a", espeak={})


def no_pad(folder: Path) -> None:
    write_voice(folder, "a", phoneme_id_map={"^": [1], "$": [2]})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (no_json, r"a\.onnx has no a\.onnx\.json: copy it"),
        (broken_json, r"a\.onnx\.json cannot be read: "),
        (no_rate, r"a\.onnx\.json cannot be read: .*sample_rate"),
        (other_phonemes, r"a\.onnx\.json: its phonemes are of the kind pinyin, and only espeak and text"),
        (no_espeak_voice, r"a\.onnx\.json names no voice of eSpeak NG"),
        (no_pad, r"a\.onnx\.json: phoneme_id_map has no _"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_by_the_name_of_the_file(tmp_path: Path, spoil: Any, says: str) -> None:
    write_voice(tmp_path, "a")
    assert describe(tmp_path) == ("voices in Piper's format: a (en)", "")
    spoil(tmp_path)
    with pytest.raises(ModelError, match=f"mine does not load: {says}"):
        Piper(tmp_path, "mine", LaneModelOptions())
    title, problem = describe(tmp_path)
    assert title == "voices in Piper's format"
    assert re.match(says, problem)


def test_a_graph_of_another_model_is_refused_by_its_name(tmp_path: Path) -> None:
    write_voice(tmp_path, "a")
    (tmp_path / "a.onnx").write_bytes(b"no graph")
    with pytest.raises(ModelError, match="mine does not load"):
        Piper(tmp_path, "mine", LaneModelOptions())
    streaming_graph(tmp_path / "a.onnx", audio="x", chunk=4, outputs=[("y", (1, 2))], states=[("s", "t")])
    with pytest.raises(ModelError, match=r"a\.onnx is not the graph of a Piper voice: it has no decoder"):
        Piper(tmp_path, "mine", LaneModelOptions())


def test_a_voice_for_which_espeak_ng_has_no_phonemes_is_refused(tmp_path: Path) -> None:
    write_voice(tmp_path, "a", espeak={"voice": "zz-none"})
    with pytest.raises(ModelError, match=r"mine does not load: espeak-ng failed: .*voice does not exist"):
        Piper(tmp_path, "mine", LaneModelOptions())


def test_two_voices_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_voice(tmp_path / folder, "a")
    with pytest.raises(ModelError, match="two voices are named a: "):
        Piper(tmp_path / "one", "one", LaneModelOptions(), voices={"two": tmp_path / "two"})


def test_without_espeak_ng_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_voice(tmp_path, "a")
    write_voice(tmp_path / "letters", "b", phoneme_type="text")
    monkeypatch.setattr(espeak, "PROGRAM", "no-such-program")
    with pytest.raises(ModelError, match=r"no-such-program is not installed \(apt install no-such-program\)"):
        Piper(tmp_path, "mine", LaneModelOptions())
    # A voice that reads letters does not need it.
    with loaded(tmp_path / "letters") as voice:
        assert pcm_of(chunks_of(voice, "abc")).any()


@pytest.mark.heavy
def test_a_published_voice_is_its_whole_graph_and_is_understood() -> None:
    settings = load_settings({}, os.environ)
    store, model = store_of(settings.models), MODELS["piper-en_US-joe-medium"]
    store.pull(model, lambda *_: None)
    folder = store.require(model)
    (file,) = voice_files(folder)
    graph, words = VoiceGraph(file.graph, speakers=1), TEXT.split("? ")[1].split()
    ids = Phonemizer(file.fields).phonemes(words).ids
    given = {"input": np.array([ids]), "input_lengths": np.array([len(ids)]), "scales": np.array([0, 1, 0], "f4")}
    (whole,) = onnxruntime.InferenceSession(str(file.graph)).run(None, given)
    sentence = graph.sentence(ids, (0.0, 1.0, 0.0), None, np.random.default_rng())
    pieces = [graph.audio(sentence, at, min(at + 40, sentence.num_frames)) for at in range(0, sentence.num_frames, 40)]
    np.testing.assert_allclose(np.concatenate(pieces), whole.reshape(-1), atol=1e-3)
    with loaded(folder) as voice:
        pcm = pcm_of(chunks_of(voice, TEXT))
        rate_hz = voice.profile.sample_rate_hz
    models = load(settings, store, roles=("transcriber",))

    async def heard() -> str:
        slab = one_slab(np.asarray(soxr.resample(pcm, rate_hz, SAMPLE_RATE_HZ), np.float32))
        found = [part async for part in models.required_transcriber.transcribe(slab, FileOptions("en"))]
        return " ".join(part.text for part in found if isinstance(part, TranscriptSegment))

    try:
        said = asyncio.run(heard())
    finally:
        models.close()
    assert re.findall(r"\w+", said.lower()) == re.findall(r"\w+", TEXT.lower())
