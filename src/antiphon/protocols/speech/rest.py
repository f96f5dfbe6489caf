"""Bodies of /v1/audio/speech, /v1/audio/speech/batch and /v1/audio/voices: docs/wire/speech.md.

Reads and checks requests, and writes answers and server-sent events. `fields.py` reads the fields that speech streams
have too.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import SpeechConfig
from antiphon.events.words import Word
from antiphon.protocols.fields import check_typos, decode, json_object
from antiphon.protocols.speech.fields import (
    MAX_EMBEDDING_NUMBERS,
    SpeechCatalog,
    SpeechFields,
    WordTime,
    read_config,
    word_times,
)
from antiphon.protocols.wire import JSON_ERRORS

T = TypeVar("T")

MAX_INPUT_CHARS, MAX_ITEMS = 4096, 32
# Maximum length of a text that is stored with an uploaded voice, in characters.
MAX_FIELD_CHARS = 2000
_encoder = msgspec.json.Encoder()


class SpeechBody(SpeechFields, kw_only=True):
    """The body of a request. A false `stream_format` (`""`, `0`, `[]`) counts as missing."""

    input: str
    stream_format: object = None
    stream: bool | None = None


# The fields of a JSON object, each as JSON text.
_RawFields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One checked request for speech over HTTP."""

    # The text to speak. It is not empty.
    text: str
    # Voice, format and speed.
    config: SpeechConfig
    # Whether the audio is sent as server-sent events instead of as a plain body.
    sse: bool = False
    # Whether the body is sent after all audio is generated, so that its size is known. If not, audio is sent while it
    # is generated.
    whole: bool = False


def parse(body: bytes, catalog: SpeechCatalog) -> SpeechRequest:
    """Read the body of a request for speech. The text is spoken as a whole, without being split.

    Raises RemoteProtocolError: `invalid_json`, `missing_required_parameter`, `string_above_max_length`, or the errors
    of `fields.read_config`.
    """
    return _request(_decode_body(body, SpeechBody), catalog)


def parse_batch(body: bytes, catalog: SpeechCatalog) -> list[SpeechRequest | RemoteProtocolError]:
    """Read the body of a batch. Returns a request for each item. The fields of an item override the shared fields.

    For an invalid item, returns its error instead; the other items are still served. Raises RemoteProtocolError if the
    body itself is invalid, or if an item is not an object.
    """
    shared = _decode_body(body, _RawFields)
    if "items" not in shared:
        raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'items'.", "items")
    items = decode(shared.pop("items"), list[msgspec.Raw], "items")
    if not 0 < len(items) <= MAX_ITEMS:
        raise RemoteProtocolError("invalid_value", f"Invalid value for 'items': expected 1 to {MAX_ITEMS}.", "items")
    out: list[SpeechRequest | RemoteProtocolError] = []
    for i, item in enumerate(items):
        own = decode(item, _RawFields, f"items[{i}]")
        try:
            # Shared fields are only checked together with the items that do not override them.
            request = _request(_decode_body(_encoder.encode(shared | own), SpeechBody), catalog)
            out.append(replace(request, sse=False, whole=True, config=replace(request.config, stream=False)))
        except RemoteProtocolError as error:
            out.append(error)
    return out


def _decode_body(body: bytes, kind: type[T]) -> T:
    try:
        found: T = decode(body, kind)
        check_typos(body, kind)
        return found
    except RemoteProtocolError:
        # If the body is not a JSON object, raise the same error as other routes.
        json_object(body)
        raise


def _request(body: SpeechBody, catalog: SpeechCatalog) -> SpeechRequest:
    if not body.input:
        raise RemoteProtocolError("invalid_value", "Invalid value for 'input': there is nothing to say.", "input")
    if len(body.input) > MAX_INPUT_CHARS:
        raise RemoteProtocolError(
            "string_above_max_length", f"Invalid value for 'input': at most {MAX_INPUT_CHARS} characters.", "input"
        )
    asked = read_config(body, catalog, "mp3")
    kind = body.stream_format or "audio"
    if kind not in ("audio", "sse"):
        raise RemoteProtocolError(
            "invalid_value", "Invalid value for 'stream_format': expected audio or sse.", "stream_format"
        )
    # A WAV file begins with its size, so it is sent as a whole, unless the client requests a stream.
    whole = asked.format == "wav" and not body.stream and kind == "audio"
    return SpeechRequest(body.input, replace(asked, stream=not whole, granularity="none"), kind == "sse", whole)


class _AudioDelta(msgspec.Struct, tag="speech.audio.delta"):
    audio: str


class _Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class _AudioDone(msgspec.Struct, tag="speech.audio.done"):
    usage: _Usage
    words: list[WordTime] | UnsetType = UNSET
    skipped: str | UnsetType = UNSET


class SpeechError(msgspec.Struct):
    """An error in OpenAI's format. `param` is the client's field at fault; None if no single field is at fault.

    `code` is None only if a stream fails after it has begun.
    """

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = None
    code: str | None = None


class _ErrorEvent(msgspec.Struct, tag="error"):
    error: SpeechError


def delta_event(data: bytes) -> bytes:
    """Return the event for a chunk of audio, encoded in the request's format. The joined chunks form the file."""
    return _sse(_AudioDelta(b64encode(data).decode()))


