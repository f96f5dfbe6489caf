"""Bodies of /v1/audio/speech, /v1/audio/speech/batch and /v1/audio/voices: docs/wire/speech.md.

Requests are read and checked, answers and server-sent events are written. The fields of a request that a speech stream
has too are read by fields.py.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import SpeechConfig
from antiphon.events.words import Word
from antiphon.protocols.fields import json_body, require, typed
from antiphon.protocols.speech import fields as speech_fields
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.wire import JSON_ERRORS

MAX_INPUT_CHARS, MAX_ITEMS = 4096, 32
# Of each text that is stored with an uploaded voice.
MAX_FIELD_CHARS = 2000
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One checked request for speech: its text, which is not empty, and the way in which it is answered."""

    text: str
    config: SpeechConfig
    # The audio is sent as server-sent events instead of the body itself.
    sse: bool = False
    # The body is sent when all audio is made, so that its size is known; otherwise as it is made.
    whole: bool = False


def parse(body: bytes, catalog: SpeechCatalog) -> SpeechRequest:
    """Read the body of a request for speech. The text is spoken as it is, without being split.

    Raises RemoteProtocolError: `invalid_json`, `missing_required_parameter`, `string_above_max_length`, or what
    `fields.read_config` raises.
    """
    return _request(json_body(body), catalog)


def parse_batch(body: bytes, catalog: SpeechCatalog) -> list[SpeechRequest | RemoteProtocolError]:
    """Read the body of a batch: its items in order, each with its own fields before those shared by all.

    An item that is wrong is its error, and the others are served. Raises RemoteProtocolError where the body itself is
    wrong, or an item is no object.
    """
    fields = json_body(body)
    items = require(fields, "items", list, "items")
    if not 0 < len(items) <= MAX_ITEMS:
        raise RemoteProtocolError("invalid_value", f"Invalid value for 'items': expected 1 to {MAX_ITEMS}.", "items")
    shared = {k: v for k, v in fields.items() if k != "items"}
    out: list[SpeechRequest | RemoteProtocolError] = []
    for i, item in enumerate(items):
        own = typed(item, dict, f"items[{i}]")
        try:
            request = _request(shared | own, catalog)
            out.append(replace(request, sse=False, whole=True, config=replace(request.config, stream=False)))
        except RemoteProtocolError as error:
            out.append(error)
    return out


def _request(fields: dict[str, Any], catalog: SpeechCatalog) -> SpeechRequest:
    text: str = require(fields, "input", str, "input")
    if not text.strip():
        raise RemoteProtocolError("invalid_value", "Invalid value for 'input': there is nothing to say.", "input")
    if len(text) > MAX_INPUT_CHARS:
        raise RemoteProtocolError(
            "string_above_max_length", f"Invalid value for 'input': at most {MAX_INPUT_CHARS} characters.", "input"
        )
    asked = speech_fields.read_config(fields, catalog, "mp3")
    kind = fields.get("stream_format") or "audio"
    if kind not in ("audio", "sse"):
        raise RemoteProtocolError(
            "invalid_value", "Invalid value for 'stream_format': expected audio or sse.", "stream_format"
        )
    stream = bool(typed(fields.get("stream"), (bool, type(None)), "stream"))
    # Only a WAV says its size at its start: it is sent whole unless a stream is asked for.
    whole = asked.format == "wav" and not stream and kind == "audio"
    return SpeechRequest(text, replace(asked, stream=not whole, granularity="none"), kind == "sse", whole)


def delta_event(data: bytes) -> bytes:
    """The server-sent event for a chunk of audio, encoded in the request's format; the chunks joined are the file."""
    return _event(type="speech.audio.delta", audio=b64encode(data).decode())


def done_event(num_symbols: int, num_frames: int, words: Sequence[Word] | None, skipped: str) -> bytes:
    """The server-sent event that ends a stream.

    `num_symbols` and `num_frames` are what the model read and made, in its own units, counted as tokens. `words` are
    their times, None where they were not asked for. `skipped` are characters of the text that were not spoken.
    """
    usage = {"input_tokens": num_symbols, "output_tokens": num_frames, "total_tokens": num_symbols + num_frames}
    more: dict[str, Any] = {} if words is None else {"words": words_json(words)}
    if skipped:
        more["skipped"] = skipped
    return _event(type="speech.audio.done", usage=usage, **more)


def error_event(message: str) -> bytes:
    """The server-sent event that ends a stream that failed after it began. The status 200 has been sent by then."""
    return _event(type="error", error={"message": message, "type": "server_error", "param": None, "code": None})


def _event(**fields: Any) -> bytes:
    return b"data: " + _encoder.encode(fields) + b"\n\n"


def words_json(words: Sequence[Word]) -> list[dict[str, Any]]:
    """Words and when they begin and end, as JSON values, in whole milliseconds from the beginning of the audio, in
    order.
    """
    return [{"word": w.text, "start_ms": round(w.start_s * 1000), "end_ms": round(w.end_s * 1000)} for w in words]


def batch_item(index: int, format: str, data: bytes, words: Sequence[Word] | None, skipped: str) -> dict[str, Any]:
    """The result of an item that was spoken, as JSON values.

    `data` is the whole file in this format; `words` and `skipped` are as in `done_event`.
    """
    more: dict[str, Any] = {} if words is None else {"words": words_json(words)}
    if skipped:
        more["skipped"] = skipped
    return {"index": index, "status": "success", "audio_data": b64encode(data).decode(), "format": format} | more


def batch_failure(index: int, error: RemoteProtocolError | str) -> dict[str, Any]:
    """The result of an item that failed, as JSON values. `error` is the client's, or the text of the server's."""
    known = isinstance(error, RemoteProtocolError)
    body = {
        "message": error.message if isinstance(error, RemoteProtocolError) else error,
        "type": "invalid_request_error" if known else "server_error",
        "param": error.param if isinstance(error, RemoteProtocolError) else None,
        "code": error.code if isinstance(error, RemoteProtocolError) else "processing_error",
    }
    return {"index": index, "status": "error", "error": body}


@dataclass(frozen=True, slots=True)
class VoiceUpload:
    """The checked fields of an uploaded voice besides its recording.

    `ref_text` is what is said in the recording, empty if unknown. `embedding` stands in its place and is None with one.
    """

    name: str
    consent: str
    ref_text: str
    description: str
    embedding: tuple[float, ...] | None


def parse_voice(form: Mapping[str, str], *, has_sample: bool) -> VoiceUpload:
    """Read the text fields of an upload; `has_sample`: a recording came with them.

    Raises RemoteProtocolError: `missing_required_parameter`, or `invalid_value` for a missing consent, a text that
    cannot be stored, and for both or neither of a recording and an embedding.
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
    """Check that a text can be stored and shown again: it is short, and no surrogate stands alone in it."""
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
    if not 0 < len(values) <= speech_fields.MAX_EMBEDDING_NUMBERS:
        raise RemoteProtocolError(
            "invalid_value",
            f"Invalid value for 'speaker_embedding': expected 1 to {speech_fields.MAX_EMBEDDING_NUMBERS} numbers.",
            "speaker_embedding",
        )
    return tuple(values)
