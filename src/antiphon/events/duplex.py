"""Commands and events that only full-duplex conversations have: epochs, overlap, playback and turn states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# JSON fields that are sent to a client with an event, or that a client sends with its own event. No code here reads
# them.
ClientFacts = Mapping[str, Any]
OverlapPolicy = Literal["listen_only", "barge_in_on_speech", "auto"]
OverlapAction = Literal["drop", "listen", "barge_in"]
TurnState = Literal["idle", "user_speaking", "user_committed", "assistant_generating", "assistant_playing", "barge_in"]


@dataclass(frozen=True, slots=True)
class NativeSampling:
    """How a native model chooses its words, when to speak, and how it sounds. None uses the model's own default. A
    model ignores a choice that it does not have.
    """

    # Temperature of words; 0 samples the likeliest one.
    temperature: float | None = None
    # The number of likeliest words that may be sampled; 0: all.
    top_k: int | None = None
    # The share of probability that may be sampled; 0: all.
    top_p: float | None = None
    # Above 1, words that were already said are less likely.
    repetition_penalty: float | None = None
    # Above 1, the end of a turn is less likely.
    turn_penalty: float | None = None
    # Factor of the score of listening.
    listen_scale: float | None = None
    # The model listens if listening is among this number of likeliest choices.
    listen_top_k: int | None = None
    # Temperature of the voice's codes.
    voice_temperature: float | None = None
    # Above 1, the voice's recent codes are less likely.
    voice_repetition_penalty: float | None = None
    # With a seed, the same input gives the same response.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class DuplexConfig:
    """How speech during a response is treated, and when a response counts as heard."""

    # `listen_only`: no speech ends a response. `barge_in_on_speech`: any speech does. `auto`: the response is ducked at
    # once; within DECISION_S (turns/overlap.py) the speech is classified as a backchannel, or stops the response.
    policy: OverlapPolicy = "auto"
    # With `auto`, speech up to this length is a backchannel unless its words say otherwise.
    short_ack_ms: int = 700
    # With `auto`, an apparent backchannel that reaches this length is a barge-in.
    barge_in_ms: int = 1200
    # Only audio that the client acknowledged counts as heard, even after a response was played to its end.
    acks_only: bool = False
    # The number of units at the start in which a native model only listens; None: the model's own default.
    listen_only_units: int | None = None
    # How a native model makes its choices.
    sampling: NativeSampling = NativeSampling()
    # An audio file of the voice for a native model to speak with; empty: its own voice.
    voice_reference: bytes = b""


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcknowledgePlayback:
    """Acknowledge that the client played `played_ms` of a response's audio, and that `committed_ms` of it count as
    heard.

    Without ids, it refers to the latest open item.
    """

    played_ms: int
    committed_ms: int
    response_id: str | None = None
    item_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class BargeIn:
    """Take the floor: the client reports that the user interrupts the response.

    The overlap decision carries `reason`.
    """

    reason: str = "client_barge_in"
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class HoldFloor:
    """Leave the floor as it is: the client reports that the user's current speech does not interrupt the response."""

    reason: str = "client_overlap_action"
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CancelInput:
    """Discard the user's current speech, and the response to it. The ClearAudio that follows drops its audio."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SkipResponse:
    """Create no response to the commit that follows."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SignalTurn:
    """Forward the client's own event about turns, as a TurnStateChanged with its `payload`."""

    event: str
    payload: ClientFacts = field(default_factory=dict)
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class AppendFrames:
    """Add the current images of the user's camera, encoded, the oldest first, for the next unit of a native model."""

    frames: tuple[bytes, ...]
    event_id: str | None = None


DuplexCommand = AcknowledgePlayback | BargeIn | HoldFloor | CancelInput | SkipResponse | SignalTurn | AppendFrames

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochRaised:
    """The epoch was raised because a response was cut off. From now on, nothing of an older epoch is sent."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TurnStateChanged:
    """A turn-taking event occurred, and `state` is the state after it.

    The events `duck` and `unduck` do not change the state. `payload` holds further fields for the client.
    """

    event: str
    state: TurnState
    payload: ClientFacts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OverlapReported:
    """The decision about speech during a response, the policy that applied, and the reason."""

    policy: OverlapPolicy
    action: OverlapAction
    reason: str


@dataclass(frozen=True, slots=True)
class SpeakStepTaken:
    """The assistant takes the floor: it begins to speak the response."""

    response_id: str


@dataclass(frozen=True, slots=True)
class ListenStepTaken:
    """The assistant listens: the user's speech or commit gets no response. `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlaybackCursors:
    """Milliseconds of one item's audio that were generated, sent to the client, played by it, and are known to have
    been heard. No cursor exceeds `generated_ms` or ever decreases.
    """

    generated_ms: int = 0
    sent_ms: int = 0
    played_ms: int = 0
    committed_ms: int = 0


@dataclass(frozen=True, slots=True)
class PlaybackAcknowledged:
    """An acknowledgement of the client was accepted."""

    # The response of the item.
    response_id: str
    # The item that was played.
    item_id: str
    # Milliseconds that the client reported as played.
    played_ms: int
    # Milliseconds that the client reported as heard.
    committed_ms: int
    # The item's cursors after the acknowledgement.
    cursors: PlaybackCursors
    # The conversation's history contains exactly what the acknowledgement reports as heard.
    history_exact: bool


DuplexEvent = EpochRaised | TurnStateChanged | OverlapReported | SpeakStepTaken | ListenStepTaken | PlaybackAcknowledged