def done_event(num_symbols: int, num_frames: int, words: Sequence[Word] | None, skipped: str) -> bytes:
    """Return the server-sent event that ends a stream.

    `num_symbols` and `num_frames` are the sizes of the model's input and output, which the event reports as tokens.
    `words` are the words with their times; None if they were not requested. `skipped` has the characters of the text
    that were not spoken.
    """
    usage = _Usage(num_symbols, num_frames, num_symbols + num_frames)
    return _sse(_AudioDone(usage, UNSET if words is None else word_times(words), skipped or UNSET))


def error_event(message: str) -> bytes:
    """Return the event for an error that ends a stream. The status 200 was already sent."""
    return _sse(_ErrorEvent(SpeechError(message, "server_error")))


def _sse(event: _AudioDelta | _AudioDone | _ErrorEvent) -> bytes:
    return b"data: " + _encoder.encode(event) + b"\n\n"


class SpokenItem(msgspec.Struct, kw_only=True):
    """The result for an item of a batch that was spoken."""

    # Index of the item in the batch, from 0.
    index: int
    # Distinguishes the result from that of a failed item.
    status: Literal["success"] = "success"
    # The whole audio file, as base64.
    audio_data: str
    # Format of the file.
    format: str
    # Times of the words, if requested.
    words: list[WordTime] | UnsetType = UNSET
    # Characters of the text that were not spoken, if any.
    skipped: str | UnsetType = UNSET


class FailedItem(msgspec.Struct, kw_only=True):
    """The result for an item of a batch that could not be spoken. Other items are not affected."""

    index: int
    status: Literal["error"] = "error"
    error: SpeechError


BatchItem = SpokenItem | FailedItem


class BatchResults(msgspec.Struct):
    """The body of the answer to a batch: a result for each item, in the same order, and the counts of results."""

    results: list[BatchItem]
    total: int
    succeeded: int
    failed: int

    @classmethod
    def of(cls, results: list[BatchItem]) -> BatchResults:
        """Count these results and return the body that contains them."""
        num_spoken = sum(isinstance(r, SpokenItem) for r in results)
        return cls(results, len(results), num_spoken, len(results) - num_spoken)


def batch_item(index: int, format: str, data: bytes, words: Sequence[Word] | None, skipped: str) -> SpokenItem:
    """Return the result for an item that was spoken.

    `data` is the whole file in `format`. `words` and `skipped` are the same as for `done_event`.
    """
    return SpokenItem(
        index=index,
        audio_data=b64encode(data).decode(),
        format=format,
        words=UNSET if words is None else word_times(words),
        skipped=skipped or UNSET,
    )


def batch_failure(index: int, error: RemoteProtocolError | str) -> FailedItem:
    """Return the result for an item that failed. `error` is the client's error, or the message of a server error."""
    if isinstance(error, RemoteProtocolError):
        shown = SpeechError(error.message, "invalid_request_error", error.param, error.code)
    else:
        shown = SpeechError(error, "server_error", None, "processing_error")
    return FailedItem(index=index, error=shown)


@dataclass(frozen=True, slots=True)
class VoiceUpload:
    """The checked fields of an uploaded voice, without its recording.

    `ref_text` has the words of the recording; empty if they are unknown. `embedding` is None if there is a recording.
    """

    name: str
    consent: str
    ref_text: str
    description: str
    embedding: tuple[float, ...] | None


def parse_voice(form: Mapping[str, str], *, has_sample: bool) -> VoiceUpload:
    """Read the text fields of an upload. `has_sample`: the upload includes a recording.

    Raises RemoteProtocolError: `missing_required_parameter`, or `invalid_value` if the consent is missing, if a text
    cannot be stored, or if the upload does not have exactly one of a recording and an embedding.
    """
    for name in ("name", "consent"):
        if not form.get(name, "").strip():
            raise RemoteProtocolError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    if form["consent"].strip().lower() in ("false", "no", "0"):
        raise RemoteProtocolError("invalid_value", "A voice is stored only with its speaker's consent.", "consent")
    raw = form.get("speaker_embedding", "")
    if bool(raw) == has_sample:
        raise RemoteProtocolError("invalid_value", "Give either 'audio_sample' or 'speaker_embedding'.", "audio_sample")
    for name in ("name", "consent", "ref_text", "speaker_description"):
        _storable(form.get(name, ""), name)
    embedding = _embedding(raw) if raw else None
    return VoiceUpload(
        form["name"].strip(),
        form["consent"].strip(),
        form.get("ref_text", ""),
        form.get("speaker_description", ""),
        embedding,
    )


def _storable(text: str, param: str) -> None:
    """Check that a text can be stored: it has at most MAX_FIELD_CHARS characters, and no lone surrogates."""
    if len(text) > MAX_FIELD_CHARS or any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for '{param}': at most {MAX_FIELD_CHARS} characters of Unicode.", param
        )


def _embedding(raw: str) -> tuple[float, ...]:
    try:
        values = msgspec.json.decode(raw, type=list[float])
    except JSON_ERRORS:
        raise RemoteProtocolError(
            "invalid_value",
            "Invalid value for 'speaker_embedding': expected a JSON array of numbers.",
            "speaker_embedding",
        ) from None
    if not 0 < len(values) <= MAX_EMBEDDING_NUMBERS:
        raise RemoteProtocolError(
            "invalid_value",
            f"Invalid value for 'speaker_embedding': expected 1 to {MAX_EMBEDDING_NUMBERS} numbers.",
            "speaker_embedding",
        )
    return tuple(values)
