"""The dialect of a video stream (/v1/video/chat/stream): docs/wire/video-stream.md.

Frames and audio come in, questions about them are answered in text and audio. Frames are images that stay encoded here;
only their first bytes are checked.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

from antiphon.audio.encode import wav_header
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.video import (
    AnswerAudioDelta,
    AnswerDone,
    AnswerStarted,
    AnswerTextDelta,
    AppendFrame,
    AppendVideoAudio,
    AskQuestion,
    FinishVideo,
    FrameInfo,
    FrameReceived,
    VideoCommand,
    VideoConfig,
    VideoEnded,
    VideoEvent,
    VideoFailed,
)
from antiphon.protocols.wire import Frame, decode_event, decode_json

# What the client is told when the server has waited too long for its first message, or for any other.
CONFIG_TIMEOUT, IDLE_TIMEOUT = "Timeout waiting for session.config", "Idle timeout"
# Of an image in base64.
MAX_FRAME_CHARS = 10 << 20
# A message is a frame and a little more.
MAX_MESSAGE_CHARS = MAX_FRAME_CHARS + (64 << 10)
# A longer name or a later time counts as missing. 1e15 ms are 31,000 years.
MAX_NAME_CHARS, MAX_TIMESTAMP_MS = 256, 1e15
# Of the audio in one message, decoded.
MAX_AUDIO_BYTES = 4 << 20
# What files of these formats begin with.
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# Older names of fields of a configuration.
OLDER_NAMES = {
    "num_sample_frames": "num_frames",
    "evs_enabled": "enable_frame_filter",
    "evs_threshold": "frame_filter_threshold",
}
# The one code of every error here; a client is sent the message only.
INVALID_REQUEST = "invalid_request"


class VideoDialect:
    """One video stream's dialect. Nothing here waits.

    `now_ms`: any steady clock, in milliseconds; the client is sent its times.
    `whole`: an answer comes as one
    piece of text and one of audio. `ga`: the events of audio have OpenAI's GA names instead of the beta's.
    """

    def __init__(self, now_ms: Callable[[], float], *, whole: bool = False, ga: bool = False) -> None:
        self._now_ms = now_ms
        self._whole = whole
        self._audio_event = "response.output_audio" if ga else "response.audio"
        self._commands: list[VideoCommand | VideoConfig] = []
        self._frames: list[Frame] = []
        self._config: VideoConfig | None = None
        self._pcm_chunks: list[bytes] = []
        self._rate_hz = 0
        # The model that the configuration names, unchecked; empty for any.
        self.model = ""
        # The connection is to be closed when the frames that wait have been sent.
        self.closing = False

    @property
    def configured(self) -> bool:
        """Whether a `session.config` was accepted.

        Before that, any error ends the connection, and the time to wait for a message is another.
        """
        return self._config is not None

    def commands(self) -> list[VideoCommand | VideoConfig]:
        """Remove and return what the messages so far ask of the session; its configuration is the first."""
        taken, self._commands = self._commands, []
        return taken

    def frames(self) -> list[Frame]:
        """Remove and return the frames that wait to be sent, oldest first; `receive` and `send` only queue them."""
        taken, self._frames = self._frames, []
        return taken

    # --- from the client

    def receive(self, data: str | bytes) -> None:
        """Read one message of the client: commands, or an answer, are queued. Never raises.

        An error before the configuration ends the connection.
        """
        try:
            if self._config is None:
                self._configure(data)
            else:
                self._receive(data)
        except RemoteProtocolError as error:
            self.refuse(error.message)

    def refuse(self, message: str, detail: str = "") -> None:
        """Queue an error with this message. The connection ends with it if no configuration was accepted yet."""
        self._add_frame(type="error", message=message, **({"detail": detail} if detail else {}))
        self.closing = self.closing or not self.configured

    def _configure(self, data: str | bytes) -> None:
        try:
            message = decode_json(data)
        except ValueError:
            raise _invalid("Invalid JSON in session.config") from None
        kind = message.get("type") if isinstance(message, dict) else type(message).__name__
        if kind != "session.config":
            raise _invalid(f"Expected session.config, got: {str(kind)[:80]}")
        try:
            self._config = _config(
                {OLDER_NAMES.get(k, k): v for k, v in message.items() if OLDER_NAMES.get(k) not in message}
            )
        except RemoteProtocolError as error:
            raise _invalid(f"Invalid session config: {error.message}") from None
        self.model = str(message.get("model") or "")
        self._commands.append(self._config)

    def _receive(self, data: str | bytes) -> None:
        if len(data) > MAX_MESSAGE_CHARS:
            raise _invalid("Frame too large")
        message = decode_event(
            data, (INVALID_REQUEST, "Invalid JSON"), (INVALID_REQUEST, "Messages must be JSON objects")
        )
        match message.get("type"):
            case "video.frame":
                self._append_frame(message)
            case "audio.chunk":
                self._append_audio(message.get("data", ""))
            case "video.query":
                text = message.get("text", "")
                if message.get("audio_data"):
                    self._append_audio(message["audio_data"])
                self._commands.append(AskQuestion(text if isinstance(text, str) else ""))
            case "video.done":
                self._commands.append(FinishVideo())
            case "ping":
                self._add_frame(type="pong")
            case kind:
                raise _invalid(f"Unknown type: {str(kind)[:80]}")

    def _append_frame(self, message: dict[str, Any]) -> None:
        data = message.get("data")
        if not isinstance(data, str) or not data:
            raise _invalid("Invalid image data")
        if len(data) > MAX_FRAME_CHARS:
            raise _invalid("Frame too large")
        try:
            image = decode_base64(data)
        except ValueError:
            raise _invalid("Invalid image data") from None
        if not image.startswith((JPEG, PNG)):
            raise _invalid("Invalid image data")
        name, quality = message.get("frame_id"), message.get("quality_profile")
        info = FrameInfo(
            self._now_ms(),
            name if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS else None,
            _timestamp_ms(message.get("pts_ms")),
            _timestamp_ms(message.get("source_pts_ms")),
            _timestamp_ms(message.get("capture_ts_ms")),
            quality if isinstance(quality, str) and len(quality) <= MAX_NAME_CHARS else None,
        )
        self._commands.append(AppendFrame(image, info))

    def _append_audio(self, data: Any) -> None:
        try:
            audio = decode_base64(data)
        except (ValueError, TypeError):
            raise _invalid("Invalid audio data") from None
        if len(audio) > MAX_AUDIO_BYTES:
            raise _invalid("Audio buffer overflow")
        self._commands.append(AppendVideoAudio(from_pcm16(audio[: len(audio) // 2 * 2])))

    # --- to the client

    def send(self, output: VideoEvent) -> None:
        """Queue the frames of an event. Audio goes out as WAV files in base64, one for each chunk or each answer."""
        match output:
            case FrameReceived(info):
                self._add_frame_ack(output, info)
            case AnswerStarted(request_id, frames):
                self._pcm_chunks = []
                self._add_frame(type="response.start")
                self._add_frames_consumed(request_id, frames)
            case AnswerTextDelta(text):
                if not self._whole:
                    self._add_frame(type="response.text.delta", delta=text)
            case AnswerAudioDelta(pcm, rate_hz):
                self._rate_hz = rate_hz
                self._pcm_chunks.append(to_pcm16(pcm))
                if not self._whole:
                    self._add_wav()
            case AnswerDone(text, has_audio):
                self._add_frame(type="response.text.done", text=text)
                if self._whole:
                    self._add_wav()
                if has_audio:
                    self._add_frame(type=f"{self._audio_event}.done")
            case VideoFailed(message, detail, answer, said):
                self.refuse(message, detail)
                if answer:
                    self._add_frame(type="response.text.done", text=said)
            case VideoEnded():
                self._add_frame(type="session.done")
                self.closing = True

    def _add_frame_ack(self, received: FrameReceived, info: FrameInfo) -> None:
        if info.id is None:
            return
        more: dict[str, Any] = {"reason": received.reason} if received.reason else {}
        if received.dropped and received.dropped.id is not None:
            more["dropped_frame_id"] = received.dropped.id
        self._add_frame(
            type="video.frame.ack",
            frame_id=info.id,
            pts_ms=info.pts_ms,
            capture_ts_ms=info.capture_ts_ms,
            accepted=received.accepted,
            buffered_frames=received.buffered,
            server_receive_ts_ms=info.received_ms,
            **more,
        )

    def _add_frames_consumed(self, request_id: str, frames: tuple[FrameInfo, ...]) -> None:
        if all(f.id is None for f in frames):
            return
        now = self._now_ms()
        shown = [
            {
                "frame_id": f.id,
                "pts_ms": f.pts_ms,
                "source_pts_ms": f.source_pts_ms,
                "quality_profile": f.quality_profile,
                "receiver_received_ts_ms": f.received_ms,
                "decoded_ready_ts_ms": now,
            }
            for f in frames
        ]
        self._add_frame(
            type="video.frames.consumed",
            request_id=request_id,
            model_selected_ts_ms=now,
            frame_ids=[f.id for f in frames if f.id is not None],
            frames=shown,
            latest_pts_ms=frames[-1].pts_ms,
        )

    def _add_wav(self) -> None:
        """Queue the audio that waits as one WAV file; nothing where there is none."""
        data, self._pcm_chunks = b"".join(self._pcm_chunks), []
        if data:
            wav = wav_header(self._rate_hz, len(data)) + data
            self._add_frame(type=f"{self._audio_event}.delta", data=b64encode(wav).decode(), format="wav")

    def _add_frame(self, **fields: Any) -> None:
        self._frames.append(Frame(fields))


def _config(fields: dict[str, Any]) -> VideoConfig:
    """The configuration that the fields come to, defaults included. Raises RemoteProtocolError."""
    modalities = fields.get("modalities", ["text", "audio"])
    if not isinstance(modalities, list) or not modalities or not set(map(str, modalities)) <= {"text", "audio"}:
        raise _invalid("modalities is a list of text and audio")
    named, filters_frames = fields.get("frame_filter"), _flag(fields, "enable_frame_filter")
    if named not in (None, "evs", "blocks"):
        raise _invalid("frame_filter is evs or blocks")
    prompt, voice, memory = fields.get("system_prompt"), fields.get("voice"), fields.get("max_memory_s")
    if not isinstance(prompt, str | None) or not isinstance(voice, str | None):
        raise _invalid("system_prompt and voice are text")
    return VideoConfig(
        audio_output="audio" in modalities,
        text_output="text" in modalities,
        num_frames=int(_number(fields, "num_frames", 4, 1, 128, whole=True)),
        max_frames=int(_number(fields, "max_frames", 50, 1, 256, whole=True)),
        instructions=prompt or "",
        filter=(named or "evs") if filters_frames else None,
        threshold=_number(fields, "frame_filter_threshold", 0.95, 0, 1),
        uses_audio=_flag(fields, "use_audio_in_video"),
        voice=voice,
        max_memory_s=None if memory is None else _number(fields, "max_memory_s", 0, 1, 86_400),
    )


def _number(
    fields: dict[str, Any], key: str, default: float, least: float, greatest: float, *, whole: bool = False
) -> float:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != int(value)):
        raise _invalid(f"{key} is a {'whole ' if whole else ''}number")
    if not least <= value <= greatest:
        raise _invalid(f"{key} is from {least} to {greatest}")
    return float(value)


def _flag(fields: dict[str, Any], key: str) -> bool:
    value = fields.get(key, True)
    if not isinstance(value, bool):
        raise _invalid(f"{key} is true or false")
    return value


def _timestamp_ms(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and abs(value) < MAX_TIMESTAMP_MS else None


def _invalid(message: str) -> RemoteProtocolError:
    return RemoteProtocolError(INVALID_REQUEST, message)
