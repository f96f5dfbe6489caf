"""OpenAI's Realtime transcription session, GA and beta names: docs/wire/openai-transcription.md.

With server VAD the server finds the turns; with `turn_detection: null` the client commits them. A turn is an item,
whose deltas may come before the item is committed. `completed.transcript` is the final of the whole turn: the joined
deltas can differ from it by a word that the model read differently at first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.g711 import from_alaw, from_ulaw
from antiphon.audio.pcm import Resampler, from_pcm16
from antiphon.errors import LocalProtocolError, RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.transcription import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    CommitRefused,
    ConfigureTranscription,
    ServerVad,
    SessionEnding,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.protocols.fields import known, require, typed
from antiphon.protocols.openai.input_fields import (
    beta_format_name,
    check_format,
    check_keywords,
    check_noise_reduction,
    check_transcription_vad,
    default_input,
    format_of_beta,
)
from antiphon.protocols.wire import Dialect, decode_event

# OpenAI's own minimum of new audio in a commit.
MIN_COMMIT_MS = 100
# What a client may send, as errors list it.
EVENTS = (
    "session.update",
    "transcription_session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
)
# The errors for a frame that is no event, as (code, message).
NOT_JSON = ("invalid_event", "The event is not valid JSON.")
NO_OBJECT = ("invalid_event", "An event is a JSON object.")
# The one value of `include`. It is accepted and shown; no logprobs are sent.
LOGPROBS = "item.input_audio_transcription.logprobs"
_TRANSCRIPTION_FIELDS = ("model", "language", "prompt", "keywords")
# Paths of the input's fields, for errors: in the beta's names, and in the GA names.
_INPUT_FIELDS = ("format", "transcription", "noise_reduction", "turn_detection")
_BETA_PARAMS = {
    "format": "session.input_audio_format",
    "transcription": "session.input_audio_transcription",
    "noise_reduction": "session.input_audio_noise_reduction",
    "turn_detection": "session.turn_detection",
}
_GA_PARAMS = {name: f"session.audio.input.{name}" for name in _INPUT_FIELDS}


@dataclass(slots=True)
class OpenAITranscription(Dialect):
    """One connection. Call `begin` first, which sets the session's defaults; nothing here waits.

    Updates are checked as a whole before anything of them is in force.
    """

    # Unix seconds.
    expires_at: int = 0
    # Events and sessions are sent with the beta's names.
    beta: bool = False
    # Whether the transcriber knows a language.
    language_check: Callable[[str], bool] = lambda _: True
    # Called with a name that is not loaded and, unless it is the transcriber, with what serves it instead.
    log_alias: Callable[..., None] = lambda *_: None
    # `session.audio.input` as the client is shown it.
    audio: dict[str, Any] = field(default_factory=dict)
    include: list[str] | None = None
    _decode: Callable[[bytes], Pcm] = from_pcm16
    _resampler: Resampler = field(default_factory=lambda: Resampler(24000, SAMPLE_RATE_HZ))
    # The items of turns whose transcript is still to come, by turn.
    _items: dict[int, str] = field(default_factory=dict)
    _last_item: str | None = None
    # The id of the client's event that is being read, which errors repeat.
    _event_id: str | None = None

    # --- the session

    def begin(self, model: str) -> None:
        """Set the session's defaults; nothing is queued.

        `model` is the name in the URL, shown as the client spells it.
        """
        self.audio = default_input(model)

    def preset(self, session: dict[str, Any]) -> None:
        """Apply an update before the session begins, for a client secret or a call. Nothing is queued.

        Raises RemoteProtocolError for a field that is wrong, and then changes nothing.
        """
        self._update(session, old_event=False)
        self.frames()
        self.commands()

    def configured(self) -> ConfigureTranscription:
        """The session's configuration as a command, which begins the session or changes it.

        It names the loaded model.
        """
        return ConfigureTranscription(self._config(self.audio))

    def session(self) -> dict[str, Any]:
        """The whole session as JSON values, in the beta's names or the GA names, whichever are in use."""
        head = {"id": self.session_id, "object": "realtime.transcription_session", "expires_at": self.expires_at}
        if self.beta:
            return head | {
                "input_audio_format": beta_format_name(self.audio["format"]),
                "input_audio_transcription": self.audio["transcription"],
                "input_audio_noise_reduction": self.audio["noise_reduction"],
                "turn_detection": self.audio["turn_detection"],
                "include": self.include,
            }
        return head | {"type": "transcription", "audio": {"input": self.audio}, "include": self.include}

    # --- from the client

    def receive(self, data: str | bytes) -> None:
        """Read one frame from the client: commands, or an error for the client, are queued.

        Never raises, whatever the frame is.
        """
        self._event_id = None
        try:
            self._receive_event(data)
        except RemoteProtocolError as error:
            self._add_error(error.code, error.message, error.param)

    def too_large(self, max_bytes: int) -> None:
        """Queue an error: a frame was larger than `max_bytes`. Call it in place of `receive`. The session goes on."""
        self._event_id = None
        self._add_error("invalid_event", f"The event is larger than {max_bytes} bytes.")

    def _receive_event(self, data: str | bytes) -> None:
        event = decode_event(data, NOT_JSON, NO_OBJECT)
        if isinstance(event.get("event_id"), str):
            self._event_id = event["event_id"]
        match require(event, "type", str, "type"):
            case "session.update" | "transcription_session.update" as kind:
                known(event, ("type", "event_id", "session"), "")
                self._update(require(event, "session", dict, "session"), old_event=kind.startswith("transcription"))
            case "input_audio_buffer.append":
                self._append(require(event, "audio", str, "audio"))
            case "input_audio_buffer.commit":
                self._flush_audio()
                self._add_commands(CommitAudio())
            case "input_audio_buffer.clear":
                self._resampler.flush()
                self._add_commands(ClearAudio())
            case kind:
                supported = ", ".join(f"'{e}'" for e in EVENTS)
                raise RemoteProtocolError(
                    "invalid_value", f"Invalid value: '{kind}'. Supported values are: {supported}.", "type"
                )

    def _append(self, text: str) -> None:
        self._add_audio(self._resampler.feed(self._decode_audio(text, "audio")))

    def _decode_audio(self, text: str, param: str) -> Pcm:
        """Samples of base64 audio in the session's format, at its rate. Raises RemoteProtocolError."""
        try:
            data = decode_base64(text)
        except ValueError:
            raise RemoteProtocolError(
                "invalid_value", "Invalid 'audio'. Expected base64-encoded audio bytes.", param
            ) from None
        if len(data) > self.max_append_bytes:
            raise RemoteProtocolError(
                "invalid_value", f"Invalid 'audio': {len(data)} bytes are more than {self.max_append_bytes}.", param
            )
        if self.audio["format"]["type"] == "audio/pcm" and len(data) % 2:
            raise RemoteProtocolError("invalid_value", "Invalid 'audio': an odd number of bytes is not PCM16.", param)
        return self._decode(data)

    def _decode_whole(self, text: str, param: str) -> Pcm:
        """All samples of base64 audio in the session's format, at 16 kHz. Raises RemoteProtocolError."""
        resampler = Resampler(self.audio["format"].get("rate", 8000), SAMPLE_RATE_HZ)
        return np.concatenate((resampler.feed(self._decode_audio(text, param)), resampler.flush()))

    def _flush_audio(self) -> None:
        self._add_audio(self._resampler.flush())

    def _add_audio(self, pcm: Pcm) -> None:
        if len(pcm):
            self._add_commands(AppendAudio(pcm))

    def _update(self, session: dict[str, Any], *, old_event: bool) -> None:
        """Check a whole update, then apply it. A wrong field refuses all of it."""
        beta = old_event or (self.beta and "audio" not in session and "type" not in session)
        changes, include = self._beta_changes(session) if beta else self._ga_changes(session)
        params = _BETA_PARAMS if beta else _GA_PARAMS
        audio = dict(self.audio)
        for key, value in changes.items():
            audio[key] = self._check_input_field(key, value, params[key])
        config = self._config(audio)
        if audio["format"] != self.audio["format"]:
            self._flush_audio()
            self._set_format(audio["format"])
        self.audio, self.beta = audio, beta
        if include is not None:
            self.include = include
        self._add_commands(ConfigureTranscription(config))
        name = "transcription_session.updated" if beta else "session.updated"
        self._add_event(name, session=self.session())

    def _ga_changes(self, session: dict[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
        kind = session.get("type", "transcription")
        if kind != "transcription":
            raise RemoteProtocolError(
                "invalid_value", f"Invalid value: '{kind}'. Supported values are: 'transcription'.", "session.type"
            )
        known(session, ("type", "audio", "include"), "session")
        audio = typed(session.get("audio", {}), dict, "session.audio")
        known(audio, ("input",), "session.audio")
        fields = typed(audio.get("input", {}), dict, "session.audio.input")
        known(fields, _INPUT_FIELDS, "session.audio.input")
        return fields, self._include(session)

    def _beta_changes(self, session: dict[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
        names = {
            "input_audio_format": "format",
            "input_audio_transcription": "transcription",
            "input_audio_noise_reduction": "noise_reduction",
            "turn_detection": "turn_detection",
        }
        known(session, (*names, "include", "modalities", "client_secret", "type"), "session")
        changes = {name: session[beta_name] for beta_name, name in names.items() if beta_name in session}
        if "format" in changes:
            changes["format"] = format_of_beta(changes["format"])
        return changes, self._include(session)

    def _include(self, session: dict[str, Any]) -> list[str] | None:
        if "include" not in session:
            return None
        values = typed(session["include"], (list, type(None)), "session.include") or []
        for value in values:
            if value != LOGPROBS:
                raise RemoteProtocolError(
                    "invalid_value", f"Invalid value: '{value}'. Supported values are: '{LOGPROBS}'.", "session.include"
                )
        return values

    def _check_input_field(self, key: str, value: Any, param: str) -> Any:
        match key:
            case "format":
                return check_format(value, param)
            case "transcription":
                return self._check_transcription(value, param)
            case "noise_reduction":
                return check_noise_reduction(value, param)
            case _:
                return self._check_turn_detection(value, param)

    def _check_turn_detection(self, value: Any, param: str) -> dict[str, Any] | None:
        return check_transcription_vad(value, self.audio["turn_detection"], param)

    def _check_transcription(self, value: Any, param: str) -> dict[str, Any] | None:
        """The fields of `transcription` merged into those in force; null changes nothing. Hosted names are logged."""
        fields = typed(value, (dict, type(None)), param) or {}
        known(fields, _TRANSCRIPTION_FIELDS, param)
        merged = dict(self.audio["transcription"])
        if "keywords" in fields:
            merged["keywords"] = check_keywords(fields["keywords"], f"{param}.keywords")
        for key in ("model", "language", "prompt"):
            if key in fields:
                text = typed(fields[key], (str, type(None)), f"{param}.{key}")
                merged.pop(key, None)
                if text:
                    merged[key] = text
        merged.setdefault("model", self.models.loaded[0])
        if self.models.lenient(merged["model"]) is None:
            raise RemoteProtocolError(
                "model_not_found", f"The model '{merged['model']}' does not exist.", f"{param}.model"
            )
        if self.models.exact(merged["model"]) is None and merged["model"] != self.audio["transcription"].get("model"):
            self.log_alias(merged["model"])
        if "language" in merged and not self.language_check(merged["language"]):
            raise RemoteProtocolError(
                "invalid_value",
                f"Invalid value: '{merged['language']}' is no language of this model.",
                f"{param}.language",
            )
        return merged

    def _config(self, audio: dict[str, Any]) -> TranscriptionConfig:
        fields, vad = audio["transcription"], audio["turn_detection"]
        keywords = ", ".join(fields.get("keywords", []))
        return TranscriptionConfig(
            model=self.models.lenient(fields["model"]) or self.models.loaded[0],
            language=fields.get("language"),
            prompt=" ".join(filter(None, [fields.get("prompt", ""), keywords])),
            vad=ServerVad(vad["threshold"], vad["prefix_padding_ms"], vad["silence_duration_ms"]) if vad else None,
        )

    def _set_format(self, audio_format: dict[str, Any]) -> None:
        self._decode = {"audio/pcmu": from_ulaw, "audio/pcma": from_alaw}.get(audio_format["type"], from_pcm16)
        self._resampler = Resampler(audio_format.get("rate", 8000), SAMPLE_RATE_HZ)

    # --- to the client

    def send(self, output: TranscriptionEvent) -> None:
        """Queue the frames of an event. Raises LocalProtocolError for one that no transcription session reports."""
        match output:
            case SpeechStarted(turn, at_ms):
                self._add_event("input_audio_buffer.speech_started", audio_start_ms=at_ms, item_id=self._item_id(turn))
            case SpeechStopped(turn, at_ms):
                self._add_event("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, item_id=self._item_id(turn))
            case TurnCommitted(turn):
                self._add_committed(self._item_id(turn))
            case TurnCleared():
                self._add_event("input_audio_buffer.cleared")
            case CommitRefused(have_ms, minimum_ms):
                self._event_id = None
                self._add_error(
                    "input_audio_buffer_commit_empty",
                    "Error committing input audio buffer: buffer too small. "
                    f"Expected at least {minimum_ms}ms of audio, but buffer only has {have_ms:.2f}ms of audio.",
                )
            case TranscriptDelta(turn, text):
                self._add_transcription_event("delta", turn, delta=text)
            case TranscriptDone():
                self._add_transcription_event(
                    "completed",
                    output.turn,
                    transcript=output.text,
                    usage={"type": "duration", "seconds": round(output.audio_s, 3)},
                )
                self._items.pop(output.turn, None)
            case TranscriptFailed(turn, message):
                error = {"type": "server_error", "code": "transcription_failed", "message": message}
                self._add_transcription_event("failed", turn, error=error)
                self._items.pop(turn, None)
            case SessionEnding(code, message):
                self._event_id = None
                self._add_error(
                    code, message, kind="server_error" if code != "session_expired" else "invalid_request_error"
                )
            case _:
                raise LocalProtocolError(f"no frame for {type(output).__name__}")

    def _add_committed(self, item_id: str) -> None:
        previous, self._last_item = self._last_item, item_id
        item = {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        self._add_event("input_audio_buffer.committed", item_id=item_id, previous_item_id=previous)
        for name in ("created",) if self.beta else ("added", "done"):
            self._add_event(f"conversation.item.{name}", item=item, previous_item_id=previous)

    def _add_transcription_event(self, name: str, turn: int, **fields: Any) -> None:
        self._add_event(
            f"conversation.item.input_audio_transcription.{name}",
            item_id=self._item_id(turn),
            content_index=0,
            **fields,
        )

    def _item_id(self, turn: int) -> str:
        if turn not in self._items:
            self._items[turn] = self.new_id("item_")
        return self._items[turn]

    def _add_event(self, kind: str, /, **fields: Any) -> None:
        self._add_frame(type=kind, event_id=self.new_id("event_"), **fields)

    def _add_error(
        self, code: str, message: str, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        error = {"type": kind, "code": code, "message": message}
        if param:
            error["param"] = param
        if self._event_id:
            error["event_id"] = self._event_id
        self._add_event("error", error=error)
