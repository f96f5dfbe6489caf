"""What a full-duplex client may ask and is told beyond a conversation (talk_events.py): epochs, overlap, playback, turn states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OverlapPolicy = Literal["listen_only", "barge_in_on_speech", "auto"]
OverlapAction = Literal["drop", "listen", "barge_in"]
TurnState = Literal["idle", "user_speaking", "user_committed", "assistant_generating", "assistant_playing", "barge_in"]


@dataclass(frozen=True, slots=True)
class DuplexConfig:
    """How speech over an answer is taken, and when an answer counts as heard.

    `auto`: the voice is ducked at once, and within DECIDE_S (overlap.py) the speech is taken for an acknowledgement, or stops the voice:
    what was no longer than `short_ack_ms` is one until its words say otherwise; what sounds like one and goes on for `barge_in_ms` is none.
    `acks_only`: of an answer that was played to its end too, only what was acknowledged was heard. `listens_first` and `temperature` are for
    a partner that takes turns by itself: units at the start in which it only listens, and how freely it chooses; so is `reference`, a sound file of the
    voice it is to speak with.
    """

    policy: OverlapPolicy = "auto"
    short_ack_ms: int = 700
    barge_in_ms: int = 1200
    acks_only: bool = False
    listen_only_units: int | None = None
    temperature: float | None = None
    voice_reference: bytes = b""


# --- from the client --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcknowledgePlayback:
    """Of a response's sound `played_ms` were played; what was heard is `committed_ms`. Ids None: the latest that is open."""

    played_ms: int
    committed_ms: int
    response_id: str | None = None
    item_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class BargeIn:
    """The client says that the user has taken the floor. `reason` as the overlap decision gives it."""

    reason: str = "client_barge_in"
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class HoldFloor:
    """The client says that what the user says now does not take the floor."""

    reason: str = "client_overlap_action"
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CancelInput:
    """What is being said, and what answers it, is void. The sound is cleared by the AudioCleared that follows."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SkipResponse:
    """The commit that follows is not to be answered."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SignalTurn:
    """The client's own event about turns, passed on as a TurnStateChanged."""

    event: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class AppendFrames:
    """What the user's camera sees now: encoded images, the oldest first."""

    frames: tuple[bytes, ...]
    event_id: str | None = None


DuplexCommand = AcknowledgePlayback | BargeIn | HoldFloor | CancelInput | SkipResponse | SignalTurn | AppendFrames

# --- to the client ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochRaised:
    """Nothing of an answer of an older epoch is sent any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TurnStateChanged:
    """Something happened between the speakers; the state after it. `duck` and `unduck` change no state."""

    event: str
    state: TurnState
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OverlapReported:
    """What became of speech over an answer, and why."""

    policy: OverlapPolicy
    action: OverlapAction
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpeakStepTaken:
    """The response begins to be said."""

    response_id: str


@dataclass(frozen=True, slots=True)
class ListenStepTaken:
    """What was said or committed is not answered: the partner listens. `reason`: why."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlaybackCursors:
    """Milliseconds of one item's sound: made, given to the client, played by it, and known to be heard. None ever goes back."""

    generated_ms: int = 0
    sent_ms: int = 0
    played_ms: int = 0
    committed_ms: int = 0


@dataclass(frozen=True, slots=True)
class PlaybackAcknowledged:
    """An acknowledgement was taken. `kept`: the history holds just what it says was heard."""

    response_id: str
    item_id: str
    played_ms: int
    committed_ms: int
    cursors: PlaybackCursors
    history_exact: bool


DuplexEvent = EpochRaised | TurnStateChanged | OverlapReported | SpeakStepTaken | ListenStepTaken | PlaybackAcknowledged
