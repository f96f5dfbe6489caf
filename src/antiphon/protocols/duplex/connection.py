"""The full-duplex dialect (docs/wire/duplex.md): OpenAI's conversation plus epochs, overlap, playback and turn states.

The client's first message opens the session. Frames with text or audio of a response carry the response's epoch, so
that queued frames can be dropped when the session's epoch increases (`transports/journal.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    ContentPart,
    ContentPartDone,
    ContentPosition,
    CreateItem,
    CreateResponse,
    Item,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import (
    AppendFrames,
    BargeIn,
    CancelInput,
    EpochRaised,
    ListenStepTaken,
    OverlapReported,
    PlaybackAcknowledged,
    SignalTurn,
    SkipResponse,
    SpeakStepTaken,
    TurnStateChanged,
)
from antiphon.events.transcription import AppendAudio, ClearAudio, CommitAudio, SessionEnding
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume, WireSnapshot
from antiphon.protocols.duplex.audio import AudioDelta, DeltaFacts, ResponseAudioTexts, duplex_audio
from antiphon.protocols.duplex.commands import (
    DROP_ACTIONS,
    acknowledgement,
    named_item_command,
    overlap_action,
    overlap_command,
    text_or_none,
)
from antiphon.protocols.duplex.messages import (
    SIGNALLED,
    DuplexAppend,
    DuplexBargeIn,
    DuplexCommit,
    DuplexMessage,
    DuplexUpdate,
    Heartbeat,
    InputCancel,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    PlaybackAck,
    PushText,
    SessionClose,
    TurnSignal,
    read_duplex,
)
from antiphon.protocols.duplex.session import DuplexSessionState, DuplexSnapshot
from antiphon.protocols.duplex.session_fields import DUPLEX_CODES, RETRYABLE, DuplexUpdateFields, read_audio_format
from antiphon.protocols.fields import Unread, decode, warnings_of
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.audio_buffer import AudioBuffer, appended
from antiphon.protocols.realtime.commands import FrameReader, command_of
from antiphon.protocols.realtime.conversation_events import ConversationEvents, RunningOutputs
from antiphon.protocols.realtime.input_fields import AudioFormat
from antiphon.protocols.realtime.items import ItemContext, video_frames
from antiphon.protocols.realtime.messages import ClientMessage, InputAudioBufferClear
from antiphon.protocols.realtime.shown_items import ShownOutput, ShownResponse, content_place, response_json
from antiphon.protocols.realtime.transcript_events import TranscriptEvents
from antiphon.protocols.realtime.writer import EventWriter
from antiphon.protocols.resume import Control, control, replaced_frame, resumed_frame
from antiphon.protocols.wire import Frame, Received

# Made once: msgspec's description of a type must not be built by two threads at the same time.
_SNAPSHOTS = msgspec.json.Decoder(DuplexSnapshot)


class DuplexConnection(FrameReader[DuplexMessage]):
    """One full-duplex connection. Errors have the dialect's own codes. A whole update is checked before any of it is
    applied.
    """

    dialect = "duplex"
    too_large_code = "event_too_large"
    # A commit is only valid if there is some new audio.
    min_commit_ms = 1
    finishing = None

    def __init__(self, opening: Opening, context: Context) -> None:
        self.opening = opening
        self.context = context
        self._session = DuplexSessionState(context)
        self._is_open = False
        # Commands that open the session. They are returned with those of the client's first frame.
        self._pending: list[Command] = []
        # The client's reason for ending the session; None until it requests the end.
        self._close_reason: str | None = None
        self._buffer = AudioBuffer(self._session.input_format, duplex_audio(context.max_append_bytes))
        session = self._session
        self._items = ItemContext(
            context.new_id,
            self._buffer.whole,
            session.loaded_voice,
            lambda: session.output.format,
            context.check_tools,
        )
        super().__init__(EventWriter(context.new_id, DUPLEX_CODES, RETRYABLE))
        self._writer.beta = opening.beta
        self._events = ConversationEvents(self._writer, TranscriptEvents(self._writer, context.new_id))
        self._audio_texts = ResponseAudioTexts()
        self._running = RunningOutputs(lambda: ShownOutput(session.output.format, session.output.voice))
        # Whether a response is being generated or played. If not, the client's fields about overlap are ignored.
        self._responding = False
        # For each response in progress, by its id: the epoch in which it began.
        self._epochs: dict[str, int] = {}

    # --- the session

    @property
    def id(self) -> str:
        """The session's id as the client knows it. A restored session keeps its id."""
        return self._session.id

    @property
    def epoch(self) -> int:
        """The session's epoch. Audio and text of older epochs are not sent."""
        return self._session.epoch

    @property
    def idle_s(self) -> float:
        """Idle timeout: seconds without a client's frame after which the session ends (`idle_timeout_s`)."""
        return self._session.own.idle_timeout_s

    @property
    def closing(self) -> bool:
        """Whether the client has requested the end of the session. The server then ends it."""
        return self._close_reason is not None

    def open(self) -> list[Frame]:
        """Apply the defaults. With `autostart`, open the session; otherwise return no frames yet.

        Raises RemoteProtocolError if no conversation model is loaded, if names are strict and the model in the URL is
        unknown, or if the client secret's session has an invalid field.
        """
        name, models = self.opening.model, self.context.conversation_models
        if models is None or not (not name or models.lenient(name) or models.exact(name) or not models.strict):
            raise RemoteProtocolError("model_not_found", f"The model `{name or 'default'}` does not exist.", "model")
        if name and models.exact(name) is None:
            self.context.log_alias(name, models.loaded[0])
        self._session.model = name or models.loaded[0]
        if self.opening.has_session:
            self._update(decode(self.opening.session, DuplexUpdateFields, "session"))
        if self.context.autostart:
            self._begin()
        return self._writer.take()

    def snapshot(self) -> WireSnapshot | None:
        """Return the session's state to store, without the items; None before the first frame."""
        if not self._is_open:
            return None
        return WireSnapshot(self.id, self.dialect, msgspec.Raw(msgspec.json.encode(self._session.snapshot())))

    def restore(self, kept: WireSnapshot) -> None:
        """Continue a session from its stored state. Call it after `open`, but do not send the frames of `open`."""
        self._session.restore(kept.session_id, _SNAPSHOTS.decode(kept.session))
        self._buffer.set_format(self._session.input_format)
        self._is_open = True
        self._pending.append(self._session.configured())

    def _begin(self, warned: Mapping[str, list[Unread]] = MappingProxyType({})) -> None:
        """Open the session. `warned`: warnings about ignored fields in the first update."""
        self._is_open = True
        self._pending.append(self._session.configured())
        head = {"type": "session.created", "event_id": self.context.new_id("event_"), "session_id": self.id}
        token = {"resume_token": self._session.resume_token} if self._session.resume_token else {}
        self._writer.add(Frame({**head, "session": self._session.shown(), **token, **warned}, numbered=False))

    # --- from the client

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. An invalid frame only returns an error for the client; nothing is raised.

        If the first frame is an update, it opens the session with its fields; if a field is invalid, the session is not
        opened. Any other first frame opens the session with the defaults, and is then read as usual.
        """
        commands: list[Command] = []
        if isinstance(data, AppendAudio):
            commands = [data]
        elif self._is_open or not self._opened_by(data):
            commands = self._asked(data)
        pending, self._pending = self._pending, []
        return Received([*pending, *commands], self._writer.take())

    def _read(self, data: str | bytes) -> DuplexMessage:
        return read_duplex(data)

    def _opened_by(self, data: str | bytes) -> bool:
        """Open the session with its first frame. Return True if that frame needs no further reading."""
        update = _first_update(data)
        try:
            if update:
                self._pending += self._update(_update_fields(update, data))
        except RemoteProtocolError as error:
            self._writer.error(error, None)
            return True
        self._begin(_warned(update, data, self._session.unspoken) if update else {})
        return update is not None

    def control(self, data: str | bytes) -> Control | None:
        """Return the message if it concerns the connection itself, such as `session.resume`. Otherwise return None."""
        return control(data)

    def _commands(self, message: ClientMessage, data: str | bytes | msgspec.Raw) -> list[Command]:
        """Return the commands of a message. `data`: its JSON text, where an update's fields may be at the top level."""
        match message:
            case DuplexUpdate():
                held_back = self._update(_update_fields(message, data))
                warned = _warned(message, data, self._session.unspoken)
                self._writer.event("session.updated", session_id=self.id, session=self._session.shown(), **warned)
                return [*held_back, self._session.configured()]
            case Heartbeat():
                self._writer.event("session.heartbeat_ack", session_id=self.id)
                return []
            case SessionClose(reason=reason):
                self._close_reason = reason if isinstance(reason, str) and reason else "client_close"
                return []
            case DuplexAppend():
                return self._append(message)
            case DuplexCommit():
                return self._commit(message)
            case InputAudioBufferClear():
                self._buffer.flush()
                return [ClearAudio()]
            case PushText(text=text):
                item = Item(self.context.new_id("item_"), parts=[ContentPart("input_text", text)])
                responds = [CreateResponse(event_id=message.own_id)] if self._session.responds else []
                return [CreateItem(item, None, message.own_id), *responds]
            case InputCancel():
                self._buffer.flush()
                return [CancelInput(message.own_id), ClearAudio()]
            case DuplexBargeIn():
                return [BargeIn("client_barge_in", message.own_id)]
            case PlaybackAck():
                return [acknowledgement(message)]
            case TurnSignal():
                return self._signal(message)
            case ItemRetrieve() | ItemTruncate() | ItemDelete():
                return [named_item_command(message)]
            case _:
                return [command_of(message, self._items)]  # type: ignore[arg-type]

    def _signal(self, message: TurnSignal) -> list[Command]:
        # Null, false, 0, an empty string and an empty list count as missing.
        is_missing = bytes(message.payload) in (b"null", b"false", b"0", b'""', b"[]")
        payload = msgspec.Raw(b"{}") if is_missing else message.payload
        if kind := SIGNALLED.get(message.event):
            inner = decode(payload, kind, "payload")
            if message.event.startswith("conversation.item."):
                # Errors about these messages quote the payload's `event_id`, if it has one.
                self._event_id = inner.own_id
            else:
                inner.event_id = message.event_id
            return self._commands(inner, payload)
        fields = decode(payload, dict[str, Any], "payload")
        if message.event == "response.cancel":
            return [CancelResponse(text_or_none(fields.get("response_id", message.response_id)), message.own_id)]
        return [SignalTurn(message.event, fields, message.own_id)]

    def _update(self, given: DuplexUpdateFields) -> list[Command]:
        """Apply an update. Returns the audio that was held back in the previous format. Raises RemoteProtocolError."""
        self._session.update(given)
        return self._set_format(self._session.input_format)

    def _set_format(self, form: AudioFormat) -> list[Command]:
        """Set the format of later appends. Returns the audio that was held back in the previous format."""
        if form == self._buffer.format:
            return []
        self._session.set_input_format(form)
        return [*appended(self._buffer.change_format(form))]

    def _append(self, message: DuplexAppend) -> list[Command]:
        form = read_audio_format(message.format, message.sample_rate_hz, self._buffer.format)
        commands = self._set_format(form)
        if message.video_frames is not None:
            commands.append(AppendFrames(video_frames(message.video_frames)))
        pcm = self._buffer.feed(message.audio)
        is_dropped = overlap_action(message) in DROP_ACTIONS and self._responding
        silent = message.is_speech is False and self._responding
        if is_dropped:
            report = OverlapReported(self._session.own.overlap_policy, "drop", "client_overlap_action")
            write_turn_event(self._writer, report, self.id, self.epoch)
        elif command := overlap_command(message, silent=silent):
            commands.append(command)
            silent = False
        return [*commands, *appended(np.zeros_like(pcm) if is_dropped or silent else pcm)]

    def _commit(self, message: DuplexCommit) -> list[Command]:
        commands: list[Command] = [*appended(self._buffer.flush())]
        final, wants_response = message.final is not False, message.wants_response
        if final and wants_response is False and self._session.responds:
            commands.append(SkipResponse(message.own_id))
        commands.append(CommitAudio(final, message.own_id))
        if final and wants_response is True and not self._session.responds:
            commands.append(CreateResponse(event_id=message.own_id))
        return commands

    # --- to the client

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event. Drops text and audio of a response from an older epoch.

        Raises LocalProtocolError for an event that cannot occur in a conversation.
        """
        self._write(event)
        return self._writer.take()

    def close(self) -> list[Frame]:
        """Return `session.closed`. The server calls it after it has closed the session at the client's request."""
        self._writer.event("session.closed", session_id=self.id, reason=self._close_reason or "closed")
        return self._writer.take()

    def resumed(self, token: str, **facts: Any) -> Frame:
        """Return the `session.resumed` frame with a new token. `facts` are additional fields."""
        self._session.resume_token = token
        return resumed_frame(self.context.new_id, self.id, self._session.shown(), resume_token=token, **facts)

    def replaced(self) -> Frame:
        """Return `session.replaced`: the last frame to a connection whose session another connection has resumed."""
        return replaced_frame(self.context.new_id, self.id)

    def _write(self, event: Event) -> None:
        match event:
            case EpochRaised(epoch):
                self._session.epoch = epoch
            case TurnStateChanged() | OverlapReported() | SpeakStepTaken() | ListenStepTaken() | PlaybackAcknowledged():
                if isinstance(event, TurnStateChanged):
                    self._responding = event.state in ("assistant_generating", "assistant_playing")
                write_turn_event(self._writer, event, self.id, self.epoch)
            case ResponseCreated(response):
                if response.stored:
                    # A response outside of the conversation has no epoch, because nothing in the conversation
                    # interrupts it.
                    self._epochs[response.id] = self.epoch
                shown = self._response(response, self._running.of(response.id))
                self._writer.event("response.created", response_id=response.id, response=shown)
            case ResponseDone(response):
                self._epochs.pop(response.id, None)
                for item in response.output:
                    self._audio_texts.forget(item.id)
                shown = self._response(response, self._running.ended(response.id))
                self._writer.event("response.done", response_id=response.id, response=shown)
            case ResponseTextDelta() | ResponseAudioDelta() | ContentPartDone():
                self._write_content(event)
            case SessionEnding(code, message):
                self._events.write(event)
                kind = "session.expired" if code in ("session_expired", "idle_timeout") else "session.closed"
                self._writer.event(kind, session_id=self.id, reason=DUPLEX_CODES.get(code, code), message=message)
            case _:
                self._events.write(event)

    def _write_content(self, event: ResponseTextDelta | ResponseAudioDelta | ContentPartDone) -> None:
        position, form = event.at, self._running.of(event.at.response_id).format
        match event:
            case ResponseTextDelta(_, text, spoken):
                name = "output_audio_transcript" if spoken else "output_text"
                self._audio_texts.add_text(position.item_id, text)
                self._media(position, f"response.{name}.delta", delta=text)
            case ResponseAudioDelta(_, pcm, rate_hz, words):
                self._session.has_spoken = True
                if delta := self._audio_texts.add_audio(position.item_id, pcm, rate_hz, words, form):
                    self._audio_delta(position, delta)
            case ContentPartDone(_, part):
                if part.kind == "output_audio":
                    self._audio_delta(position, self._audio_texts.end(position.item_id, form))
                self._events.part_done(position, part)

    def _media(self, position: ContentPosition, kind: str, *, facts: DeltaFacts | None = None, **fields: Any) -> None:
        """Queue text or audio of a response, marked with its epoch. No-op if that epoch has passed."""
        epoch = self._epochs.get(position.response_id, self.epoch)
        if epoch < self.epoch:
            return
        metadata = {"session_id": self.id, "epoch": epoch, "end_of_turn": False, **(facts or {})}
        head = {"type": self._writer.name(kind), "event_id": self.context.new_id("event_"), **content_place(position)}
        self._writer.add(Frame({**head, **fields, "metadata": metadata}, epoch))

    def _audio_delta(self, position: ContentPosition, delta: AudioDelta) -> None:
        self._media(
            position,
            "response.output_audio.delta",
            facts=delta.facts,
            delta=delta.audio,
            format=delta.format,
            sample_rate_hz=delta.rate_hz,
        )

    def _response(self, response: Response, output: ShownOutput) -> ShownResponse:
        return response_json(response, self.id, output, beta=self._writer.beta)


