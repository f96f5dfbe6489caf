"""Writes the events about the user's turns and their transcripts: docs/wire/openai-transcription.md."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import TypedDict, TypeVar

import msgspec
from msgspec import UnsetType

from antiphon.errors import LocalProtocolError, RemoteProtocolError
from antiphon.events.transcription import (
    CommitRefused,
    LanguageDetected,
    SessionEnding,
    SilenceCommitted,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.events.words import TokenLogprob, Word
from antiphon.protocols.realtime.writer import EventWriter
from antiphon.protocols.wire import NewId

# The allowed values of `include`: one from OpenAI, and two extensions in the same style.
LOGPROBS = "item.input_audio_transcription.logprobs"
WORDS = "item.input_audio_transcription.words"
LANGUAGE = "item.input_audio_transcription.language"
INCLUDABLE = (LOGPROBS, WORDS, LANGUAGE)
Include = TypeVar("Include", list[str], list[str] | None, list[str] | UnsetType | None)


def check_include(given: Include) -> Include:
    """Return `session.include` unchanged. Raises RemoteProtocolError for a value that is not in INCLUDABLE."""
    for value in given if isinstance(given, list) else ():
        if value not in INCLUDABLE:
            names = ", ".join(f"'{name}'" for name in INCLUDABLE)
            message = f"Invalid value: '{value}'. Supported values are: {names}."
            raise RemoteProtocolError("invalid_value", message, "session.include")
    return given


class ShownWord(TypedDict):
    """A word as the client sees it: its text, its start and end in seconds, and the model's probability of it."""

    word: str
    start: float
    end: float
    confidence: float


class _ShownLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class _Included(TypedDict, total=False):
    logprobs: list[_ShownLogprob]
    words: list[ShownWord]


class KeptItems(msgspec.Struct):
    """The stored form of the item ids: of turns without a transcript, by turn, and of the last committed turn."""

    waiting: dict[int, str]
    last: str | None


class TranscriptEvents:
    """Writes the events of a transcription. Each turn is an item. The item's id is made for the turn's first event.

    `include`: the values of INCLUDABLE that the client has requested. Only these facts are written.
    """

    def __init__(self, writer: EventWriter, new_id: NewId) -> None:
        self._writer = writer
        self._new_id = new_id
        self.include: Collection[str] = ()
        # Item ids of the turns that wait for their transcript, by turn.
        self._items: dict[int, str] = {}
        self._last_item: str | None = None

    def name(self, turn: int, item_id: str) -> None:
        """Set the item id of a turn. For a conversation, which makes the ids itself."""
        self._items[turn] = item_id

    def snapshot(self) -> KeptItems:
        """Return the item ids to store."""
        return KeptItems(self._items, self._last_item)

    def restore(self, kept: KeptItems) -> None:
        """Use the item ids that `snapshot` returned at another host."""
        self._items, self._last_item = kept.waiting, kept.last

    def write(self, event: TranscriptionEvent) -> None:
        """Write the messages for an event. Raises LocalProtocolError if it cannot occur in a transcription."""
        add = self._writer.event
        match event:
            case SpeechStarted(turn, at_ms):
                add("input_audio_buffer.speech_started", audio_start_ms=at_ms, item_id=self._item_id(turn))
            case SpeechStopped(turn, at_ms):
                add("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, item_id=self._item_id(turn))
            case SilenceCommitted(turn, start_ms, end_ms):
                kind = "input_audio_buffer.timeout_triggered"
                add(kind, audio_start_ms=start_ms, audio_end_ms=end_ms, item_id=self._item_id(turn))
            case TurnCommitted(turn):
                self._committed(self._item_id(turn))
            case TurnCleared():
                add("input_audio_buffer.cleared")
            case CommitRefused(have_ms, minimum_ms, event_id):
                message = (
                    "Error committing input audio buffer: buffer too small. "
                    f"Expected at least {minimum_ms}ms of audio, but buffer only has {have_ms:.2f}ms of audio."
                )
                self._writer.error(RemoteProtocolError("input_audio_buffer_commit_empty", message), event_id)
            case TranscriptDelta() | TranscriptDone() | TranscriptFailed():
                self._transcript(event)
            case LanguageDetected(turn, language, probability):
                if LANGUAGE in self.include:
                    kind = "conversation.item.input_audio_transcription.language"
                    add(kind, item_id=self._item_id(turn), language=language, probability=round(probability, 3))
            case SessionEnding(code, message):
                kind = "server_error" if code != "session_expired" else "invalid_request_error"
                self._writer.error(RemoteProtocolError(code, message), None, kind)
            case _:
                raise LocalProtocolError(f"no frame for {type(event).__name__}")

    def _transcript(self, event: TranscriptDelta | TranscriptDone | TranscriptFailed) -> None:
        add = partial(self._writer.event, item_id=self._item_id(event.turn), content_index=0)
        match event:
            case TranscriptDelta(_, text):
                add("conversation.item.input_audio_transcription.delta", delta=text, **self._included(event))
            case TranscriptDone():
                usage = {"type": "duration", "seconds": round(event.audio_s, 3)}
                kind = "conversation.item.input_audio_transcription.completed"
                whose = {"speaker": event.speaker, "speaker_label": event.speaker_label}
                whose = {name: value for name, value in whose.items() if value}
                add(kind, transcript=event.text, usage=usage, **self._included(event), **whose)
            case TranscriptFailed(_, message):
                error = {"type": "server_error", "code": "transcription_failed", "message": message}
                add("conversation.item.input_audio_transcription.failed", error=error)
        if not isinstance(event, TranscriptDelta):
            self._items.pop(event.turn, None)

    def _included(self, event: TranscriptDelta | TranscriptDone) -> _Included:
        fields: _Included = {}
        if LOGPROBS in self.include:
            fields["logprobs"] = [_shown_logprob(token) for token in event.logprobs]
        if WORDS in self.include:
            fields["words"] = shown_words(event.words)
        return fields

    def _committed(self, item_id: str) -> None:
        previous, self._last_item = self._last_item, item_id
        item = {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        self._writer.event("input_audio_buffer.committed", item_id=item_id, previous_item_id=previous)
        for name in ("added", "done"):
            self._writer.event(f"conversation.item.{name}", item=item, previous_item_id=previous)

    def _item_id(self, turn: int) -> str:
        if turn not in self._items:
            self._items[turn] = self._new_id("item_")
        return self._items[turn]


def shown_words(words: Iterable[Word]) -> list[ShownWord]:
    """Return the words in the form that the client sees."""
    return [
        {
            "word": w.text,
            "start": round(w.start_s, 3),
            "end": round(w.end_s, 3),
            "confidence": round(w.probability, 3),
        }
        for w in words
    ]


def _shown_logprob(token: TokenLogprob) -> _ShownLogprob:
    """Return a token in OpenAI's form. If a character is split between tokens, each shows a replacement character."""
    return {
        "token": token.utf8.decode(errors="replace"),
        "logprob": round(token.logprob, 5),
        "bytes": list(token.utf8),
    }
