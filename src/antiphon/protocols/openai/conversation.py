"""OpenAI's Realtime conversation, GA and beta names: docs/wire/openai-realtime.md.

Its input (formats, turn detection, transcripts of the user) is that of a transcription session, which this extends. The
JSON of items and responses is made by items.py, that of the session by session_fields.py.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

from antiphon.audio import Pcm
from antiphon.audio.g711 import to_alaw, to_ulaw
from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDelta,
    ArgumentsDone,
    CancelResponse,
    ClearOutputAudio,
    CommandRejected,
    ConfigureConversation,
    ContentPart,
    ContentPartAdded,
    ContentPartDone,
    ContentPosition,
    ConversationConfig,
    ConversationEvent,
    CreateItem,
    DeleteItem,
    IdleTimeoutReached,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    ItemTruncated,
    OutputItemAdded,
    OutputItemDone,
    PlaybackCleared,
    PlaybackStarted,
    PlaybackStopped,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    RetrieveItem,
    TruncateItem,
    UserTurnCommitted,
    UserTurnStarted,
)
from antiphon.events.transcription import (
    ClearAudio,
    CommitAudio,
    OverlapDecided,
    OverlapStarted,
    ServerVad,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCommitted,
)
from antiphon.protocols.fields import known, number, require, typed
from antiphon.protocols.openai.input_fields import check_conversation_vad, check_format, default_input
from antiphon.protocols.openai.items import (
    item_from,
    item_json,
    part_json,
    position_fields,
    response_from,
    response_json,
    tool_choice_from,
    tools_from,
)
from antiphon.protocols.openai.session_fields import (
    beta_session_json,
    check_session_field,
    ga_session_json,
    read_beta_update,
    read_ga_update,
    truncation_from,
    uses_beta_names,
)
from antiphon.protocols.openai.transcription import NO_OBJECT, NOT_JSON, OpenAITranscription
from antiphon.protocols.wire import decode_event
from antiphon.turns.eagerness import semantic_vad

# What a client may send, as errors list it.
EVENTS = (
    "session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
    "conversation.item.create",
    "conversation.item.retrieve",
    "conversation.item.truncate",
    "conversation.item.delete",
    "response.create",
    "response.cancel",
)
# Events that have another name in the beta, and those that it does not have.
_BETA_EVENTS = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "conversation.item.added": "conversation.item.created",
}
_BETA_SILENT = frozenset(("conversation.item.done",))


@dataclass(slots=True)
class OpenAIConversation(OpenAITranscription):
    """One connection. Call `begin` first, which sets the session's defaults; nothing here waits."""

    # The conversation model's voices; the first is the default. With none, responses are text.
    voices: tuple[str, ...] = ()
    # The server plays the audio of responses itself, on a WebRTC track: it is in no event.
    server_plays: bool = False
    # The model's name as the client spells it.
    model: str = ""
    # The session's fields but `audio.input`, as the client is shown them in the GA names.
    fields: dict[str, Any] = field(default_factory=dict)
    # The client was sent audio: the voice cannot be changed any more.
    _audio_sent: bool = False
    # By item: a response beside the conversation may be spoken at the same time.
    _output_resamplers: dict[str, Resampler] = field(default_factory=dict)

    def begin(self, model: str) -> None:
        """Set the session's defaults; nothing is queued.

        `model` is the name in the URL, shown as the client spells it.
        """
        self.model = model
        self.audio = default_input("") | {"transcription": None}
        self.audio["turn_detection"] |= {"create_response": True, "interrupt_response": True, "idle_timeout_ms": None}
        self.fields = {
            "output_modalities": ["audio"] if self.voices else ["text"],
            "instructions": "",
            "tools": [],
            "tool_choice": "auto",
            "max_output_tokens": "inf",
            "truncation": "auto",
            "tracing": None,
            "prompt": None,
            "include": None,
            "output": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "voice": self.voices[0] if self.voices else "",
                "speed": 1.0,
            },
        }

    def configured(self) -> Any:
        """The session's configuration as a command (ConfigureConversation), which begins the session or changes it at
        once.
        """
        f, vad = self.fields, self.audio["turn_detection"] or {}
        most = f["max_output_tokens"]
        return ConfigureConversation(
            ConversationConfig(
                self._transcription_config(),
                instructions=f["instructions"],
                audio_output=f["output_modalities"] == ["audio"],
                voice=self._loaded_voice(f["output"]["voice"]),
                speed=f["output"]["speed"],
                tools=tools_from(f["tools"]),
                tool_choice=tool_choice_from(f["tool_choice"]),
                max_tokens=None if most == "inf" else most,
                create_response=vad.get("create_response") is not False,
                interrupt_response=vad.get("interrupt_response") is not False,
                reports_transcripts=self.audio["transcription"] is not None,
                idle_timeout_ms=vad.get("idle_timeout_ms"),
                truncation=truncation_from(f["truncation"]),
                allows_backchannels=vad.get("type") == "semantic_vad",
            )
        )

    def snapshot(self) -> dict[str, Any]:
        """The session's configuration as JSON values, for `restore`. These keys are stored, so they must not change."""
        return {
            "model": self.model,
            "audio": self.audio,
            "fields": self.fields,
            "beta": self.beta,
            "spoken": self._audio_sent,
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Take the configuration of an earlier session, of which `kept` is the snapshot. Nothing is queued."""
        self.model, self.audio, self.fields = kept["model"], kept["audio"], kept["fields"]
        self.beta, self._audio_sent = kept["beta"], kept["spoken"]
        self._set_format(self.audio["format"])

    def _transcription_config(self) -> TranscriptionConfig:
        asked, vad = self.audio["transcription"] or {}, self.audio["turn_detection"]
        turn = None
        if vad and vad["type"] == "semantic_vad":
            turn = semantic_vad(vad["eagerness"])
        elif vad:
            turn = ServerVad(vad["threshold"], vad["prefix_padding_ms"], vad["silence_duration_ms"])
        return TranscriptionConfig(
            language=asked.get("language"),
            prompt=asked.get("prompt", ""),
            vad=turn,
            # With semantic_vad, the first words of an overlap decide whether it is a barge-in.
            partials=self.audio["transcription"] is not None or bool(turn and turn.patience_ms),
            preflight=True,
        )

    def _loaded_voice(self, asked: Any) -> str | None:
        name = asked.get("id") if isinstance(asked, dict) else asked
        return next((v for v in self.voices if isinstance(name, str) and v.lower() == name.lower()), None)

    def session(self) -> dict[str, Any]:
        """The whole session as JSON values, in the beta's names or the GA names, whichever are in use."""
        f, head = self.fields, {"id": self.session_id, "object": "realtime.session", "expires_at": self.expires_at}
        if self.beta:
            return head | beta_session_json(self.model, f, self.audio)
        return head | ga_session_json(self.model, f, self.audio)

    # --- from the client

    def _receive_event(self, data: str | bytes) -> None:
        event = decode_event(data, NOT_JSON, NO_OBJECT)
        event_id = event.get("event_id")
        self._event_id = event_id if isinstance(event_id, str) else None
        self._handle_event(event)

    def _handle_event(self, event: dict[str, Any]) -> None:
        """Read one event, whose id is `_event_id`. Raises RemoteProtocolError."""
        match require(event, "type", str, "type"):
            case "session.update":
                self._update(require(event, "session", dict, "session"))
            case "input_audio_buffer.append":
                self._append(require(event, "audio", str, "audio"))
            case "input_audio_buffer.commit":
                self._flush_audio()
                self._add_commands(CommitAudio())
            case "input_audio_buffer.clear":
                self._resampler.flush()
                self._add_commands(ClearAudio())
            case kind if kind.startswith("conversation.item.") and kind in EVENTS:
                self._handle_item_event(kind, event)
            case "response.create":
                self._add_commands(
                    response_from(
                        typed(event.get("response"), (dict, type(None)), "response") or {},
                        self.new_id,
                        self._loaded_voice,
                        self._decode_whole,
                        self._event_id,
                    )
                )
            case "output_audio_buffer.clear" if self.server_plays:
                self._add_commands(ClearOutputAudio(self._event_id))
            case "response.cancel":
                wanted = typed(event.get("response_id"), (str, type(None)), "response_id")
                self._add_commands(CancelResponse(wanted, self._event_id))
            case kind:
                supported = ", ".join(f"'{e}'" for e in EVENTS)
                raise RemoteProtocolError(
                    "invalid_value", f"Invalid value: '{kind}'. Supported values are: {supported}.", "type"
                )

    def _handle_item_event(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "conversation.item.create":
            previous_id = typed(event.get("previous_item_id"), (str, type(None)), "previous_item_id")
            fields = require(event, "item", dict, "item")
            item = item_from(fields, "item", self.new_id, self._decode_whole)
            self._add_commands(CreateItem(item, previous_id, self._event_id))
            return
        if kind == "conversation.item.truncate":
            index = require(event, "content_index", int, "content_index")
            end_ms = require(event, "audio_end_ms", int, "audio_end_ms")
            number(end_ms, "audio_end_ms", 0, 2**31)
            item_id = require(event, "item_id", str, "item_id")
            self._add_commands(TruncateItem(item_id, index, end_ms, self._event_id))
            return
        command = RetrieveItem if kind == "conversation.item.retrieve" else DeleteItem
        self._add_commands(command(require(event, "item_id", str, "item_id"), self._event_id))

    def _update(self, session: dict[str, Any], *, old_event: bool = False) -> None:
        """Check a whole update, then apply it. A wrong field refuses all of it."""
        beta_names = self.beta or uses_beta_names(session)
        fields, inputs, output = read_beta_update(session) if beta_names else read_ga_update(session)
        audio = dict(self.audio)
        for key, value in inputs.items():
            audio[key] = self._check_input_field(key, value, f"session.audio.input.{key}")
        merged = dict(self.fields)
        for key, value in fields.items():
            merged[key] = check_session_field(key, value, speaks=bool(self.voices))
        if output:
            merged["output"] = self._check_output(output)
        if audio["format"] != self.audio["format"]:
            self._flush_audio()
            self._set_format(audio["format"])
        self.audio, self.fields, self.beta = audio, merged, beta_names
        self._add_commands(self.configured())
        self._add_event("session.updated", session=self.session())

    def _check_transcription(self, value: Any, param: str) -> dict[str, Any] | None:
        """The fields of `transcription` merged into those in force; null turns the user's transcripts off."""
        if value is None:
            return None
        given = typed(value, dict, param)
        known(given, ("model", "language", "prompt"), param)
        merged = dict(self.audio["transcription"] or {})
        for name in ("model", "language", "prompt"):
            if name in given and typed(given[name], (str, type(None)), f"{param}.{name}"):
                merged[name] = given[name]
        if merged.get("language") and not self.language_check(merged["language"]):
            raise RemoteProtocolError(
                "invalid_value",
                f"Invalid value: '{merged['language']}' is no language of this model.",
                f"{param}.language",
            )
        return merged

    def _check_turn_detection(self, value: Any, param: str) -> dict[str, Any] | None:
        return check_conversation_vad(value, self.audio["turn_detection"], param)

    def _check_output(self, given: dict[str, Any]) -> dict[str, Any]:
        merged = dict(self.fields["output"])
        if given.get("format") is not None:
            merged["format"] = check_format(given["format"], "session.audio.output.format")
        if given.get("speed") is not None:
            merged["speed"] = number(given["speed"], "session.audio.output.speed", 0.25, 1.5)
        if given.get("voice") is not None and given["voice"] != merged["voice"]:
            if self._audio_sent:
                raise RemoteProtocolError(
                    "cannot_update_voice",
                    "Cannot update a conversation's voice if assistant audio is present.",
                    "session.audio.output.voice",
                )
            typed(given["voice"], (str, dict), "session.audio.output.voice")
            merged["voice"] = given["voice"]
            if self._loaded_voice(given["voice"]) is None:
                self.log_alias(f"voice {given['voice']}", self.voices[0] if self.voices else "nobody")
        return merged

    # --- to the client

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an event; several events have none here, and some of the GA's have none in the beta.

        Raises LocalProtocolError for an event that no conversation reports.
        """
        match output:
            case OverlapStarted() | OverlapDecided() | TurnCommitted():
                # An overlap is told in full duplex only, and a turn's item comes with UserTurnCommitted.
                return
            case UserTurnStarted(turn, item_id):
                self._items[turn] = item_id
            case CommandRejected(code, message, param, event_id):
                self._event_id = event_id
                self._add_error(code, message, param)
                self._event_id = None
            case IdleTimeoutReached(item_id, start_ms, end_ms):
                self._add_event(
                    "input_audio_buffer.timeout_triggered",
                    audio_start_ms=start_ms,
                    audio_end_ms=end_ms,
                    item_id=item_id,
                )
            case UserTurnCommitted() | ItemAdded() | ItemDone() | ItemRetrieved() | ItemDeleted() | ItemTruncated():
                self._send_item_event(output)
            case ResponseCreated(response):
                self._add_event("response.created", response=self._response_json(response))
            case ResponseDone(response):
                self._add_event("response.done", response=self._response_json(response))
                self._add_event("rate_limits.updated", rate_limits=[])
            case PlaybackStarted(response_id):
                self._add_event("output_audio_buffer.started", response_id=response_id)
            case PlaybackStopped(response_id):
                self._add_event("output_audio_buffer.stopped", response_id=response_id)
            case PlaybackCleared(response_id):
                self._add_event("output_audio_buffer.cleared", response_id=response_id)
            case OutputItemAdded() | OutputItemDone():
                self._send_output_item(output)
            case ContentPartAdded() | ContentPartDone() | ResponseTextDelta() | ResponseAudioDelta():
                self._send_content(output)
            case ArgumentsDelta() | ArgumentsDone():
                self._send_arguments(output)
            case _:
                # The rest are events of the input, or of no conversation.
                OpenAITranscription.send(self, output)  # type: ignore[arg-type]

    def _send_item_event(
        self, output: UserTurnCommitted | ItemAdded | ItemDone | ItemRetrieved | ItemDeleted | ItemTruncated
    ) -> None:
        match output:
            case UserTurnCommitted(_, item, previous_id):
                self._add_event("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous_id)
                self._add_item_event("added", item, previous_item_id=previous_id)
                self._add_item_event("done", item, previous_item_id=previous_id)
            case ItemAdded(item, previous_id):
                self._add_item_event("added", item, previous_item_id=previous_id)
            case ItemDone(item, previous_id):
                self._add_item_event("done", item, previous_item_id=previous_id)
            case ItemRetrieved(item):
                self._add_item_event("retrieved", item)
            case ItemDeleted(item_id):
                self._add_event("conversation.item.deleted", item_id=item_id)
            case ItemTruncated(item_id, index, end_ms):
                self._add_event(
                    "conversation.item.truncated", item_id=item_id, content_index=index, audio_end_ms=end_ms
                )

    def _send_output_item(self, output: OutputItemAdded | OutputItemDone) -> None:
        name = "added" if isinstance(output, OutputItemAdded) else "done"
        self._add_event(
            f"response.output_item.{name}",
            response_id=output.response.id,
            output_index=output.index,
            item=item_json(output.item, beta=self.beta),
        )

    def _send_content(
        self, output: ContentPartAdded | ContentPartDone | ResponseTextDelta | ResponseAudioDelta
    ) -> None:
        match output:
            case ContentPartAdded(position, part):
                self._add_event("response.content_part.added", **position_fields(position), part=part_json(part))
            case ResponseTextDelta(position, text, spoken):
                name = "output_audio_transcript" if spoken else "output_text"
                self._add_event(f"response.{name}.delta", **position_fields(position), delta=text)
            case ResponseAudioDelta(position, pcm, rate_hz):
                self._audio_sent = True
                if not self.server_plays:
                    self._add_audio_delta(position, self._encode_audio(position, pcm, rate_hz))
            case ContentPartDone(position, part):
                self._add_part_done(position, part)

    def _send_arguments(self, output: ArgumentsDelta | ArgumentsDone) -> None:
        place = position_fields(output.at, content=False)
        if isinstance(output, ArgumentsDelta):
            self._add_event(
                "response.function_call_arguments.delta", **place, call_id=output.call_id, delta=output.text
            )
            return
        self._add_event(
            "response.function_call_arguments.done",
            **place,
            call_id=output.call_id,
            name=output.name,
            arguments=output.arguments,
        )

    def _add_item_event(self, name: str, item: Item, **fields: Any) -> None:
        self._add_event(f"conversation.item.{name}", item=item_json(item, beta=self.beta), **fields)

    def _add_part_done(self, position: ContentPosition, part: ContentPart) -> None:
        if part.kind == "output_audio":
            if resampler := self._output_resamplers.pop(position.item_id, None):
                self._add_audio_delta(position, self._to_output_format(resampler.flush()))
            self._add_event("response.output_audio.done", **position_fields(position))
            self._add_event("response.output_audio_transcript.done", **position_fields(position), transcript=part.text)
        else:
            self._add_event("response.output_text.done", **position_fields(position), text=part.text)
        self._add_event("response.content_part.done", **position_fields(position), part=part_json(part))

    def _add_audio_delta(self, position: ContentPosition, data: bytes) -> None:
        if data:
            self._add_event("response.output_audio.delta", **position_fields(position), delta=b64encode(data).decode())

    def _encode_audio(self, position: ContentPosition, pcm: Pcm, rate_hz: int) -> bytes:
        if position.item_id not in self._output_resamplers:
            self._output_resamplers[position.item_id] = Resampler(
                rate_hz, self.fields["output"]["format"].get("rate", 8000)
            )
        return self._to_output_format(self._output_resamplers[position.item_id].feed(pcm))

    def _to_output_format(self, pcm: Pcm) -> bytes:
        kind = self.fields["output"]["format"]["type"]
        return {"audio/pcmu": to_ulaw, "audio/pcma": to_alaw}.get(kind, to_pcm16)(pcm)

    def _add_event(self, kind: str, /, **fields: Any) -> None:
        if self.beta:
            if kind in _BETA_SILENT:
                return
            kind = _BETA_EVENTS.get(kind, kind)
        self._add_frame(type=kind, event_id=self.new_id("event_"), **fields)

    def _response_json(self, response: Response) -> dict[str, Any]:
        return response_json(response, self.session_id, self.fields["output"], beta=self.beta)
