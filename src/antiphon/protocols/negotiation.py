"""A connection to /v1/realtime whose dialect is still open: docs/wire/index.md, "Which dialect a connection speaks".

The server speaks first, with one `session.created` that the clients of all three dialects can read. The first
`session.update` decides: with a top-level `model` and no `session` object it is the vLLM dialect, with a `session` of
type `transcription` OpenAI's transcription, otherwise OpenAI's conversation, or its transcription where no conversation
model is loaded. `?dialect=`, `?intent=transcription` and a `model` in the URL decide earlier. Audio that comes before
the decision is held for about a second: a client that sends no update at all is answered by the default. It may send 16
kHz, as Hugging Face's speech-to-speech does, or 24 kHz, as the hosted service: the size of its frames tells.

Full duplex and the bridges are not negotiated: their URLs name them (`dialects.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from antiphon.errors import LocalProtocolError, RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.transcription import AppendAudio, SessionEnding
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume, WireSnapshot
from antiphon.protocols.fields import decode
from antiphon.protocols.openai.conversation import ConversationSnapshot, OpenAIConversation
from antiphon.protocols.openai.transcription import OpenAITranscription
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.session_fields import BetaSession, GaSession
from antiphon.protocols.resume import Control, control, refused_frame, replaced_frame, resumed_frame
from antiphon.protocols.vllm.dialect import VllmDialect
from antiphon.protocols.wire import Frame, Received

# How much may be held until the dialect is known, in bytes of frames: in base64, 1.5 s of PCM16 at 16 kHz, or 1 s at
# 24 kHz. With more, the default dialect is chosen: the client knows of the session and has nothing to say about it.
MAX_HELD_BYTES = 64 << 10

OpenAIDialect = OpenAIConversation | OpenAITranscription


class _Probe(msgspec.Struct):
    """What of a first message decides for a dialect. Values of other types decide nothing."""

    type: object = None
    model: object = UNSET
    session: msgspec.Raw | msgspec.UnsetType = UNSET


class _Preset(msgspec.Struct):
    """What of a session decides for a dialect."""

    type: object = None
    model: object = None


class RealtimeConnection:
    """One connection to /v1/realtime: it chooses a dialect and from then on hands everything to it."""

    # These dialects have no epochs, no idle time, and no message with which a client ends its session: it closes the
    # connection.
    epoch = 0
    idle_s = None
    closing = False

    def __init__(self, opening: Opening, context: Context) -> None:
        self.opening = opening
        self.context = context
        self.id = ""
        # What the client is shown as long as no dialect is chosen: what it gets by default.
        self._default: OpenAIDialect | None = None
        self._transcription: OpenAITranscription | None = None
        self._dialect: OpenAIDialect | VllmDialect | None = None
        # Commands of a dialect that was chosen by the opening, which go to the session with the client's first frame.
        self._pending: list[Command] = []
        self._held: list[str | bytes] = []
        self._held_bytes = 0

    # --- the opening

    def open(self) -> list[Frame]:
        """The `session.created`; the dialect is chosen where the URL or a client secret does.

        Raises RemoteProtocolError if the URL, or the session of a client secret, names an unknown dialect, a model that
        is not loaded or a field that is wrong.
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
        """Raises RemoteProtocolError (`model_not_found`) unless some model of this name can serve the connection."""
        models, answers = self.context.models, self.context.conversation_models
        if vllm:
            # vLLM's clients name models exactly.
            known = models.exact(name) or (answers.exact(name) if answers else None)
        else:
            known = models.lenient(name)
            if answers and not transcription_only:
                known = known or answers.lenient(name)
        if not known:
            raise RemoteProtocolError("model_not_found", f"The model `{name}` does not exist.", "model")

    def _log_model_alias(self) -> None:
        """Log a hosted name in the URL together with the loaded model that serves it."""
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
        # Only a transcription of the beta counts its first event, as it has done from the start.
        return Frame(fields, numbered=beta_transcription)

    def session(self) -> GaSession | BetaSession | msgspec.Struct:
        """The session as `session.created` has it. To be called after `open`."""
        assert self._default
        return self._default.session()

    # --- restoring and resuming

    def snapshot(self) -> WireSnapshot | None:
        """What is stored of a conversation besides its items; None for a transcription."""
        if not isinstance(self._dialect, OpenAIConversation):
            return None
        return WireSnapshot(self.id, self.dialect, msgspec.Raw(msgspec.json.encode(self._dialect.snapshot())))

    def restore(self, kept: WireSnapshot) -> None:
        """Continue a conversation of an earlier process. Call it after `open`, whose frames are not sent then."""
        if not isinstance(self._default, OpenAIConversation):
            raise LocalProtocolError("a conversation is restored into a connection that holds none")
        self.id = kept.session_id
        self._default.restore(kept.session_id, msgspec.json.decode(kept.session, type=ConversationSnapshot))
        self._pending += self._choose(self._default)

    def control(self, data: str | bytes) -> Control | None:
        """The message, where it is about the connection itself, such as `session.resume`; None for any other."""
        return control(data)

    def resumed(self, token: str, **facts: Any) -> Frame:
        """The `session.resumed` frame with a new token; `facts` are its further fields."""
        shown = self._dialect if isinstance(self._dialect, OpenAIDialect) else self._default
        assert shown
        return resumed_frame(self.context.new_id, self.id, shown.session(), resume_token=token, **facts)

    def replaced(self) -> Frame:
        """The `session.replaced` frame, the last to a connection whose session was resumed elsewhere."""
        return replaced_frame(self.context.new_id, self.id)

    # --- what is of the chosen dialect

    @property
    def min_commit_ms(self) -> int:
        """How many milliseconds of audio a commit must at least have: 100 in OpenAI's dialects, 0 in vLLM's."""
        return self._dialect.min_commit_ms if self._dialect else 0

    @property
    def dialect(self) -> str:
        """The chosen dialect as metrics name it.

        One of `vllm`, `openai` (a transcription), `realtime` (a conversation) and `undecided`.
        """
        return self._dialect.name if self._dialect else "undecided"

    def close(self) -> list[Frame]:
        """Nothing: these dialects have no message for the end of a session that the client has asked for."""
        return []

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """An error about the connection itself, such as a wrong acknowledgement, or about a message that there is no
        memory for. The session goes on.
        """
        if error.code == "memory_limit_exceeded" and isinstance(self._dialect, VllmDialect):
            # Its errors are flat, and it counts the responses that it waits for.
            return self._dialect.refuse(error, event_id)
        return [refused_frame(self.context.new_id, error, event_id)]

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """The answer to a frame that was larger than `max_bytes` and was not read. The session goes on."""
        return self._answering.too_large(data, max_bytes)

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. What is wrong with it is answered and changes nothing; nothing is raised.

        Until the dialect is known, appends of audio are held and read after the frame that decides.
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
            # Held audio comes after an update, so that it is read in the format that the update sets.
            waiting = [*waiting, *self._held] if _is_update((waiting or [data])[0]) else [*self._held, *waiting]
            self._held, self._held_bytes = [], 0
        dialect = self._answering
        for frame in waiting:
            received = dialect.feed(frame)
            commands += received.commands
            answers += received.answers
        return Received(commands, answers)

    def send(self, event: Event) -> list[Frame]:
        """The frames of an event; the default dialect is chosen if none is yet, unless the session ends with it.

        Raises LocalProtocolError for an event that the dialect has no frame for.
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
        """Speak this dialect from now on; return what begins its session."""
        self._dialect = dialect
        return [] if isinstance(dialect, VllmDialect) else [dialect.configured()]

    def _decided_by(self, data: str | bytes) -> OpenAIDialect | VllmDialect | None:
        """The dialect that a frame decides for; None for audio, which decides nothing unless the URL names a model. A
        commit decides: vLLM's clients name their model before it.
        """
        assert self._default
        assert self._transcription
        try:
            probe = decode(data, _Probe)
        except RemoteProtocolError:
            # Broken JSON decides for the default dialect, which says what is wrong.
            return self._default
        if probe.type == "input_audio_buffer.append" and not self.opening.model:
            return None
        if probe.type == "session.update" and probe.session is UNSET and self.opening.dialect != "openai":
            # Without `session` and `model` it has the shape of neither dialect: the vLLM dialect says what is missing.
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
    """Whether each of these appends lasts for a multiple of 10 ms at 16 kHz, and not all do at 24 kHz.

    Clients cut their audio by the clock: 640 bytes are 20 ms of the one, 960 of the other.
    """
    try:
        sizes = {len(decode_base64(decode(frame, _Append).audio)) for frame in frames}
    except (RemoteProtocolError, ValueError):
        return False
    return not any(size % 320 for size in sizes) and any(size % 480 for size in sizes)


def _update_to_16_khz(dialect: OpenAIDialect) -> str:
    """The update that a client of speech-to-speech would have sent: 16 kHz both ways, and the user's words."""
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
