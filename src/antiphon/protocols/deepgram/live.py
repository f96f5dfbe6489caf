"""The common parts of Deepgram's live dialects: audio in binary frames, the end of the stream, and errors."""

from __future__ import annotations

import hashlib

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    ConfigureTranscription,
    SessionEnding,
    TranscriptionConfig,
)
from antiphon.protocols.connection import Command, Context, Event, NeverResumed
from antiphon.protocols.deepgram.forms import BAD_AUDIO, FAILED, SILENT
from antiphon.protocols.deepgram.query import DeepgramQuery
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received

# Codes of a SessionEnding after which Deepgram closes with 1011. Other ends keep the server's close code.
_FAILURES = {"idle_timeout": SILENT, "server_error": FAILED, "resource_exhausted": FAILED}
# Seconds without a frame after which Deepgram ends a stream.
IDLE_S = 10.0


class LiveListener(NeverResumed):
    """One connection whose audio is transcribed. Its configuration is in the URL, and it cannot be resumed.

    A subclass reads text messages (`_read`), writes events (`_write`) and errors (`_error`).
    """

    epoch, closing, min_commit_ms = 0, False, 0
    idle_s: float | None = IDLE_S

    def __init__(self, opening: Opening, context: Context) -> None:
        self.opening = opening
        self.context = context
        self.id = context.new_id("")
        self.finishing: tuple[int, str] | None = None
        self._config = TranscriptionConfig()
        self._has_begun = False
        self._num_samples = 0
        self._sha256 = hashlib.sha256()

    def open(self) -> list[Frame]:
        """Check the query, and return the first frames. Raises RemoteProtocolError, for a refusal over HTTP."""
        query = DeepgramQuery(self.opening.query)
        self._audio = query.audio()
        return self._open(query)

    @property
    def received_s(self) -> float:
        """Seconds of audio received so far."""
        return self._num_samples / SAMPLE_RATE_HZ

    # --- from the client

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame: audio, or a text message. An invalid frame is answered with an error."""
        try:
            commands, answers = self._received(data)
        except RemoteProtocolError as error:
            return Received([], self.refuse(error, None))
        begin = [] if self._has_begun else [ConfigureTranscription(self._config)]
        self._has_begun = True
        return Received([*begin, *commands], answers)

    def _received(self, data: str | bytes | AppendAudio) -> tuple[list[Command], list[Frame]]:
        if isinstance(data, AppendAudio):
            return self._append(data.pcm)
        if isinstance(data, str):
            return self._read(data)
        if not data:
            # SDKs before version 3 end the stream with an empty frame.
            return self._close_stream()
        self._sha256.update(data)
        try:
            pcm = self._audio.feed(data)
        except MediaError as error:
            self.finishing = BAD_AUDIO
            return [], self._error("DATA-0000", f"The audio cannot be decoded: {error}.")
        return self._append(pcm)

    def _append(self, pcm: Pcm) -> tuple[list[Command], list[Frame]]:
        self._num_samples += len(pcm)
        return ([AppendAudio(pcm)] if len(pcm) else []), self._heard()

    def _close_stream(self) -> tuple[list[Command], list[Frame]]:
        """End the stream after what was received has been transcribed."""
        try:
            commands, answers = self._append(self._audio.flush())
        except MediaError as error:
            self.finishing = BAD_AUDIO
            return [], self._error("DATA-0000", f"The audio cannot be decoded: {error}.")
        self.finishing = 1000, ""
        return commands, answers

    def _end_turn(self) -> list[Command]:
        return [CommitAudio()]

    def _reconfigure(self) -> list[Command]:
        """Return the command after a change of the configuration. Before the first frame, there is none."""
        return [ConfigureTranscription(self._config)] if self._has_begun else []

    # --- to the client

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event. Some events have none."""
        if isinstance(event, SessionEnding):
            self.finishing = _FAILURES.get(event.code)
            return self._error(event.code, event.message)
        return self._write(event)

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. Ignores `event_id`, because messages have no ids in this dialect."""
        return self._error(error.code, error.message)

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`. The session continues."""
        return self._error("invalid_message", f"The message is larger than {max_bytes} bytes.")

    def close(self) -> list[Frame]:
        """Return the last frames, after the results of all audio."""
        return []

    # --- each dialect

    def _open(self, query: DeepgramQuery) -> list[Frame]:
        raise NotImplementedError

    def _read(self, data: str) -> tuple[list[Command], list[Frame]]:
        raise NotImplementedError

    def _heard(self) -> list[Frame]:
        """Return the frames that are due after more audio has arrived."""
        return []

    def _write(self, event: Event) -> list[Frame]:
        raise NotImplementedError

    def _error(self, code: str, text: str) -> list[Frame]:
        raise NotImplementedError