TurnEvent = TurnStateChanged | OverlapReported | SpeakStepTaken | ListenStepTaken | PlaybackAcknowledged


def write_turn_event(writer: EventWriter, event: TurnEvent, session_id: str, epoch: int) -> None:
    """Queue the message for an event. `epoch`: the session's current epoch."""
    match event:
        case TurnStateChanged(name, state, payload):
            more = {"payload": payload} if payload else {}
            writer.event("turn.event", session_id=session_id, epoch=epoch, event=name, turn_state=state, **more)
        case OverlapReported(policy, action, reason):
            writer.event(
                "overlap.decision",
                session_id=session_id,
                epoch=epoch,
                policy=policy,
                action=action,
                reason=reason,
                metadata={},
            )
        case SpeakStepTaken(response_id):
            writer.event("response.speak", session_id=session_id, epoch=epoch, response_id=response_id, metadata={})
        case ListenStepTaken(reason):
            response = {"object": "realtime.response", "status": "listening", "metadata": {"reason": reason}}
            writer.event("response.listen", session_id=session_id, epoch=epoch, response=response)
        case PlaybackAcknowledged():
            # Only this event has nested fields.
            acknowledged = {
                "session_id": session_id,
                "epoch": epoch,
                "type": "playback.acknowledged",
                "response_id": event.response_id,
                "item_id": event.item_id,
                "played_ms": event.played_ms,
                "committed_ms": event.committed_ms,
                "playback": asdict(event.cursors),
                "history_committed": event.history_exact,
            }
            writer.event("playback.acknowledged", event=acknowledged)


