"""The full-duplex dialect: docs/wire/duplex.md. OpenAI's conversation with epochs, overlap, playback and turn states.

Frames with text or audio of a response carry its epoch, so that those that wait can be dropped when the epoch is raised
(resume/journal.py). What opens the session is in connection.py, the session's own fields are in session_fields.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import Resampler
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    ConfigureConversation,
    ContentPart,
    ContentPartDone,
    ContentPosition,
    ConversationEvent,
    CreateItem,
    CreateResponse,
    Item,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.data_uri import decode_base64
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
from antiphon.events.transcription import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    SessionEnding,
    TranscriptionEvent,
)
from antiphon.protocols.duplex.audio import ResponseAudioTexts, decoder
from antiphon.protocols.duplex.commands import DROP_ACTIONS, acknowledgement, overlap_action, overlap_command
from antiphon.protocols.duplex.session_fields import (
    ALIASES,
    DUPLEX_CODES,
    RETRYABLE,
    AudioFormat,
    audio_json,
    capabilities,
    conversation_update,
    duplex_config,
    duplex_fields,
    input_format,
    output_format,
    own_update,
    read_audio_format,
    video_frames,
)
from antiphon.protocols.duplex.turn_events import overlap_fields, turn_event
from antiphon.protocols.fields import require, typed
from antiphon.protocols.openai.conversation import EVENTS, OpenAIConversation
from antiphon.protocols.openai.items import position_fields
from antiphon.protocols.openai.session_fields import check_session_field
from antiphon.protocols.wire import Frame, decode_event
from antiphon.turns.eagerness import semantic_vad


@dataclass(slots=True)
class DuplexDialect(OpenAIConversation):
    """One connection. Call `begin` first, which sets the session's defaults, then `open` or `restore`.

    Errors have the dialect's own codes; an update is checked as a whole before anything of it is in force.
    """

    # The fields that a conversation does not have, as the client is shown them; `ref_audio` is the file's bytes.
    own_fields: dict[str, Any] = field(default_factory=duplex_fields)
    # The token that resumes the session, where it can be resumed.
    resume_token: str | None = None
    # The milliseconds of a native model's unit; 0 for a cascade.
    unit_ms: int = 0
    # The session's epoch: audio and text of an older one are not sent any more.
    epoch: int = 0
    # Why the client has asked for the end of the session, once it has.
    closing: str | None = None
    _sample_bytes: int = 2
    _audio_texts: ResponseAudioTexts = field(default_factory=ResponseAudioTexts)
    # A response is generated or played: what the client says about overlap counts.
    _responding: bool = False
    # The epochs in which the responses under way began, by id.
    _epochs: dict[str, int] = field(default_factory=dict)

    # --- the session

    def begin(self, model: str) -> None:
        """Set the session's defaults; nothing is queued.

        `model` is the name in the URL, shown as the client spells it.
        """
        OpenAIConversation.begin(self, model)
        self.audio = self.audio | {"turn_detection": None}
        self.fields["output"] = self.fields["output"] | {"format": {"type": "pcm16", "rate": 24000}}
        self._set_audio_format({"type": "pcm16", "rate": SAMPLE_RATE_HZ})

    def open(self, session: Mapping[str, Any] | None = None) -> None:
        """Open the session with the fields of a first `session.update`, or with its defaults: queue `session.created`.

        Raises RemoteProtocolError for a field that is wrong; the session can then still be opened.
        """
        if session is not None:
            self._apply_update(dict(session))
        self.start()
        fields = {
            "type": "session.created",
            "event_id": self.new_id("event_"),
            "session_id": self.session_id,
            "session": self.session(),
        }
        token = {"resume_token": self.resume_token} if self.resume_token else {}
        self._frames.append(Frame(fields | token, numbered=False))

    def preset(self, session: dict[str, Any]) -> None:
        """Apply an update before the session is opened, for a client secret. Nothing is queued.

        Raises RemoteProtocolError for a field that is wrong, and then changes nothing.
        """
        self._apply_update(session)
        self.commands()

    def start(self) -> None:
        """Queue the configuration, with which the session begins. The client is sent nothing."""
        self._add_commands(self.configured())

    def session(self) -> dict[str, Any]:
        """The whole session as JSON values, in the flat names of this dialect and without `ref_audio`."""
        f, form, out = self.fields, self.audio["format"], self.fields["output"]
        return {
            "id": self.session_id,
            "session_id": self.session_id,
            "object": "realtime.session",
            "type": "realtime",
            "model": self.model,
            "expires_at": self.expires_at,
            "modalities": ["audio", "text"] if f["output_modalities"] == ["audio"] else ["text"],
            "instructions": f["instructions"],
            "voice": out["voice"],
            "input_audio_format": form["type"],
            "output_audio_format": out["format"]["type"],
            "sample_rate_hz": form["rate"],
            "audio": audio_json(form, out),
            "turn_detection": self.audio["turn_detection"],
            "input_audio_transcription": self.audio["transcription"],
            "tools": f["tools"],
            "tool_choice": f["tool_choice"],
            "max_response_output_tokens": f["max_output_tokens"],
            **{k: v for k, v in self.own_fields.items() if k != "ref_audio"},
            "epoch": self.epoch,
            "capabilities": capabilities(
                unit_ms=self.unit_ms, speaks=bool(self.voices), resumes=self.resume_token is not None
            ),
        }

    def configured(self) -> Any:
        """The session's configuration as a command (ConfigureConversation), which begins the session or changes it at
        once.
        """
        config = OpenAIConversation.configured(self).config
        vad = self.audio["turn_detection"] or {}
        transcription = config.transcription
        if not vad:
            # Null leaves endpointing to the server. A native model decides by itself, a cascade by a turn detector.
            transcription = replace(transcription, vad=semantic_vad())
        policy = self.own_fields["overlap_policy"]
        # A native model hears the user speak over it, and decides by itself unless the client sets turn detection.
        interrupts = bool(vad or not self.unit_ms)
        interrupts = interrupts and vad.get("interrupt_response") is not False and policy != "listen_only"
        return ConfigureConversation(
            replace(
                config,
                transcription=replace(transcription, partials=True),
                create_response=self._auto_response,
                interrupt_response=interrupts,
                reports_transcripts=True,
                allows_backchannels=policy == "auto",
                duplex=duplex_config(self.own_fields),
            )
        )

    @property
    def _auto_response(self) -> bool:
        """Whether a turn is answered without being asked."""
        vad, extra = self.audio["turn_detection"] or {}, self.own_fields["extra_body"]
        return extra.get("auto_response") is not False and vad.get("create_response") is not False

    @property
    def idle_s(self) -> float:
        """How many seconds may pass without a frame of the client before the session expires (`idle_timeout_s`)."""
        return float(self.own_fields["idle_timeout_s"])

    def snapshot(self) -> dict[str, Any]:
        """The session's configuration and epoch as JSON values, for `restore`. `ref_audio` is not stored."""
        return OpenAIConversation.snapshot(self) | {"own": self.own_fields | {"ref_audio": None}, "epoch": self.epoch}

    def restore(self, kept: dict[str, Any]) -> None:
        """Take the configuration of an earlier session, of which `kept` is the snapshot. Nothing is queued.

        The epoch is raised, so that nothing of a response from before is sent.
        """
        OpenAIConversation.restore(self, kept)
        self._set_audio_format(self.audio["format"])
        self.own_fields, self.epoch = kept["own"], kept["epoch"] + 1

    def _apply_update(self, session: dict[str, Any]) -> None:
        """Check a whole update, then apply it. A wrong field refuses all of it."""
        own_fields = own_update(session)
        fields, inputs, output = conversation_update(session)
        audio = dict(self.audio)
        for key, value in inputs.items():
            audio[key] = self._check_input(key, value)
        merged = dict(self.fields)
        for key, value in fields.items():
            merged[key] = check_session_field(key, value, speaks=bool(self.voices))
        form, out_form = input_format(session, audio["format"]), output_format(session, merged["output"]["format"])
        if output:
            merged["output"] = self._check_output(output)
        merged["output"] = merged["output"] | {"format": out_form}
        if own_fields.get("ref_audio") is not None and not self.unit_ms:
            self.log_alias("a voice cloned from ref_audio", merged["output"]["voice"] or "nobody")
        self.audio, self.fields, self.own_fields = audio, merged, self.own_fields | own_fields
        if isinstance(session.get("model"), str) and session["model"]:
            self.model = session["model"]
        if form != self.audio["format"]:
            self._flush_audio()
            self._set_audio_format(form)

    def _check_input(self, key: str, value: Any) -> Any:
        param = f"session.{key}"
        if key != "turn_detection" or value is None:
            return self._check_input_field(key, value, param)
        given = dict(typed(value, dict, param))
        least_ms = given.pop("min_speech_duration_ms", 96)
        if given.get("type", "server_vad") not in ("server_vad", "semantic_vad"):
            raise RemoteProtocolError(
                "unsupported_turn_detection", "Turn detection is null, server_vad or semantic_vad.", f"{param}.type"
            )
        checked = self._check_input_field(key, given, param)
        return checked | ({"min_speech_duration_ms": least_ms} if checked["type"] == "server_vad" else {})

    def _set_audio_format(self, form: AudioFormat) -> None:
        self.audio = self.audio | {"format": form}
        self._decode, self._sample_bytes = decoder(form)
        self._resampler = Resampler(form["rate"], SAMPLE_RATE_HZ)

    # --- from the client

    def _receive_event(self, data: str | bytes) -> None:
        event = decode_event(data)
        self._event_id = _event_id(event)
        self._handle_event(event)

    def _handle_event(self, event: dict[str, Any]) -> None:
        name = require(event, "type", str, "type")
        match ALIASES.get(name, name):
            case "session.update":
                self._update_event(event)
            case "session.heartbeat":
                self._add_event("session.heartbeat_ack", session_id=self.session_id)
            case "session.close":
                reason = event.get("reason")
                self.closing = reason if isinstance(reason, str) and reason else "client_close"
            case "input_audio_buffer.append":
                self._append_event(event)
            case "input_audio_buffer.commit" | "input.commit":
                self._commit_event(event, default=True if name == "input.commit" else None)
            case "push_text":
                self._text_event(event)
            case "input.cancel":
                self._resampler.flush()
                self._add_commands(CancelInput(self._event_id), ClearAudio())
            case "barge_in":
                self._add_commands(BargeIn("client_barge_in", self._event_id))
            case "playback.ack":
                self._add_commands(acknowledgement(event, self._event_id))
            case "turn.signal":
                self._handle_turn_signal(event)
            case kind if kind in EVENTS:
                self._conversation_event(kind, event)
            case kind:
                raise RemoteProtocolError("unknown_event", f"There is no event '{kind}'.", "type")

    def _update_event(self, event: dict[str, Any]) -> None:
        session = event.get("session")
        if not isinstance(session, dict):
            session = {k: v for k, v in event.items() if k != "type"}
        self._apply_update(session)
        self._add_commands(self.configured())
        self._add_event("session.updated", session_id=self.session_id, session=self.session())

    def _text_event(self, event: dict[str, Any]) -> None:
        text = require(event, "text", str, "text")
        item = Item(self.new_id("item_"), parts=[ContentPart("input_text", text)])
        self._add_commands(CreateItem(item, None, self._event_id))
        if self._auto_response:
            self._add_commands(CreateResponse(event_id=self._event_id))

    def _conversation_event(self, kind: str, event: dict[str, Any]) -> None:
        """Read an event that a conversation has too. Inside a `turn.signal`, errors repeat its own id, if any."""
        names_item = kind.startswith("conversation.item.") and kind != "conversation.item.create"
        if names_item and not event.get("item_id"):
            raise RemoteProtocolError("missing_item_id", f"{kind} needs an item_id.", "item_id")
        if kind == "conversation.item.truncate":
            event = {"content_index": 0} | event
        self._event_id = _event_id(event)
        OpenAIConversation._handle_event(self, event)

    def _append_event(self, event: dict[str, Any]) -> None:
        form = read_audio_format(event.get("format"), event.get("sample_rate_hz"), self.audio["format"])
        if form != self.audio["format"]:
            self._flush_audio()
            self._set_audio_format(form)
        if event.get("video_frames") is not None:
            self._add_commands(AppendFrames(video_frames(event["video_frames"])))
        pcm = self._resampler.feed(self._decode_audio(require(event, "audio", str, "audio"), "audio"))
        if self._apply_overlap(event):
            pcm = np.zeros_like(pcm)
        if len(pcm):
            self._add_commands(AppendAudio(pcm))

    def _decode_audio(self, text: str, param: str) -> Pcm:
        try:
            data = decode_base64(text)
        except ValueError:
            raise RemoteProtocolError("bad_audio", "Sound comes in base64.", param) from None
        if len(data) > self.max_append_bytes or len(data) % self._sample_bytes:
            raise RemoteProtocolError(
                "bad_audio",
                f"{len(data)} bytes are no whole number of samples, or over {self.max_append_bytes}.",
                param,
            )
        pcm = self._decode(data)
        if not np.isfinite(pcm).all():
            raise RemoteProtocolError("bad_audio", "A sample is not a finite number.", param)
        return pcm

    def _apply_overlap(self, event: dict[str, Any]) -> bool:
        """Queue what an append says about audio over a response. True: the audio itself counts as silence."""
        if overlap_action(event) in DROP_ACTIONS and self._responding:
            self._add_overlap_decision("drop", "client_overlap_action")
            return True
        silent = event.get("is_speech") is False and self._responding
        if command := overlap_command(event, self._event_id, silent=silent):
            self._add_commands(command)
            return False
        return silent

    def _commit_event(self, event: dict[str, Any], default: bool | None) -> None:
        self._flush_audio()
        final = event.get("final") is not False
        wants_response = event.get("response_create", event.get("create_response", default))
        if final and wants_response is False and self._auto_response:
            self._add_commands(SkipResponse(self._event_id))
        self._add_commands(CommitAudio(final))
        if final and wants_response is True and not self._auto_response:
            self._add_commands(CreateResponse(event_id=self._event_id))

    def _handle_turn_signal(self, event: dict[str, Any]) -> None:
        name = require(event, "event", str, "event")
        payload = typed(event.get("payload") or {}, dict, "payload")
        match name:
            case (
                "barge_in"
                | "input.cancel"
                | "session.update"
                | "conversation.item.create"
                | "conversation.item.delete"
                | "conversation.item.truncate"
                | "conversation.item.retrieve"
            ):
                self._handle_event(payload | {"type": name})
            case "response.cancel":
                wanted = payload.get("response_id", event.get("response_id"))
                self._add_commands(CancelResponse(typed(wanted, (str, type(None)), "response_id"), self._event_id))
            case _:
                self._add_commands(SignalTurn(name, payload, self._event_id))

    # --- to the client

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an event. Text and audio of a response from an older epoch are dropped.

        Raises LocalProtocolError for an event that no conversation reports.
        """
        match output:
            case EpochRaised(epoch):
                self.epoch = epoch
            case TurnStateChanged() | OverlapReported() | SpeakStepTaken() | ListenStepTaken() | PlaybackAcknowledged():
                if isinstance(output, TurnStateChanged):
                    self._responding = output.state in ("assistant_generating", "assistant_playing")
                kind, fields = turn_event(output, self.session_id, self.epoch)
                self._add_event(kind, **fields)
            case ResponseCreated(response):
                if response.stored:
                    # A response beside the conversation is in no epoch: it goes on whatever happens there.
                    self._epochs[response.id] = self.epoch
                self._add_event("response.created", response_id=response.id, response=self._response_json(response))
            case ResponseDone(response):
                self._epochs.pop(response.id, None)
                for item in response.output:
                    self._audio_texts.forget(item.id)
                self._add_event("response.done", response_id=response.id, response=self._response_json(response))
            case ResponseTextDelta(position, text, spoken):
                name = "output_audio_transcript" if spoken else "output_text"
                self._audio_texts.add_text(position.item_id, text)
                self._add_media_event(position, f"response.{name}.delta", delta=text)
            case ResponseAudioDelta(position, pcm, rate_hz, words):
                self._audio_sent = True
                form = self.fields["output"]["format"]
                if delta := self._audio_texts.add_audio(position.item_id, pcm, rate_hz, words, form):
                    self._add_media_event(position, "response.output_audio.delta", **delta)
            case ContentPartDone(position, part):
                if part.kind == "output_audio":
                    delta = self._audio_texts.end(position.item_id, self.fields["output"]["format"])
                    self._add_media_event(position, "response.output_audio.delta", **delta)
                self._add_part_done(position, part)
            case SessionEnding(code, message):
                OpenAIConversation.send(self, output)
                kind = "session.expired" if code in ("session_expired", "idle_timeout") else "session.closed"
                self._add_event(kind, session_id=self.session_id, reason=DUPLEX_CODES.get(code, code), message=message)
            case _:
                OpenAIConversation.send(self, output)

    def closed(self) -> None:
        """Queue `session.closed`: the end that the client has asked for was carried out."""
        self._add_event("session.closed", session_id=self.session_id, reason=self.closing or "closed")

    def _add_media_event(
        self, position: ContentPosition, kind: str, *, metadata: Mapping[str, Any] | None = None, **fields: Any
    ) -> None:
        """Queue text or audio of a response with its epoch, unless that has passed."""
        epoch = self._epochs.get(position.response_id, self.epoch)
        if epoch < self.epoch:
            return
        facts = {"session_id": self.session_id, "epoch": epoch, "end_of_turn": False} | dict(metadata or {})
        head = {"type": kind, "event_id": self.new_id("event_")}
        self._frames.append(Frame(head | position_fields(position) | fields | {"metadata": facts}, epoch))

    def _add_overlap_decision(self, action: str, reason: str) -> None:
        policy = self.own_fields["overlap_policy"]
        self._add_event("overlap.decision", **overlap_fields(self.session_id, self.epoch, policy, action, reason, {}))

    def _add_error(
        self, code: str, message: str, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        code = DUPLEX_CODES.get(code, code)
        error: dict[str, Any] = {
            "type": "rate_limit_error" if code in RETRYABLE else kind,
            "code": code,
            "message": message,
        }
        error |= {"retryable": True} if code in RETRYABLE else {}
        error |= {"param": param} if param else {}
        error |= {"event_id": self._event_id} if self._event_id else {}
        self._add_event("error", error=error)

    def reject(self, error: RemoteProtocolError, event_id: str | None) -> None:
        """Queue an error of the client's, with the id of its event if that had one. The session goes on."""
        self._event_id = event_id
        self._add_error(error.code, error.message, error.param)
        self._event_id = None

    def too_large(self, max_bytes: int) -> None:
        """Queue an error: a frame was larger than `max_bytes`. Call it in place of `receive`. The session goes on."""
        self._event_id = None
        self._add_error("event_too_large", f"The event is larger than {max_bytes} bytes.")


def _event_id(event: dict[str, Any]) -> str | None:
    found = event.get("event_id")
    return found if isinstance(found, str) else None
