"""What a conversation is assembled from: the models that it uses, and what its server gives it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from antiphon.contracts import ConversationModel, ImageReader, Transcriber, TurnDetector, VoiceActivityDetector
from antiphon.contracts.speaker import SpeakerModel
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CommandRejected,
    ConfigureConversation,
    ConversationCommand,
    ConversationEvent,
)
from antiphon.events.transcription import TranscriptionEvent

EmitConversation = Callable[[TranscriptionEvent | ConversationEvent], Awaitable[None]]


def _unmeasured(kind: str, value: float) -> None:
    """Nobody measures or counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationContext:
    """The surroundings of one conversation. All models belong to the caller.

    - `transcriber`, `detector`: hear the user. `turn_detector`: judges pauses, where it is given.
    - `model`: answers; a native model takes turns by itself instead.
    - `speaker_model`: tells the user's voice from others, where it is given.
    - `image_reader`: describes images to a model that takes none.
    - `new_id`: returns a fresh id that begins with the given prefix. `clock`: returns monotonic seconds.
    - `measure`: takes a measurement's name and its seconds.
    - `count`: takes a counter's name and what is added to it: `preemptive_begun`, `preemptive_used` and
      `preemptive_dropped` responses, `preemptive_dropped_tokens`, `ducks`, and `ducks_without_interruption`.
    - `min_commit_ms`: as TranscriptionSession has it.
    - `owner`: whose conversation it is, as `ConversationModel.open` has it.
    """

    transcriber: Transcriber
    detector: VoiceActivityDetector
    model: ConversationModel
    new_id: Callable[[str], str]
    turn_detector: TurnDetector | None = None
    image_reader: ImageReader | None = None
    speaker_model: SpeakerModel | None = None
    measure: Callable[[str, float], None] = _unmeasured
    count: Callable[[str, int], None] = _unmeasured
    clock: Callable[[], float] = time.monotonic
    min_commit_ms: int = 0
    owner: Hashable | None = None


def rejected(error: RemoteProtocolError, command: ConversationCommand) -> CommandRejected:
    """The event that answers a command which cannot be carried out."""
    event_id = None if isinstance(command, ConfigureConversation) else command.event_id
    return CommandRejected(error.code, error.message, error.param, event_id)
