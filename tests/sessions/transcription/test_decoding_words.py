"""What decoding reports about words: their text, their times, their tokens' log-probabilities, their language."""

from __future__ import annotations

from dataclasses import replace

from antiphon.contracts import Hypothesis, Window
from antiphon.events.transcription import LanguageDetected, TranscriptDelta, TranscriptDone, TranscriptionConfig
from antiphon.events.words import TokenLogprob
from tests.scripted import FRAME, WORD_SAMPLES, ScriptedTranscriber, speech
from tests.sessions.transcription.scripted_windows import done, ended, growing, opened, play, turn_ended, window


class Speaking(ScriptedTranscriber):
    """Recognizes `language` with `probability` if free to choose, and returns log-probabilities if requested."""

    def __init__(self, language: str = "en", probability: float = 0.95) -> None:
        super().__init__()
        self.language, self.probability = language, probability

    async def decode(self, asked: Window) -> Hypothesis:
        found = await super().decode(asked)
        if asked.logprobs:
            tokens = [(TokenLogprob(p.text.encode(), -0.5),) for p in found.pieces]
            found = replace(found, pieces=tuple(map(lambda p, t: replace(p, logprobs=t), found.pieces, tokens)))
        if asked.language:
            return replace(found, language=asked.language)
        return replace(found, language=self.language, language_probability=self.probability)


def test_when_words_and_logprobs_are_asked_for_then_deltas_have_those_of_their_own_words() -> None:
    start = 7 * WORD_SAMPLES
    pcm = speech(1, 8)
    ends = range(FRAME * 5, len(pcm) + 1, FRAME * 5)
    inputs = [opened(window(pcm[:end], start=start)) for end in ends]
    config = TranscriptionConfig(word_times=True, logprobs=True)
    out = play(*inputs, ended(window(pcm, start=start)), turn_ended(), transcriber=Speaking(), config=config)
    deltas = [o for o in out if isinstance(o, TranscriptDelta)]
    assert len(deltas) > 2
    for delta in deltas:
        assert [w.text for w in delta.words] == delta.text.split()
        assert b"".join(t.utf8 for t in delta.logprobs).decode().strip() == delta.text.strip()
    (final,) = done(out)
    assert sum((d.words for d in deltas), ()) == final.words
    place = [round(t * 16000) for t in (final.words[1].start_s, final.words[1].end_s)]
    assert place == [start + WORD_SAMPLES, start + 2 * WORD_SAMPLES]
    assert b"".join(t.utf8 for t in final.logprobs).decode().strip() == final.text
    assert {t.logprob for t in final.logprobs} == {-0.5}


def test_when_they_are_not_asked_for_then_there_are_none_and_no_decode_is_asked_for_them() -> None:
    transcriber = Speaking()
    out = play(*growing(speech(1, 8)), ended(window(speech(1, 8))), turn_ended(), transcriber=transcriber)
    assert all((o.words, o.logprobs) == ((), ()) for o in out if isinstance(o, TranscriptDelta | TranscriptDone))
    assert not any(w.word_times or w.logprobs for w in transcriber.windows)


def test_the_language_is_reported_once_it_is_known_and_given_to_what_is_decoded_next() -> None:
    transcriber = Speaking("de")
    config = TranscriptionConfig(reports_language=True, languages=("de", "en"))
    inputs = growing(speech(1, 5))
    out = play(*inputs, ended(window(speech(1, 5))), turn_ended(), transcriber=transcriber, config=config)
    assert [o for o in out if isinstance(o, LanguageDetected)] == [LanguageDetected(0, "de", 0.95)]
    lengths = [(len(w.pcm) / 16000, w.language) for w in transcriber.windows]
    detected = [s for s, language in lengths if language is None]
    # The first window of a second or more decides, and later ones are decoded in its language.
    assert [s >= 1.0 for s in detected] == [False] * (len(detected) - 1) + [True]
    assert [language for _, language in lengths[len(detected) :]] == ["de"] * (len(lengths) - len(detected))
    assert len(lengths) > len(detected)
    assert all(w.languages == ("de", "en") for w in transcriber.windows if w.language is None)
    # The turn's language is that of its words.
    assert [d.language for d in done(out)] == ["de"]
    silent = play(*inputs, ended(window(speech(1, 5))), turn_ended(), transcriber=Speaking("de"))
    assert not any(isinstance(o, LanguageDetected) for o in silent), "nobody asked"


def test_when_a_later_turn_is_clearly_in_another_language_then_the_change_is_reported() -> None:
    transcriber = Speaking("de")
    config = TranscriptionConfig(reports_language=True)

    def speaks_english(_: object) -> None:
        transcriber.language = "en"

    short, long = (
        window(speech(1, n), id=i, start=i * 160_000, turn=i - 1) for n, i in ((5, 2), (8, 3))
    )  # 1.6 and 2.56 s
    out = play(
        ended(window(speech(1, 5))),
        turn_ended(0),
        speaks_english,
        ended(short),
        turn_ended(1),
        ended(long),
        turn_ended(2),
        transcriber=transcriber,
        config=config,
    )
    changes = [(o.turn, o.language) for o in out if isinstance(o, LanguageDetected)]
    assert changes == [(0, "de"), (2, "en")]
    assert [d.language for d in done(out)] == ["de", "de", "en"]
    assert transcriber.windows[-1].likely_language == "de"


def test_when_the_client_names_the_language_then_none_is_detected_or_reported() -> None:
    transcriber = Speaking("de")
    config = TranscriptionConfig(language="en", languages=("de",), reports_language=True)
    out = play(
        *growing(speech(1, 8)), ended(window(speech(1, 8))), turn_ended(), transcriber=transcriber, config=config
    )
    assert {w.language for w in transcriber.windows} == {"en"}
    assert not any(isinstance(o, LanguageDetected) for o in out)
