"""Deepgram's live transcription, `/v1/listen` as a WebSocket: docs/wire/deepgram.md.

A result with `is_final` false is the text of the open turn so far, which later results of the turn replace. The result
with `is_final` true is the text of the whole turn: clients join these texts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import (
    CommitAudio,
    ServerVad,
    SessionEnding,
    SpeechStarted,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TurnCommitted,
)
from antiphon.events.words import Word
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume
from antiphon.protocols.deepgram.forms import (
    BAD_AUDIO,
    FAILED,
    SILENT,
    DeepgramWord,
    Speakers,
    confidence,
    created,
    model_info,
    model_uuid,
    shown_text,
    shown_words,
)
from antiphon.protocols.deepgram.query import COMMON, MAX_SHOWN_CHARS, DeepgramQuery
from antiphon.protocols.fields import Reader, Text
from antiphon.protocols.hearing import INVALID_AUDIO, HearingConnection
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received, message

# The shortest pause that ends a turn, and the pause without endpointing, in ms. A shorter pause of the client counts as
# the shortest: words are decoded with the sound around them.
MIN_ENDPOINTING_MS, NO_ENDPOINTING_MS = 200, 1000
PATH = "/v1/listen"
# Codes of a SessionEnding after which Deepgram closes with 1011. Other ends keep the server's close code.
_FAILURES = {"idle_timeout": SILENT, "server_error": FAILED, "resource_exhausted": FAILED}
# The index of the only channel, and the number of channels.
CHANNEL = [0, 1]


class KeepAlive(msgspec.Struct, tag_field="type", tag="KeepAlive"):
    """Keeps the stream open while no audio is sent."""


class Finalize(msgspec.Struct, tag_field="type", tag="Finalize"):
    """Ends the open turn. The result of it has `from_finalize`."""


class CloseStream(msgspec.Struct, tag_field="type", tag="CloseStream"):
    """Ends the stream after the results of the audio so far, and a `Metadata`."""


class Configure(msgspec.Struct, tag_field="type", tag="Configure"):
    """Replaces the keyterms. Other fields are ignored."""

    # Words and phrases that are likely to be said.
    keyterms: list[Text] | UnsetType = UNSET


ListenMessage = KeepAlive | Finalize | CloseStream | Configure
_MESSAGE: Reader[ListenMessage] = Reader(ListenMessage)


class Alternative(msgspec.Struct):
    """The transcript of a result, with the mean confidence of its words."""

    transcript: str
    confidence: float
    words: list[DeepgramWord]
    # The detected language, if the client asked for its detection.
    languages: list[str] | UnsetType = UNSET


@dataclass(slots=True)
class _Turn:
    """A turn without its final result: its start in seconds, and what was sent of it."""

    start_s: float
    end_s: float = 0.0
    text: str = ""
    words: list[Word] = field(default_factory=list)
    # Whether a Finalize has ended it.
    is_finalized: bool = False


class DeepgramHearing(HearingConnection):
    """The common part of `/v1/listen` and `/v2/listen`. A subclass writes events (`write`) and errors (`error`)."""

    id_prefix = ""
    # Seconds without a frame after which Deepgram ends a stream.
    idle_s = 10.0
    min_commit_ms = 0
    refuses_over_http = True

    def hear(self, data: bytes) -> Received[Command]:
        """Append audio. SDKs before version 3 end the stream with an empty frame."""
        return super().hear(data) if data else self.end()

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event. Some events have none."""
        if isinstance(event, SessionEnding):
            self.finishing = _FAILURES.get(event.code)
            return self.error(event.code, event.message)
        return self.write(event)

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error. Only audio that cannot be decoded ends the stream."""
        if error.code != INVALID_AUDIO:
            return self.error(error.code, error.message)
        self.finishing = BAD_AUDIO
        return self.error("DATA-0000", error.message)

    def write(self, event: Event) -> list[Frame]:
        """Return the frames of an event, except of a SessionEnding."""
        raise NotImplementedError

    def error(self, code: str, text: str) -> list[Frame]:
        """Return an error for the client."""
        raise NotImplementedError


class ListenConnection(DeepgramHearing):
    """One stream of a client of `/v1/listen`."""

    dialect = "deepgram"

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        # The hash of all audio frames.
        self._sha256 = hashlib.sha256()
        self._turns: dict[int, _Turn] = {}
        self._speakers = Speakers()
        # For each Finalize without its turn: the end of the audio before it, in ms.
        self._finalized_ms: list[int] = []
        # The end of the last word, in seconds, until its UtteranceEnd was sent.
        self._last_word_s: float | None = None

    def configure(self) -> TranscriptionConfig:
        """Read the parameters of the URL. Raises RemoteProtocolError if one is invalid."""
        query = DeepgramQuery(self.opening.query)
        self.audio = query.audio()
        self._interim = query.flag("interim_results")
        self._vad_events = query.flag("vad_events")
        self._punctuate = query.flag("punctuate") or query.flag("smart_format")
        self._detects = query.language(self.context) is None
        self._utterance_end_s = query.number("utterance_end_ms", 0, 0, 60_000) / 1000
        if self._utterance_end_s and not self._interim:
            raise RemoteProtocolError("invalid_value", "utterance_end_ms needs interim_results.", "utterance_end_ms")
        self._ends_turns = query.text("endpointing").lower() not in ("false", "0")
        pause_ms = NO_ENDPOINTING_MS
        if self._ends_turns:
            given = "endpointing" if query.text("endpointing").lower() not in ("", "true") else ""
            pause_ms = max(MIN_ENDPOINTING_MS, round(query.number(given, MIN_ENDPOINTING_MS, 0, 60_000)))
        vad = ServerVad(silence_duration_ms=pause_ms)
        self._name = self.context.models.loaded[0]
        return query.config(self.context, vad, partials=self._interim, preflight=False)

    # --- from the client

    def hear(self, data: bytes) -> Received[Command]:
        """Append audio, and hash it for the `Metadata`."""
        self._sha256.update(data)
        return super().hear(data)

    def read(self, data: str) -> Received[Command]:
        """Read a text message. Raises RemoteProtocolError."""
        match _MESSAGE.read(data):
            case KeepAlive():
                return Received()
            case Finalize():
                self._finalized_ms.append(int(self.received_s * 1000))
                return Received([CommitAudio()])
            case CloseStream():
                return self.end()
            case Configure(keyterms=terms):
                return self._configured([] if terms is UNSET else terms, changes=terms is not UNSET)

    def _configured(self, terms: list[str], *, changes: bool) -> Received[Command]:
        answer = {"request_id": self.id, "keyterms": terms}
        if not changes:
            return Received([], [message(type="ConfigureSuccess", request_id=self.id)])
        try:
            keyterms = DeepgramQuery([("keyterm", term) for term in terms]).terms()
        except RemoteProtocolError as error:
            failure = message(type="ConfigureFailure", request_id=self.id, description=error.message)
            return Received([], [failure])
        commands = self.reconfigure(replace(self.config, keyterms=keyterms))
        return Received(commands, [message(type="ConfigureSuccess", **answer)])

    def heard(self) -> list[Frame]:
        """Return `UtteranceEnd`, if there was no speech for `utterance_end_ms` since the last word."""
        since_s = self._last_word_s
        if since_s is None or self._turns or self.received_s < since_s + self._utterance_end_s:
            return []
        self._last_word_s = None
        return [message(type="UtteranceEnd", channel=CHANNEL, last_word_end=round(since_s, 3))]

    # --- to the client

    def write(self, event: Event) -> list[Frame]:
        """Return the frames of an event. Some events have none."""
        match event:
            case SpeechStarted(turn, at_ms):
                self._turns[turn] = _Turn(at_ms / 1000)
                timestamp = {"channel": CHANNEL, "timestamp": at_ms / 1000}
                return [message(type="SpeechStarted", **timestamp)] if self._vad_events else []
            case TurnCommitted(turn, start_ms, end_ms):
                open_turn = self._turns.setdefault(turn, _Turn(start_ms / 1000))
                open_turn.start_s, open_turn.end_s = start_ms / 1000, end_ms / 1000
                while self._finalized_ms and self._finalized_ms[0] <= end_ms:
                    self._finalized_ms.pop(0)
                    open_turn.is_finalized = True
                return []
            case TranscriptDelta(turn, text, words) if self._interim and turn in self._turns:
                return [self._interim_result(self._turns[turn], text, words)]
            case TranscriptDone(turn, text, _, words):
                return self._final(self._turns.pop(turn, _Turn(0.0)), event)
            case TranscriptFailed(turn, text):
                failed = self._turns.pop(turn, _Turn(0.0))
                empty = TranscriptDone(turn, "", "", (), "", 0.0, 0, 0)
                return [*self.error("processing_error", text), *self._final(failed, empty)]
            case _:
                return []

    def _interim_result(self, turn: _Turn, text: str, words: tuple[Word, ...]) -> Frame:
        turn.text += text
        turn.words += words
        end_s = max(self.received_s, turn.words[-1].end_s if turn.words else 0.0)
        return self._result(turn, end_s, self._alternative(turn.text, turn.words))

    def _final(self, turn: _Turn, done: TranscriptDone) -> list[Frame]:
        languages = [done.language] if self._detects and done.text and done.language else UNSET
        alternative = self._alternative(done.text, list(done.words), done.speaker_label, languages)
        # A turn that has ended by itself counts too if its result comes after the Finalize: clients wait for its words.
        finalized = turn.is_finalized or bool(self._finalized_ms)
        ended = self._ends_turns or finalized
        frame = self._result(turn, turn.end_s, alternative, ended=ended, finalized=finalized)
        if done.words and self._utterance_end_s:
            self._last_word_s = done.words[-1].end_s
        return [frame, *self.heard()]

    def _alternative(
        self, text: str, words: list[Word], label: str = "", languages: list[str] | UnsetType = UNSET
    ) -> Alternative:
        language = languages[0] if languages else UNSET
        shown = shown_words(words, speaker=self._speakers.number(label), language=language)
        return Alternative(shown_text(text, punctuate=self._punctuate), confidence(words), shown, languages)

    def _result(
        self, turn: _Turn, end_s: float, alternative: Alternative, *, ended: bool | None = None, finalized: bool = False
    ) -> Frame:
        """Return a result. `ended`: a pause has ended the turn; None if the turn is open."""
        return message(
            type="Results",
            channel_index=CHANNEL,
            duration=round(max(0.0, end_s - turn.start_s), 3),
            start=round(turn.start_s, 3),
            is_final=ended is not None,
            speech_final=bool(ended),
            channel={"alternatives": [alternative]},
            metadata={
                "request_id": self.id,
                "model_info": model_info(self._name),
                "model_uuid": model_uuid(self._name),
            },
            from_finalize=finalized,
        )

    def close(self) -> list[Frame]:
        """Return the `Metadata` of a stream that the client has ended."""
        if not self.was_ended:
            return []
        return [
            message(
                type="Metadata",
                transaction_key="deprecated",
                request_id=self.id,
                sha256=self._sha256.hexdigest(),
                created=created(self.context.now_s()),
                duration=round(self.received_s, 3),
                channels=1,
                models=[model_uuid(self._name)],
                model_info={model_uuid(self._name): model_info(self._name)},
            )
        ]

    def error(self, code: str, text: str) -> list[Frame]:
        """Return an error, which leaves the stream open."""
        return [message(type="Error", variant=code[:MAX_SHOWN_CHARS], description=text)]


DIALECT = Dialect(
    name="deepgram",
    matches=lambda opening: opening.path == PATH,
    connect=ListenConnection,
    paths=(PATH,),
    parameters=COMMON
    | {
        "detect_language",
        "diarize",
        "diarize_model",
        "endpointing",
        "interim_results",
        "language",
        "multichannel",
        "punctuate",
        "smart_format",
        "utterance_end_ms",
        "vad_events",
    },
    resume=Resume.NEVER,
)
