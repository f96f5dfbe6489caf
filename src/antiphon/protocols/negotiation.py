"""/v1/realtime before its dialect is known. The server speaks first: one `session.created` that every client reads.

The first `session.update` decides: a top-level `model` and no `session` object is the vLLM dialect, a `session` of type
`transcription` OpenAI's transcription, anything else OpenAI's conversation, or its transcription where nobody is loaded who answers.
`?dialect=`, `?intent=transcription` and a `model` in the URL decide earlier; what comes before is held.
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
from antiphon.protocols.wire import NewId, decode_event, frame, random_id

# Sound that may come before the dialect is known, in bytes of frames; more ends the connection.
MAX_HELD_BYTES = 4 << 20


@dataclass(slots=True)
class RealtimeConnection:
    """One connection of /v1/realtime: negotiates, then hands every frame to the dialect."""

    opening: Opening
    models: ModelNames
    now_s: Callable[[], float]
    session_s: float = 3600.0
    new_id: NewId = random_id
    max_append_bytes: int = 15 << 20
    language_check: Callable[[str], bool] = lambda _: True
    log_alias: Callable[..., None] = lambda *_: None
    # Names of whoever answers, and the voices; None: nobody does.
    conversation_models: ModelNames | None = None
    voices: tuple[str, ...] = ()
    # What resumes it, if anything does.
    resume_token: str | None = None
    _conversation: OpenAIConversation | None = None
    _dialect: VllmDialect | OpenAITranscription | None = None
    _transcription: OpenAITranscription | None = None
    _own_frames: list[str] = field(default_factory=list)
    _commands: list[TranscriptionCommand | ConversationCommand] = field(default_factory=list)
    _held: list[str | bytes] = field(default_factory=list)
    _held_bytes: int = 0
    _session_id: str = ""

    def open(self) -> None:
        """Queue the first frame. Raises RemoteProtocolError if the URL, or its key's session, asks for what is not there."""
        if self.opening.dialect not in ("", "vllm", "openai"):
            raise RemoteProtocolError("invalid_value", f"Unknown dialect: {self.opening.dialect}", "dialect")
        vllm = self.opening.dialect == "vllm"
        preset = self.opening.session
        named = preset.get("model") if preset else None
        name = self.opening.model or (named if isinstance(named, str) else "") or self.models.loaded[0]
        transcription_only = self.opening.intent == "transcription" or bool(
            preset and preset.get("type") == "transcription"
        )
        answered = (
            bool(
                self.conversation_models
                and (self.conversation_models.lenient(name) or self.conversation_models.exact(name))
            )
            and not transcription_only
        )
        partner = self.conversation_models.exact(name) if self.conversation_models else None
        if (self.models.exact(name) or partner if vllm else self.models.lenient(name) or answered) in (None, False):
            raise RemoteProtocolError("model_not_found", f"The model `{name}` does not exist.", "model")
        self._session_id = self.new_id("sess-")
        openai = self._transcription = OpenAITranscription(
            self.models,
            self.new_id,
            self.max_append_bytes,
            self._session_id,
            expires_at=int(self.now_s() + (self.session_s or 365 * 86400)),
            beta=self.opening.beta,
            language_check=self.language_check,
            log_alias=self.log_alias,
        )
        openai.begin(name)
        if self.conversation_models and not vllm and not transcription_only:
            self._conversation = OpenAIConversation(
                self.models,
                self.new_id,
                self.max_append_bytes,
                self._session_id,
                expires_at=openai.expires_at,
                beta=self.opening.beta,
                language_check=self.language_check,
                log_alias=self.log_alias,
                voices=self.voices,
                server_plays=self.opening.plays,
            )
            self._conversation.begin(name if self.opening.model or named else self.conversation_models.loaded[0])
        first = self._conversation or openai
        if preset is not None:
            if self._conversation is None and not transcription_only:
                raise RemoteProtocolError("model_not_found", "No language model is loaded.", "session.model")
            first.preset(dict(preset))
        if (
            self._conversation
            and self.conversation_models
            and self.opening.model
            and self.conversation_models.exact(name) is None
        ):
            self.log_alias(name, self.conversation_models.loaded[0])
        elif not self._conversation and self.opening.model and not vllm and self.models.exact(name) is None:
            self.log_alias(name)
        self._own_frames.append(
            frame(
                type="transcription_session.created"
                if self.opening.beta and not self._conversation
                else "session.created",
                event_id=self.new_id("event_"),
                session=first.session(),
                id=self._session_id,
                created=int(self.now_s()),
                **({"resume_token": self.resume_token} if self.resume_token else {}),
            )
        )
        if vllm:
            self._choose_vllm()
        elif self._conversation and (self.opening.beta or preset is not None):
            self._choose_conversation()
        elif not self._conversation and (self.opening.dialect == "openai" or transcription_only or self.opening.beta):
            self._choose_transcription()

    def snapshot(self) -> dict[str, Any] | None:
        """What is kept of a conversation beside its items; None for what is none."""
        conversation = self._dialect
        if not isinstance(conversation, OpenAIConversation):
            return None
        return {"session_id": self.id, "dialect": "realtime", "session": conversation.snapshot()}

    def restore(self, kept: dict[str, Any]) -> None:
        """After `open`: the conversation of before a restart."""
        assert self._conversation
        self._own_frames.clear()
        self._session_id = self._conversation.session_id = kept["session_id"]
        self._conversation.restore(kept["session"])
        self._choose_conversation()

    # Of its own it has none.
    epoch = 0

    def session(self) -> dict[str, Any]:
        """The session as the client is shown it first."""
        assert self._transcription
        return (self._conversation or self._transcription).session()

    @property
    def id(self) -> str:
        """The session's id, as the client was told."""
        return self._session_id

    @property
    def min_commit_ms(self) -> int:
        """Least new audio a commit must have in the chosen dialect."""
        return MIN_COMMIT_MS if isinstance(self._dialect, OpenAITranscription) else 0

    @property
    def dialect(self) -> str:
        """`vllm`, `openai` (transcription), `realtime` (conversation), or `undecided`."""
        match self._dialect:
            case VllmDialect():
                return "vllm"
            case OpenAIConversation():
                return "realtime"
            case OpenAITranscription():
                return "openai"
            case None:
                return "undecided"

    # A connection of these dialects is as long as its session, and its client leaves by leaving.
    idle_s = None
    closing = False

    def closed(self) -> None:
        """Nobody asks for it in these dialects."""

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """See resuming.control."""
        return control(data)

    def resumed(self, token: str, **facts: Any) -> str:
        """The first frame after a resume."""
        shown = self._dialect.session() if isinstance(self._dialect, OpenAITranscription) else self.session()
        return resumed_frame(self.new_id, self.id, shown, resume_token=token, **facts)

    def replaced(self) -> str:
        """The last frame of a connection that was replaced."""
        return replaced_frame(self.new_id, self.id)

    def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Answer what the client did wrong about its connection."""
        self._own_frames.append(refused_frame(self.new_id, error, event_id if isinstance(event_id, str) else None))

    def receive(self, data: str | bytes) -> None:
        """One frame from the client. Never raises."""
        if self._dialect is None and not self._decide(data):
            self._hold(data)
            return
        assert self._dialect is not None
        self._dialect.receive(data)
        # What was held comes after the update that decided, so that it is read under its format and model.
        if self._held:
            self._replay()

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an output."""
        if self._dialect is None:
            self._choose_default()
        assert self._dialect is not None
        self._dialect.send(output)  # type: ignore[arg-type]

    def too_large(self, most: int) -> None:
        """A frame over the server's limit came: the connection ends after this."""
        self._answering_dialect().too_large(most)

    def refuse(self, code: str, message: str) -> None:
        """The connection ends for a reason the client should know."""
        self._answering_dialect().send(SessionEnding(code, message))

    def commands(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Take the inputs so far."""
        taken, self._commands = self._commands, []
        return [*taken, *(self._dialect.commands() if self._dialect else [])]

    def frames(self) -> list[str]:
        """Take the frames to be sent."""
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
            # The dialect says what is wrong.
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
        # Flat and without a model is neither shape: the vLLM dialect says what is missing.
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
