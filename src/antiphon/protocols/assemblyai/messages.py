"""The messages of AssemblyAI's streaming API, and the settings of a session, in its URL or in a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from antiphon.audio.incoming import Encoding
from antiphon.errors import RemoteProtocolError
from antiphon.events.languages import language_code
from antiphon.events.transcription import Eagerness, ServerVad, TranscriptionConfig
from antiphon.events.words import Word
from antiphon.protocols.connection import Context
from antiphon.protocols.fields import Text
from antiphon.protocols.opening import TRUE_VALUES
from antiphon.protocols.realtime.input_fields import MAX_KEYTERM_CHARS, MAX_KEYTERMS, NO_SPEAKER_MODEL

# The encodings of a client's audio. Opus comes in packets, one in each message, or in a container.
ENCODINGS: Mapping[str, Encoding] = {
    "": "s16",
    "pcm_s16le": "s16",
    "pcm_mulaw": "ulaw",
    "opus": "opus",
    "ogg_opus": "container",
    "aac": "container",
}
# Range of the pauses that may end a turn, and the longest pause of a turn by default, in milliseconds.
MIN_SILENCE_MS, MAX_SILENCE_MS, DEFAULT_SILENCE_MS = 32, 60_000, 1280
# From this confidence on, no pause but the longest ends a turn. Clients that end turns themselves ask for it.
NEVER_CONFIDENT = 1.0
# Thresholds of the confidence, each with the eagerness up to it.
_EAGERNESS: tuple[tuple[float, Eagerness], ...] = ((0.3, "high"), (0.6, "auto"), (NEVER_CONFIDENT, "low"))


class SessionSettings(msgspec.Struct):
    """The settings that may change during a session. None leaves a setting as it is."""

    # Confidence, in [0, 1], from which a pause ends the turn. A lower one ends turns sooner.
    end_of_turn_confidence_threshold: float | None = None
    # The longest pause of a turn, in milliseconds.
    max_turn_silence: float | None = None
    # Speech probability, in [0, 1], from which a frame counts as speech.
    vad_threshold: float | None = None
    # Words and phrases that are likely to be said.
    keyterms_prompt: list[Text] | None = None
    # Hint for the model: what is said, and about what.
    prompt: Text | None = None
    # The language, as a list of one code. With several codes, one of them is detected.
    language_codes: list[Text] | None = None
    # Accepted, but has no effect: transcripts are always formatted.
    format_turns: object = None
    # Accepted, but has no effect: the turn's sound and words decide.
    min_turn_silence: object = None
    # An older name of `min_turn_silence`.
    min_end_of_turn_silence_when_confident: object = None


class UpdateConfiguration(SessionSettings, tag_field="type", tag="UpdateConfiguration"):
    """Changes settings of the session for the audio that follows."""


class ForceEndpoint(msgspec.Struct, tag_field="type", tag="ForceEndpoint"):
    """Ends the current turn, whether or not a pause has begun."""


class AssemblyKeepAlive(msgspec.Struct, tag_field="type", tag="KeepAlive"):
    """Restarts the idle timeout without sending audio."""


class Terminate(msgspec.Struct, tag_field="type", tag="Terminate"):
    """Ends the session after its last transcript."""


AssemblyMessage = UpdateConfiguration | ForceEndpoint | AssemblyKeepAlive | Terminate


class AssemblyWord(msgspec.Struct):
    """A word of a turn. `start` and `end` are milliseconds of the session's audio."""

    # The word, with its punctuation.
    text: str
    # When it begins.
    start: int
    # When it ends.
    end: int
    # The model's probability of the word, in [0, 1].
    confidence: float
    # Always true: a word that was sent does not change.
    word_is_final: bool
    # The label of its speaker, if speakers are distinguished.
    speaker: str | None = None


def shown_words(words: Sequence[Word], speaker: str | None = None) -> list[AssemblyWord]:
    """Return the words as a `Turn` shows them."""
    return [
        AssemblyWord(w.text, round(w.start_s * 1000), round(w.end_s * 1000), round(w.probability, 3), True, speaker)
        for w in words
    ]


