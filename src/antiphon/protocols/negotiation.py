"""A connection to /v1/realtime whose dialect is still open: docs/wire/index.md, "Which dialect a connection speaks".

The server speaks first, with one `session.created` that the clients of all three dialects can read. The first
`session.update` decides: with a top-level `model` and no `session` object it is the vLLM dialect, with a `session` of
type `transcription` OpenAI's transcription, otherwise OpenAI's conversation, or its transcription where no conversation
model is loaded. `?dialect=`, `?intent=transcription` and a `model` in the URL decide earlier. Audio that comes before
the decision is held.

Full duplex and the bridges are not negotiated: their URLs name them (duplex/connection.py, bridges/base.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConversationCommand, ConversationEvent
from antiphon.events.transcription import SessionEnding, TranscriptionCommand, TranscriptionEvent
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.openai.conversation import OpenAIConversation
from antiphon.protocols.openai.transcription import MIN_COMMIT_MS, OpenAITranscription
from antiphon.protocols.opening import Opening
from antiphon.protocols.resume.control import control, refused_frame, replaced_frame, resumed_frame
from antiphon.protocols.vllm.dialect import VllmDialect
from antiphon.protocols.wire import Frame, NewId, decode_event, random_id

# How much may be held until the dialect is known, in bytes of frames: 98 s of PCM16 at 16 kHz in base64. With more, the
# default dialect is chosen.
MAX_HELD_BYTES = 4 << 20
YEAR_S = 365 * 86400


@dataclass(slots=True)
class RealtimeConnection:
    """One connection to /v1/realtime: it chooses a dialect and from then on hands everything to it.

    Call `open` first; then the interface is that of a dialect. Nothing here waits.
    """

    opening: Opening
    # The names of the transcriber.
    models: ModelNames
    # Unix seconds.
    now_s: Callable[[], float]
    # How long a session lasts, in seconds, for its `expires_at`; 0 for no limit, which is shown as a year.
    session_s: float = 3600.0
    new_id: NewId = random_id
    # The most audio of one append, in bytes after base64 is decoded.
    max_append_bytes: int = 15 << 20
    # Whether the transcriber knows a language.
    language_check: Callable[[str], bool] = lambda _: True
    # Called with a name that is not loaded and, unless it is the transcriber, with what serves it instead.
    log_alias: Callable[..., None] = lambda *_: None
    # The names of the conversation model, None where none is loaded, and its voices; the first is the default.
    conversation_models: ModelNames | None = None
    voices: tuple[str, ...] = ()
    # The first resume token of a session that can be resumed; it is sent in `session.created`.
    resume_token: str | None = None
    _conversation: OpenAIConversation | None = None
    _dialect: VllmDialect | OpenAITranscription | None = None
    _transcription: OpenAITranscription | None = None
    _own_frames: list[Frame] = field(default_factory=list)
    _commands: list[TranscriptionCommand | ConversationCommand] = field(default_factory=list)
    _held: list[str | bytes] = field(default_factory=list)
    _held_bytes: int = 0
    _session_id: str = ""

    def open(self) -> None:
        """Queue the `session.created`, and choose the dialect where the URL or a client secret does.

        Raises RemoteProtocolError if the URL, or the session of a client secret, names an unknown dialect, a model that
        is not loaded or a field that is wrong; nothing is queued then.
        """
        opening = self.opening
        if opening.dialect not in ("", "vllm", "openai"):
            raise RemoteProtocolError("invalid_value", f"Unknown dialect: {opening.dialect}", "dialect")
        vllm = opening.dialect == "vllm"
        preset = opening.session
        preset_model = preset.get("model") if preset else None
        named = opening.model or (preset_model if isinstance(preset_model, str) else "")
        transcription_only = opening.intent == "transcription" or bool(preset and preset.get("type") == "transcription")
        name = named or self.models.loaded[0]
        self._check_model(name, vllm=vllm, transcription_only=transcription_only)
        self._session_id = self.new_id("sess-")
        self._transcription = self._new_transcription(name)
        if self.conversation_models and not vllm and not transcription_only:
            begins_with = name if opening.model or preset_model else self.conversation_models.loaded[0]
            self._conversation = self._new_conversation(begins_with, self._transcription.expires_at)
        first = self._conversation or self._transcription
        if preset is not None:
            if self._conversation is None and not transcription_only:
                raise RemoteProtocolError("model_not_found", "No language model is loaded.", "session.model")
            first.preset(dict(preset))
        if not vllm:
            self._log_model_alias()
        self._add_created(first.session())
        if vllm:
            self._choose_vllm()
        elif self._conversation and (opening.beta or preset is not None):
            self._choose_conversation()
        elif not self._conversation and (opening.dialect == "openai" or transcription_only or opening.beta):
            self._choose_transcription()

    def _check_model(self, name: str, *, vllm: bool, transcription_only: bool) -> None:
        """Raises RemoteProtocolError (`model_not_found`) unless some model of this name can serve the connection."""
        answers = self.conversation_models
        if vllm:
            # vLLM's clients name models exactly.
            known = self.models.exact(name) or (answers.exact(name) if answers else None)
        else:
            known = self.models.lenient(name)
            if answers and not transcription_only:
                known = known or answers.lenient(name)
        if not known:
            raise RemoteProtocolError("model_not_found", f"The model `{name}` does not exist.", "model")

    def _new_transcription(self, name: str) -> OpenAITranscription:
        transcription = OpenAITranscription(
            self.models,
            self.new_id,
            self.max_append_bytes,
            self._session_id,
            expires_at=int(self.now_s() + (self.session_s or YEAR_S)),
            beta=self.opening.beta,
            language_check=self.language_check,
            log_alias=self.log_alias,
        )
        transcription.begin(name)
        return transcription

    def _new_conversation(self, name: str, expires_at: int) -> OpenAIConversation:
        conversation = OpenAIConversation(
            self.models,
            self.new_id,
            self.max_append_bytes,
            self._session_id,
            expires_at=expires_at,
            beta=self.opening.beta,
            language_check=self.language_check,
            log_alias=self.log_alias,
            voices=self.voices,
            server_plays=self.opening.plays,
        )
        conversation.begin(name)
        return conversation

    def _log_model_alias(self) -> None:
        """Log a hosted name in the URL together with the loaded model that serves it."""
        name = self.opening.model
        if not name:
            return
        if self._conversation and self.conversation_models:
            if self.conversation_models.exact(name) is None:
                self.log_alias(name, self.conversation_models.loaded[0])
        elif self.models.exact(name) is None:
            self.log_alias(name)

    def _add_created(self, session: dict[str, Any]) -> None:
        beta_transcription = self.opening.beta and not self._conversation
        fields = {
            "type": "transcription_session.created" if beta_transcription else "session.created",
            "event_id": self.new_id("event_"),
            "session": session,
            "id": self._session_id,
            "created": int(self.now_s()),
        }
        token = {"resume_token": self.resume_token} if self.resume_token else {}
        # Only a transcription of the beta counts its first event, as it has done from the start.
        self._own_frames.append(Frame(fields | token, numbered=beta_transcription))

    def snapshot(self) -> dict[str, Any] | None:
        """What is stored of a conversation besides its items, as JSON values; None for a transcription."""
        conversation = self._dialect
        if not isinstance(conversation, OpenAIConversation):
            return None
        return {"session_id": self.id, "dialect": "realtime", "session": conversation.snapshot()}

    def restore(self, kept: dict[str, Any]) -> None:
        """Continue a conversation from before a restart, of which `kept` is the snapshot. To be called after `open`.

        The `session.created` is not sent: the client gets `session.resumed` instead.
        """
        assert self._conversation
        self._own_frames.clear()
        self._session_id = self._conversation.session_id = kept["session_id"]
        self._conversation.restore(kept["session"])
        self._choose_conversation()

    # These dialects have no epochs.
    epoch = 0

    def session(self) -> dict[str, Any]:
        """The session's fields as `session.created` has them, JSON values; not to be changed.

        To be called after `open`.
        """
        assert self._transcription
        return (self._conversation or self._transcription).session()

    @property
    def id(self) -> str:
        """The session's id as the client knows it; empty before `open`."""
        return self._session_id

    @property
    def min_commit_ms(self) -> int:
        """How many milliseconds of audio a commit must at least have: 100 in OpenAI's dialects, 0 in vLLM's."""
        return MIN_COMMIT_MS if isinstance(self._dialect, OpenAITranscription) else 0

    @property
    def dialect(self) -> str:
        """The chosen dialect as metrics name it.

        One of `vllm`, `openai` (a transcription), `realtime` (a conversation) and `undecided`.
        """
        match self._dialect:
            case VllmDialect():
                return "vllm"
            case OpenAIConversation():
                return "realtime"
            case OpenAITranscription():
                return "openai"
            case None:
                return "undecided"

    # These dialects have no idle time, and no message with which a client ends its session: it closes the connection.
    idle_s = None
    closing = False

    def closed(self) -> None:
        """Do nothing: these dialects have no message for the end of a session that the client has asked for."""

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """The fields of a frame about the connection itself, such as `session.resume`; None for any other
        (resume/control.py).
        """
        return control(data)

    def resumed(self, token: str, **facts: Any) -> Frame:
        """The `session.resumed` frame with a new token; `facts` are its further fields. It is returned, not queued."""
        shown = self._dialect.session() if isinstance(self._dialect, OpenAITranscription) else self.session()
        return resumed_frame(self.new_id, self.id, shown, resume_token=token, **facts)

    def replaced(self) -> Frame:
        """The `session.replaced` frame, the last to a connection whose session was resumed elsewhere. Not queued."""
        return replaced_frame(self.new_id, self.id)

    def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Queue an error about the connection itself, such as a wrong acknowledgement. The session goes on.

        `event_id` is whatever the client's message had there; it is repeated if it is text.
        """
        self._own_frames.append(refused_frame(self.new_id, error, event_id if isinstance(event_id, str) else None))

    def receive(self, data: str | bytes) -> None:
        """Read one frame from the client: commands, or an error for the client, are queued. Never raises.

        Until the dialect is known, appends and commits of audio are held and read after the frame that decides.
        """
        if self._dialect is None and not self._decide(data):
            self._hold(data)
            return
        assert self._dialect is not None
        self._dialect.receive(data)
        # Held audio comes after the update that decided, so that it is read in the format that the update sets.
        if self._held:
            self._replay()

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an event; the default dialect is chosen if none is yet.

        Raises LocalProtocolError for an event that the dialect has no frame for.
        """
        if self._dialect is None:
            self._choose_default()
        assert self._dialect is not None
        self._dialect.send(output)  # type: ignore[arg-type]

    def too_large(self, max_bytes: int) -> None:
        """Queue an error: a frame was larger than `max_bytes`. Call it in place of `receive`. The session goes on."""
        self._answering_dialect().too_large(max_bytes)

    def refuse(self, code: str, message: str) -> None:
        """Queue an error with which the server then ends the connection."""
        self._answering_dialect().send(SessionEnding(code, message))

    def commands(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Remove and return what the frames so far ask of the session, the configuration of a chosen dialect first."""
        taken, self._commands = self._commands, []
        return [*taken, *(self._dialect.commands() if self._dialect else [])]

    def frames(self) -> list[Frame]:
        """Remove and return the frames that wait to be sent, oldest first; `receive` and `send` only queue them."""
        taken, self._own_frames = self._own_frames, []
        return taken + (self._answering_dialect().frames() if self._transcription else [])

    def _answering_dialect(self) -> VllmDialect | OpenAITranscription:
        if self._dialect:
            return self._dialect
        assert self._transcription is not None
        return self._conversation or self._transcription

    def _decide(self, data: str | bytes) -> bool:
        try:
            event = decode_event(data)
        except RemoteProtocolError:
            # Broken JSON decides for the default dialect, which says what is wrong.
            event = {}
        kind = event.get("type")
        if kind in ("input_audio_buffer.append", "input_audio_buffer.commit") and not self.opening.model:
            return False
        flat = kind == "session.update" and "session" not in event
        flat = flat and self.opening.dialect != "openai"
        session = event.get("session")
        transcription_only = kind == "transcription_session.update" or (
            kind == "session.update" and isinstance(session, dict) and session.get("type") == "transcription"
        )
        # Without `session` and `model` it has the shape of neither dialect: the vLLM dialect says what is missing.
        if flat and ("model" in event or not self.opening.model):
            self._choose_vllm()
        elif transcription_only:
            self._choose_transcription()
        else:
            self._choose_default()
        return True

    def _hold(self, data: str | bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > MAX_HELD_BYTES:
            self._choose_default()
            self._replay()

    def _choose_vllm(self) -> None:
        self._dialect = VllmDialect(
            self.models,
            self.new_id,
            self.max_append_bytes,
            self._session_id,
            conversation_models=self.conversation_models,
            voices=self.voices,
            language_check=self.language_check,
        )

    def _choose_default(self) -> None:
        if self._conversation:
            self._choose_conversation()
        else:
            self._choose_transcription()

    def _choose_conversation(self) -> None:
        assert self._conversation is not None
        self._dialect = self._conversation
        self._commands.append(self._conversation.configured())

    def _choose_transcription(self) -> None:
        assert self._transcription is not None
        self._dialect = self._transcription
        self._commands.append(self._transcription.configured())

    def _replay(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        assert self._dialect is not None
        for data in held:
            self._dialect.receive(data)
