"""Writes the events about a conversation's items and responses: docs/wire/openai-realtime.md."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable

from antiphon.audio import Pcm
from antiphon.audio.line.g711 import to_alaw, to_ulaw
from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDelta,
    ArgumentsDone,
    CommandRejected,
    ContentPart,
    ContentPartAdded,
    ContentPartDone,
    ContentPosition,
    ConversationEvent,
    IdleTimeoutReached,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    ItemTruncated,
    OutputItemAdded,
    OutputItemDone,
    ResponseAudioDelta,
    ResponseTextDelta,
    UserTurnCommitted,
    UserTurnStarted,
)
from antiphon.events.playback import PlaybackCleared, PlaybackHoldChanged, PlaybackStarted, PlaybackStopped
from antiphon.events.tools import ToolCallBegan, ToolCallEnded, ToolListBegan, ToolListEnded
from antiphon.events.transcription import OverlapDecided, OverlapStarted, TranscriptionEvent, TurnCommitted
from antiphon.protocols.realtime.input_fields import AudioFormat
from antiphon.protocols.realtime.shown_items import ShownOutput, content_place, item_json, output_place, part_json
from antiphon.protocols.realtime.transcript_events import TranscriptEvents
from antiphon.protocols.realtime.writer import EventWriter

_ENCODERS = {"audio/pcmu": to_ulaw, "audio/pcma": to_alaw}


class ConversationEvents:
    """Writes the events of a conversation, except those for the beginning, end, text and audio of a response.

    The dialects write the latter themselves, with `part_done` and OutputAudio. `knows_server_calls`: the dialect has
    events for calls that tool servers carry out. Otherwise, and with beta names, they are not reported.
    """

    def __init__(self, writer: EventWriter, transcripts: TranscriptEvents, *, knows_server_calls: bool = False) -> None:
        self._writer = writer
        self._transcripts = transcripts
        self._knows_server_calls = knows_server_calls

    @property
    def shows_server_calls(self) -> bool:
        """Whether calls that tool servers carry out are reported."""
        return self._knows_server_calls and not self._writer.beta

    def write(self, event: TranscriptionEvent | ConversationEvent) -> None:
        """Write the messages for an event. Some events have no message.

        Raises LocalProtocolError for an event that cannot occur in a conversation.
        """
        add = self._writer.event
        if _is_of_server_call(event) and not self.shows_server_calls:
            return
        match event:
            case OverlapStarted() | OverlapDecided() | TurnCommitted():
                # Only full duplex reports overlaps. A turn's item is reported by UserTurnCommitted.
                return
            case UserTurnStarted(turn, item_id):
                self._transcripts.name(turn, item_id)
            case CommandRejected(code, message, param, event_id):
                self._writer.error(RemoteProtocolError(code, message, param), event_id)
            case IdleTimeoutReached(item_id, start_ms, end_ms):
                kind = "input_audio_buffer.timeout_triggered"
                add(kind, audio_start_ms=start_ms, audio_end_ms=end_ms, item_id=item_id)
            case UserTurnCommitted() | ItemAdded() | ItemDone() | ItemRetrieved() | ItemDeleted() | ItemTruncated():
                self._item(event)
            case PlaybackStarted(response_id):
                add("output_audio_buffer.started", response_id=response_id)
            case PlaybackStopped(response_id):
                add("output_audio_buffer.stopped", response_id=response_id)
            case PlaybackCleared(response_id):
                add("output_audio_buffer.cleared", response_id=response_id)
            case PlaybackHoldChanged(held):
                add(f"output_audio_buffer.{'ducked' if held else 'unducked'}")
            case OutputItemAdded() | OutputItemDone():
                self._output_item(event)
            case ContentPartAdded(position, part):
                add("response.content_part.added", **content_place(position), part=part_json(part))
            case ArgumentsDelta() | ArgumentsDone():
                self._arguments(event)
            case ToolCallBegan(item_id, index):
                add("response.mcp_call.in_progress", item_id=item_id, output_index=index)
            case ToolCallEnded(item_id, index, failure):
                outcome = "failed" if failure else "completed"
                add(f"response.mcp_call.{outcome}", item_id=item_id, output_index=index)
            case ToolListBegan(item_id):
                add("mcp_list_tools.in_progress", item_id=item_id)
            case ToolListEnded(item_id, failed):
                add(f"mcp_list_tools.{'failed' if failed else 'completed'}", item_id=item_id)
            case _:
                # The other events are about the input, or cannot occur in a conversation.
                self._transcripts.write(event)  # type: ignore[arg-type]

    def part_done(self, position: ContentPosition, part: ContentPart) -> None:
        """Write the events that end a content part. Call it after the part's last audio or text."""
        add, place = self._writer.event, content_place(position)
        if part.kind == "output_audio":
            add("response.output_audio.done", **place)
            add("response.output_audio_transcript.done", **place, transcript=part.text)
        else:
            add("response.output_text.done", **place, text=part.text)
        add("response.content_part.done", **place, part=part_json(part))

    def _item(
        self, event: UserTurnCommitted | ItemAdded | ItemDone | ItemRetrieved | ItemDeleted | ItemTruncated
    ) -> None:
        add, beta = self._writer.event, self._writer.beta
        match event:
            case UserTurnCommitted(_, item, previous_id):
                add("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous_id)
                for name in ("added", "done"):
                    add(f"conversation.item.{name}", item=item_json(item, beta=beta), previous_item_id=previous_id)
            case ItemAdded(item, previous_id):
                add("conversation.item.added", item=item_json(item, beta=beta), previous_item_id=previous_id)
            case ItemDone(item, previous_id):
                add("conversation.item.done", item=item_json(item, beta=beta), previous_item_id=previous_id)
            case ItemRetrieved(item):
                add("conversation.item.retrieved", item=item_json(item, beta=beta))
            case ItemDeleted(item_id):
                add("conversation.item.deleted", item_id=item_id)
            case ItemTruncated(item_id, index, end_ms):
                add("conversation.item.truncated", item_id=item_id, content_index=index, audio_end_ms=end_ms)

    def _output_item(self, event: OutputItemAdded | OutputItemDone) -> None:
        name = "added" if isinstance(event, OutputItemAdded) else "done"
        self._writer.event(
            f"response.output_item.{name}",
            response_id=event.response_id,
            output_index=event.index,
            item=item_json(event.item, beta=self._writer.beta),
        )

    def _arguments(self, event: ArgumentsDelta | ArgumentsDone) -> None:
        place = output_place(event.at)
        if event.server and isinstance(event, ArgumentsDelta):
            self._writer.event("response.mcp_call_arguments.delta", **place, delta=event.text)
        elif event.server and isinstance(event, ArgumentsDone):
            self._writer.event("response.mcp_call_arguments.done", **place, arguments=event.arguments)
        elif isinstance(event, ArgumentsDelta):
            self._writer.event(
                "response.function_call_arguments.delta", **place, call_id=event.call_id, delta=event.text
            )
        else:
            self._writer.event(
                "response.function_call_arguments.done",
                **place,
                call_id=event.call_id,
                name=event.name,
                arguments=event.arguments,
            )


def _is_of_server_call(event: TranscriptionEvent | ConversationEvent) -> bool:
    match event:
        case ItemAdded(item) | ItemDone(item) | OutputItemAdded(item=item) | OutputItemDone(item=item):
            return bool(item.server)
        case ArgumentsDelta(server=server) | ArgumentsDone(server=server):
            return bool(server)
    return isinstance(event, ToolCallBegan | ToolCallEnded | ToolListBegan | ToolListEnded)


class RunningOutputs:
    """The format and voice of each response in progress. They do not change after the response has begun.

    `session`: returns the session's current format and voice, for a new response.
    """

    def __init__(self, session: Callable[[], ShownOutput]) -> None:
        self._session = session
        self._kept: dict[str, ShownOutput] = {}

    def of(self, response_id: str) -> ShownOutput:
        """Return the format and voice of a response. The first call fixes them."""
        return self._kept.setdefault(response_id, self._session())

    def ended(self, response_id: str) -> ShownOutput:
        """Forget the format and voice of a response that has ended, and return them."""
        return self._kept.pop(response_id, None) or self._session()


class OutputAudio:
    """Writes the text and audio of responses, each in its own format.

    `by_events`: audio is sent as delta events. Otherwise the server itself plays it, and only sends an event for its
    end.
    """

    def __init__(self, writer: EventWriter, events: ConversationEvents, *, by_events: bool) -> None:
        self._writer = writer
        self._events = events
        self._by_events = by_events
        # One resampler for each item, because a response outside of the conversation may be spoken at the same time.
        self._resamplers: dict[str, Resampler] = {}

    def write(self, event: ResponseTextDelta | ResponseAudioDelta | ContentPartDone, audio_format: AudioFormat) -> None:
        """Write the messages for an event. Holds back audio that is too short for one output sample."""
        position = event.at
        match event:
            case ResponseTextDelta(_, text, spoken):
                name = "output_audio_transcript" if spoken else "output_text"
                self._writer.event(f"response.{name}.delta", **content_place(position), delta=text)
            case ResponseAudioDelta(_, pcm, rate_hz):
                if self._by_events:
                    if position.item_id not in self._resamplers:
                        self._resamplers[position.item_id] = Resampler(rate_hz, audio_format.rate_hz)
                    self._delta(position, self._resamplers[position.item_id].feed(pcm), audio_format)
            case ContentPartDone(_, part):
                if part.kind == "output_audio" and (resampler := self._resamplers.pop(position.item_id, None)):
                    self._delta(position, resampler.flush(), audio_format)
                self._events.part_done(position, part)

    def _delta(self, position: ContentPosition, pcm: Pcm, audio_format: AudioFormat) -> None:
        if data := _ENCODERS.get(audio_format.type, to_pcm16)(pcm):
            self._writer.event("response.output_audio.delta", **content_place(position), delta=b64encode(data).decode())
