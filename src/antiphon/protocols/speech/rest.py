"""Bodies of `/v1/audio/speech`, `/v1/audio/speech/batch` and `/v1/audio/voices`: parsed and written. Sans-IO."""

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
MAX_FIELD_CHARS = 2000
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One text to be spoken. `sse`: as events. `whole`: as one file of known size."""

    text: str
    config: SpeechConfig
    sse: bool = False
    whole: bool = False


def parse(body: bytes, catalog: SpeechCatalog) -> SpeechRequest:
    """The body of a speech request. Raises RemoteProtocolError."""
    return _request(json_body(body), catalog)


def parse_batch(body: bytes, catalog: SpeechCatalog) -> list[SpeechRequest | RemoteProtocolError]:
    """The items of a batch, each with the shared defaults under its own fields; what is wrong with one is its own.

    Raises RemoteProtocolError for what is wrong with all.
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
    asked = speech_fields.config(fields, catalog, "mp3")
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
    """One piece of sound as a server-sent event."""
    return _event(type="speech.audio.delta", audio=b64encode(data).decode())


def done_event(num_symbols: int, num_frames: int, words: Sequence[Word] | None, skipped: str) -> bytes:
    """The end: what the model read and made, in its own units, and, where asked for, where each word lies."""
    usage = {"input_tokens": num_symbols, "output_tokens": num_frames, "total_tokens": num_symbols + num_frames}
    more: dict[str, Any] = {} if words is None else {"words": words_json(words)}
    if skipped:
        more["skipped"] = skipped
    return _event(type="speech.audio.done", usage=usage, **more)


def error_event(message: str) -> bytes:
    """What ends a stream that fails under way."""
    return _event(type="error", error={"message": message, "type": "server_error", "param": None, "code": None})


def _event(**fields: Any) -> bytes:
    return b"data: " + _encoder.encode(fields) + b"\n\n"


def words_json(words: Sequence[Word]) -> list[dict[str, Any]]:
    """Words with their milliseconds."""
    return [{"word": w.text, "start_ms": round(w.start_s * 1000), "end_ms": round(w.end_s * 1000)} for w in words]


def batch_item(index: int, format: str, data: bytes, words: Sequence[Word] | None, skipped: str) -> dict[str, Any]:
    """One result of a batch that was spoken."""
    more: dict[str, Any] = {} if words is None else {"words": words_json(words)}
    if skipped:
        more["skipped"] = skipped
    return {"index": index, "status": "success", "audio_data": b64encode(data).decode(), "format": format} | more


def batch_failure(index: int, error: RemoteProtocolError | str) -> dict[str, Any]:
    """One result of a batch that failed."""
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
    """The fields of an uploaded voice besides its sample."""

    name: str
    consent: str
    ref_text: str
    description: str
    embedding: tuple[float, ...] | None


def parse_voice(form: Mapping[str, str], *, has_sample: bool) -> VoiceUpload:
    """The text fields of an upload. Raises RemoteProtocolError."""
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
    """Text that can be kept and shown again: of a bounded length, and without halves of characters."""
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
    if not 0 < len(values) <= speech_fields.MAX_EMBEDDING:
        raise RemoteProtocolError(
            "invalid_value",
            f"Invalid value for 'speaker_embedding': expected 1 to {speech_fields.MAX_EMBEDDING} numbers.",
            "speaker_embedding",
        )
    return tuple(values)
