"""The fields of `turn_detection`, with their defaults and checks: docs/wire/openai-realtime.md#turn-detection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal, cast, get_args

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import FALSE_START_MS
from antiphon.events.transcription import Eagerness, Expects, ServerVad
from antiphon.protocols.fields import merged, number, unknown_parameter, unsupported
from antiphon.turns.end_of_turn import semantic_vad

# Minimum and maximum of `idle_timeout_ms`.
IDLE_TIMEOUT_RANGE_MS = (1000, 60_000)
MAX_FALSE_START_MS = 10_000


class TurnDetectionFields(msgspec.Struct, forbid_unknown_fields=True):
    """Turn detection of either type, as a client sends it."""

    type: str | UnsetType = UNSET  # `server_vad` or `semantic_vad`.
    # Speech probability, in [0, 1], from which a frame counts as speech.
    threshold: float | UnsetType | None = UNSET
    prefix_padding_ms: float | UnsetType | None = UNSET  # Audio before the onset that is added to a turn, in ms.
    silence_duration_ms: float | UnsetType | None = UNSET  # Pause that ends a turn, in ms.
    # Silence after a response that triggers another response, in ms; null for never.
    idle_timeout_ms: float | UnsetType | None = UNSET
    create_response: bool | UnsetType | None = UNSET  # Whether the model responds when a turn ends.
    interrupt_response: bool | UnsetType | None = UNSET  # Whether speech cuts off a response.
    false_start_ms: float | UnsetType | None = UNSET  # See `TurnDetection`.
    eagerness: str | UnsetType | None = UNSET  # How readily `semantic_vad` ends a turn.
    expects: str | UnsetType | None = UNSET  # See `TurnDetection`.

    @property
    def least_speech_ms(self) -> object:
        """The client's `min_speech_duration_ms`. It is UNSET except in full duplex."""
        return UNSET


# For each type: the fields that only this type has.
VAD_LEAVES: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "server_vad": ("threshold", "prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms"),
        "semantic_vad": ("eagerness", "expects"),
    }
)


class TurnDetection(msgspec.Struct, kw_only=True):
    """Turn detection as the client sees it. Fields that do not exist for its type or kind of session are UNSET."""

    type: Literal["server_vad", "semantic_vad"] = "server_vad"  # The type of turn detection.
    threshold: float | UnsetType = UNSET  # Speech probability, in [0, 1], from which a frame counts as speech.
    prefix_padding_ms: int | UnsetType = UNSET  # Audio before the onset that is added to a turn, in ms.
    silence_duration_ms: int | UnsetType = UNSET  # Pause that ends a turn, in ms.
    eagerness: str | UnsetType = UNSET  # How readily `semantic_vad` ends a turn.
    create_response: bool | UnsetType | None = UNSET  # Whether the model responds when a turn ends.
    interrupt_response: bool | UnsetType | None = UNSET  # Whether speech cuts off a response.
    # Silence after a response that triggers another response, in ms. In a transcription, such a silence becomes a turn
    # without words.
    idle_timeout_ms: int | UnsetType | None = UNSET
    # If the user goes on at most this time after a response became audible, in ms, the turn continues; 0: never. This
    # extension is only shown to clients that have set it.
    false_start_ms: int | UnsetType = UNSET
    # What the user will probably say: `digits`, `yes_no` or `open`; null: unknown. This extension is only shown to
    # clients that have set it.
    expects: str | UnsetType | None = UNSET
    min_speech_duration_ms: object = UNSET  # Shown in full duplex, without effect.

    @property
    def responds(self) -> bool:
        """Whether the model responds when a turn ends."""
        return self.create_response is not False

    @property
    def interrupts(self) -> bool:
        """Whether the user's speech cuts off a response."""
        return self.interrupt_response is not False

    @property
    def forgiven_ms(self) -> float:
        """The value of `ConversationConfig.false_start_ms`."""
        return FALSE_START_MS if self.false_start_ms is UNSET else self.false_start_ms

    def config(self) -> ServerVad:
        """Convert these fields into the session's turn detection."""
        if isinstance(self.eagerness, str):
            return semantic_vad(cast(Eagerness, self.eagerness), cast(Expects, self.expects or None))
        assert self.threshold is not UNSET
        assert self.prefix_padding_ms is not UNSET
        assert self.silence_duration_ms is not UNSET
        return ServerVad(self.threshold, self.prefix_padding_ms, self.silence_duration_ms)


