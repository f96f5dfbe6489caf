"""The dependencies of a conversation: its models, and the callbacks of its server."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from antiphon.contracts import (
    BackchannelDetector,
    ConversationModel,
    ConversationStream,
    ImageReader,
    Transcriber,
    TurnDetector,
    VoiceActivityDetector,
)
from antiphon.contracts.language import ToolServers
from antiphon.contracts.speaker import SpeakerModel
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CommandRejected,
    ConfigureConversation,
    ConversationCommand,
    ConversationEvent,
)
from antiphon.events.tools import CallOptions
from antiphon.events.transcription import TranscriptionEvent
from antiphon.sessions.conversation.native_units import UnitDone

EmitConversation = Callable[[TranscriptionEvent | ConversationEvent], Awaitable[None]]


def _unmeasured(kind: str, value: float) -> None:
    """Ignore the value: the default for `measure` and `count`."""


def _unit_ignored(unit: UnitDone) -> None:
    """Ignore the unit: the default for `on_unit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationContext:
    """The dependencies of one conversation. The caller owns the models and closes them."""

    # Transcribes the user's speech.
    transcriber: Transcriber
    # Finds speech in the user's audio.
    detector: VoiceActivityDetector
    # Answers the user. A native model also takes turns by itself.
    model: ConversationModel
    # Returns a fresh id that begins with the given prefix.
    new_id: Callable[[str], str]
    # Judges whether a pause ends a turn. If None, only the words and the length of the pause count.
    turn_detector: TurnDetector | None = None
    # Judges speech over a response before it has words. If None, its words and its length decide.
    backchannel_detector: BackchannelDetector | None = None
    # Reads the text on images for a model that takes no images. If None, such images are left out.
    image_reader: ImageReader | None = None
    # Tells the user's voice from other voices. If None, all voices count as the user's.
    speaker_model: SpeakerModel | None = None
    # Carry out functions that the model may call in addition to the client's. If None, there are only the client's.
    tool_servers: ToolServers | None = None
    # What happens until their results are known, if the client has chosen nothing else.
    calls: CallOptions = CallOptions()  # noqa: RUF009 (frozen)
    # Returns a stream whose one response says the given text. If None, the model is asked to say it.
    say: Callable[[str], ConversationStream] | None = None
    # Called with the name of a measured time and its seconds.
    measure: Callable[[str, float], None] = _unmeasured
    # Called with a counter's name and the increment: `preemptive_begun`, `preemptive_used` and `preemptive_dropped`
    # responses, `preemptive_dropped_tokens`, `ducks`, `ducks_without_interruption`, and
    # `false_starts`.
    count: Callable[[str, int], None] = _unmeasured
    # Called with each unit of a native model whose result has come.
    on_unit: Callable[[UnitDone], None] = _unit_ignored
    # Returns monotonic seconds.
    clock: Callable[[], float] = time.monotonic
    # A commit with less new audio than this, in milliseconds, is refused. See `TranscriptionSession`.
    min_commit_ms: int = 0
    # The owner of the conversation, see `ConversationModel.open`.
    owner: Hashable | None = None


def rejected(error: RemoteProtocolError, command: ConversationCommand) -> CommandRejected:
    """Return the event that tells the client that a command cannot be carried out, and why."""
    event_id = None if isinstance(command, ConfigureConversation) else command.event_id
    return CommandRejected(error.code, error.message, error.param, event_id)
