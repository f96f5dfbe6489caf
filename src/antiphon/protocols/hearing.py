"""The common part of other vendors' connections that transcribe: audio in, turns of text out, and no resuming.

A dialect derives from HearingConnection. Its session begins with the connection, in the configuration of its URL.
"""

from __future__ import annotations

from antiphon.audio.incoming import Encoding, IncomingAudio
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.events.transcription import AppendAudio, ConfigureTranscription, TranscriptionConfig
from antiphon.protocols.connection import Command, Context, NeverResumed
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received


class HearingConnection(NeverResumed):
    """One connection. A dialect implements `configure`, `read`, `refuse` and `send`, and sets `finishing` at the end.

    `query`: the parameters of the URL without keys. Of a repeated parameter, the last value counts.
    """

    # The name in metrics.
    dialect = ""
    # Idle timeout in seconds; None for none.
    idle_s: float | None = None
    # These dialects have no epochs, and end only after the last transcript.
    epoch, closing = 0, False
    # A commit is only valid if there is some new audio.
    min_commit_ms = 1

    def __init__(self, opening: Opening, context: Context) -> None:
        self.opening = opening
        self.context = context
        self.id = context.new_id("sess-")
        self.query = dict(opening.query)
        # The close code and reason, as soon as the session is to end.
        self.finishing: tuple[int, str] | None = None
        self._config: TranscriptionConfig | None = None
        self._audio = IncomingAudio("s16")
        self._num_samples = 0

    # --- what a dialect implements

    def configure(self) -> TranscriptionConfig:
        """Return the configuration of the URL, and call `decode_as`. Raises RemoteProtocolError."""
        raise NotImplementedError

    def opened(self) -> list[Frame]:
        """Return the first frames to the client."""
        return []

    def read(self, data: str) -> list[Command]:
        """Return the commands in a text message. Raises RemoteProtocolError."""
        raise NotImplementedError

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. Sets `finishing` if the vendor's service ends the session then."""
        raise NotImplementedError

    # --- what a dialect calls

    def decode_as(self, encoding: Encoding, rate_hz: int) -> None:
        """Set the encoding of the audio. Raises RemoteProtocolError for a rate that cannot be decoded."""
        try:
            self._audio = IncomingAudio(encoding, rate_hz)
        except ValueError as error:
            raise RemoteProtocolError("invalid_value", f"Invalid sample rate: {error}.", "sample_rate") from None

    def hear(self, data: bytes) -> list[Command]:
        """Return the command that appends audio; [] if it completes no sample. Raises RemoteProtocolError."""
        if len(data) > self.context.max_append_bytes:
            most = self.context.max_append_bytes
            raise RemoteProtocolError("invalid_value", f"A message has at most {most} bytes of audio.", "audio")
        try:
            pcm = self._audio.feed(data)
        except MediaError as error:
            raise RemoteProtocolError("invalid_audio", f"The audio cannot be decoded: {error}.", "audio") from None
        self._num_samples += len(pcm)
        return [AppendAudio(pcm)] if len(pcm) else []

    def check_model(self, name: str) -> None:
        """Raise RemoteProtocolError (`model_not_found`) if no loaded transcriber can serve this name."""
        models = self.context.models
        if name and models.lenient(name) is None:
            raise RemoteProtocolError("model_not_found", f"The model `{name[:100]}` does not exist.", "model")
        if name and models.exact(name) is None:
            self.context.log_alias(name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a number of the query. Raises RemoteProtocolError if it is no number, or out of range."""
        text = self.query.get(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise RemoteProtocolError("invalid_value", f"'{name}' has to be {low:g} to {high:g}.", name)
        return value

    @property
    def audio_s(self) -> float:
        """Seconds of audio that were received."""
        return self._num_samples / 16_000

    # --- WireConnection

    def open(self) -> list[Frame]:
        """Return the first frames. For a URL that cannot be served, they are an error, and the session is to end."""
        try:
            self._config = self.configure()
        except RemoteProtocolError as error:
            frames = self.refuse(error, None)
            self.finishing = self.finishing or (1008, error.code)
            return frames
        return self.opened()

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. An invalid frame only returns an error for the client; nothing is raised."""
        if self.finishing:
            return Received()
        commands: list[Command] = [ConfigureTranscription(self._config)] if self._config else []
        self._config = None
        try:
            match data:
                case str():
                    return Received([*commands, *self.read(data)])
                case bytes():
                    return Received([*commands, *self.hear(data)])
                case _:
                    return Received([*commands, data])
        except RemoteProtocolError as error:
            return Received(commands, self.refuse(error, None))

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`."""
        return self.refuse(RemoteProtocolError("too_large", f"A message has at most {max_bytes} bytes."), None)

    def close(self) -> list[Frame]:
        """Return the last frames, after the last transcript."""
        return []