# Defaults of OpenAI's hosted service for a conversation.
CONVERSATION_VAD = TurnDetection(
    threshold=0.5,
    prefix_padding_ms=300,
    silence_duration_ms=200,
    create_response=True,
    interrupt_response=True,
    idle_timeout_ms=None,
)
# Defaults for a transcription.
SERVER_VAD = msgspec.structs.replace(
    CONVERSATION_VAD, create_response=UNSET, interrupt_response=UNSET, idle_timeout_ms=UNSET
)


def check_turn_detection(
    given: TurnDetectionFields | None, before: TurnDetection | None, param: str, *, responds: bool = True
) -> TurnDetection | None:
    """Check turn detection: `server_vad`, `semantic_vad`, or None if the client ends turns by committing its audio.

    Missing fields are filled in from `before`. If `type` is missing there too, it is `server_vad`. `responds`: the
    session is a conversation. A transcription has no responses, so `create_response: true` is refused, and
    `interrupt_response` is accepted but not shown.
    """
    if given is None:
        return None
    if not responds and given.false_start_ms not in (UNSET, None):
        raise unknown_parameter(f"{param}.false_start_ms")
    if not responds and given.create_response not in (UNSET, None, False):
        raise RemoteProtocolError(
            "invalid_value", "A transcription session makes no responses.", f"{param}.create_response"
        )
    kind = given.type or (before.type if before else "server_vad")
    if kind not in VAD_LEAVES:
        raise unsupported(kind, tuple(VAD_LEAVES), f"{param}.type")
    for name in (name for other in VAD_LEAVES.keys() - {kind} for name in VAD_LEAVES[other]):
        if getattr(given, name) not in (UNSET, None):
            raise unknown_parameter(f"{param}.{name}")
    found = merged(given, before)
    shown = _semantic_vad(found, param) if kind == "semantic_vad" else _server_vad(found, param)
    if responds:
        shown.create_response = found.create_response is not False
        shown.interrupt_response = found.interrupt_response is not False
        if found.false_start_ms not in (UNSET, None):
            shown.false_start_ms = int(number(found.false_start_ms, f"{param}.false_start_ms", 0, MAX_FALSE_START_MS))
    elif shown.idle_timeout_ms is None:
        shown.idle_timeout_ms = UNSET
    return shown


def _server_vad(given: TurnDetectionFields, param: str) -> TurnDetection:
    def leaf(name: str, low: float, high: float) -> float:
        value = getattr(given, name)
        value = getattr(CONVERSATION_VAD, name) if value in (UNSET, None) else value
        return number(value, f"{param}.{name}", low, high)

    has_timeout = given.idle_timeout_ms not in (UNSET, None)
    return TurnDetection(
        threshold=leaf("threshold", 0.0, 1.0),
        prefix_padding_ms=int(leaf("prefix_padding_ms", 0, 5000)),
        silence_duration_ms=int(leaf("silence_duration_ms", 32, 60000)),
        idle_timeout_ms=int(leaf("idle_timeout_ms", *IDLE_TIMEOUT_RANGE_MS)) if has_timeout else None,
        min_speech_duration_ms=given.least_speech_ms,
    )


def _semantic_vad(given: TurnDetectionFields, param: str) -> TurnDetection:
    eagerness = given.eagerness or "auto"
    if eagerness not in get_args(Eagerness):
        raise unsupported(eagerness, get_args(Eagerness), f"{param}.eagerness")
    if given.expects not in (UNSET, None, *get_args(Expects)):
        raise unsupported(given.expects, get_args(Expects), f"{param}.expects")
    return TurnDetection(type="semantic_vad", eagerness=eagerness, expects=given.expects)
