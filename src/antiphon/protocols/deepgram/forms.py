"""Deepgram's forms: words and texts, what messages say about the model, errors over HTTP, and close codes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.events.words import Word
from antiphon.protocols.wire import ShapedError

# Punctuation that is removed around a word if the client has not asked for it.
_MARKS = ".,;:!?…\"'“”„«»()[]¿¡。，、！？"
# The version of the model in Deepgram's messages.
VERSION = "1"
# The paths at which errors have Deepgram's shape.
DEEPGRAM_PATHS = ("/v1/listen", "/v2/listen", "/v1/speak", "/v1/agent/converse")
# The value of `err_code` for each status; for other statuses, Deepgram writes the status in words.
_CODES = {
    400: "Bad Request",
    401: "INVALID_AUTH",
    402: "ASR_PAYMENT_REQUIRED",
    403: "INSUFFICIENT_PERMISSIONS",
    404: "NOT_FOUND",
    408: "SLOW_UPLOAD",
    413: "PAYLOAD_TOO_LARGE",
    429: "TOO_MANY_REQUESTS",
    503: "SERVICE_UNAVAILABLE",
}
# The close code and reason of each way in which the server ends a WebSocket.
BAD_AUDIO = 1008, "DATA-0000"
SILENT = 1011, "NET-0001"
FAILED = 1011, "NET-0000"


class DeepgramWord(msgspec.Struct, kw_only=True):
    """A word. `start` and `end` are seconds of the session's audio."""

    # The word in lower case, without punctuation.
    word: str
    # When the word begins.
    start: float
    # When the word ends.
    end: float
    # The model's probability of the word, in [0, 1].
    confidence: float
    # The word as the model writes it.
    punctuated_word: str | UnsetType = UNSET
    # The number of the speaker, from 0.
    speaker: int | UnsetType = UNSET
    # ISO-639-1 code of the language, if it is detected.
    language: str | UnsetType = UNSET


class Speakers:
    """Numbers the labels of speakers in the order in which they appear."""

    def __init__(self) -> None:
        self._labels: list[str] = []

    def number(self, label: str) -> int | UnsetType:
        """Return the number of a label, from 0; UNSET for "", an unknown speaker."""
        if not label:
            return UNSET
        if label not in self._labels:
            self._labels.append(label)
        return self._labels.index(label)


def shown_words(
    words: Sequence[Word], *, speaker: int | UnsetType = UNSET, language: str | UnsetType = UNSET
) -> list[DeepgramWord]:
    """Return words of one speaker and one language in Deepgram's form."""
    return [
        DeepgramWord(
            word=plain(word.text),
            start=round(word.start_s, 3),
            end=round(word.end_s, 3),
            confidence=round(word.probability, 4),
            punctuated_word=word.text,
            speaker=speaker,
            language=language,
        )
        for word in words
    ]


def plain(text: str) -> str:
    """Return a word in lower case, without the punctuation around it. A word of punctuation only stays as it is."""
    return text.strip(_MARKS).lower() or text


def shown_text(text: str, *, punctuate: bool) -> str:
    """Return a text as the model writes it, or in lower case and without punctuation."""
    return text.strip() if punctuate else " ".join(map(plain, text.split()))


def confidence(words: Sequence[Word]) -> float:
    """Return the mean probability of the words; 0 without words."""
    return round(sum(word.probability for word in words) / len(words), 4) if words else 0.0


def model_uuid(name: str) -> str:
    """Return an id for a model, which is the same for the same name."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, name))


def model_info(name: str) -> dict[str, str]:
    """Return what messages say about a model."""
    return {"name": name, "version": VERSION, "arch": name}


def created(now_s: float) -> str:
    """Return a time in Unix seconds as ISO 8601 text."""
    return datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def deepgram_error(status: int, code: str, message: str, request_id: str) -> ShapedError:
    """Return a refusal in Deepgram's shape. `code` is ours, which Deepgram's shape does not have."""
    body = {"err_code": _CODES.get(status, "INTERNAL_SERVER_ERROR"), "err_msg": message, "request_id": request_id}
    # The message may quote any text of the client, but a header has only printable characters.
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in message)
    return ShapedError(body, {"dg-error": shown, "dg-request-id": request_id})
