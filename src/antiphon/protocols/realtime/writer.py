"""Writes the events of a realtime session as frames, in the GA names or the beta's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.wire import ErrorBody, Frame, NewId

# Events with another name in the beta. Those of _BETA_SILENT have no counterpart in the beta.
_BETA_EVENTS = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "conversation.item.added": "conversation.item.created",
}
# Paths of a session's fields in an update, each with its path in the beta.
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
    """If a client uses the beta's names, rewrite the field paths of raised errors to these names."""
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
    """Collects the frames of one connection until they are taken.

    `codes`: a dialect's own names of error codes. `retryable`: its codes after which the same message may be accepted
    later. `beta`: whether events get the beta's names; it may be set at any time.
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
        """Remove and return the frames that were written, oldest first."""
        if not self._frames:
            return []
        taken, self._frames = self._frames, []
        return taken

    def event(self, kind: str, /, **fields: Any) -> None:
        """Write an event of type `kind` with a new id. The beta renames some events and lacks others."""
        if self.beta and kind in _BETA_SILENT:
            return
        self._frames.append(Frame({"type": self.name(kind), "event_id": self._new_id("event_")} | fields))

    def name(self, kind: str) -> str:
        """Return the name of an event of type `kind` for this client."""
        return _BETA_EVENTS.get(kind, kind) if self.beta else kind

    def add(self, frame: Frame) -> None:
        """Write a message as it is."""
        self._frames.append(frame)

    def error(self, error: RemoteProtocolError, event_id: str | None, kind: str = "invalid_request_error") -> None:
        """Write an error. `event_id`: the client's id of the message at fault, if it had one."""
        code = self._codes.get(error.code, error.code)
        is_retryable = code in self._retryable
        kind = "rate_limit_error" if is_retryable else kind
        shown = ErrorBody(kind, code, error.message, is_retryable, error.param or None, event_id or None)
        self.event("error", error=shown)
