"""Deepgram's Flux, `/v2/listen`: turns with their likely ends. See docs/wire/deepgram.md.

`EagerEndOfTurn` is the session's guess in a pause that may end the turn. The turn then ends with the same text, or goes
on with `TurnResumed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import (
    CommitAudio,
    Eagerness,
    GuessDropped,
    ServerVad,
    SpeechStarted,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionConfig,
)
from antiphon.events.words import Word
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume
from antiphon.protocols.deepgram.listen import CloseStream, DeepgramHearing, KeepAlive
from antiphon.protocols.deepgram.query import COMMON, DeepgramQuery
from antiphon.protocols.fields import Reader, Text, number
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received, message
from antiphon.turns.end_of_turn import semantic_vad

PATH = "/v2/listen"
# The ranges of the thresholds, and the default of one. Without `eager_eot_threshold`, there is no EagerEndOfTurn.
RANGES = {"eot_threshold": (0.5, 0.9), "eager_eot_threshold": (0.3, 0.9), "eot_timeout_ms": (500, 10_000)}
EOT_THRESHOLD = 0.7
# The largest `eot_threshold` for each eagerness, in order.
_EAGERNESS: tuple[tuple[float, Eagerness], ...] = ((0.6, "high"), (0.8, "medium"), (0.9, "low"))


class Thresholds(msgspec.Struct, omit_defaults=True):
    """When a turn ends. Missing fields keep their value."""

    # Confidence from which a turn has ended, in [0.5, 0.9].
    eot_threshold: float | UnsetType = UNSET
    # Confidence from which a turn has probably ended, in [0.3, 0.9].
    eager_eot_threshold: float | UnsetType | None = UNSET
    # Pause after which a turn has ended, whatever its words, in ms.
    eot_timeout_ms: float | UnsetType = UNSET


class FluxConfigure(msgspec.Struct, tag_field="type", tag="Configure"):
    """Changes thresholds and keyterms. Other fields are ignored."""

    # When a turn ends.
    thresholds: Thresholds = msgspec.field(default_factory=Thresholds)
    # Words and phrases that are likely to be said; replaces those before.
    keyterms: list[Text] | UnsetType = UNSET


class ForceEndTurn(msgspec.Struct, tag_field="type", tag="ForceEndTurn"):
    """Ends the open turn at once, without waiting for a pause."""


FluxMessage = KeepAlive | CloseStream | FluxConfigure | ForceEndTurn
_MESSAGE: Reader[FluxMessage] = Reader(FluxMessage)


class FluxWord(msgspec.Struct):
    """A word, with its confidence in [0, 1]. It has no times: SDKs before version 6 refuse them."""

    word: str
    confidence: float


@dataclass(slots=True)
class _Turn:
    """The open turn: its start in seconds, and its text so far."""

    start_s: float
    text: str = ""
    words: list[Word] = field(default_factory=list)
    # The text of its EagerEndOfTurn, until it is resumed.
    guess: str | None = None
    # Its `turn_index`, once its StartOfTurn was sent.
    index: int | None = None


class FluxConnection(DeepgramHearing):
    """One stream of a client of `/v2/listen`."""

    dialect = "flux"
    # Flux has no message that keeps a stream open.
    idle_s = 60.0

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        self._turns: dict[int, _Turn] = {}
        # Numbers of sent messages, and of turns with words.
        self._num_sent = self._num_turns = 0
        self._thresholds = Thresholds()

    def configure(self) -> TranscriptionConfig:
        """Read the parameters of the URL. Raises RemoteProtocolError if one is invalid."""
        query = DeepgramQuery(self.opening.query)
        self.audio = query.audio()
        given = {name: query.number(name, 0, *RANGES[name]) for name in RANGES if query.text(name)}
        self._thresholds = Thresholds(**given)
        return query.config(self.context, self._vad(), partials=True, preflight=self._is_eager)

    def opened(self) -> list[Frame]:
        """Return the first message."""
        return [self._message("Connected")]

    @property
    def _is_eager(self) -> bool:
        return isinstance(self._thresholds.eager_eot_threshold, int | float)

    @property
    def _eot_threshold(self) -> float:
        given = self._thresholds.eot_threshold
        return EOT_THRESHOLD if given is UNSET else given

    def _vad(self) -> ServerVad:
        eagerness = next(name for most, name in _EAGERNESS if self._eot_threshold <= most)
        timeout_ms = self._thresholds.eot_timeout_ms
        vad = semantic_vad(eagerness)
        if timeout_ms is UNSET:
            return vad
        return replace(vad, silence_duration_ms=round(timeout_ms))

    # --- from the client

    def read(self, data: str) -> Received[Command]:
        """Read a text message. Raises RemoteProtocolError."""
        match _MESSAGE.read(data):
            case KeepAlive():
                return Received()
            case CloseStream():
                return self.end()
            case ForceEndTurn():
                return Received([CommitAudio()])
            case FluxConfigure() as asked:
                return self._configured(asked)

    def _configured(self, asked: FluxConfigure) -> Received[Command]:
        try:
            for name, (low, high) in RANGES.items():
                value = getattr(asked.thresholds, name)
                if value not in (UNSET, None):
                    number(value, f"thresholds.{name}", low, high)
            terms = self.config.keyterms
            if asked.keyterms is not UNSET:
                terms = DeepgramQuery([("keyterm", term) for term in asked.keyterms]).terms()
        except RemoteProtocolError as error:
            failure = self._message("ConfigureFailure", error_code=error.code, description=error.message)
            return Received([], [failure])
        given = {name: v for name in RANGES if (v := getattr(asked.thresholds, name)) is not UNSET}
        self._thresholds = msgspec.structs.replace(self._thresholds, **given)
        config = replace(self.config, vad=self._vad(), preflight=self._is_eager, keyterms=terms)
        answer = {"thresholds": self._thresholds, "keyterms": list(terms)}
        return Received(self.reconfigure(config), [self._message("ConfigureSuccess", **answer)])

    # --- to the client

    def write(self, event: Event) -> list[Frame]:
        """Return the frames of an event. Some events have none."""
        match event:
            case SpeechStarted(turn, at_ms):
                self._turns[turn] = _Turn(at_ms / 1000)
                return []
            case TranscriptDelta(turn, text, words) if found := self._turns.get(turn):
                found.text += text
                found.words += words
                return self._grown(found)
            case TranscriptGuessed(turn, text) if found := self._turns.get(turn):
                found.guess = text.strip()
                return [*self._begin(found), self._info(found, "EagerEndOfTurn", found.guess)] if found.guess else []
            case GuessDropped(turn) if (found := self._turns.get(turn)) and found.guess:
                text, found.guess = found.guess, None
                return [self._info(found, "TurnResumed", text)]
            case TranscriptDone(turn, text, _, words) if found := self._turns.pop(turn, None):
                return self._ended(found, text.strip(), list(words))
            case TranscriptFailed(turn, text):
                self._turns.pop(turn, None)
                return [self._message("Warning", code="PROCESSING_ERROR", description=text)]
            case _:
                return []

    def _grown(self, turn: _Turn) -> list[Frame]:
        """Return the frame about more words of a turn. After its guess, they are words that the guess already has."""
        if turn.guess is not None:
            return []
        return self._begin(turn) or ([self._info(turn, "Update", turn.text)] if turn.text.strip() else [])

    def _begin(self, turn: _Turn) -> list[Frame]:
        """Return the StartOfTurn of a turn whose first words have come, unless it was sent before."""
        if turn.index is not None or not (turn.text.strip() or turn.guess):
            return []
        turn.index, self._num_turns = self._num_turns, self._num_turns + 1
        return [self._info(turn, "StartOfTurn", turn.text or turn.guess or "")]

    def _ended(self, turn: _Turn, text: str, words: list[Word]) -> list[Frame]:
        """Return the end of a turn. Users have already answered its guess, so the text is the same."""
        if turn.guess and turn.guess != text:
            text = turn.guess
        if not text and turn.index is None:
            return []
        turn.text, turn.words = text, words
        return [*self._begin(turn), self._info(turn, "EndOfTurn", text)]

    def _info(self, turn: _Turn, event: str, text: str) -> Frame:
        certain = {"EndOfTurn": 1.0, "EagerEndOfTurn": self._thresholds.eager_eot_threshold or 0.0}
        return self._message(
            "TurnInfo",
            event=event,
            turn_index=turn.index or 0,
            audio_window_start=round(turn.start_s, 3),
            audio_window_end=round(max(turn.start_s, self.received_s), 3),
            transcript=text.strip(),
            words=[FluxWord(word.text, round(word.probability, 4)) for word in turn.words],
            end_of_turn_confidence=certain.get(event, 0.0),
        )

    def _message(self, kind: str, **fields: object) -> Frame:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        return message(type=kind, request_id=self.id, sequence_id=number, **fields)

    def error(self, code: str, text: str) -> list[Frame]:
        """Return an error. Only one that ends the stream is an `Error` for Flux's clients, which then close."""
        return [self._message("Error" if self.finishing else "Warning", code=code, description=text)]


DIALECT = Dialect(
    name="flux",
    matches=lambda opening: opening.path == PATH,
    connect=FluxConnection,
    paths=(PATH,),
    parameters=COMMON | {"diarize", "eager_eot_threshold", "eot_threshold", "eot_timeout_ms", "language"},
    resume=Resume.NEVER,
)
