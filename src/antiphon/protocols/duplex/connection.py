"""A duplex connection from its first frame on: what opens it, and the session's dialect behind that. As RealtimeConnection is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConversationCommand, ConversationEvent
from antiphon.events.transcription import SessionEnding, TranscriptionCommand, TranscriptionEvent
from antiphon.protocols.duplex.dialect import DuplexDialect
from antiphon.protocols.duplex.session_fields import ALIASES
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from antiphon.protocols.resume.control import control, replaced_frame, resumed_frame
from antiphon.protocols.wire import NewId, decode_event


class DuplexConnection:
    """`resume_token`: what resumes it. `autostart`: it opens by itself, without a first frame."""

    min_commit_ms = 1
    dialect = "duplex"

    def __init__(
        self,
        opening: Opening,
        models: ModelNames,
        conversation_models: ModelNames | None,
        voices: tuple[str, ...],
        *,
        new_id: NewId,
        expires_at: int,
        max_append_bytes: int,
        language_check: Callable[[str], bool],
        log_alias: Callable[..., None],
        resume_token: str | None,
        autostart: bool,
    ) -> None:
        self.opening = opening
        self.new_id = new_id
        self._conversation_models = conversation_models
        self._autostart = autostart
        self._opened = False
        self._dialect = DuplexDialect(
            models,
            new_id,
            max_append_bytes,
            new_id("sess-"),
            expires_at=expires_at,
            language_check=language_check,
            log_alias=log_alias,
            voices=voices,
            resume_token=resume_token,
            unit_ms=conversation_models.unit_ms if conversation_models else 0,
        )

    def open(self) -> None:
        """Make ready for the first frame. Raises RemoteProtocolError where nobody answers to the model's name."""
        name = self.opening.model
        if self._conversation_models is None or not (
            not name
            or self._conversation_models.lenient(name)
            or self._conversation_models.exact(name)
            or not self._conversation_models.strict
        ):
            raise RemoteProtocolError("model_not_found", f"The model `{name or 'default'}` does not exist.", "model")
        if name and self._conversation_models.exact(name) is None:
            self._dialect.log_alias(name, self._conversation_models.loaded[0])
        self._dialect.begin(name or self._conversation_models.loaded[0])
        if self.opening.session:
            self._dialect.preset(dict(self.opening.session))
        if self._autostart:
            self._opened = True
            self._dialect.open()

    def snapshot(self) -> dict[str, Any] | None:
        """What is kept of it beside its items."""
        return (
            {"session_id": self.id, "dialect": "duplex", "session": self._dialect.snapshot()} if self._opened else None
        )

    def restore(self, kept: dict[str, Any]) -> None:
        """Instead of `open`: the session of before a restart."""
        self._dialect.session_id = kept["session_id"]
        self._dialect.restore(kept["session"])
        self._opened = True
        self._dialect.start()

    def session(self) -> dict[str, Any]:
        """The session as its client is shown it."""
        return self._dialect.session()

    @property
    def id(self) -> str:
        """The session's id."""
        return self._dialect.session_id

    @property
    def idle_s(self) -> float | None:
        """See DuplexDialect."""
        return self._dialect.idle_s

    @property
    def closing(self) -> bool:
        """The client wants to leave."""
        return self._dialect.closing is not None

    @property
    def epoch(self) -> int:
        """The session's."""
        return self._dialect.epoch

    def receive(self, data: str | bytes) -> None:
        """One frame from the client. Never raises."""
        if not self._opened:
            update = _first_update(data)
            try:
                self._dialect.open(update)
            except RemoteProtocolError as error:
                self.reject(error, None)
                return
            self._opened = True
            if update is not None:
                return
        self._dialect.receive(data)

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an output."""
        self._dialect.send(output)

    def too_large(self, most: int) -> None:
        """A frame over the server's limit came."""
        self._dialect.too_large(most)

    def refuse(self, code: str, message: str) -> None:
        """The session ends for a reason the client should know."""
        self._dialect.send(SessionEnding(code, message))

    def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Answer what the client did wrong."""
        self._dialect.reject(error, event_id if isinstance(event_id, str) else None)

    def closed(self) -> None:
        """The client's close was carried out."""
        self._dialect.closed()

    def commands(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Take the inputs so far."""
        return self._dialect.commands()

    def frames(self) -> list[str]:
        """Take the frames to be sent."""
        return self._dialect.frames()

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """See resuming.control."""
        return control(data)

    def resumed(self, token: str, **facts: Any) -> str:
        """The first frame after a resume."""
        self._dialect.resume_token = token
        return resumed_frame(self.new_id, self.id, self.session(), resume_token=token, **facts)

    def replaced(self) -> str:
        """The last frame of a connection that was replaced."""
        return replaced_frame(self.new_id, self.id)


def _first_update(data: str | bytes) -> Mapping[str, Any] | None:
    """The session's fields, if the first frame is a `session.update` (or an older `session.create`)."""
    try:
        event = decode_event(data)
    except RemoteProtocolError:
        return None
    kind = event.get("type")
    if not isinstance(kind, str) or ALIASES.get(kind, kind) != "session.update":
        return None
    session = event.get("session")
    return session if isinstance(session, dict) else {k: v for k, v in event.items() if k not in ("type", "event_id")}
