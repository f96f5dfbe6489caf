"""Chooses the language of a session whose client has not named one. Pure: gets the languages that the transcriber
detects, and returns the language in which to decode.

The language is decided from the first second of clear speech and then passed to every decode, so that a short or
unclear window is not transcribed in another language. It changes only if the speech of one window is clearly in another
language, at most once per window. That corrects a misleading first second, and follows a speaker who changes to another
language.

This was measured with Whisper's base model on the first seconds of 43 recordings in seven other languages and 40 in
English, 15 of them by learners. After 1 s, 46 recordings had a language with a probability of 0.5 or more, and for 10
of them it was wrong. With 0.7 or more it was wrong for 4 of 33, all four by learners. After 3 s, 0.5 or more was wrong
for 4 of 66. After 2 s, 0.9 or more was wrong for none of 36.
"""

from __future__ import annotations

from dataclasses import dataclass

# Before the session's language is decided, words of a language with a smaller probability are not sent, because sent
# words cannot be taken back.
MIN_LANGUAGE_PROBABILITY = 0.7
# Seconds of speech from which the language is decided, with at least MIN_LANGUAGE_PROBABILITY. After DECIDE_LATE_S,
# DECIDE_LATE_PROBABILITY is enough.
DECIDE_S = 1.0
DECIDE_LATE_S, DECIDE_LATE_PROBABILITY = 3.0, 0.5
# Seconds of speech that a window needs to change the session's language. The transcriber decides how clear the other
# language has to be.
CHANGE_S = 2.0


@dataclass(frozen=True, slots=True)
class LanguageRequest:
    """The language settings of a decode. For the meaning of the fields, see those of the same name in
    `contracts.Window`.
    """

    language: str | None = None
    languages: tuple[str, ...] = ()
    likely_language: str | None = None


class SpokenLanguage:
    """Decides the language of one session's windows.

    `named` is the language that the client has named (ISO 639-1), which is used for every window. If it is None, the
    language is detected. A `languages` that is not empty limits the choice.
    """

    def __init__(self, named: str | None, languages: tuple[str, ...]) -> None:
        self._named, self._languages = named, languages
        self._decided: str | None = None
        # The window in which the language last changed.
        self._changed_in: int | None = None

    def configure(self, named: str | None, languages: tuple[str, ...]) -> None:
        """Apply the client's choice from now on. A decided language that it excludes is forgotten."""
        self._named, self._languages = named, languages
        if languages and self._decided not in languages:
            self._decided = None

    def request(self, window: int, speech_s: float) -> LanguageRequest:
        """Return the language in which to decode the window of this id, which has `speech_s` seconds of speech."""
        if self._named:
            return LanguageRequest(self._named)
        if self._decided is None:
            return LanguageRequest(languages=self._languages)
        if self._may_change(window, speech_s):
            return LanguageRequest(languages=self._languages, likely_language=self._decided)
        return LanguageRequest(self._decided)

    def offer(self, window: int, speech_s: float, language: str, probability: float) -> bool:
        """Use the detected language of a hypothesis that was decoded with `request`'s answer. Returns whether the
        session's language changed. Call it only for hypotheses with speech.
        """
        if self._named or not language or language == self._decided:
            return False
        if self._decided is None:
            late = speech_s >= DECIDE_LATE_S and probability >= DECIDE_LATE_PROBABILITY
            if not late and (speech_s < DECIDE_S or probability < MIN_LANGUAGE_PROBABILITY):
                return False
        elif self._may_change(window, speech_s):
            self._changed_in = window
        else:
            return False
        self._decided = language
        return True

    def _may_change(self, window: int, speech_s: float) -> bool:
        return speech_s >= CHANGE_S and window != self._changed_in
