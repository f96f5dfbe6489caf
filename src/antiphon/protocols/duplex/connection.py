"""A full-duplex connection from its first frame on: docs/wire/duplex.md, "Connecting".

The client speaks first, and its first frame opens the session. What comes after that belongs to the dialect
(dialect.py). The interface is that of a connection to /v1/realtime (negotiation.py).
"""

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
from antiphon.protocols.wire import Frame, NewId, decode_event


class DuplexConnection:
    """One full-duplex connection. Call `open` first; nothing here waits.

    `models`: the names of the transcriber. `conversation_models`: those of the conversation model, None where none is
    loaded. `voices`: its voices, the first is the default. `expires_at`: Unix seconds. `max_append_bytes`: the most
    audio of one append, after base64 is decoded. `language_check`: whether the transcriber knows a language.
    `log_alias`: called with what was asked for and what serves it instead. `resume_token`: the first token of a session
    that can be resumed. `autostart`: the session opens by itself, without a first frame.
    """

    # Any new audio is enough for a commit.
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
        """Set the defaults, and with `autostart` open the session. Without it nothing is queued yet.

        Raises RemoteProtocolError where no conversation model is loaded, the URL names one that does not exist while
        names are strict, or a field of a client secret's session is wrong.
        """
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
        """What is stored of the session besides its items, as JSON values; None before the first frame."""
        if not self._opened:
            return None
        return {"session_id": self.id, "dialect": "duplex", "session": self._dialect.snapshot()}

    def restore(self, kept: dict[str, Any]) -> None:
        """Continue a session from before a restart, of which `kept` is the snapshot. To be called after `open`.

        Nothing is queued for the client, who gets `session.resumed`.
        """
        self._dialect.session_id = kept["session_id"]
        self._dialect.restore(kept["session"])
        self._opened = True
        self._dialect.start()

    def session(self) -> dict[str, Any]:
        """The session's fields as `session.created` has them, JSON values.

        They are the dialect's own state: do not change them.
        """
        return self._dialect.session()

    @property
    def id(self) -> str:
        """The session's id as the client knows it; of a restored session it is the earlier one."""
        return self._dialect.session_id

    @property
    def idle_s(self) -> float | None:
        """How many seconds may pass without a frame of the client before the session expires (`idle_timeout_s`)."""
        return self._dialect.idle_s

    @property
    def closing(self) -> bool:
        """Whether the client has asked for the end of the session, which the server then carries out."""
        return self._dialect.closing is not None

    @property
    def epoch(self) -> int:
        """The session's epoch: audio and text of an older one are not sent any more."""
        return self._dialect.epoch

    def receive(self, data: str | bytes) -> None:
        """Read one frame from the client: commands, and an answer where it has one, are queued. Never raises.

        A first frame that is an update opens the session with its fields, and where they are wrong leaves it to be
        opened. Any other first frame opens it with the defaults and is then read.
        """
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
        """Queue the frames of an event of the session. Raises LocalProtocolError for one that has no frame."""
        self._dialect.send(output)

    def too_large(self, max_bytes: int) -> None:
        """Queue an error: a frame was larger than `max_bytes`. Call it in place of `receive`. The session goes on."""
        self._dialect.too_large(max_bytes)

    def refuse(self, code: str, message: str) -> None:
        """Queue an error and the end of the session, with which the server then ends the connection."""
        self._dialect.send(SessionEnding(code, message))

    def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Queue an error of the client's. `event_id` is repeated if it is text. The session goes on."""
        self._dialect.reject(error, event_id if isinstance(event_id, str) else None)

    def closed(self) -> None:
        """Queue `session.closed`: the end that the client has asked for was carried out."""
        self._dialect.closed()

    def commands(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Remove and return what the frames so far ask of the session, in their order; frames that are wrong ask
        nothing.
        """
        return self._dialect.commands()

    def frames(self) -> list[Frame]:
        """Remove and return the frames that wait to be sent, oldest first; `receive` and `send` only queue them."""
        return self._dialect.frames()

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """The fields of a frame about the connection itself, such as `session.resume`; None for any other
        (resume/control.py).
        """
        return control(data)

    def resumed(self, token: str, **facts: Any) -> Frame:
        """The `session.resumed` frame with a new token; `facts` are its further fields. It is returned, not queued."""
        self._dialect.resume_token = token
        return resumed_frame(self.new_id, self.id, self.session(), resume_token=token, **facts)

    def replaced(self) -> Frame:
        """The `session.replaced` frame, the last to a connection whose session was resumed elsewhere. Not queued."""
        return replaced_frame(self.new_id, self.id)


def _first_update(data: str | bytes) -> Mapping[str, Any] | None:
    """The session's fields, nested or flat, of a `session.update` or an older `session.create`; else None."""
    try:
        event = decode_event(data)
    except RemoteProtocolError:
        return None
    kind = event.get("type")
    if not isinstance(kind, str) or ALIASES.get(kind, kind) != "session.update":
        return None
    session = event.get("session")
    return session if isinstance(session, dict) else {k: v for k, v in event.items() if k not in ("type", "event_id")}
