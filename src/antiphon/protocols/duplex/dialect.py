"""Full duplex: docs/wire/duplex.md. OpenAI's conversation and what goes beyond it: epochs, overlap, playback, turn states. Sans-IO.

The first frame opens the session; until then nothing is said. Frames with an answer's words and sound carry their epoch, so that what is not
sent yet can be thrown away when it is raised. Frames are numbered as they are sent (journal.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
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
    audio_format,
    capabilities,
    conversation_update,
    duplex_config,
    duplex_fields,
    input_format,
    output_format,
    own_update,
    video_frames,
)
from antiphon.protocols.fields import require, typed
from antiphon.protocols.openai.conversation import EVENTS, OpenAIConversation
from antiphon.protocols.openai.items import check_session_field, position_fields
from antiphon.protocols.wire import MediaFrame, decode_event, frame
from antiphon.turns.eagerness import semantic_vad


@dataclass(slots=True)
class DuplexDialect(OpenAIConversation):
    """One connection. `own`: the session's fields that a conversation does not have. `resume_token`: what resumes it, if anything does.
    `unit_ms`: see Models.
    """

    own_fields: dict[str, Any] = field(default_factory=duplex_fields)
    resume_token: str | None = None
    unit_ms: int = 0
    epoch: int = 0
    # Why the client wants to leave, once it has said so.
    closing: str | None = None
    _sample_bytes: int = 2
    _audio_texts: ResponseAudioTexts = field(default_factory=ResponseAudioTexts)
    # An answer is made, or sounds.
    _responding: bool = False
    _epochs: dict[str, int] = field(default_factory=dict)

    # --- the session ------------------------------------------------------------------------------------------------------

    def begin(self, model: str) -> None:
        """Set the defaults for the model the URL named (as the client spells it)."""
        OpenAIConversation.begin(self, model)
        self.audio = self.audio | {"turn_detection": None}
        self.fields["output"] = self.fields["output"] | {"format": {"type": "pcm16", "rate": 24000}}
        self._set_audio_format({"type": "pcm16", "rate": SAMPLE_RATE_HZ})

    def open(self, session: Mapping[str, Any] | None = None) -> None:
        """Open it, as a first `session.update` asks where there was one. Raises RemoteProtocolError."""
        if session is not None:
            self._apply_update(dict(session))
        self.start()
        token = {"resume_token": self.resume_token} if self.resume_token else {}
        self._add_event("session.created", session_id=self.session_id, session=self.session(), **token)

    def preset(self, session: dict[str, Any]) -> None:
        """Begin with this update, as a short-lived key gives it. Raises RemoteProtocolError."""
        self._apply_update(session)
        self.commands()

    def start(self) -> None:
        """Let the session begin; nothing is said of it."""
        self._add_commands(self.configured())

    def session(self) -> dict[str, Any]:
        """The whole session, in the flat names of this dialect."""
        f = self.fields
        form, out = self.audio["format"], f["output"]
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
            "audio": {
                "input": {"format": form["type"], "sample_rate_hz": form["rate"]},
                "output": {
                    "format": out["format"]["type"],
                    "sample_rate_hz": out["format"]["rate"],
                    "voice": out["voice"],
                    "speed": out["speed"],
                },
            },
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
        """The configuration in force."""
        config = OpenAIConversation.configured(self).config
        own_fields, vad = self.own_fields, self.audio["turn_detection"] or {}
        transcription = config.transcription
        if not vad:
            # Null leaves endpointing to the server. A native model decides by itself, a cascade by a turn detector.
            transcription = replace(transcription, vad=semantic_vad())
        policy = own_fields["overlap_policy"]
        ends = vad.get("interrupt_response") is not False and policy != "listen_only"
        # A partner that takes turns by itself hears who speaks over it.
        ends = ends and bool(vad or not self.unit_ms)
        return ConfigureConversation(
            replace(
                config,
                transcription=replace(transcription, partials=True),
                create_response=self._auto_response,
                interrupt_response=ends,
                reports_transcripts=True,
                allows_backchannels=policy == "auto",
                duplex=duplex_config(own_fields),
            )
        )

    @property
    def _auto_response(self) -> bool:
        vad = self.audio["turn_detection"] or {}
        return (
            self.own_fields["extra_body"].get("auto_response") is not False and vad.get("create_response") is not False
        )

    @property
    def idle_s(self) -> float:
        """After this long without a frame from the client the session expires."""
        return float(self.own_fields["idle_timeout_s"])

    def snapshot(self) -> dict[str, Any]:
        """See OpenAIConversation."""
        return OpenAIConversation.snapshot(self) | {"own": self.own_fields | {"ref_audio": None}, "epoch": self.epoch}

    def restore(self, kept: dict[str, Any]) -> None:
        """See OpenAIConversation. What an answer was saying when it ended is old."""
        OpenAIConversation.restore(self, kept)
        self._set_audio_format(self.audio["format"])
        self.own_fields, self.epoch = kept["own"], kept["epoch"] + 1

    def _apply_update(self, session: dict[str, Any]) -> None:
        """Check an update whole, then put it in force."""
        own_fields = own_update(session)
        fields, given, output = conversation_update(session)
        audio = dict(self.audio)
        for key, value in given.items():
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

    # --- from the client --------------------------------------------------------------------------------------------------

    def _receive_event(self, data: str | bytes) -> None:
        event = decode_event(data)
        mine = event.get("event_id")
        self._event_id = mine if isinstance(mine, str) else None
        self.event(event)

    def event(self, event: dict[str, Any]) -> None:
        """One event, decoded. Raises RemoteProtocolError."""
        name = require(event, "type", str, "type")
        match ALIASES.get(name, name):
            case "session.update":
                session = event.get("session")
                self._apply_update(
                    session if isinstance(session, dict) else {k: v for k, v in event.items() if k != "type"}
                )
                self._add_commands(self.configured())
                self._add_event("session.updated", session_id=self.session_id, session=self.session())
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
                text = require(event, "text", str, "text")
                self._add_commands(
                    CreateItem(
                        Item(self.new_id("item_"), parts=[ContentPart("input_text", text)]), None, self._event_id
                    )
                )
                if self._auto_response:
                    self._add_commands(CreateResponse(event_id=self._event_id))
            case "input.cancel":
                self._resampler.flush()
                self._add_commands(CancelInput(self._event_id))
                self._add_commands(ClearAudio())
            case "barge_in":
                self._add_commands(BargeIn("client_barge_in", self._event_id))
            case "playback.ack":
                self._add_commands(acknowledgement(event, self._event_id))
            case "turn.signal":
                self._handle_turn_signal(event)
            case kind if kind in EVENTS:
                if (
                    kind.startswith("conversation.item.")
                    and kind != "conversation.item.create"
                    and not event.get("item_id")
                ):
                    raise RemoteProtocolError("missing_item_id", f"{kind} needs an item_id.", "item_id")
                if kind == "conversation.item.truncate":
                    event = {"content_index": 0} | event
                OpenAIConversation._receive_event(self, msgspec.json.encode(event))
            case kind:
                raise RemoteProtocolError("unknown_event", f"There is no event '{kind}'.", "type")

    def _append_event(self, event: dict[str, Any]) -> None:
        form = audio_format(event.get("format"), event.get("sample_rate_hz"), self.audio["format"])
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
        """Pass on what the client says about audio over a response. True: the audio is to be dropped."""
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
        answer = event.get("response_create", event.get("create_response", default))
        if final and answer is False and self._auto_response:
            self._add_commands(SkipResponse(self._event_id))
        self._add_commands(CommitAudio(final))
        if final and answer is True and not self._auto_response:
            self._add_commands(CreateResponse(event_id=self._event_id))

    def _handle_turn_signal(self, event: dict[str, Any]) -> None:
        name = require(event, "event", str, "event")
        payload = typed(event.get("payload") or {}, dict, "payload")
        match name:
            case "barge_in" | "input.cancel" | "conversation.item.create" | "conversation.item.delete":
                self.event(payload | {"type": name})
            case "conversation.item.truncate" | "conversation.item.retrieve" | "session.update":
                self.event(payload | {"type": name})
            case "response.cancel":
                wanted = payload.get("response_id", event.get("response_id"))
                self._add_commands(CancelResponse(typed(wanted, (str, type(None)), "response_id"), self._event_id))
            case _:
                self._add_commands(SignalTurn(name, payload, self._event_id))

    # --- to the client ----------------------------------------------------------------------------------------------------

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an output."""
        here = {"session_id": self.session_id, "epoch": self.epoch}
        match output:
            case EpochRaised(epoch):
                self.epoch = epoch
            case TurnStateChanged(event, state, payload):
                self._responding = state in ("assistant_generating", "assistant_playing")
                more = {"payload": payload} if payload else {}
                self._add_event("turn.event", **here, event=event, turn_state=state, **more)
            case OverlapReported(policy, action, reason, facts):
                self._add_event(
                    "overlap.decision", **here, policy=policy, action=action, reason=reason, metadata=dict(facts)
                )
            case SpeakStepTaken(response_id):
                self._add_event("response.speak", **here, response_id=response_id, metadata={})
            case ListenStepTaken(reason):
                shown = {"object": "realtime.response", "status": "listening", "metadata": {"reason": reason}}
                self._add_event("response.listen", **here, response=shown)
            case PlaybackAcknowledged(response_id, item_id, played_ms, committed_ms, cursors, kept):
                known = here | {"type": "playback.acknowledged", "response_id": response_id, "item_id": item_id}
                known |= {"played_ms": played_ms, "committed_ms": committed_ms, "playback": asdict(cursors)}
                self._add_event("playback.acknowledged", event=known | {"history_committed": kept})
            case ResponseCreated(response):
                if response.stored:
                    # One beside the conversation goes on whatever happens in it.
                    self._epochs[response.id] = self.epoch
                self._add_event("response.created", response_id=response.id, response=self._response_json(response))
            case ResponseDone(response):
                self._epochs.pop(response.id, None)
                for item in response.output:
                    self._audio_texts.forget(item.id)
                self._add_event("response.done", response_id=response.id, response=self._response_json(response))
            case ResponseTextDelta(at, text, spoken):
                name = "output_audio_transcript" if spoken else "output_text"
                self._audio_texts.text(at.item_id, text)
                self._add_media_event(at, f"response.{name}.delta", delta=text)
            case ResponseAudioDelta(at, pcm, rate_hz, words):
                self._audio_sent = True
                form = self.fields["output"]["format"]
                if delta := self._audio_texts.sound(at.item_id, pcm, rate_hz, words, form):
                    self._add_media_event(at, "response.output_audio.delta", **delta)
            case ContentPartDone(at, part):
                if part.kind == "output_audio":
                    delta = self._audio_texts.end(at.item_id, self.fields["output"]["format"])
                    self._add_media_event(at, "response.output_audio.delta", **delta)
                OpenAIConversation._add_part_done(self, at, part)
            case SessionEnding(code, message):
                OpenAIConversation.send(self, output)
                kind = "session.expired" if code in ("session_expired", "idle_timeout") else "session.closed"
                self._add_event(kind, session_id=self.session_id, reason=DUPLEX_CODES.get(code, code), message=message)
            case _:
                OpenAIConversation.send(self, output)

    def closed(self) -> None:
        """The client's close was carried out."""
        self._add_event("session.closed", session_id=self.session_id, reason=self.closing or "closed")

    def _add_media_event(
        self, at: ContentPosition, kind: str, *, metadata: Mapping[str, Any] | None = None, **fields: Any
    ) -> None:
        """A frame that is worth nothing once its epoch has passed."""
        epoch = self._epochs.get(at.response_id, self.epoch)
        if epoch < self.epoch:
            return
        facts = {"session_id": self.session_id, "epoch": epoch, "end_of_turn": False} | dict(metadata or {})
        text = frame(type=kind, event_id=self.new_id("event_"), **position_fields(at), **fields, metadata=facts)
        self._frames.append(MediaFrame(text, epoch))

    def _add_overlap_decision(self, action: str, reason: str) -> None:
        self._add_event(
            "overlap.decision",
            session_id=self.session_id,
            epoch=self.epoch,
            policy=self.own_fields["overlap_policy"],
            action=action,
            reason=reason,
            metadata={},
        )

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
        """Answer what the client did wrong."""
        self._event_id = event_id
        self._add_error(error.code, error.message, error.param)
        self._event_id = None

    def too_large(self, max_bytes: int) -> None:
        """A frame over the server's limit came: the connection ends after this."""
        self._event_id = None
        self._add_error("event_too_large", f"The event is larger than {max_bytes} bytes.")
