"""Commands and events of full-duplex conversations, beyond those of every conversation: epochs, overlap, playback and
turn states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# What a client is told beside an event, or told the server beside its own: fields of JSON, which nothing here reads.
ClientFacts = Mapping[str, Any]
OverlapPolicy = Literal["listen_only", "barge_in_on_speech", "auto"]
OverlapAction = Literal["drop", "listen", "barge_in"]
TurnState = Literal["idle", "user_speaking", "user_committed", "assistant_generating", "assistant_playing", "barge_in"]


@dataclass(frozen=True, slots=True)
class NativeSampling:
    """How a native model chooses its words, when to speak, and how it says them. None: as its makers have it. A model
    that has no such choice ignores it.

    - `temperature`: of words; 0 takes the likeliest. `top_k`, `top_p`: 0 leaves all words in.
    - `repetition_penalty`: above 1, words that were said are less likely.
    - `turn_penalty`: above 1, the end of a turn is less likely.
    - `listen_scale`: what the score of listening is multiplied by.
    - `listen_top_k`: the model listens where that is one of the so many likeliest choices.
    - `voice_temperature`, `voice_repetition_penalty`: of the codes that the voice is made of.
    - `seed`: with one, the same input gives the same response.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    turn_penalty: float | None = None
    listen_scale: float | None = None
    listen_top_k: int | None = None
    voice_temperature: float | None = None
    voice_repetition_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class DuplexConfig:
    """How speech during a response is treated, and when a response counts as heard.

    - `policy`: `listen_only` lets no speech end a response, `barge_in_on_speech` any. With `auto` the response is
      ducked at once, and within DECISION_S (turns/overlap.py) the speech is taken for a backchannel or stops the
      response.
    - `short_ack_ms`: with `auto`, speech no longer than this is a backchannel until its words say otherwise.
    - `barge_in_ms`: with `auto`, what sounds like a backchannel and goes on for this long is none.
    - `acks_only`: only what the client acknowledged was heard, also of a response that was played to its end.
    - `listen_only_units`: units at the start in which a native model only listens; None: as its makers have it.
    - `sampling`: how a native model chooses.
    - `voice_reference`: an audio file of the voice that a native model is to speak with; empty: its own voice.
    """

    policy: OverlapPolicy = "auto"
    short_ack_ms: int = 700
    barge_in_ms: int = 1200
    acks_only: bool = False
    listen_only_units: int | None = None
    sampling: NativeSampling = NativeSampling()
    voice_reference: bytes = b""


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcknowledgePlayback:
    """Acknowledge that the client played `played_ms` of a response's audio, and that `committed_ms` of it count as
    heard. Without ids it is about the latest item that is open.
    """

    played_ms: int
    committed_ms: int
    response_id: str | None = None
    item_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class BargeIn:
    """Take the floor: the client says that the user interrupts the response. `reason` is given back in the overlap
    decision.
    """

    reason: str = "client_barge_in"
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class HoldFloor:
    """Leave the floor where it is: the client says that the user's present speech does not interrupt the response."""

    reason: str = "client_overlap_action"
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CancelInput:
    """Void the user's present speech, and the response to it. Its audio is dropped by the ClearAudio that follows."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SkipResponse:
    """Leave the commit that follows without a response."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SignalTurn:
    """Pass the client's own event about turns on, as a TurnStateChanged with its `payload`."""

    event: str
    payload: ClientFacts = field(default_factory=dict)
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class AppendFrames:
    """Add what the user's camera shows now: encoded images, the oldest first. A native model sees them with its next
    unit.
    """

    frames: tuple[bytes, ...]
    event_id: str | None = None


DuplexCommand = AcknowledgePlayback | BargeIn | HoldFloor | CancelInput | SkipResponse | SignalTurn | AppendFrames

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochRaised:
    """The epoch was raised because a response was cut off: nothing of a response of an older epoch is sent any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TurnStateChanged:
    """Something happened between the speakers, and `state` is the state after it. The events `duck` and `unduck` do not
    change the state. `payload` holds further fields for the client.
    """

    event: str
    state: TurnState
    payload: ClientFacts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OverlapReported:
    """What was decided about speech during a response, under which policy and why."""

    policy: OverlapPolicy
    action: OverlapAction
    reason: str


@dataclass(frozen=True, slots=True)
class SpeakStepTaken:
    """The response begins to be spoken: the assistant takes the floor."""

    response_id: str


@dataclass(frozen=True, slots=True)
class ListenStepTaken:
    """What the user said or committed gets no response: the assistant listens. `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlaybackCursors:
    """Milliseconds of one item's audio that were generated, sent to the client, played by it, and are known to have
    been heard. None exceeds what was generated, and none ever goes back.
    """

    generated_ms: int = 0
    sent_ms: int = 0
    played_ms: int = 0
    committed_ms: int = 0


@dataclass(frozen=True, slots=True)
class PlaybackAcknowledged:
    """An acknowledgement was accepted. `cursors` are the item's after it. `history_exact`: the conversation's history
    holds exactly what the acknowledgement says was heard.
    """

    response_id: str
    item_id: str
    played_ms: int
    committed_ms: int
    cursors: PlaybackCursors
    history_exact: bool


DuplexEvent = EpochRaised | TurnStateChanged | OverlapReported | SpeakStepTaken | ListenStepTaken | PlaybackAcknowledged
