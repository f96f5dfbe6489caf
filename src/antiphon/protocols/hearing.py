"""The common part of other vendors' connections that transcribe: audio in, transcripts out, and no resuming.

A dialect derives from HearingConnection. Its session begins with the connection, in the configuration of its URL.
"""

from __future__ import annotations

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.incoming import Encoding, IncomingAudio
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.events.transcription import AppendAudio, ConfigureTranscription, TranscriptionConfig
from antiphon.protocols.connection import Command, Context, NeverResumed
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received

# The code of the error for audio that cannot be decoded.
INVALID_AUDIO = "invalid_audio"


class HearingConnection(NeverResumed):
    """One connection. A dialect implements `configure`, `read`, `refuse` and `send`, and sets `finishing` at the end.

    `query`: the parameters of the URL without keys. Of a repeated parameter, the last value counts.
    """

    # The name in metrics.
    dialect = ""
    # The beginning of the session's id.
    id_prefix = "sess-"
    # Idle timeout in seconds; None for none.
    idle_s: float | None = None
    # These dialects have no epochs, and end only after the last transcript.
    epoch, closing = 0, False
    # Shortest new audio that can be committed, in ms.
    min_commit_ms = 1
    # Whether a URL that cannot be served is refused over HTTP, instead of after the upgrade.
    refuses_over_http = False

    def __init__(self, opening: Opening, context: Context) -> None:
        self.opening = opening
        self.context = context
        self.id = context.new_id(self.id_prefix)
        self.query = dict(opening.query)
        # The close code and reason, as soon as the session is to end.
        self.finishing: tuple[int, str] | None = None
        self.config = TranscriptionConfig()
        # The decoder of the client's audio. `configure` sets it.
        self.audio = IncomingAudio("s16")
        self._has_begun = False
        self._num_samples = 0

    # --- what a dialect implements

    def configure(self) -> TranscriptionConfig:
        """Return the configuration of the URL, and set `audio`. Raises RemoteProtocolError."""
        raise NotImplementedError

    def opened(self) -> list[Frame]:
        """Return the first frames to the client."""
        return []

    def read(self, data: str) -> Received[Command]:
        """Read a text message. Raises RemoteProtocolError, or MediaError from its audio."""
        raise NotImplementedError

    def heard(self) -> list[Frame]:
        """Return the frames that are due after more audio has arrived."""
        return []

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. Sets `finishing` if the vendor's service ends the session then."""
        raise NotImplementedError

    # --- what a dialect calls

    def decode_as(self, encoding: Encoding, rate_hz: int) -> None:
        """Set the encoding of the audio. Raises RemoteProtocolError for a rate that cannot be decoded."""
        try:
            self.audio = IncomingAudio(encoding, rate_hz)
        except ValueError as error:
            raise RemoteProtocolError("invalid_value", f"Invalid sample rate: {error}.", "sample_rate") from None

    def hear(self, data: bytes) -> Received[Command]:
        """Append audio. Raises RemoteProtocolError for too much of it, and MediaError."""
        if len(data) > self.context.max_append_bytes:
            most = self.context.max_append_bytes
            raise RemoteProtocolError("invalid_value", f"A message has at most {most} bytes of audio.", "audio")
        return self._append(self.audio.feed(data))

    def end(self) -> Received[Command]:
        """End the session after what was received has been transcribed. Raises MediaError."""
        received = self._append(self.audio.flush())
        self.finishing = 1000, ""
        return received

    def reconfigure(self, config: TranscriptionConfig) -> list[Command]:
        """Change the configuration. Returns no command before the first frame, because the session has not begun."""
        self.config = config
        return [ConfigureTranscription(config)] if self._has_begun else []

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
    def received_s(self) -> float:
        """Seconds of audio received so far."""
        return self._num_samples / SAMPLE_RATE_HZ

    @property
    def was_ended(self) -> bool:
        """Whether the client has ended the session."""
        return self.finishing is not None and self.finishing[0] == 1000

    # --- WireConnection

    def open(self) -> list[Frame]:
        """Return the first frames. For a URL that cannot be served, they are an error, and the session is to end.

        With `refuses_over_http`, raises RemoteProtocolError instead.
        """
        try:
            self.config = self.configure()
        except RemoteProtocolError as error:
            if self.refuses_over_http:
                raise
            frames = self.refuse(error, None)
            self.finishing = self.finishing or (1008, error.code)
            return frames
        return self.opened()

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. An invalid frame only returns an error for the client; nothing is raised."""
        if self.finishing:
            return Received()
        try:
            received = self._received(data)
        except RemoteProtocolError as error:
            received = Received([], self.refuse(error, None))
        except MediaError as error:
            undecoded = RemoteProtocolError(INVALID_AUDIO, f"The audio cannot be decoded: {error}.", "audio")
            received = Received([], self.refuse(undecoded, None))
        if self._has_begun:
            return received
        self._has_begun = True
        return Received([ConfigureTranscription(self.config), *received.commands], received.answers)

    def _received(self, data: str | bytes | AppendAudio) -> Received[Command]:
        match data:
            case str():
                return self.read(data)
            case bytes():
                return self.hear(data)
            case AppendAudio(pcm):
                return self._append(pcm)

    def _append(self, pcm: Pcm) -> Received[Command]:
        self._num_samples += len(pcm)
        return Received([AppendAudio(pcm)] if len(pcm) else [], self.heard())

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`."""
        return self.refuse(RemoteProtocolError("too_large", f"A message has at most {max_bytes} bytes."), None)

    def close(self) -> list[Frame]:
        """Return the last frames, after the last transcript."""
        return []
