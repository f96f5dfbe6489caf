"""Writes the events of a realtime session as frames, with GA (general availability) or beta names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.wire import ErrorBody, Frame, NewId

# Events that have another name in the beta API. The events in _BETA_SILENT do not exist there.
_BETA_EVENTS = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "conversation.item.added": "conversation.item.created",
}
# For each path of a session's field in an update: its path in the beta API.
_BETA_PATHS = {
    "session.audio.input.format": "session.input_audio_format",
    "session.audio.input.transcription": "session.input_audio_transcription",
    "session.audio.input.noise_reduction": "session.input_audio_noise_reduction",
    "session.audio.input.turn_detection": "session.turn_detection",
    "session.audio.output.format": "session.output_audio_format",
    "session.audio.output.voice": "session.voice",
    "session.audio.output.speed": "session.speed",
    "session.output_modalities": "session.modalities",
    "session.max_output_tokens": "session.max_response_output_tokens",
}
_BETA_SILENT = frozenset(("conversation.item.done",))


@contextmanager
def beta_paths(beta: bool) -> Iterator[None]:
    """If `beta`, convert the field paths in raised errors to beta names."""
    try:
        yield
    except RemoteProtocolError as error:
        given = error.param or ""
        for path, name in _BETA_PATHS.items() if beta else ():
            if given == path or given.startswith((f"{path}.", f"{path}[")):
                param = given.replace(path, name, 1)
                raise RemoteProtocolError(error.code, error.message.replace(given, param), param) from None
        raise


class EventWriter:
    """Collects the frames of one connection until the caller takes them.

    `codes`: the dialect's own names for error codes. `retryable`: the dialect's codes for messages that may succeed if
    they are sent again later. `beta`: whether events get beta names. It may be changed at any time.
    """

    def __init__(
        self, new_id: NewId, codes: Mapping[str, str] | None = None, retryable: Collection[str] = frozenset()
    ) -> None:
        self._new_id = new_id
        self._codes = codes or {}
        self._retryable = retryable
        self.beta = False
        self._frames: list[Frame] = []

    def take(self) -> list[Frame]:
        """Remove and return the collected frames, oldest first."""
        if not self._frames:
            return []
        taken, self._frames = self._frames, []
        return taken

    def event(self, kind: str, /, **fields: Any) -> None:
        """Write an event of type `kind` with a new id. With beta names, some events are renamed, some skipped."""
        if self.beta and kind in _BETA_SILENT:
            return
        self._frames.append(Frame({"type": self.name(kind), "event_id": self._new_id("event_")} | fields))

    def name(self, kind: str) -> str:
        """Return the name under which this client gets events of type `kind`."""
        return _BETA_EVENTS.get(kind, kind) if self.beta else kind

    def add(self, frame: Frame) -> None:
        """Add a frame without changing it."""
        self._frames.append(frame)

    def error(self, error: RemoteProtocolError, event_id: str | None, kind: str = "invalid_request_error") -> None:
        """Write an error. `event_id`: the id that the client gave to the message at fault, if any."""
        code = self._codes.get(error.code, error.code)
        is_retryable = code in self._retryable
        kind = "rate_limit_error" if is_retryable else kind
        shown = ErrorBody(kind, code, error.message, is_retryable, error.param or None, event_id or None)
        self.event("error", error=shown)
