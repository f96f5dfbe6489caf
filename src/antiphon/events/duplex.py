"""Commands and events that only full-duplex conversations have: epochs, overlap, playback and turn states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Additional JSON fields of an event, sent to or by a client. No code here reads them.
ClientFacts = Mapping[str, Any]
OverlapPolicy = Literal["listen_only", "barge_in_on_speech", "auto"]
OverlapAction = Literal["drop", "listen", "barge_in"]
TurnState = Literal["idle", "user_speaking", "user_committed", "assistant_generating", "assistant_playing", "barge_in"]


@dataclass(frozen=True, slots=True)
class NativeSampling:
    """Sampling parameters of a native model. None uses the model's default. A model ignores parameters that it does not
    have.
    """

    # Sampling temperature for text; 0 always takes the most likely token.
    temperature: float | None = None
    # Number of most likely text tokens to sample from; 0 for all.
    top_k: int | None = None
    # Top-p sampling: the total probability of the text tokens to sample from; 0 for all.
    top_p: float | None = None
    # Repetition penalty for text. Above 1, words that were already said become less likely.
    repetition_penalty: float | None = None
    # Penalty for the end of a turn. Above 1, it becomes less likely.
    turn_penalty: float | None = None
    # Factor applied to the score of the listen token.
    listen_scale: float | None = None
    # The model listens if the listen token is one of this number of most likely tokens.
    listen_top_k: int | None = None
    # Sampling temperature for audio codes.
    voice_temperature: float | None = None
    # Repetition penalty for audio codes. Above 1, recent codes become less likely.
    voice_repetition_penalty: float | None = None
    # Random seed. The same seed and input give the same response.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class DuplexConfig:
    """How to treat speech during a response, and when a response counts as heard."""

    # `listen_only`: no speech ends a response. `barge_in_on_speech`: any speech ends a response. `auto`: the response
    # is ducked at once. Within DECISION_S (turns/overlap.py), the speech counts as a backchannel or ends the response.
    policy: OverlapPolicy = "auto"
    # With `auto`, speech up to this duration counts as a backchannel, unless its words say otherwise. In milliseconds.
    short_ack_ms: int = 700
    # With `auto`, an apparent backchannel becomes a barge-in after this duration, in milliseconds.
    barge_in_ms: int = 1200
    # Whether only audio that the client has acknowledged counts as heard, even at the end of a response.
    acks_only: bool = False
    # Whether PlayoutEnded is reported.
    reports_playout: bool = False
    # Number of units at the start during which a native model only listens; None for the model's default.
    listen_only_units: int | None = None
    # Sampling parameters of a native model.
    sampling: NativeSampling = NativeSampling()
    # An audio file with the voice for a native model to use; empty for the model's own voice.
    voice_reference: bytes = b""


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcknowledgePlayback:
    """Report that the client has played `played_ms` of a response's audio, of which `committed_ms` count as heard.

    Without ids, the acknowledgement is for the latest open item.
    """

    played_ms: int
    committed_ms: int
    response_id: str | None = None
    item_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class BargeIn:
    """Give the floor to the user: the client reports that the user interrupts the response.

    The event with the overlap decision has this `reason`.
    """

    reason: str = "client_barge_in"
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class HoldFloor:
    """Keep the floor as it is: the client reports that the user's current speech does not interrupt the response."""

    reason: str = "client_overlap_action"
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CancelInput:
    """Discard the user's current speech and the response to it. The next ClearAudio drops the audio of that speech."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SkipResponse:
    """Do not create a response to the next commit."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SignalTurn:
    """Report the client's own event about turns, as a TurnStateChanged with this `payload`."""

    event: str
    payload: ClientFacts = field(default_factory=dict)
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class AppendFrames:
    """Add images from the user's camera to a native model's next unit. They are encoded, oldest first."""

    frames: tuple[bytes, ...]
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class PauseConversation:
    """Pause a conversation in which neither side speaks: free the model's KV. A no-op in any other case, and with a
    native model.

    Speech in audio that is appended and any other command resume it, see ConversationResumed.
    """

    event_id: str | None = None


DuplexCommand = (
    AcknowledgePlayback
    | BargeIn
    | HoldFloor
    | CancelInput
    | SkipResponse
    | SignalTurn
    | AppendFrames
    | PauseConversation
)

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochRaised:
    """The epoch has increased because a response was cut off. From now on, nothing from an older epoch is sent."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TurnStateChanged:
    """A turn-taking event occurred, and `state` is the state after it.

    The events `duck` and `unduck` do not change the state. `payload` has additional fields for the client.
    """

    event: str
    state: TurnState
    payload: ClientFacts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OverlapReported:
    """The decision about speech during a response, with the policy that applied and the reason."""

    policy: OverlapPolicy
    action: OverlapAction
    reason: str


@dataclass(frozen=True, slots=True)
class SpeakStepTaken:
    """The assistant takes the floor and begins to speak the response."""

    response_id: str


@dataclass(frozen=True, slots=True)
class ListenStepTaken:
    """The assistant listens, so the user's speech or commit gets no response. `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlaybackCursors:
    """How many milliseconds of an item's audio were generated, sent, played by the client, and certainly heard.

    No cursor exceeds `generated_ms`, and no cursor ever decreases.
    """

    generated_ms: int = 0
    sent_ms: int = 0
    played_ms: int = 0
    committed_ms: int = 0


@dataclass(frozen=True, slots=True)
class PlaybackAcknowledged:
    """An acknowledgement of the client was accepted."""

    # The response that contains the item.
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


@dataclass(frozen=True, slots=True)
class PlayoutEnded:
    """A stored response is done, and all of its audio should have been played, by the clock or by acknowledgements.

    Not reported for a response that was cut off.
    """

    response_id: str


@dataclass(frozen=True, slots=True)
class ConversationPaused:
    """The conversation is paused. Its history stays; the model computes it again when the conversation is resumed."""


@dataclass(frozen=True, slots=True)
class ConversationResumed:
    """The conversation goes on. If speech has resumed it, the events of that speech follow, from its first word on."""


DuplexEvent = (
    EpochRaised
    | TurnStateChanged
    | OverlapReported
    | SpeakStepTaken
    | ListenStepTaken
    | PlaybackAcknowledged
    | PlayoutEnded
    | ConversationPaused
    | ConversationResumed
)