def _first_update(data: str | bytes) -> DuplexUpdate | None:
    """Decode the frame as an update, under either name. Returns None if it is another message or invalid."""
    try:
        message = read_duplex(data)
    except RemoteProtocolError:
        return None
    return message if isinstance(message, DuplexUpdate) else None


def _update_fields(message: DuplexUpdate, data: str | bytes | msgspec.Raw) -> DuplexUpdateFields:
    """Return the session's fields in an update, from `session` or from the top level."""
    if message.session is not UNSET and bytes(message.session)[:1] == b"{":
        return decode(message.session, DuplexUpdateFields, "session")
    return decode(data, DuplexUpdateFields)


def _warned(message: DuplexUpdate, data: str | bytes | msgspec.Raw, unspoken: list[Unread]) -> dict[str, list[Unread]]:
    """Return the `warnings` field of the answer to an update: ignored fields and `unspoken`. {} without warnings."""
    if message.session is not UNSET and bytes(message.session)[:1] == b"{":
        # Fields next to `session` are not read.
        found = warnings_of(data, DuplexUpdate) + warnings_of(message.session, DuplexUpdateFields, "session")
    else:
        found = warnings_of(data, DuplexUpdateFields, also=FLAT_FIELDS)
    found += unspoken
    return {"warnings": found} if found else {}


# The fields that an update has at its top level in addition to the session's fields.
FLAT_FIELDS = ("type", "event_id", "session")

DIALECT = Dialect(
    name="duplex",
    matches=lambda opening: opening.duplex or opening.path == "/v1/duplex",
    connect=DuplexConnection,
    paths=("/v1/duplex",),
    resume=Resume.ALWAYS,
    client_first=True,
    subprotocol="realtime",
    opens_secret=lambda opening: not opening.is_transcription,
)
