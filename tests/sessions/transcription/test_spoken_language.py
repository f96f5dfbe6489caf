from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.sessions.transcription.spoken_language import CHANGE_S, LanguageRequest, SpokenLanguage

DETECT = LanguageRequest()


def test_when_the_client_names_the_language_then_it_holds_whatever_is_heard() -> None:
    spoken = SpokenLanguage("de", ())
    assert not spoken.offer(1, 9.0, "en", 1.0)
    assert spoken.request(1, 9.0) == LanguageRequest("de")


def test_when_a_second_of_speech_is_likely_then_it_decides_the_language_of_what_follows() -> None:
    spoken = SpokenLanguage(None, ())
    assert not spoken.offer(1, 0.9, "en", 0.99), "too short"
    assert not spoken.offer(1, 1.0, "en", 0.6), "too uncertain"
    assert spoken.request(1, 1.2) == DETECT
    assert spoken.offer(1, 1.2, "de", 0.7)
    assert spoken.request(1, 1.5) == spoken.request(2, 0.3) == LanguageRequest("de")
    assert not spoken.offer(1, 1.5, "de", 1.0), "it is known"


def test_when_the_first_seconds_stay_uncertain_then_more_speech_decides() -> None:
    spoken = SpokenLanguage(None, ())
    assert not spoken.offer(1, 2.9, "de", 0.6)
    assert spoken.offer(1, 3.0, "de", 0.6)


def test_when_enough_speech_of_a_window_is_in_another_language_then_the_language_changes_once_in_it() -> None:
    spoken = SpokenLanguage(None, ())
    spoken.offer(1, 1.0, "en", 0.8)
    assert not spoken.offer(1, 1.9, "de", 1.0), "too short to change it"
    assert spoken.request(1, CHANGE_S) == LanguageRequest(likely_language="en")
    assert spoken.offer(1, CHANGE_S, "de", 0.95)
    # It was corrected, and stays for the rest of the window whatever is detected.
    assert spoken.request(1, 9.0) == LanguageRequest("de")
    assert not spoken.offer(1, 9.0, "en", 1.0)
    # A speaker may continue in another language.
    assert spoken.request(2, 1.0) == LanguageRequest("de")
    assert spoken.request(2, 3.0) == LanguageRequest(likely_language="de")
    assert spoken.offer(2, 3.0, "en", 0.95)


def test_languages_restrict_detection_and_a_decided_language_that_they_exclude_is_forgotten() -> None:
    spoken = SpokenLanguage(None, ("en", "de"))
    assert spoken.request(1, 0.5) == LanguageRequest(languages=("en", "de"))
    spoken.offer(1, 1.0, "en", 0.9)
    assert spoken.request(1, 2.0) == LanguageRequest(languages=("en", "de"), likely_language="en")
    spoken.configure(None, ("en", "fr"))
    assert spoken.request(1, 1.0) == LanguageRequest("en")
    spoken.configure(None, ("de", "fr"))
    assert spoken.request(1, 1.0) == LanguageRequest(languages=("de", "fr"))


heard = st.tuples(st.floats(0, 30), st.sampled_from(["en", "de", "fr"]), st.floats(0, 1))


@given(st.lists(st.lists(heard, max_size=8), max_size=6))
def test_whatever_is_detected_the_language_is_decided_once_and_changes_at_most_once_in_a_window(
    windows: list[list[tuple[float, str, float]]],
) -> None:
    spoken, known = SpokenLanguage(None, ()), ""
    for window, hypotheses in enumerate(windows):
        changes = 0
        for speech_s, language, probability in sorted(hypotheses):
            asked = spoken.request(window, speech_s)
            # A transcriber decodes in the requested language.
            language = asked.language or language
            if spoken.offer(window, speech_s, language, probability):
                assert language != known
                changes += bool(known)
                known = language
            if known:
                assert known in (spoken.request(window, speech_s).language, asked.likely_language, language)
                assert spoken.request(window, 0.5) == LanguageRequest(known), "a short window never asks again"
        assert changes <= 1
