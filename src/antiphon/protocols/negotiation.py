"""A connection to /v1/realtime that chooses its dialect: docs/wire/index.md, "Which dialect a connection speaks".

The server first sends a `session.created` that the clients of all three dialects can read. The client's first
`session.update` then decides. If it has a top-level `model` and no `session` object, the dialect is vLLM's. If its
`session` has the type `transcription`, the dialect is OpenAI's transcription. Otherwise the dialect is OpenAI's
conversation, or OpenAI's transcription if no conversation model is loaded. In the URL, `?dialect=`,
`?intent=transcription` and `model` decide the dialect before any update.

The server holds up to about a second of audio that arrives before the decision. A client that sends no update gets
the default dialect. Its audio may be at 16 kHz, as for Hugging Face's speech-to-speech, or at 24 kHz, as for OpenAI's
hosted service. The size of its frames shows which of the two it is.

Full duplex and the bridges are not negotiated, because their URLs name them (`dialects.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from antiphon.errors import LocalProtocolError, RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.transcription import AppendAudio, SessionEnding, TranscriptionConfig
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume, WireSnapshot
from antiphon.protocols.fields import decode
from antiphon.protocols.openai.conversation import ConversationSnapshot, OpenAIConversation
from antiphon.protocols.openai.transcription import OpenAITranscription, TranscriptionSnapshot
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.beta_session import BetaSession
from antiphon.protocols.realtime.session_fields import GaSession
from antiphon.protocols.resume import Control, Notice, control, notice_frames, refused_frame, resumed_frame
from antiphon.protocols.vllm.dialect import VllmDialect
from antiphon.protocols.wire import Frame, Received

# Maximum size of the frames that are held until the dialect is known, in bytes: 1.5 s of PCM16 at 16 kHz in base64, or
# 1 s at 24 kHz. Beyond the limit, the default dialect is chosen, because the client evidently sends no update.
MAX_HELD_BYTES = 64 << 10

OpenAIDialect = OpenAIConversation | OpenAITranscription


class _KeptTranscription(msgspec.Struct, omit_defaults=True):
    """The stored form of a transcription: in OpenAI's dialect, or in vLLM's."""

    transcription: TranscriptionSnapshot | None = None
    vllm: TranscriptionConfig | None = None
    # The known speakers of `vllm`.
    known_speaker_names: list[str] = []


# Made once: msgspec's description of a type must not be built by two threads at the same time.
_SNAPSHOTS = msgspec.json.Decoder(ConversationSnapshot)
_TRANSCRIPTIONS = msgspec.json.Decoder(_KeptTranscription)


class _Probe(msgspec.Struct):
    """The fields of a first message that decide the dialect. Values of other types have no effect on the decision."""

    type: object = None
    model: object = UNSET
    session: msgspec.Raw | msgspec.UnsetType = UNSET


class _Preset(msgspec.Struct):
    """The fields of a session that decide the dialect."""

    type: object = None
    model: object = None


class RealtimeConnection:
    """One connection to /v1/realtime. Chooses a dialect, then forwards everything to it."""

    # These dialects have no epochs and no idle timeout. They have no message that ends the session: the client closes
    # the connection instead.
    epoch = 0
    idle_s = None
    closing = False
    finishing = None

    def __init__(self, opening: Opening, context: Context) -> None:
        self.opening = opening
        self.context = context
        self.id = ""
        # The default dialect. Until a dialect is chosen, the server answers in this one.
        self._default: OpenAIDialect | None = None
        self._transcription: OpenAITranscription | None = None
        self._dialect: OpenAIDialect | VllmDialect | None = None
        # Commands of a dialect that the opening decided. They are returned with those of the client's first frame.
        self._pending: list[Command] = []
        self._held: list[str | bytes] = []
        self._held_bytes = 0

    # --- the opening

    def open(self) -> list[Frame]:
        """Return the `session.created` frame. Chooses the dialect if the URL or a client secret decides it.

        Raises RemoteProtocolError if the URL or the session of a client secret has an unknown dialect, a model that is
        not loaded or an invalid field.
        """
        opening, context = self.opening, self.context
        if opening.dialect not in ("", "vllm", "openai"):
            raise RemoteProtocolError("invalid_value", f"Unknown dialect: {opening.dialect}", "dialect")
        vllm = opening.dialect == "vllm"
        preset = decode(opening.session, _Preset, "session") if opening.has_session else _Preset()
        named = opening.model or (preset.model if isinstance(preset.model, str) else "")
        transcription_only = opening.intent == "transcription" or preset.type == "transcription"
        name = named or context.models.loaded[0]
        self._check_model(name, vllm=vllm, transcription_only=transcription_only)
        self.id = context.new_id("sess-")
        expires_at = context.expires_at
        self._transcription = OpenAITranscription(context, self.id, expires_at, name, beta=opening.beta)
        self._default = self._transcription
        if context.conversation_models and not vllm and not transcription_only:
            begins_with = name if opening.model or preset.model else context.conversation_models.loaded[0]
            self._default = OpenAIConversation(
                context, self.id, expires_at, begins_with, beta=opening.beta, server_plays=opening.plays
            )
        if opening.has_session:
            if self._default is self._transcription and not transcription_only:
                raise RemoteProtocolError("model_not_found", "No language model is loaded.", "session.model")
            self._default.preset(opening.session)
        if not vllm:
            self._log_model_alias()
        created = self._created()
        talks = isinstance(self._default, OpenAIConversation)
        if vllm:
            self._dialect = VllmDialect(context)
        elif opening.beta or (opening.has_session if talks else opening.dialect == "openai" or transcription_only):
            self._pending += self._choose(self._default)
        return [created]

    def _check_model(self, name: str, *, vllm: bool, transcription_only: bool) -> None:
        """Raise RemoteProtocolError (`model_not_found`) if no loaded model can serve this name on this connection."""
        models, answers = self.context.models, self.context.conversation_models
        if vllm:
            # vLLM's clients send exact names.
            known = models.exact(name) or (answers.exact(name) if answers else None)
        else:
            known = models.lenient(name)
            if answers and not transcription_only:
                known = known or answers.lenient(name)
        if not known:
            raise RemoteProtocolError("model_not_found", f"The model `{name}` does not exist.", "model")

    def _log_model_alias(self) -> None:
        """If the URL has a hosted model's name, log it and the loaded model that is used instead."""
        name, context = self.opening.model, self.context
        if not name:
            return
        if isinstance(self._default, OpenAIConversation) and context.conversation_models:
            if context.conversation_models.exact(name) is None:
                context.log_alias(name, context.conversation_models.loaded[0])
        elif context.models.exact(name) is None:
            context.log_alias(name)

    def _created(self) -> Frame:
        beta_transcription = self.opening.beta and self._default is self._transcription
        fields = {
            "type": "transcription_session.created" if beta_transcription else "session.created",
            "event_id": self.context.new_id("event_"),
            "session": self.session(),
            "id": self.id,
            "created": int(self.context.now_s()),
        }
        if self.context.resume_token:
            fields["resume_token"] = self.context.resume_token
        # For compatibility, only a beta transcription counts its first event.
        return Frame(fields, numbered=beta_transcription)

    def session(self) -> GaSession | BetaSession | msgspec.Struct:
        """Return the session in the form of `session.created`. Call it after `open`."""
        assert self._default
        return self._default.session()

    # --- restoring and resuming

    def snapshot(self) -> WireSnapshot | None:
        """Return the session's state to store, without its items. None in vLLM's dialect with a conversation model, and
        before the client has decided the dialect.
        """
        kept: object = None
        match self._dialect:
            case OpenAIConversation() as conversation:
                kept = conversation.snapshot()
            case OpenAITranscription() as transcription:
                kept = _KeptTranscription(transcription=transcription.snapshot())
            case VllmDialect() as vllm if config := vllm.snapshot():
                kept = _KeptTranscription(vllm=config, known_speaker_names=vllm.known_speakers)
            case _:
                return None
        return WireSnapshot(self.id, DIALECT.name, msgspec.Raw(msgspec.json.encode(kept)))

    def restore(self, kept: WireSnapshot) -> None:
        """Continue a session from its stored state. Call it after `open`, but do not send the frames of `open`."""
        self.id = kept.session_id
        found = _TRANSCRIPTIONS.decode(kept.session)
        self._pending.clear()
        if found.vllm:
            self._dialect = VllmDialect(self.context)
            self._pending.append(self._dialect.restore(found.vllm, found.known_speaker_names))
            return
        if found.transcription:
            assert self._transcription
            self._default = self._transcription
            self._transcription.restore(kept.session_id, found.transcription)
        elif isinstance(self._default, OpenAIConversation):
            self._default.restore(kept.session_id, _SNAPSHOTS.decode(kept.session))
        else:
            raise LocalProtocolError("a conversation is restored into a connection that holds none")
        self._pending += self._choose(self._default)

    def control(self, data: str | bytes) -> Control | None:
        """Return the message if it concerns the connection itself, such as `session.resume`. Otherwise return None."""
        return control(data)

    def resumed(self, token: str, **facts: Any) -> Frame:
        """Return the `session.resumed` frame with a new token. `facts` are additional fields."""
        return resumed_frame(self.context.new_id, self.id, self._shown(), resume_token=token, **facts)

    def beside(self, id: str, token: str) -> Frame:
        """Return the first frame to a program beside the client: `session.created`, with the session as it is now.

        `id`: the id of the program's connection, with which it resumes it. `token`: see `Context.resume_token`; "" for
        none.
        """
        fields = {"type": "session.created", "event_id": self.context.new_id("event_"), "session": self._shown()}
        return Frame(fields | {"id": id} | ({"resume_token": token} if token else {}), numbered=False)

    def _shown(self) -> GaSession | BetaSession | msgspec.Struct:
        shown = self._dialect if isinstance(self._dialect, OpenAIDialect) else self._default
        assert shown
        return shown.session()

    def notice(self, notice: Notice) -> list[Frame]:
        """Return the frames that report `notice` about the connection, such as `session.replaced`."""
        return notice_frames(self.context.new_id, self.id, notice)

    # --- properties of the chosen dialect

    @property
    def min_commit_ms(self) -> int:
        """Minimum audio in a commit, in milliseconds: 100 in OpenAI's dialects, 0 in vLLM's."""
        return self._dialect.min_commit_ms if self._dialect else 0

    @property
    def dialect(self) -> str:
        """The name of the chosen dialect, for metrics.

        It is `vllm`, `openai` (a transcription), `realtime` (a conversation) or `undecided`.
        """
        return self._dialect.name if self._dialect else "undecided"

    def close(self) -> list[Frame]:
        """Return [], because these dialects have no message that ends the session."""
        return []

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. The session continues.

        The error may be about the connection, such as an invalid acknowledgement, or about a message that exceeds the
        memory limit.
        """
        if error.code == "memory_limit_exceeded" and isinstance(self._dialect, VllmDialect):
            # In vLLM's dialect, errors are flat. The dialect also counts the responses that the client waits for.
            return self._dialect.refuse(error, event_id)
        return [refused_frame(self.context.new_id, error, event_id)]

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`. The session continues."""
        return self._answering.too_large(data, max_bytes)

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. An invalid frame only returns an error for the client; nothing is raised.

        Until the dialect is known, the connection holds frames with audio. It reads them after the deciding frame.
        """
        if self._dialect and not self._pending and not isinstance(data, AppendAudio):
            received: Received[Command] = self._dialect.feed(data)
            return received
        commands, self._pending = self._pending, []
        if isinstance(data, AppendAudio):
            return Received([*commands, data])
        answers: list[Frame] = []
        waiting = [data]
        if self._dialect is None:
            decided = self._decided_by(data)
            if decided is None:
                self._held.append(data)
                self._held_bytes += len(data)
                if self._held_bytes <= MAX_HELD_BYTES:
                    return Received(commands)
                decided, waiting = self._answering, []
                if not isinstance(decided, VllmDialect) and _is_16_khz(self._held):
                    waiting = [_update_to_16_khz(decided)]
            commands += self._choose(decided)
            # Read held audio after an update, so that it is decoded in the format that the update sets.
            waiting = [*waiting, *self._held] if _is_update((waiting or [data])[0]) else [*self._held, *waiting]
            self._held, self._held_bytes = [], 0
        dialect = self._answering
        for frame in waiting:
            received = dialect.feed(frame)
            commands += received.commands
            answers += received.answers
        return Received(commands, answers)

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event. If no dialect is chosen, choose the default, unless the session ends.

        Raises LocalProtocolError for an event that cannot occur in the dialect.
        """
        if self._dialect is None and not isinstance(event, SessionEnding):
            self._pending += self._choose(self._answering)
        return self._answering.send(event)

    @property
    def _answering(self) -> OpenAIDialect | VllmDialect:
        found = self._dialect or self._default
        assert found
        return found

    def _choose(self, dialect: OpenAIDialect | VllmDialect) -> list[Command]:
        """Choose this dialect for the rest of the connection. Returns the commands that begin its session."""
        self._dialect = dialect
        return [] if isinstance(dialect, VllmDialect) else [dialect.configured()]

    def _decided_by(self, data: str | bytes) -> OpenAIDialect | VllmDialect | None:
        """Return the dialect that a frame decides.

        Returns None for an append of audio, unless the URL names a model. A commit decides, because vLLM's clients name
        their model before their first commit.
        """
        assert self._default
        assert self._transcription
        try:
            probe = decode(data, _Probe)
        except RemoteProtocolError:
            # For invalid JSON, choose the default dialect, which reports the error.
            return self._default
        if probe.type == "input_audio_buffer.append" and not self.opening.model:
            return None
        if probe.type == "session.update" and probe.session is UNSET and self.opening.dialect != "openai":
            # An update without `session` and `model` fits no dialect. vLLM's dialect then reports the missing field.
            if probe.model is not UNSET or not self.opening.model:
                return VllmDialect(self.context)
        elif probe.type == "transcription_session.update" or (
            probe.type == "session.update" and probe.session is not UNSET and _is_transcription(probe.session)
        ):
            return self._transcription
        return self._default