def settings_of(query: Mapping[str, str]) -> SessionSettings:
    """Read the settings in a URL. A list is JSON in one value. Raises RemoteProtocolError."""
    found = SessionSettings(prompt=query.get("prompt"), keyterms_prompt=_list(query, "keyterms_prompt"))
    for name in ("end_of_turn_confidence_threshold", "max_turn_silence", "vad_threshold"):
        if text := query.get(name):
            try:
                setattr(found, name, float(text))
            except ValueError:
                raise invalid(name, "a number") from None
    codes = _list(query, "language_codes")
    if query.get("language_code"):
        codes = codes or [query["language_code"]]
    found.language_codes = codes
    return found


def apply(settings: SessionSettings, before: TranscriptionConfig, context: Context) -> TranscriptionConfig:
    """Return the configuration after a change of settings. Raises RemoteProtocolError, and then changes nothing."""
    vad = before.vad or ServerVad(silence_duration_ms=DEFAULT_SILENCE_MS, eagerness="auto")
    if (threshold := settings.vad_threshold) is not None:
        vad = replace(vad, threshold=_in_range(threshold, "vad_threshold", 0.0, 1.0))
    if (silence_ms := settings.max_turn_silence) is not None:
        silence_ms = _in_range(silence_ms, "max_turn_silence", 0, MAX_SILENCE_MS)
        vad = replace(vad, silence_duration_ms=max(MIN_SILENCE_MS, int(silence_ms)))
    if (confidence := settings.end_of_turn_confidence_threshold) is not None:
        confidence = _in_range(confidence, "end_of_turn_confidence_threshold", 0.0, 1.0)
        eagerness = next((kind for below, kind in _EAGERNESS if confidence < below), None)
        vad = replace(vad, eagerness=eagerness)
    config = replace(before, vad=vad)
    if settings.keyterms_prompt is not None:
        config = replace(config, keyterms=_keyterms(settings.keyterms_prompt))
    if settings.prompt is not None:
        config = replace(config, prompt=settings.prompt)
    if settings.language_codes is not None:
        config = _with_languages(config, settings.language_codes, context)
    return config


def wants_labels(query: Mapping[str, str], context: Context) -> bool:
    """Return whether speakers are to be distinguished. Raises RemoteProtocolError if no model can do so."""
    wanted = query.get("speaker_labels", "").lower() in TRUE_VALUES
    if wanted and not context.tells_voices:
        raise RemoteProtocolError("invalid_value", NO_SPEAKER_MODEL, "speaker_labels")
    return wanted


def invalid(name: str, expected: str) -> RemoteProtocolError:
    """Return the error for an invalid setting."""
    return RemoteProtocolError("invalid_value", f"Invalid value for '{name}': expected {expected}.", name)


def _list(query: Mapping[str, str], name: str) -> list[str] | None:
    if not (text := query.get(name)):
        return None
    try:
        return msgspec.json.decode(text, type=list[Text])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise invalid(name, "a JSON array of strings") from None


def _in_range(value: float, name: str, low: float, high: float) -> float:
    if not low <= value <= high:
        raise invalid(name, f"{low:g} to {high:g}")
    return value


def _keyterms(given: list[str]) -> tuple[str, ...]:
    terms = tuple(term.strip() for term in given if term.strip())
    if len(terms) > MAX_KEYTERMS or any(len(term) > MAX_KEYTERM_CHARS for term in terms):
        raise invalid("keyterms_prompt", f"at most {MAX_KEYTERMS} terms of {MAX_KEYTERM_CHARS} characters")
    return terms


def _with_languages(config: TranscriptionConfig, given: list[str], context: Context) -> TranscriptionConfig:
    codes = [language_code(code) for code in given if code and code != "multi"]
    for code in codes:
        context.check_language(code, "language_codes")
    if len(codes) == 1:
        return replace(config, language=codes[0], languages=())
    return replace(config, language=None, languages=tuple(codes))
