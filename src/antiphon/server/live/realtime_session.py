"""Makes the session of a realtime connection, and limits the commands that its client may send."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts.language import ToolServers
from antiphon.errors import Refused, RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    ClearOutputAudio,
    ConfigureConversation,
    ConversationCommand,
    CreateItem,
    CreateResponse,
)
from antiphon.events.duplex import AcknowledgePlayback, BargeIn, CancelInput
from antiphon.events.size import num_bytes
from antiphon.events.tools import CallOptions
from antiphon.events.transcription import AppendAudio, ConfigureTranscription
from antiphon.protocols.connection import Command, WireConnection
from antiphon.protocols.realtime.call_fields import GENERATED
from antiphon.server.credentials import Caller
from antiphon.server.live.observers import SessionObservers
from antiphon.server.memory import MemoryAccount
from antiphon.server.state import ServerState
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation
from antiphon.sessions.conversation.responses.session_tools import together
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.session import DuplexSession
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.sessions.transcription.state import ContinuedTranscription
from antiphon.settings import ToolSettings
from antiphon.transports.transport import AudioPlayer

# Sessions that read their commands from an inbox. Any exception from `run` ends only that live session, with
# `server_error`.
RealtimeConversation = ConversationSession | DuplexSession
RealtimeSession = TranscriptionSession | RealtimeConversation

URGENT = (BargeIn, CancelInput, AcknowledgePlayback, ClearOutputAudio)
# Minimum number of audio samples (5 ms). A frame with less audio counts as an event without audio.
MIN_AUDIO_SAMPLES = SAMPLE_RATE_HZ // 200
RATE_WINDOW_S = 2.0
# Maximum number of items in a conversation: finding an item is a linear search.
MAX_ITEMS = 10_000
# The session ends after this number of commands were refused because memory was short.
MAX_REFUSED = 100


class CommandBounds:
    """Limits what one client may send: the rate of events without audio, and the memory for data that has to be kept.

    `max_events_per_s` limits events without audio, on average over RATE_WINDOW_S. `config_bytes` is the memory that
    the session's configuration takes.
    """

    def __init__(
        self, memory: MemoryAccount, max_events_per_s: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = memory
        self._max_events_per_s = max_events_per_s
        self._clock = clock
        # Arrival times of the events without audio within the last RATE_WINDOW_S.
        self._event_times_s: deque[float] = deque()
        self._num_refused = 0
        self.config_bytes = 0

    @property
    def is_spent(self) -> bool:
        """True if the session has to end, because MAX_REFUSED of its commands were refused when memory was short."""
        return self._num_refused >= MAX_REFUSED

    def configure(self, command: ConfigureTranscription | ConfigureConversation) -> None:
        """Record the size of a configuration, which replaces that of the previous configuration."""
        self.config_bytes = num_bytes(command)

    @staticmethod
    def have_audio(commands: Sequence[Command]) -> bool:
        """Return whether a frame's commands have enough audio to be limited by the backlog instead of by their rate."""
        return sum(len(c.pcm) for c in commands if isinstance(c, AppendAudio)) >= MIN_AUDIO_SAMPLES

    def count_event(self) -> bool:
        """Count an event without audio; return whether the rate is above the limit."""
        now_s = self._clock()
        self._event_times_s.append(now_s)
        while self._event_times_s[0] < now_s - RATE_WINDOW_S:
            self._event_times_s.popleft()
        return len(self._event_times_s) > self._max_events_per_s * RATE_WINDOW_S

    def check(self, command: CreateItem | CreateResponse, num_items: int) -> None:
        """Raise RemoteProtocolError if a history of `num_items`, or the memory, has no room for a command's data."""
        if isinstance(command, CreateItem) and num_items >= MAX_ITEMS:
            raise RemoteProtocolError("conversation_too_large", f"A conversation may have {MAX_ITEMS} items.")
        try:
            self._memory.check(num_bytes(command))
        except Refused as refusal:
            self._num_refused += 1
            raise RemoteProtocolError("memory_limit_exceeded", f"This was not kept: {refusal}.") from None


def goes_first(command: Command, conversation: RealtimeConversation) -> TypeGuard[ConversationCommand]:
    """Return whether a command is handled at once, before the commands that wait in the inbox.

    A CancelResponse is handled at once only if a response has begun. Otherwise the client may want to cancel a response
    that a command in the inbox has yet to begin.
    """
    return isinstance(command, URGENT) or (isinstance(command, CancelResponse) and conversation.progress.can_cancel)


def new_transcription(
    state: ServerState,
    wire: WireConnection,
    first: ConfigureTranscription,
    inbox: Inbox,
    emit: EmitConversation,
    measure: Callable[[str, float], None],
    *,
    keeps_state: bool,
    continued: ContinuedTranscription | None,
) -> TranscriptionSession:
    """Return a transcription session for a wire, with the server's models. For `keeps_state` and `continued` see
    `TranscriptionSession`.
    """
    models = state.loaded()
    return TranscriptionSession(
        first.config,
        models.required_transcriber,
        models.required_vad,
        inbox,
        emit,
        min_commit_ms=wire.min_commit_ms,
        measure=measure,
        turn_detector=models.turn_detector,
        speaker_model=models.speaker_model,
        keeps_state=keeps_state,
        continued=continued,
    )


def new_conversation(
    state: ServerState,
    caller: Caller,
    wire: WireConnection,
    first: ConfigureConversation,
    inbox: Inbox,
    emit: EmitConversation,
    playback: AudioPlayer | None,
    observers: SessionObservers,
    tools: ToolServers | None = None,
) -> ConversationSession | DuplexSession:
    """Return a conversation session for a wire, with the server's models and an empty history.

    `tools`: functions of this conversation alone. Those of the server come after them.
    """
    models = state.loaded()
    assert models.for_conversations
    context = ConversationContext(
        transcriber=models.required_transcriber,
        detector=models.required_vad,
        model=models.for_conversations,
        new_id=wire.context.new_id,
        turn_detector=models.turn_detector,
        backchannel_detector=models.backchannel_detector,
        image_reader=models.image_reader,
        speaker_model=models.speaker_model,
        tool_servers=together(tools, state.own_tools(caller), state.tool_servers),
        calls=call_options(state.settings.tools),
        say=models.line if models.synthesizer and not models.conversation_model else None,
        measure=observers.measure,
        count=observers.count,
        on_unit=observers.unit,
        min_commit_ms=wire.min_commit_ms,
        owner=caller.key,
    )
    make = partial(ConversationSession, first.config, context, inbox)
    if first.config.duplex:
        return DuplexSession(first.config.duplex, make, emit, epoch=wire.epoch)
    return make(emit=emit, playback=playback)


def call_options(tools: ToolSettings) -> CallOptions:
    """Return what happens in all conversations until the tool servers' results are known."""
    is_generated = tools.filler == (GENERATED,)
    return CallOptions(() if is_generated else tools.filler, is_generated, 1000 * tools.filler_after_s)
