"""`/v1/video/chat/stream`: frames and sound in, answers out. Sans-IO; the events are in docs/wire/video-stream.md."""

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
from antiphon.protocols.wire import decode_event, decode_json, frame

CONFIG_TIMEOUT, IDLE_TIMEOUT = "Timeout waiting for session.config", "Idle timeout"
MAX_FRAME_CHARS = 10 << 20
# A message is a frame and a little more.
MAX_MESSAGE_CHARS = MAX_FRAME_CHARS + (64 << 10)
# Longer names and later times than these are taken for none.
MAX_NAME_CHARS, MOST_MS = 256, 1e15
MAX_SOUND_BYTES = 4 << 20
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
OLDER = {
    "num_sample_frames": "num_frames",
    "evs_enabled": "enable_frame_filter",
    "evs_threshold": "frame_filter_threshold",
}
# The one code of every error here; a client is sent the message only.
INVALID_REQUEST = "invalid_request"


class VideoDialect:
    """One connection's dialect. `whole`: answers come in one piece of text and one of sound. `ga`: sound has its newer event names.

    `now_ms` tells the time, for what the client is told of when a frame came.
    """

    def __init__(self, now_ms: Callable[[], float], *, whole: bool = False, ga: bool = False) -> None:
        self._now_ms = now_ms
        self._whole = whole
        self._audio = "response.output_audio" if ga else "response.audio"
        self._commands: list[VideoCommand | VideoConfig] = []
        self._frames: list[str] = []
        self._config: VideoConfig | None = None
        self._sound: list[bytes] = []
        self._rate_hz = 0
        self.model = ""
        # Errors that end the connection; and all was said that was to be.
        self.closing = False

    @property
    def configured(self) -> bool:
        """The session has begun."""
        return self._config is not None

    def commands(self) -> list[VideoCommand | VideoConfig]:
        """Take what frames received so far amount to; the configuration is the first."""
        taken, self._commands = self._commands, []
        return taken

    def frames(self) -> list[str]:
        """Take the frames to be sent."""
        taken, self._frames = self._frames, []
        return taken

    # --- from the client --------------------------------------------------------------------------------------------------

    def receive(self, data: str | bytes) -> None:
        """One message. Never raises; before the session has begun an error ends the connection."""
        try:
            if self._config is None:
                self._configure(data)
            else:
                self._take(data)
        except RemoteProtocolError as error:
            self.refuse(error.message)

    def refuse(self, message: str, detail: str = "") -> None:
        """Answer with an error."""
        self._say(type="error", message=message, **({"detail": detail} if detail else {}))
        self.closing = self.closing or not self.configured

    def _configure(self, data: str | bytes) -> None:
        try:
            message = decode_json(data)
        except ValueError:
            raise _wrong("Invalid JSON in session.config") from None
        kind = message.get("type") if isinstance(message, dict) else type(message).__name__
        if kind != "session.config":
            raise _wrong(f"Expected session.config, got: {str(kind)[:80]}")
        try:
            self._config = _config({OLDER.get(k, k): v for k, v in message.items() if OLDER.get(k) not in message})
        except RemoteProtocolError as error:
            raise _wrong(f"Invalid session config: {error.message}") from None
        self.model = str(message.get("model") or "")
        self._commands.append(self._config)

    def _take(self, data: str | bytes) -> None:
        if len(data) > MAX_MESSAGE_CHARS:
            raise _wrong("Frame too large")
        message = decode_event(
            data, (INVALID_REQUEST, "Invalid JSON"), (INVALID_REQUEST, "Messages must be JSON objects")
        )
        match message.get("type"):
            case "video.frame":
                self._frame(message)
            case "audio.chunk":
                self._hear(message.get("data", ""))
            case "video.query":
                text = message.get("text", "")
                if message.get("audio_data"):
                    self._hear(message["audio_data"])
                self._commands.append(AskQuestion(text if isinstance(text, str) else ""))
            case "video.done":
                self._commands.append(FinishVideo())
            case "ping":
                self._say(type="pong")
            case kind:
                raise _wrong(f"Unknown type: {str(kind)[:80]}")

    def _frame(self, message: dict[str, Any]) -> None:
        data = message.get("data")
        if not isinstance(data, str) or not data:
            raise _wrong("Invalid image data")
        if len(data) > MAX_FRAME_CHARS:
            raise _wrong("Frame too large")
        try:
            image = decode_base64(data)
        except ValueError:
            raise _wrong("Invalid image data") from None
        if not image.startswith((JPEG, PNG)):
            raise _wrong("Invalid image data")
        name, quality = message.get("frame_id"), message.get("quality_profile")
        facts = FrameInfo(
            self._now_ms(),
            name if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS else None,
            _number(message.get("pts_ms")),
            _number(message.get("source_pts_ms")),
            _number(message.get("capture_ts_ms")),
            quality if isinstance(quality, str) and len(quality) <= MAX_NAME_CHARS else None,
        )
        self._commands.append(AppendFrame(image, facts))

    def _hear(self, data: Any) -> None:
        try:
            sound = decode_base64(data)
        except (ValueError, TypeError):
            raise _wrong("Invalid audio data") from None
        if len(sound) > MAX_SOUND_BYTES:
            raise _wrong("Audio buffer overflow")
        self._commands.append(AppendVideoAudio(from_pcm16(sound[: len(sound) // 2 * 2])))

    # --- to the client ----------------------------------------------------------------------------------------------------

    def send(self, output: VideoEvent) -> None:
        """Queue the frames of one output."""
        match output:
            case FrameReceived(facts):
                self._ack(output, facts)
            case AnswerStarted(request_id, frames):
                self._sound = []
                self._say(type="response.start")
                self._consumed(request_id, frames)
            case AnswerTextDelta(text):
                if not self._whole:
                    self._say(type="response.text.delta", delta=text)
            case AnswerAudioDelta(pcm, rate_hz):
                self._rate_hz = rate_hz
                self._sound.append(to_pcm16(pcm))
                if not self._whole:
                    self._wav()
            case AnswerDone(text, sounded):
                self._say(type="response.text.done", text=text)
                if self._whole:
                    self._wav()
                if sounded:
                    self._say(type=f"{self._audio}.done")
            case VideoFailed(message, detail, answer, said):
                self.refuse(message, detail)
                if answer:
                    self._say(type="response.text.done", text=said)
            case VideoEnded():
                self._say(type="session.done")
                self.closing = True

    def _ack(self, taken: FrameReceived, facts: FrameInfo) -> None:
        if facts.id is None:
            return
        more: dict[str, Any] = {"reason": taken.reason} if taken.reason else {}
        if taken.dropped and taken.dropped.id is not None:
            more["dropped_frame_id"] = taken.dropped.id
        self._say(
            type="video.frame.ack",
            frame_id=facts.id,
            pts_ms=facts.pts_ms,
            capture_ts_ms=facts.capture_ts_ms,
            accepted=taken.accepted,
            buffered_frames=taken.buffered,
            server_receive_ts_ms=facts.received_ms,
            **more,
        )

    def _consumed(self, request_id: str, frames: tuple[FrameInfo, ...]) -> None:
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
        self._say(
            type="video.frames.consumed",
            request_id=request_id,
            model_selected_ts_ms=now,
            frame_ids=[f.id for f in frames if f.id is not None],
            frames=shown,
            latest_pts_ms=frames[-1].pts_ms,
        )

    def _wav(self) -> None:
        """What has come of the sound, as a file of its own."""
        data, self._sound = b"".join(self._sound), []
        if data:
            wav = wav_header(self._rate_hz, len(data)) + data
            self._say(type=f"{self._audio}.delta", data=b64encode(wav).decode(), format="wav")

    def _say(self, **fields: Any) -> None:
        self._frames.append(frame(**fields))


def _config(given: dict[str, Any]) -> VideoConfig:
    """Raises RemoteProtocolError."""
    modalities = given.get("modalities", ["text", "audio"])
    if not isinstance(modalities, list) or not modalities or not set(map(str, modalities)) <= {"text", "audio"}:
        raise _wrong("modalities is a list of text and audio")
    named, on = given.get("frame_filter"), _flag(given, "enable_frame_filter")
    if named not in (None, "evs", "blocks"):
        raise _wrong("frame_filter is evs or blocks")
    prompt, voice, memory = given.get("system_prompt"), given.get("voice"), given.get("max_memory_s")
    if not isinstance(prompt, str | None) or not isinstance(voice, str | None):
        raise _wrong("system_prompt and voice are text")
    return VideoConfig(
        audio_output="audio" in modalities,
        text_output="text" in modalities,
        num_frames=int(_within(given, "num_frames", 4, 1, 128, whole=True)),
        max_frames=int(_within(given, "max_frames", 50, 1, 256, whole=True)),
        instructions=prompt or "",
        filter=(named or "evs") if on else None,
        threshold=_within(given, "frame_filter_threshold", 0.95, 0, 1),
        uses_audio=_flag(given, "use_audio_in_video"),
        voice=voice,
        max_memory_s=None if memory is None else _within(given, "max_memory_s", 0, 1, 86_400),
    )


def _within(given: dict[str, Any], key: str, default: float, low: float, high: float, *, whole: bool = False) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != int(value)):
        raise _wrong(f"{key} is a {'whole ' if whole else ''}number")
    if not low <= value <= high:
        raise _wrong(f"{key} is from {low} to {high}")
    return float(value)


def _flag(given: dict[str, Any], key: str) -> bool:
    value = given.get(key, True)
    if not isinstance(value, bool):
        raise _wrong(f"{key} is true or false")
    return value


def _number(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and abs(value) < MOST_MS else None


def _wrong(message: str) -> RemoteProtocolError:
    return RemoteProtocolError(INVALID_REQUEST, message)