class _Append(msgspec.Struct):
    audio: str = ""


def _is_16_khz(frames: Sequence[str | bytes]) -> bool:
    """Whether the sizes of all appends are multiples of 10 ms at 16 kHz, but not all are at 24 kHz.

    Clients send audio in chunks of a fixed duration: 20 ms are 640 bytes at 16 kHz and 960 bytes at 24 kHz.
    """
    try:
        sizes = {len(decode_base64(decode(frame, _Append).audio)) for frame in frames}
    except (RemoteProtocolError, ValueError):
        return False
    return not any(size % 320 for size in sizes) and any(size % 480 for size in sizes)


def _update_to_16_khz(dialect: OpenAIDialect) -> str:
    """Return an update with the defaults of speech-to-speech: 16 kHz in both directions, and the user's transcripts."""
    pcm = {"format": {"type": "audio/pcm", "rate": 16_000}}
    if isinstance(dialect, OpenAITranscription):
        session = {"type": "transcription", "audio": {"input": pcm}}
    else:
        session = {"type": "realtime", "audio": {"input": pcm | {"transcription": {}}, "output": pcm}}
    return msgspec.json.encode({"type": "session.update", "session": session}).decode()


def _is_update(data: str | bytes) -> bool:
    try:
        return decode(data, _Probe).type in ("session.update", "transcription_session.update")
    except RemoteProtocolError:
        return False


def _is_transcription(session: msgspec.Raw) -> bool:
    try:
        return decode(session, _Preset).type == "transcription"
    except RemoteProtocolError:
        return False


def _opens_secret(opening: Opening) -> bool:
    return opening.dialect != "vllm" and (opening.intent != "transcription" or opening.is_transcription)


DIALECT = Dialect(
    name="realtime",
    matches=lambda _: True,
    connect=RealtimeConnection,
    paths=("/v1/realtime", "/realtime"),
    resume=Resume.ON_REQUEST,
    subprotocol="realtime",
    opens_secret=_opens_secret,
)
