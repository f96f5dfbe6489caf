"""The query parameters of Deepgram's clients: what to listen to, and which of their wishes are refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from antiphon.audio.incoming import Encoding, IncomingAudio
from antiphon.audio.pcm import MAX_CHANNELS
from antiphon.errors import RemoteProtocolError
from antiphon.events.languages import language_code
from antiphon.events.transcription import ServerVad, TranscriptionConfig
from antiphon.protocols.connection import Context
from antiphon.protocols.realtime.input_fields import MAX_KEYTERM_CHARS, MAX_KEYTERMS, NO_SPEAKER_MODEL

# Values of a parameter that switch it on, and off.
TRUE, FALSE = ("true", "1", "yes"), ("", "false", "0", "no")
# Maximum number of characters of a value that an error quotes.
MAX_SHOWN_CHARS = 60
# Wishes that change what the client gets, and that this server cannot fulfil. They are refused unless they are off.
REFUSED = (
    "callback",
    "custom_intent",
    "custom_topic",
    "detect_entities",
    "intents",
    "redact",
    "replace",
    "search",
    "sentiment",
    "summarize",
    "topics",
    "translate",
)
# Wishes without effect: the transcript is as the model writes it.
HINTS = (
    "callback_method",
    "custom_intent_mode",
    "custom_topic_mode",
    "dictation",
    "extra",
    "filler_words",
    "language_hint",
    "measurements",
    "mip_opt_out",
    "no_delay",
    "numerals",
    "profanity_filter",
    "tag",
    "tier",
    "version",
)
# The parameters of both live paths and of files.
COMMON = frozenset((*REFUSED, *HINTS, "model", "encoding", "sample_rate", "channels", "keyterm", "keywords"))
# The encoding of each value of `encoding`. A container is found out from its bytes.
ENCODINGS: dict[str, Encoding] = {
    "linear16": "s16",
    "linear32": "f32",
    "mulaw": "ulaw",
    "alaw": "alaw",
    "opus": "opus",
    "ogg-opus": "container",
    "flac": "container",
    "speex": "container",
    "amr-nb": "container",
    "amr-wb": "container",
    "": "container",
}
# Encodings without a header, which need a `sample_rate`.
RAW = ("linear16", "linear32", "mulaw", "alaw")


class DeepgramQuery:
    """The query parameters of one request. The last value counts, except in lists.

    All methods raise RemoteProtocolError for an invalid value.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        self._last = dict(pairs)
        for name in REFUSED:
            if self.text(name).lower() not in FALSE:
                raise RemoteProtocolError("unsupported_parameter", f"'{name}' is not supported by this server.", name)

    def text(self, name: str, default: str = "") -> str:
        """Return the value of a parameter, or `default` if it is missing."""
        return self._last.get(name, default)

    def all(self, name: str) -> list[str]:
        """Return all values of a parameter."""
        return [value for key, value in self._pairs if key == name]

    def flag(self, name: str) -> bool:
        """Return whether a parameter is on; False if it is missing."""
        value = self.text(name).lower()
        if value not in TRUE and value not in FALSE:
            raise self.invalid(name, "true or false")
        return value in TRUE

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a number, or `default` if it is missing."""
        text = self.text(name)
        try:
            value = float(text) if text else default
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise self.invalid(name, f"a number from {low:g} to {high:g}")
        return value

    def invalid(self, name: str, expected: str) -> RemoteProtocolError:
        """Return the error for the value of a parameter."""
        shown = self.text(name)[:MAX_SHOWN_CHARS]
        return RemoteProtocolError("invalid_value", f"Invalid '{name}': '{shown}'. Expected {expected}.", name)

    def terms(self) -> tuple[str, ...]:
        """Return the words and phrases that are likely to be said. The boost of a keyword (`name:2`) has no effect."""
        given = [term for value in self.all("keyterm") for term in _listed(value)]
        given += [word.rpartition(":")[0] or word for value in self.all("keywords") for word in _listed(value)]
        terms = tuple(" ".join(term.split()) for term in given if term.strip())
        if len(terms) > MAX_KEYTERMS or any(len(term) > MAX_KEYTERM_CHARS for term in terms):
            message = f"At most {MAX_KEYTERMS} keyterms of {MAX_KEYTERM_CHARS} characters are supported."
            raise RemoteProtocolError("invalid_value", message, "keyterm")
        return terms

    def check_model(self, context: Context) -> None:
        """Check the name of the model, which may be one of Deepgram's. Logs such a name once."""
        name = self.text("model")
        if name and context.models.lenient(name) is None:
            raise RemoteProtocolError("invalid_value", f"There is no model '{name[:MAX_SHOWN_CHARS]}'.", "model")
        if name and context.models.exact(name) is None:
            context.log_alias(name)

    def language(self, context: Context) -> str | None:
        """Return the code of the language; None to detect it (`multi`). As at Deepgram, the default is English."""
        given = self.text("language", "multi" if self.text("model").endswith("multi") else "en")
        if given.lower() in ("multi", "") or self.flag("detect_language"):
            return None
        code = language_code(given)
        if not context.knows_language(code) and self.text("language"):
            raise self.invalid("language", "'multi', or a language that the model knows")
        return code if context.knows_language(code) else None

    def check_encoding(self) -> Encoding:
        """Return the encoding of the audio."""
        encoding = self.text("encoding")
        if encoding not in ENCODINGS:
            raise self.invalid("encoding", f"one of {', '.join(filter(None, ENCODINGS))}")
        return ENCODINGS[encoding]

    def raw_format(self) -> tuple[int, int]:
        """Return the sample rate in Hz, and the number of channels, of audio without a header."""
        if not self.text("sample_rate"):
            message = f"The encoding {self.text('encoding')} needs a sample_rate."
            raise RemoteProtocolError("invalid_value", message, "sample_rate")
        return round(self.number("sample_rate", 0, 1_000, 192_000)), round(self.number("channels", 1, 1, MAX_CHANNELS))

    def audio(self) -> IncomingAudio:
        """Return the decoder of live audio."""
        encoding = self.check_encoding()
        if self.flag("multichannel") and self.number("channels", 1, 1, MAX_CHANNELS) > 1:
            message = "Live audio is transcribed as one channel: leave out 'multichannel', or send a file."
            raise RemoteProtocolError("unsupported_parameter", message, "multichannel")
        return IncomingAudio(encoding, *(self.raw_format() if self.text("encoding") in RAW else ()))

    def config(self, context: Context, vad: ServerVad, *, partials: bool, preflight: bool) -> TranscriptionConfig:
        """Return the configuration of a live session, with word times."""
        self.check_model(context)
        diarize = self.flag("diarize") or bool(self.text("diarize_model"))
        if diarize and not context.tells_voices:
            raise RemoteProtocolError("unsupported_parameter", NO_SPEAKER_MODEL, "diarize")
        return TranscriptionConfig(
            context.models.loaded[0],
            self.language(context),
            vad=vad,
            word_times=True,
            partials=partials,
            preflight=preflight,
            keyterms=self.terms(),
            speaker_labels=diarize,
        )


def _listed(value: str) -> list[str]:
    """Return the texts of a value. Deepgram's SDK for JavaScript sends a list as JSON in one value."""
    if not value.startswith("["):
        return [value]
    try:
        return msgspec.json.decode(value, type=list[str])
    except msgspec.DecodeError:
        return [value]
