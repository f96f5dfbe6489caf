"""The fit of the end-of-turn model: no speaker is both fitted and tested, and the table can be computed again."""

from __future__ import annotations

import dataclasses
import runpy
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from bench.common import RESULTS
from bench.turn_taking.fit import fit, log_normal, logistic
from bench.turn_taking.fit import main as fit_main
from bench.turn_taking.pauses import Pause, deepest_gap, is_whole, noise_like, read, speaker_of, write
from bench.turn_taking.replay import is_fitted, listening, outcome, turn_detector_alone

from antiphon.turns.end_of_turn_table import (
    LOGISTIC,
    PAUSE_MEDIAN_S,
    PAUSE_SPREAD,
    PAUSES_A_TURN,
    SPEAKER_SHRINKAGE,
    THRESHOLDS,
    TURN_SHRINKAGE,
)


@pytest.fixture(scope="module")
def pauses() -> list[Pause]:
    return read()


def pause(length_s: float | None, complete: float = 0.5, text: str = "Yes.", speaker: str = "a") -> Pause:
    return Pause("r", 1.0, speaker, "c", "asr_read", "en", False, length_s, complete, None, text, len(text.split()))


def test_no_speaker_is_on_both_sides(pauses):
    # All pauses of a speaker are on the same side, including those in recordings with an inserted pause. So are all
    # pauses of a corpus that does not tell its speakers apart.
    sides = {}
    for p in pauses:
        recording = p.recording.removesuffix("+pause")
        for key in (p.speaker, recording, p.corpus if p.corpus == "Picovoice barista" else p.speaker):
            assert sides.setdefault(key, is_fitted(p.speaker)) == is_fitted(p.speaker)
    tested = [p for p in pauses if not is_fitted(p.speaker)]
    assert 0.3 * len(pauses) < len(tested) < 0.7 * len(pauses)


def test_there_are_enough_pauses(pauses):
    assert sum(p.length_s is not None and not p.mixed for p in pauses) >= 300
    assert (RESULTS / "turns-pauses.json").stat().st_size < 1e6


def test_the_table_is_what_the_fit_makes(pauses):
    made = fit(pauses)
    assert made["LOGISTIC"].keys() == LOGISTIC.keys()
    for kind, weights in LOGISTIC.items():
        assert made["LOGISTIC"][kind] == pytest.approx(weights, abs=2e-3)
    assert made["PAUSE_MEDIAN_S"] == pytest.approx(PAUSE_MEDIAN_S, abs=2e-3)
    assert made["PAUSE_SPREAD"] == pytest.approx(PAUSE_SPREAD, abs=2e-3)
    assert made["SPEAKER_SHRINKAGE"] == pytest.approx(SPEAKER_SHRINKAGE, abs=0.2)
    assert made["PAUSES_A_TURN"] == pytest.approx(PAUSES_A_TURN, abs=0.02)
    assert made["TURN_SHRINKAGE"] == TURN_SHRINKAGE
    assert made["THRESHOLDS"] == pytest.approx(THRESHOLDS, abs=0.011)


def test_the_fit_ignores_the_speakers_that_it_is_tested_on(pauses):
    changed = [p if is_fitted(p.speaker) else dataclasses.replace(p, complete=1 - p.complete) for p in pauses]
    assert fit(changed) == fit(pauses)


def test_the_logistic_fit_finds_what_tells_ends_from_pauses():
    apart = [pause(None, 0.9) for _ in range(40)] + [pause(0.5, 0.1) for _ in range(40)]
    weights = logistic(apart, sound=True, words=False)
    assert weights["sound"] > 0.5
    untold = [pause(None, c) for c in (0.1, 0.9) * 40] + [pause(0.5, c) for c in (0.1, 0.9) * 40]
    assert abs(logistic(untold, sound=True, words=False)["sound"]) < 0.05


def test_the_survival_fit_finds_the_median_and_the_spread():
    quantiles = [NormalDist(np.log(0.4), 0.8).inv_cdf((i + 0.5) / 400) for i in range(400)]
    made = [dataclasses.replace(pause(0.2 + float(np.exp(q)) - 0.016), recording=str(q)) for q in quantiles]
    median_s, spread = log_normal(made)
    assert median_s == pytest.approx(0.4, rel=0.03)
    assert spread == pytest.approx(0.8, rel=0.05)


def test_outcomes_count_pauses_that_a_rule_ends_and_waits_at_ends():
    inner, ends = [pause(0.25), pause(0.5), pause(1.0)], [pause(None), pause(None, 0.1)]
    found = outcome(lambda pause: 500.0, inner, ends)
    assert (found.cut_off, found.wait_p50_s) == (pytest.approx(2 / 3), 0.5)
    # The answer is heard 0.6 s after the start of the pause.
    assert found.talked_into == pytest.approx(1 / 3)
    found = outcome(turn_detector_alone(0.5), inner, ends)
    assert (found.cut_off, found.wait_p50_s) == (pytest.approx(2 / 3), pytest.approx(2.15))


def test_the_words_count_from_when_they_are_there():
    early, late = pause(None, 0.99, "I would like the"), pause(None, 0.99, "I would like the red one.")
    assert listening(0.2)(early) == listening(0.2)(late)
    assert listening(0.9, words_ms=256)(early) > listening(0.9, words_ms=256)(late)


def test_the_noise_after_a_recording_is_far_below_its_speech():
    speech = np.sin(np.arange(16000) * 0.2).astype(np.float32) * 0.3
    noise = noise_like(speech, 8000, "a")
    assert len(noise) == 8000
    assert 0 < float(np.sqrt(np.mean(noise**2))) <= 0.3 / 2**0.5 * 10 ** (-40 / 20) * 1.01
    assert np.array_equal(noise, noise_like(speech, 8000, "a"))


def test_a_pause_is_put_between_words():
    speech = np.sin(np.arange(32000) * 0.2).astype(np.float32) * 0.3
    assert deepest_gap(speech) is None
    speech[15000:16600] *= 1e-3
    assert deepest_gap(speech) == pytest.approx(15800, abs=320)


def test_only_whole_sentences_are_ends():
    assert is_whole({"corpus": "LJ Speech", "text": "has never been surpassed."})
    assert not is_whole({"corpus": "LJ Speech", "text": "of the true printed book,"})
    assert is_whole({"corpus": "FLEURS", "text": "und ist völlig isoliert"})
    assert speaker_of({"corpus": "FLEURS", "language": "de", "speaker": "fleurs-de-001"}) == "fleurs-de"


def test_a_table_is_fitted_to_the_pauses_of_another_detector(tmp_path: Path) -> None:
    # This detector judges worse than Smart Turn: a third of its logit is missing.
    pauses = [replace(p, complete=1 / (1 + (1 / min(0.9999, max(1e-4, p.complete)) - 1) ** (2 / 3))) for p in read()]
    other, out = tmp_path / "pauses.json", tmp_path / "table.py"
    write(other, [], pauses, [])
    fit_main(["--pauses", str(other), "--out", str(out)])
    found = runpy.run_path(str(out))
    assert found["THRESHOLDS"].keys() == {"low", "medium", "high", "auto"}
    assert found["LOGISTIC"]["sound"]["sound"] > LOGISTIC["sound"]["sound"]
    assert found["LOGISTIC"]["words"] == LOGISTIC["words"]
